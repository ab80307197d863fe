"""The hook plugin `otel`: spans of a request's lookup, load, tiers and store, made after the fact."""

from __future__ import annotations

from collections import OrderedDict
from importlib.metadata import version
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode, TracerProvider
from opentelemetry.util.types import AttributeValue

from lmcache_core import Chain, JobResult, RequestReport, hookimpl

MAX_REQUESTS: Final = 1024
"""Requests whose span a later store of theirs is put under."""
_NS: Final = 1_000_000_000


class OtelHooks:
    """One for each cache, called on its event thread.  Spans go to `provider`, by default the process's own.

    Who records and exports them is up to that provider; without one they cost next to nothing.
    """

    api_version = (1, 0)

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("lmcache", version("lmcache-otel"), provider)
        self._roots: OrderedDict[str, Context] = OrderedDict()

    @hookimpl
    def lmcache_request_ended(self, report: RequestReport) -> None:
        start = int(report.started_at * _NS)
        root = self._tracer.start_span(
            "lmcache.request",
            start_time=start,
            attributes={
                "lmcache.request": report.request,
                "lmcache.prompt_tokens": report.tokens,
                "lmcache.hit_tokens": report.hit_tokens,
                "lmcache.refused_tokens": report.refused_tokens,
                "lmcache.saved_estimated_s": report.saved_s,
            },
        )
        inside = trace.set_span_in_context(root)
        end = _after(start, report.lookup_s)
        lookup = self._tracer.start_span("lmcache.lookup", inside, start_time=start)
        for tier, chunks in report.tiers:
            lookup.set_attribute(f"lmcache.tier.{tier}.chunks", chunks)
        lookup.end(end)
        if report.parts or report.failed_chunks:
            end = self._load(inside, report, start)
        root.end(end)
        self._remember(report.request, inside)

    def _load(self, inside: Context, report: RequestReport, start: int) -> int:
        """The load and its tiers; when it ended."""
        began = _after(start, report.load_after_s)
        end = _after(began, report.load_s)
        attributes = {
            "lmcache.chunks": report.loaded_chunks,
            "lmcache.failed_chunks": report.failed_chunks,
            "lmcache.bytes": report.nbytes,
        }
        load = self._tracer.start_span("lmcache.load", inside, start_time=began, attributes=attributes)
        if report.failed_chunks:
            load.set_status(Status(StatusCode.ERROR, f"{report.failed_chunks} chunks failed to load"))
        for part in report.parts:
            tier = self._tracer.start_span(
                f"lmcache.tier {part.tier}",
                trace.set_span_in_context(load),
                start_time=began,
                attributes={"lmcache.tier": part.tier, "lmcache.chunks": part.chunks},
            )
            tier.end(_after(began, part.seconds))
        load.end(end)
        return end

    @hookimpl
    def lmcache_prompt_stored(
        self, request: str, chain: Chain, span: range, result: JobResult, ended_at: float
    ) -> None:
        end = int(ended_at * _NS)
        store = self._tracer.start_span(
            "lmcache.store",
            self._roots.get(request),
            start_time=end - int(result.seconds * _NS),
            attributes={
                "lmcache.request": request,
                "lmcache.prompt_tokens": chain.tokens,
                "lmcache.chunks": result.ok_chunks,
                "lmcache.skipped_chunks": result.skipped,
                "lmcache.failed_chunks": len(span) - result.ok_chunks - result.skipped,
                "lmcache.bytes": result.nbytes,
            },
        )
        _fail(store, {reason for _, _, reason in result.failed})
        store.end(end)

    @hookimpl
    def lmcache_tier_health(self, tier: str, healthy: bool, error: str) -> None:
        attributes: dict[str, AttributeValue] = {"lmcache.tier": tier, "lmcache.healthy": healthy}
        change = self._tracer.start_span("lmcache.tier_health", Context(), attributes=attributes)
        _fail(change, {error} - {""})
        change.end()

    def _remember(self, request: str, inside: Context) -> None:
        self._roots.pop(request, None)
        self._roots[request] = inside
        if len(self._roots) > MAX_REQUESTS:
            self._roots.popitem(last=False)


def _after(start: int, seconds: float) -> int:
    return start + int(seconds * _NS)


def _fail(span: Span, reasons: set[str]) -> None:
    if reasons:
        span.set_status(Status(StatusCode.ERROR, ", ".join(sorted(reasons))))
