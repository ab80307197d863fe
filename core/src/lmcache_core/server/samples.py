"""The last minutes of a daemon, as points in a ring: what a page draws at once when somebody opens it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from ..metrics import Metrics, Reading
from ..pool import Pool
from ..unhandled import report

INTERVAL_S: Final = 2.0
MAX_POINTS: Final = 450
"""A quarter of an hour."""
_READING_EVERY: Final = 15
"""Points from one whole reading that is kept to the next, for what is said of the last five minutes."""
_MAX_READINGS: Final = 11


class TierPoint(msgspec.Struct, frozen=True, array_like=True):
    """One tier at one moment.  What was counted is since the daemon's start, so that any stretch is a difference."""

    used_nbytes: int
    records: int
    read_nbytes: float
    reads: int
    """Batches."""
    read_s: float
    written_nbytes: float
    writes: int
    write_s: float
    evictions: float
    drops: float


class Point(msgspec.Struct, frozen=True):
    """One moment."""

    number: int
    at: float
    """Seconds since the epoch."""
    lookups: tuple[float, float, float, float]
    """Full, partial, miss, refused."""
    tokens: float
    hit_tokens: float
    saved_s: float
    loads: float
    stores: float
    load_nbytes: float
    store_nbytes: float
    clients: int
    tiers: tuple[TierPoint, ...]
    """Host memory, then those below it."""


class Samples:
    """Thread-safe.  A thread takes a point each `INTERVAL_S`, and never holds a lock for longer than a copy takes."""

    def __init__(
        self, pool: Pool, metrics: Metrics, clients: Callable[[], int], *, clock: Callable[[], float] = time.time
    ) -> None:
        self._pool = pool
        self._metrics = metrics
        self._clients = clients
        self._clock = clock
        self._lock = threading.Lock()
        self._points: deque[bytes] = deque(maxlen=MAX_POINTS)
        self._readings: deque[tuple[float, Reading]] = deque(maxlen=_MAX_READINGS)
        self._taken = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self.take()
        self._thread = threading.Thread(target=self._run, name="lmcache-samples", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def take(self) -> None:
        """Add a point for this moment."""
        reading, at = self._metrics.read(), self._clock()
        point = _point(self._taken, at, reading, self._pool, self._clients())
        encoded = msgspec.json.encode(point)
        with self._lock:
            self._points.append(encoded)
            if self._taken % _READING_EVERY == 0:
                self._readings.append((at, reading))
            self._taken += 1

    @property
    def taken(self) -> int:
        """How many points there have been."""
        return self._taken

    def after(self, number: int) -> list[bytes]:
        """The points that are kept and came after that one, as JSON, oldest first."""
        with self._lock:
            wanted = max(0, min(self._taken - 1 - number, len(self._points)))
            return list(self._points)[len(self._points) - wanted :]

    def lately(self) -> tuple[float, Reading, Reading]:
        """Seconds of the stretch that is called lately, what was counted in it, and since the start."""
        now, at = self._metrics.read(), self._clock()
        with self._lock:
            began, before = self._readings[0] if self._readings else (at, now)
        return max(at - began, 1e-9), now.since(before), now

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            try:
                self.take()
            except BaseException:  # a bug of ours; the next point is taken all the same
                report()


def _point(number: int, at: float, reading: Reading, pool: Pool, clients: int) -> Point:
    lookups = reading.by("lookups", "result")
    host = _tier(pool.name, pool.slab.used_nbytes, pool.records(), reading)
    below = (_tier(tier.name, tier.ledger.used_nbytes, len(tier.known), reading) for tier in pool.tiers)
    return Point(
        number=number,
        at=round(at, 3),
        lookups=(
            lookups.get("full", 0.0),
            lookups.get("partial", 0.0),
            lookups.get("miss", 0.0),
            lookups.get("refused", 0.0),
        ),
        tokens=reading.total("lookup_tokens"),
        hit_tokens=reading.total("hit_tokens"),
        saved_s=round(reading.total("ttft_saved_estimated_seconds"), 6),
        loads=reading.total("loads"),
        stores=reading.total("stores"),
        load_nbytes=reading.total("load_bytes"),
        store_nbytes=reading.total("store_bytes"),
        clients=clients,
        tiers=(host, *below),
    )


def _tier(name: str, used_nbytes: int, records: int, reading: Reading) -> TierPoint:
    reads, read_s = reading.spent("tier_read_seconds", tier=name)
    writes, write_s = reading.spent("tier_write_seconds", tier=name)
    return TierPoint(
        used_nbytes,
        records,
        reading.total("tier_read_bytes", tier=name),
        reads,
        round(read_s, 6),
        reading.total("tier_written_bytes", tier=name),
        writes,
        round(write_s, 6),
        reading.total("evictions", tier=name),
        reading.total("drops", tier=name),
    )
