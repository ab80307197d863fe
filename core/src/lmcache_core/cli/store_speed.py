"""How fast one store is through a tier, as a cache uses it: throughput of many records, latency of one, existence."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from lmcache_core import frame
from lmcache_core.audit import aligned_buffer
from lmcache_core.config import PluginsConfig, TierConfig
from lmcache_core.errors import CacheError, PluginError
from lmcache_core.events import Events
from lmcache_core.frame import Frame
from lmcache_core.keys import ChunkKey
from lmcache_core.layout import PAGE_NBYTES, Layout, Region
from lmcache_core.metrics import Metrics
from lmcache_core.opening import open_tier
from lmcache_core.tier import LoadItem, StoreItem, Tier

SINGLES: Final = 50
"""Records that are timed one by one; fewer where they are slow."""
SINGLES_S: Final = 2.0
ASKED: Final = 512
"""Keys of one question about existence."""
_GRACE_S: Final = 30.0


class StoreFailed(CacheError):
    """The store did not do what was measured."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Of one operation at a time, in seconds."""

    p50_s: float
    p95_s: float
    p99_s: float

    @classmethod
    def of(cls, samples: list[float]) -> Latency:
        ordered = sorted(samples)
        return cls(*(ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.95, 0.99)))


@dataclass(frozen=True, slots=True)
class Speed:
    """What a store gave with one set of options and one size of records."""

    record_nbytes: int
    io_threads: int
    records: int
    """Put and read at once."""
    put: float
    """Bytes a second."""
    get: float
    put_latency: Latency
    get_latency: Latency
    exists_latency: Latency
    exists: float
    """Keys a second, asked for in batches."""
    description: str
    """What the backend says of itself."""


class Bench:
    """A tier over the store, and records whose keys nobody has; they are removed when it is closed."""

    def __init__(self, tier: TierConfig, use: PluginsConfig, payload_nbytes: int, data_nbytes: int) -> None:
        self._nbytes = payload_nbytes
        self._timeout_s = tier.timeout_s
        self._shard_id = os.urandom(16)
        self._keys: list[ChunkKey] = []
        region = Region(name="kv", layers=1, block_tokens=1, block_nbytes=payload_nbytes, dtype="u1", packing="bench")
        self._layout = Layout(chunk_tokens=1, regions=(region,))
        self._events = Events(None)
        self._tier = _opened(tier, use, self._events, 4 * data_nbytes)
        try:
            limit = self._tier.backend.traits.max_nbytes
            record_nbytes = frame.record_nbytes(payload_nbytes)
            if limit is not None and record_nbytes > limit:
                raise StoreFailed(f"records of {record_nbytes} bytes are over the store's {limit}")
            count = max(2, data_nbytes // record_nbytes)
            self._records = [self._filled(record_nbytes) for _ in range(count)]
        except BaseException:
            self.close()
            raise

    def measure(self) -> Speed:
        """Raises StoreFailed with the store's reason if anything it was asked for was not done."""
        backend = self._tier.backend
        puts, gets = self._one_by_one()
        # As many records as there is time for: what one takes is known by now.
        one_s = max(1e-6, sum(puts) / len(puts))
        wanted = max(2 * backend.traits.io_threads, int(SINGLES_S * backend.traits.io_threads / one_s))
        records = self._records[: max(2, wanted)]
        keys = self._new_keys(len(records))
        nbytes = sum(record.nbytes for record in records)
        put_s = self._timed("put", lambda done: self._store(keys, records, done), len(records))
        get_s = self._timed("get", lambda done: self._load(keys, records, done), len(records))
        exists, batch = self._questions(keys)
        self._remove()
        return Speed(
            record_nbytes=records[0].nbytes,
            io_threads=backend.traits.io_threads,
            records=len(records),
            put=nbytes / put_s,
            get=nbytes / get_s,
            put_latency=Latency.of(puts),
            get_latency=Latency.of(gets),
            exists_latency=Latency.of(exists),
            exists=ASKED / batch,
            description=self._tier.status().description,
        )

    def close(self) -> None:
        """Remove what is left and close the store."""
        with contextlib.suppress(StoreFailed):
            self._remove()
        self._tier.close()
        self._events.close()

    def _one_by_one(self) -> tuple[list[float], list[float]]:
        puts: list[float] = []
        gets: list[float] = []
        until = time.monotonic() + SINGLES_S
        record = self._records[0]
        while len(puts) < SINGLES and (len(puts) < 2 or time.monotonic() < until):
            keys = self._new_keys(1)
            puts.append(self._timed("put", partial(self._store, keys, [record]), 1))
            gets.append(self._timed("get", partial(self._load, keys, [record]), 1))
        return puts[1:] or puts, gets[1:] or gets  # the first one connects

    def _questions(self, keys: list[ChunkKey]) -> tuple[list[float], float]:
        """Seconds to ask for one key, several times; and for a batch of keys that are all there, some of them twice."""
        singles = [self._asked([keys[index % len(keys)]]) for index in range(SINGLES + 1)][1:]
        batch = [keys[index % len(keys)] for index in range(ASKED)]
        return singles, min(self._asked(batch) for _ in range(3))

    def _asked(self, keys: list[ChunkKey]) -> float:
        nbytes = frame.record_nbytes(self._nbytes)
        return self._timed(
            "exists", lambda done: done("" if self._probe(keys, nbytes) else "the tier is unavailable"), 1
        )

    def _probe(self, keys: list[ChunkKey], nbytes: int) -> bool:
        ended = threading.Event()
        asked = self._tier.probe(keys, nbytes, ended.set)
        return asked and ended.wait(2 * self._timeout_s + _GRACE_S) and self._tier.breaker.reason == ""

    def _store(self, keys: list[ChunkKey], records: list[memoryview], done: Callable[[str], None]) -> None:
        for key, record in zip(keys, records, strict=True):
            head = Frame(key, 0, self._layout.fingerprint, self._nbytes, self._nbytes, time.time_ns())
            frame.pack(head, record[:PAGE_NBYTES])
        self._tier.store(
            [
                StoreItem(key, record, self._layout, lambda item, reason, in_use: done(reason), lambda item: None)
                for key, record in zip(keys, records, strict=True)
            ]
        )

    def _load(self, keys: list[ChunkKey], records: list[memoryview], done: Callable[[str], None]) -> None:
        for record in records:
            frame.void(record)
        self._tier.load(
            [
                LoadItem(key, record, self._layout, lambda item, found, reason, in_use: done(reason), lambda item: None)
                for key, record in zip(keys, records, strict=True)
            ]
        )

    def _timed(self, verb: str, start: Callable[[Callable[[str], None]], None], count: int) -> float:
        """Seconds from asking until each record has its answer, all of which must be good."""
        lock, ended = threading.Lock(), threading.Event()
        reasons: list[str] = []

        def done(reason: str) -> None:
            with lock:
                reasons.append(reason)
                if len(reasons) == count:
                    ended.set()

        began = time.perf_counter()
        start(done)
        # The tier answers for each batch by twice its timeout; batches of stores wait for one another.
        ended.wait(2 * self._timeout_s * (1 + count) + _GRACE_S)
        took_s = time.perf_counter() - began
        with lock:
            bad = [reason for reason in reasons if reason]
            missing = count - len(reasons)
        if bad or missing:
            raise StoreFailed(f"{verb}: {len(bad) + missing} of {count} failed: {bad[0] if bad else 'no answer'}")
        return max(took_s, 1e-9)

    def _new_keys(self, count: int) -> list[ChunkKey]:
        keys = [ChunkKey(self._shard_id + os.urandom(32)) for _ in range(count)]
        self._keys += keys
        return keys

    def _remove(self) -> None:
        keys, self._keys = self._keys, []
        if not keys:
            return
        left = [*keys]

        def run() -> None:
            # By the backend, which may raise anything: the tier removes only what it knows of.
            with contextlib.suppress(Exception):
                while left:
                    self._tier.backend.remove(left[-1])
                    left.pop()

        thread = threading.Thread(target=run, name="lmc-bench-remove", daemon=True)
        thread.start()
        thread.join(2 * self._timeout_s + _GRACE_S)
        if left:
            raise StoreFailed(f"{len(left)} records of shard {self._shard_id.hex()} could not be removed")

    def _filled(self, nbytes: int) -> memoryview:
        record = aligned_buffer(nbytes, self._tier.backend)[:nbytes]
        record[:] = os.urandom(nbytes)
        return record


@contextlib.contextmanager
def bench(tier: TierConfig, use: PluginsConfig, payload_nbytes: int, data_nbytes: int) -> Iterator[Bench]:
    made = Bench(tier, use, payload_nbytes, data_nbytes)
    try:
        yield made
    finally:
        made.close()


def _opened(tier: TierConfig, use: PluginsConfig, events: Events, max_queued_nbytes: int) -> Tier:
    try:
        return open_tier(tier, use, Metrics(), events, max_queued_nbytes=max_queued_nbytes)
    except BaseException as error:
        events.close()
        if isinstance(error, Exception) and not isinstance(error, CacheError):
            raise PluginError(
                f"the backend {tier.backend!r} could not be opened: {type(error).__name__}: {error}"
            ) from error
        raise
