"""What became of each request: gathered from its lookup to its release, then told once, to hooks and to the log."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from .cache import Hit
from .events import Events

MAX_OPEN: Final = 4096
"""Requests that are followed at a time; beyond it the oldest is told as it is."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one tier gave for a request."""

    tier: str
    chunks: int
    seconds: float
    """From the call that asked until the last of it was in host memory."""


@dataclass(frozen=True, slots=True)
class RequestReport:
    """One request, as far as the cache had to do with it in this process."""

    request: str
    started_at: float
    """Seconds since the epoch."""
    tokens: int = 0
    """Of the prompt; 0 where the lookup was made in another process."""
    hit_tokens: int = 0
    refused_tokens: int = 0
    """Found, and dearer to load than to compute."""
    tiers: tuple[tuple[str, int], ...] = ()
    """Chunks of the hit by the tier that they were in at the lookup, nearest first."""
    lookup_s: float = 0.0
    """From the first lookup to its last answer."""
    load_after_s: float = 0.0
    """When the load began, after `started_at`."""
    load_s: float = 0.0
    loaded_chunks: int = 0
    failed_chunks: int = 0
    nbytes: int = 0
    parts: tuple[Part, ...] = ()
    saved_s: float = 0.0
    """Estimated; 0 where nothing was measured."""


@dataclass(slots=True)
class _Open:
    began: float
    report: RequestReport
    worth_s: float = 0.0


@dataclass(slots=True)
class Requests:
    """Thread-safe, bounded; does nothing unless somebody listens."""

    events: Events
    log: Callable[[RequestReport], None] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _open: OrderedDict[str, _Open] = field(default_factory=OrderedDict)

    @property
    def wanted(self) -> bool:
        """Whether anybody listens."""
        return self.log is not None or self.events.wanted

    def looked_up(self, hit: Hit, began: float, token_s: float) -> None:
        """A lookup that `began` then was answered; `token_s` is what a token restored saves, 0 if unknown."""
        if not self.wanted:
            return
        tokens = hit.chain.model.family.chunk_tokens
        with self._lock:
            found = self._of(hit.request, began)
            found.worth_s = max(0.0, token_s) * hit.tokens
            found.report = replace(
                found.report,
                tokens=hit.chain.tokens,
                hit_tokens=hit.tokens,
                refused_tokens=hit.refused * tokens,
                tiers=hit.tiers,
                lookup_s=time.monotonic() - found.began,
            )

    def loaded(
        self, request: str, began: float, seconds: float, *, ok: int, failed: int, nbytes: int, parts: dict[str, Part]
    ) -> None:
        """A load of the request has ended; several are added up."""
        if not self.wanted:
            return
        with self._lock:
            found = self._of(request, began)
            before = found.report
            found.report = replace(
                before,
                load_after_s=before.load_after_s if before.load_s else max(0.0, began - found.began),
                load_s=max(before.load_s, seconds),
                loaded_chunks=before.loaded_chunks + ok,
                failed_chunks=before.failed_chunks + failed,
                nbytes=before.nbytes + nbytes,
                parts=(*before.parts, *parts.values()),
            )

    def ended(self, request: str) -> None:
        """The request was released; unknown ones are ignored."""
        with self._lock:
            found = self._open.pop(request, None)
        if found is not None:
            self._tell(found)

    def close(self) -> None:
        """Tell what is left."""
        while self._open:
            self.ended(next(iter(self._open)))

    def _of(self, request: str, began: float) -> _Open:
        found = self._open.get(request)
        if found is None:
            started_at = time.time() - (time.monotonic() - began)
            found = self._open[request] = _Open(began, RequestReport(request, started_at))
            if len(self._open) > MAX_OPEN:
                self._tell(self._open.popitem(last=False)[1])
        return found

    def _tell(self, found: _Open) -> None:
        report = found.report
        if report.loaded_chunks and found.worth_s:
            report = replace(report, saved_s=max(0.0, found.worth_s - report.load_s))
        self.events.emit("lmcache_request_ended", report=report)
        if self.log is not None:
            self.log(report)
