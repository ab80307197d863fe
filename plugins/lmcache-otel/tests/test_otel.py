"""Traces of requests through the tiers, as an exporter sees them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from lmcache_core import Family, Group, GroupKind, Layout, LocalCache, Model, Region, RequestReport, Shard, open_cache
from lmcache_otel import MAX_REQUESTS, OtelHooks

WAIT_S = 60.0
LAYOUT = Layout(
    chunk_tokens=16,
    regions=(Region(name="kv", layers=1, block_tokens=16, block_nbytes=64, dtype="uint8", packing="test"),),
)
FAMILY = Family(model="traced", weights="1", kv_dtype="uint8", chunk_tokens=16)
SHARD = Shard.of(FAMILY, LAYOUT, layers=(0, 1))
MODEL = Model(FAMILY, (Group(GroupKind.FULL, (SHARD,)),))
CONFIG = """
chunk_tokens: 16
device: cpu
tiers:
  - {{name: host, backend: memory, capacity: 1MiB}}
  - {{name: disk, backend: disk, capacity: 1MiB, options: {{path: {folder}/store}}}}
plugins: {{hooks: [otel]}}
"""


@pytest.fixture(scope="module")
def provider() -> TracerProvider:
    """The process's own, which can be set once."""
    made = TracerProvider()
    trace.set_tracer_provider(made)
    return made


@pytest.fixture
def exporter(provider: TracerProvider) -> Iterator[InMemorySpanExporter]:
    made = InMemorySpanExporter()
    processor = SimpleSpanProcessor(made)
    provider.add_span_processor(processor)
    yield made
    made.shutdown()


def opened(folder: Path) -> LocalCache:
    file = folder / "lmcache.yaml"
    file.write_text(CONFIG.format(folder=folder))
    cache = open_cache(file)
    assert isinstance(cache, LocalCache)
    return cache


def serve(cache: LocalCache, request: str, chunks: int = 3) -> None:
    """Look up, load what is there, release, store."""
    pages = [[np.zeros((chunks, 64), np.uint8)]]
    chain = cache.chain(range(16 * chunks), MODEL)
    hit = cache.lookup_answered(chain, request, timeout_s=WAIT_S)
    if hit.chunks:
        assert cache.retrieve(hit, SHARD, range(hit.chunks), pages, range(hit.chunks)).wait(WAIT_S) is not None
    cache.release(request)
    assert cache.store(chain, SHARD, range(chunks), pages, range(chunks), request=request).wait(WAIT_S) is not None


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_a_request_is_a_trace_of_its_lookup_its_load_its_tiers_and_its_store(
    tmp_path: Path, exporter: InMemorySpanExporter
) -> None:
    with opened(tmp_path) as cache:
        serve(cache, "first")
        assert cache.drain(WAIT_S)
    with opened(tmp_path) as cache:
        serve(cache, "second")
    spans = exporter.get_finished_spans()
    roots = {attributes(span)["lmcache.request"]: span for span in spans if span.name == "lmcache.request"}
    assert set(roots) == {"first", "second"}
    second = roots["second"]
    assert attributes(second)["lmcache.prompt_tokens"] == attributes(second)["lmcache.hit_tokens"] == 48
    mine = {span.name: span for span in spans if span.context.trace_id == second.context.trace_id}
    assert set(mine) == {"lmcache.request", "lmcache.lookup", "lmcache.load", "lmcache.tier disk", "lmcache.store"}
    parents = {name: span.parent.span_id if span.parent else None for name, span in mine.items()}
    root, load = second.context.span_id, mine["lmcache.load"].context.span_id
    assert parents == {
        "lmcache.request": None,
        "lmcache.lookup": root,
        "lmcache.load": root,
        "lmcache.tier disk": load,
        "lmcache.store": root,
    }
    assert attributes(mine["lmcache.lookup"]) == {"lmcache.tier.disk.chunks": 3}
    assert attributes(mine["lmcache.tier disk"])["lmcache.chunks"] == 3
    assert attributes(mine["lmcache.load"])["lmcache.bytes"] == 3 * 64
    for span in mine.values():
        assert span.start_time is not None
        assert span.end_time is not None
        assert second.start_time is not None
        assert second.start_time <= span.start_time <= span.end_time
    first = {span.name for span in spans if span.context.trace_id == roots["first"].context.trace_id}
    assert first == {"lmcache.request", "lmcache.lookup", "lmcache.store"}


def test_a_load_that_failed_is_an_error(tmp_path: Path, exporter: InMemorySpanExporter) -> None:
    with opened(tmp_path) as cache:
        serve(cache, "first")
        assert cache.drain(WAIT_S)
    with opened(tmp_path) as cache:
        for path in tmp_path.rglob("*"):
            if path.is_file() and len(path.name) == 64:
                path.write_bytes(b"damaged")
        serve(cache, "second")
    (load,) = (span for span in exporter.get_finished_spans() if span.name == "lmcache.load")
    assert load.status.status_code is StatusCode.ERROR
    assert attributes(load)["lmcache.failed_chunks"] == 3


def test_a_tier_that_is_left_alone_is_an_error_span(tmp_path: Path, exporter: InMemorySpanExporter) -> None:
    with opened(tmp_path) as cache:
        cache._pool.tiers[0].breaker.failed("pulled out", fatal=True)
    (change,) = (span for span in exporter.get_finished_spans() if span.name == "lmcache.tier_health")
    assert attributes(change) == {"lmcache.tier": "disk", "lmcache.healthy": False}
    assert change.status.description == "pulled out"


def test_an_exporter_that_raises_costs_no_request(tmp_path: Path, exporter: InMemorySpanExporter) -> None:
    def broken(spans: Any) -> Any:
        raise RuntimeError("the collector is away")

    exporter.export = broken  # type: ignore[method-assign]
    with opened(tmp_path) as cache:
        for number in range(3):
            serve(cache, f"r{number}")
        assert cache.metrics.count("loads", result="ok") == 6


def test_requests_that_are_remembered_are_bounded() -> None:
    hooks = OtelHooks(trace.NoOpTracerProvider())
    for number in range(2 * MAX_REQUESTS):
        hooks.lmcache_request_ended(RequestReport(f"r{number}", 1.0))
    assert len(hooks._roots) == MAX_REQUESTS


def test_without_a_provider_nothing_is_recorded_and_nothing_fails() -> None:
    hooks = OtelHooks(trace.NoOpTracerProvider())
    hooks.lmcache_request_ended(RequestReport("r", 1.0))
    hooks.lmcache_tier_health("disk", False, "away")
