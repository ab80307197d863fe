"""What became of each request: gathered from its lookup to its release, then told once, to hooks and to the log."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
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
    """A request on its way; times by the monotonic clock."""

    request: str
    began: float
    hit: Hit | None = None
    worth_s: float = 0.0
    answered: float = 0.0
    load_began: float = 0.0
    load_s: float = 0.0
    loaded: int = 0
    failed: int = 0
    nbytes: int = 0
    parts: list[Part] = field(default_factory=list)

    def report(self) -> RequestReport:
        hit = self.hit
        tokens = hit.chain.model.family.chunk_tokens if hit is not None else 0
        return RequestReport(
            request=self.request,
            started_at=time.time() - (time.monotonic() - self.began),
            tokens=hit.chain.tokens if hit is not None else 0,
            hit_tokens=hit.tokens if hit is not None else 0,
            refused_tokens=hit.refused * tokens if hit is not None else 0,
            tiers=hit.tiers if hit is not None else (),
            lookup_s=self.answered - self.began if hit is not None else 0.0,
            load_after_s=max(0.0, self.load_began - self.began) if self.load_began else 0.0,
            load_s=self.load_s,
            loaded_chunks=self.loaded,
            failed_chunks=self.failed,
            nbytes=self.nbytes,
            parts=tuple(self.parts),
            saved_s=max(0.0, self.worth_s - self.load_s) if self.loaded and self.worth_s else 0.0,
        )


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
        return self.log is not None or self.events.hears("lmcache_request_ended")

    def looked_up(self, hit: Hit, began: float, token_s: float) -> None:
        """A lookup that `began` then was answered; `token_s` is what a token restored saves, 0 if unknown."""
        if not self.wanted:
            return
        with self._lock:
            found = self._of(hit.request, began)
            found.hit, found.answered = hit, time.monotonic()
            found.worth_s = max(0.0, token_s) * hit.tokens

    def loaded(
        self, request: str, began: float, seconds: float, *, ok: int, failed: int, nbytes: int, parts: dict[str, Part]
    ) -> None:
        """A load of the request has ended; several are added up."""
        if not self.wanted:
            return
        with self._lock:
            found = self._of(request, began)
            found.load_began = found.load_began or began
            found.load_s = max(found.load_s, seconds)
            found.loaded += ok
            found.failed += failed
            found.nbytes += nbytes
            found.parts += parts.values()

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
            found = self._open[request] = _Open(request, began)
            if len(self._open) > MAX_OPEN:
                self._tell(self._open.popitem(last=False)[1])
        return found

    def _tell(self, found: _Open) -> None:
        report = found.report()
        self.events.emit("lmcache_request_ended", report=report)
        if self.log is not None:
            self.log(report)
