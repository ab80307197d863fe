"""The lines that people and log collectors read: one for each request when asked, all of them as JSON when asked."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final, Literal, TypeVar

from .history import Lookup, plain
from .requests import RequestReport

LogRequests = Literal["off", "text", "json"]
T = TypeVar("T")
_log: Final = logging.getLogger("lmcache_core.requests")


def request_log(kind: LogRequests) -> Callable[[RequestReport], None] | None:
    """What writes the line of a request, or None for none."""
    if kind == "off":
        return None
    return lambda report: _write(kind, request_text, _fields_of_request, report)


def lookup_log(kind: LogRequests) -> Callable[[Lookup], None] | None:
    """What writes the line of a lookup in a daemon, which does not see the request's end; or None for none."""
    if kind == "off":
        return None
    return lambda lookup: _write(kind, lookup_text, _fields_of_lookup, lookup)


def request_text(report: RequestReport) -> str:
    """`request 'r1': prefix hit of 512 of 640 prompt tokens (host 1, disk 1) in 12.3 ms, saved about 850 ms`."""
    words = _hit(report.request, report.hit_tokens, report.tokens, report.tiers)
    words += f" in {(report.lookup_s + report.load_s) * 1e3:.1f} ms"
    if report.refused_tokens:
        words += f", {report.refused_tokens} tokens more refused by cost"
    if report.failed_chunks:
        words += f", {report.failed_chunks} chunks failed to load"
    if report.saved_s:
        words += f", saved about {report.saved_s * 1e3:.0f} ms"
    return words


def lookup_text(lookup: Lookup) -> str:
    """The same of a lookup, with the reason why there was no more."""
    words = _hit(lookup.request, lookup.hit_tokens, lookup.tokens, lookup.tiers)
    return f"{words}; then: {lookup.reason}" if lookup.reason else words


def _hit(request: str, hit_tokens: int, tokens: int, tiers: tuple[tuple[str, int], ...]) -> str:
    if not hit_tokens:
        return f"request {request[:64]!r}: no prefix hit of {tokens} prompt tokens"
    where = ", ".join(f"{tier} {chunks}" for tier, chunks in tiers)
    return f"request {request[:64]!r}: prefix hit of {hit_tokens} of {tokens} prompt tokens ({where})"


def _fields_of_request(report: RequestReport) -> dict[str, Any]:
    return {"event": "request", **asdict(report)}


def _fields_of_lookup(lookup: Lookup) -> dict[str, Any]:
    return {"event": "lookup", **plain(lookup)}


def _write(kind: LogRequests, text: Callable[[T], str], fields: Callable[[T], dict[str, Any]], of: T) -> None:
    if _log.isEnabledFor(logging.INFO):
        line = json.dumps(fields(of)) if kind == "json" else text(of)
        _log.info("%s", line, extra={"lmcache_fields": lambda: fields(of)})


class JsonFormatter(logging.Formatter):
    """Every record as one JSON object; what a line is about stands in fields of its own."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
        }
        own = getattr(record, "lmcache_fields", None)
        if own is None:
            fields["message"] = record.getMessage()
        else:
            fields |= own()
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)
