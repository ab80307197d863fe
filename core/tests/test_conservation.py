"""Counters obey conservation under a mixed, faulty load: what was asked for is what ended one way or another."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from daemons import serving
from prometheus_client.parser import text_string_to_metric_families
from tiny import BLOCKS, RAW, RECORD, Engine, chain, open_local, store, until

from lmcache_core.backend import Context, NoOptions
from lmcache_core.backends.disk import DiskBackend
from lmcache_core.cache import Cache
from lmcache_core.client.cache import connect
from lmcache_core.events import Events
from lmcache_core.metrics import Metrics
from lmcache_core.pool import Pool
from lmcache_core.testing import DictBackend, in_threads
from lmcache_core.testing.faults import Fault, FaultBackend

WORKERS = 4
OPERATIONS = 150
CHUNKS = 6
WANTED = ("lookups", "loads", "stores", "evictions", "corruptions", "drops")
MOST_ROUNDS = 5
"""How fast the machine is decides what meets a fault."""
RATES = {
    Fault.UNAVAILABLE: 0.03,
    Fault.BROKEN: 0.02,
    Fault.VANISH: 0.01,
    Fault.FLIP: 0.02,
    Fault.TRUNCATE: 0.01,
    Fault.SHORT_PUT: 0.01,
    Fault.FULL: 0.02,
}


class Told:
    """What hooks were told: how many records left which tier and why."""

    def __init__(self) -> None:
        self.gone: Counter[tuple[str, str]] = Counter()
        self.dropped: list[int] = []
        self.events = Events(self, lambda: self.dropped.append(1))

    def __call__(self, hook: str, arguments: dict[str, Any]) -> None:
        if hook == "lmcache_chunks_evicted":
            self.gone[arguments["tier"], arguments["reason"]] += len(arguments["keys"])


class Asked:
    """What one worker asked for."""

    def __init__(self) -> None:
        self.lookups = self.looked_up = self.hit_tokens = self.loads = self.stores = 0


def faulty(seed: int) -> FaultBackend:
    inner = DictBackend(NoOptions(), Context(capacity_nbytes=None, timeout_s=5.0))
    return FaultBackend(inner, seed=seed, rates=RATES)


def work(cache: Cache, number: int, asked: Asked) -> None:
    """A seeded mix of stores, loads, lookups that come to nothing, prefetches and removals."""
    rng = random.Random(number)
    for step in range(OPERATIONS):
        of = chain(rng.randint(1, CHUNKS), seed=rng.randrange(8))
        (shard,) = of.model.shards
        request = f"{number}-{step}"
        match rng.choices(("store", "load", "leave", "prefetch", "evict"), (6, 8, 2, 1, 1))[0]:
            case "store":
                engine = Engine(len(of) * BLOCKS)
                ids = engine.compute(of, shard, range(len(of)))
                assert cache.store(of, shard, range(len(of)), engine.pages, ids).wait(60) is not None
                asked.stores += len(of)
            case "prefetch":
                assert cache.prefetch(of).wait(60) is not None
                asked.lookups += 1
                asked.looked_up += of.tokens
            case "evict":
                cache.evict(of)
            case kind:
                hit = cache.lookup_answered(of, request, timeout_s=60)
                asked.lookups += 1
                asked.looked_up += of.tokens
                asked.hit_tokens += hit.tokens
                if kind == "load":
                    engine = Engine(max(1, hit.chunks) * BLOCKS)
                    ids = list(range(hit.chunks * BLOCKS))
                    assert cache.retrieve(hit, shard, range(hit.chunks), engine.pages, ids).wait(60) is not None
                    asked.loads += hit.chunks
                cache.release(request)


def scrape(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.prometheus_text())
        for sample in family.samples
    }


def run(caches: Sequence[Cache], metrics: Metrics, wanted: Sequence[str] = WANTED) -> Asked:
    """All workers at once, each on its cache, while somebody scrapes, until all that is wanted has been counted.

    What they asked for in all.
    """
    asked = [Asked() for _ in caches]
    working = threading.Event()
    fallen: list[object] = []

    def watch() -> None:
        before: dict[Any, float] = {}
        while not working.is_set():
            now = scrape(metrics)
            counted = {key: value for key, value in now.items() if key[0].endswith(("_total", "_bucket", "_count"))}
            fallen.extend((key, value) for key, value in before.items() if counted[key] < value)
            before = counted
            working.wait(0.02)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for first in range(0, MOST_ROUNDS * len(caches), len(caches)):
            workers = (partial(work, c, first + n, asked[n]) for n, c in enumerate(caches))
            in_threads(*workers, timeout_s=240.0)
            if all(metrics.count(name) for name in wanted):
                break
    finally:
        working.set()
        watcher.join()
    assert not fallen, "a counter fell"
    total = Asked()
    for name in vars(total):
        setattr(total, name, sum(getattr(one, name) for one in asked))
    return total


def check(metrics: Metrics, pool: Pool, asked: Asked, told: Told) -> None:
    count = metrics.count
    assert count("lookups") == asked.lookups
    assert count("lookups") == sum(count("lookups", result=r) for r in ("full", "partial", "miss", "refused"))
    assert count("lookup_tokens") == asked.looked_up
    assert count("hit_tokens") >= asked.hit_tokens, "prefetches look up too"
    assert count("loads") == asked.loads
    assert count("loads") == sum(count("loads", result=r) for r in ("ok", "failed", "late"))
    assert count("stores") == asked.stores
    assert count("stores") == sum(count("stores", result=r) for r in ("ok", "skipped", "failed"))
    assert count("store_bytes") == count("stores", result="ok") * RAW
    for name in WANTED:
        assert count(name) > 0, f"the load was to have {name}"
    for tier in pool.tiers:
        assert tier.ledger.used_nbytes == sum(tier.known.values())
        assert count("tier_writes", tier=tier.name) > 0
        outcomes = ("ok", "miss", "corrupt", "fault", "late", "tier unavailable")
        assert count("tier_reads", tier=tier.name) == sum(
            count("tier_reads", tier=tier.name, result=result) for result in outcomes
        )
        assert count("corruptions", tier=tier.name) == count("tier_reads", tier=tier.name, result="corrupt")
    assert pool.slab.used_nbytes >= sum(entry.slot.nbytes for entry in pool._index.entries.values())
    assert pool.held_nbytes() == 0
    assert not told.dropped
    counted = {
        (dict(labels)["tier"], dict(labels)["reason"]): value
        for (name, labels), value in metrics._counters.items()
        if name == "evictions"
    }
    assert until(lambda: told.gone == counted), (told.gone, counted)
    assert scrape(metrics) == scrape(metrics), "nothing changes when nobody does anything"


def test_counters_add_up_in_one_process() -> None:
    told, metrics = Told(), Metrics()
    backends = [faulty(1), faulty(2)]
    with open_local(
        backends,
        chunks=20,
        tier_capacity_nbytes=30 * RECORD,
        probe_interval_s=0.01,
        metrics=metrics,
        events=told.events,
    ) as cache:
        asked = run([cache] * WORKERS, metrics)
        for backend in backends:
            backend.heal()
        assert until(lambda: cache.drain(10))
        check(metrics, cache._pool, asked, told)


def test_counters_add_up_in_a_daemon_with_four_clients(tmp_path: Path) -> None:
    told = Told()
    backends = [faulty(3)]
    with serving(
        tmp_path / "s", backends, chunks=20, tier_capacity_nbytes=30 * RECORD, probe_interval_s=0.01, events=told.events
    ) as daemon:
        caches = [connect(tmp_path / "s", call_timeout_s=60.0) for _ in range(WORKERS)]
        try:
            asked = run(caches, daemon.metrics)
            backends[0].heal()
            assert until(lambda: caches[0].drain(10))
        finally:
            for cache in caches:
                cache.close()
        assert until(lambda: daemon._pool.usage()[1] == 0 and daemon._clients() == 0)
        check(daemon.metrics, daemon._pool, asked, told)


def test_what_a_disk_tier_says_that_it_uses_is_what_is_on_disk(tmp_path: Path) -> None:
    options = DiskBackend.Options(path=str(tmp_path))
    backend = DiskBackend(options, Context(capacity_nbytes=20 * RECORD, timeout_s=5.0))
    with open_local([backend], chunks=10, tier_capacity_nbytes=20 * RECORD) as cache:
        run([cache] * 2, cache.metrics, wanted=())
        assert cache.drain(30)
        tier = cache._pool.tiers[0]

        def on_disk() -> int:
            return sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file() and len(path.name) == 64)

        assert until(lambda: on_disk() == tier.ledger.used_nbytes), (on_disk(), tier.ledger.used_nbytes)
        (used,) = (
            value for (name, labels), value in scrape(cache.metrics).items()
            if name == "lmcache_used_bytes" and ("tier", "tier1") in labels
        )  # fmt: skip
        assert used == on_disk()


def test_a_record_that_is_being_removed_is_not_written_until_it_is_gone() -> None:
    inner = DictBackend(NoOptions(), Context(capacity_nbytes=None, timeout_s=60.0))
    backend = FaultBackend(inner, script=[Fault.STALL], verbs=["remove"])
    with open_local([backend], timeout_s=60.0) as cache:
        of = chain(1)
        (key,) = of.keys(of.model.shards[0])
        store(cache, of)
        assert cache.drain(60)
        cache.evict(of)
        assert backend.stalled.acquire(timeout=60)
        store(cache, of)
        assert until(lambda: cache.metrics.count("tier_writes") == 2)
        assert cache.metrics.count("drops", tier="tier1", reason="busy") == 1
        backend.release_stalls()
        assert until(lambda: cache.drain(60))
        assert key in cache._pool.tiers[0].known
        assert inner.contains(key)


@pytest.mark.parametrize("result", ["late", "failed"])
def test_a_load_that_does_not_come_is_counted_once(result: str) -> None:
    fault = Fault.STALL if result == "late" else Fault.BROKEN
    inner = DictBackend(NoOptions(), Context(capacity_nbytes=None, timeout_s=0.05))
    backend = FaultBackend(inner, script=[fault], verbs=["get"])
    with open_local([backend], timeout_s=0.05 if result == "late" else 5.0) as cache:
        of = chain(1)
        engine = Engine(BLOCKS)
        ids = engine.compute(of, of.model.shards[0], range(1))
        cache.store(of, of.model.shards[0], range(1), engine.pages, ids).wait(10)
        assert cache.drain(10)
        with cache._pool._lock:
            cache._pool._evict(list(cache._pool._index.entries.values()))
        hit = cache.lookup(of, "r")
        assert hit.chunks == 1
        assert cache.retrieve(hit, of.model.shards[0], range(1), engine.pages, ids).wait(30) is not None
        cache.release("r")
        assert cache.metrics.count("loads") == cache.metrics.count("loads", result=result) == 1
        backend.heal()
