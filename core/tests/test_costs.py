"""Hits that are dearer than computing are refused, once both have been measured, and never before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from daemons import open_remote
from tiny import CHUNK, RECORD, Chain, LocalCache, chain, load, open_local, store

from lmcache_core.backend import Context, NoOptions
from lmcache_core.cache import Cache
from lmcache_core.costs import MIN_SAMPLES, Costs
from lmcache_core.metrics import Metrics
from lmcache_core.pool import Pool
from lmcache_core.testing import DictBackend, in_threads
from lmcache_core.worth import MAX_FAMILIES, Worth

OPENERS: Any = pytest.mark.parametrize("opened", [open_local, open_remote], ids=["local", "daemon"])


def dict_backend() -> DictBackend:
    return DictBackend(NoOptions(), Context(capacity_nbytes=None, timeout_s=5.0))


def pool_of(cache: Cache) -> Pool:
    from daemons import POOLS

    return cache._pool if isinstance(cache, LocalCache) else POOLS[cache]


def metrics_of(cache: Any) -> Metrics:
    from daemons import METRICS

    found: Metrics = cache.metrics if isinstance(cache, LocalCache) else METRICS[cache]
    return found


def below(cache: Cache, *chains: Chain) -> None:
    """Have the tier hold `chains`, and host memory nothing."""
    for of in chains:
        store(cache, of)
    assert cache.drain(10)
    pool = pool_of(cache)
    with pool._lock:
        pool._evict(list(pool._index.entries.values()))


def teach(cache: Any, of: Chain, *, load_s: float, compute_s: float) -> None:
    """Loading all of `of` takes `load_s`, computing it `compute_s`."""
    (tier,) = pool_of(cache).tiers
    for _ in range(MIN_SAMPLES):
        tier.costs.sample(len(of) * RECORD, load_s)
        cache.computed(of.model, len(of) * CHUNK, compute_s)


@contextmanager
def cache_with(opened: Any, of: Chain, *, load_s: float, compute_s: float, **settings: Any) -> Iterator[Any]:
    with opened([dict_backend()], **settings) as cache:
        below(cache, of)
        teach(cache, of, load_s=load_s, compute_s=compute_s)
        yield cache


@OPENERS
def test_a_hit_that_is_dearer_than_computing_is_refused_and_says_so(opened: Any) -> None:
    of = chain(8)
    with cache_with(opened, of, load_s=2.0, compute_s=1.0) as cache:
        hit = cache.lookup_answered(of, "r", timeout_s=5.0)
        assert (hit.chunks, hit.refused, hit.tiers) == (0, 8, ())
        cache.release("r")
        found = pool_of(cache).history.lookup("r")
        assert found is not None
        assert (found.result, found.reason, found.refused_chunks) == ("refused", "refused by cost", 8)
        assert found.load_s == pytest.approx(2.0)
        assert found.recompute_s == pytest.approx(1.0)
        metrics = metrics_of(cache)
        assert metrics.count("lookups", result="refused") == metrics.count("lookups") == 1
        assert metrics.count("refused_tokens") == 8 * CHUNK
        assert metrics.count("hit_tokens") == 0
        assert not pool_of(cache).tiers[0].ledger._pins, "what is refused is not held"


@OPENERS
def test_a_hit_that_is_cheaper_than_computing_is_taken_and_what_it_saves_is_counted(opened: Any) -> None:
    of = chain(8)
    with cache_with(opened, of, load_s=1.0, compute_s=3.0) as cache:
        hit, result = load(cache, of)
        assert (hit, result.ok_chunks) == (8, 8)
        assert metrics_of(cache).count("lookups", result="full") == 1
        assert metrics_of(cache).count("ttft_saved_estimated_seconds") == pytest.approx(2.0, rel=0.2)


@OPENERS
def test_what_is_in_host_memory_is_taken_whatever_the_rest_costs(opened: Any) -> None:
    of = chain(8)
    with cache_with(opened, of, load_s=2.0, compute_s=1.0) as cache:
        store(cache, of, range(3))
        hit, result = load(cache, of)
        assert (hit, result.ok_chunks) == (3, 3)
        assert metrics_of(cache).count("lookups", result="refused") == 1
        assert metrics_of(cache).count("hit_tokens") == 3 * CHUNK


def test_one_refusal_in_32_is_let_through_to_be_measured_again() -> None:
    of = chain(8)
    with cache_with(open_local, of, load_s=2.0, compute_s=1.0) as cache:
        chunks = []
        for number in range(64):
            chunks.append(cache.lookup(of, f"r{number}").chunks)
            cache.release(f"r{number}")
        assert chunks == ([0] * 31 + [8]) * 2
        assert cache.metrics.count("cost_probes") == 2
        assert cache.metrics.count("lookups", result="full") == 2


def test_copying_that_takes_longer_than_computing_refuses_host_memory_too() -> None:
    of = chain(8)
    with open_local() as cache:
        store(cache, of)
        for _ in range(MIN_SAMPLES):
            cache.computed(of.model, 8 * CHUNK, 1e-7)
            cache._worth.copied(of.model, 8, 1.0)
        assert (cache.lookup(of, "r").chunks, cache.lookup(of, "r").refused) == (0, 8)
        cache.release("r")
        assert cache.status().records_in_use == 0


@pytest.mark.parametrize("missing", ["loads", "computing", "both", "few"])
def test_without_measurements_nothing_is_refused(missing: str) -> None:
    of = chain(8)
    with open_local([dict_backend()]) as cache:
        below(cache, of)
        for _ in range(MIN_SAMPLES - (missing == "few")):
            if missing in ("computing", "few"):
                cache._pool.tiers[0].costs.sample(8 * RECORD, 100.0)
            if missing in ("loads", "few"):
                cache.computed(of.model, 8 * CHUNK, 1e-3)
        assert cache.lookup(of, "r").chunks == 8
        cache.release("r")


@pytest.mark.parametrize("where", ["engine", "pool"])
def test_admission_always_refuses_nothing(where: str) -> None:
    of = chain(8)
    with cache_with(open_local, of, load_s=2.0, compute_s=1.0) as cache:
        if where == "engine":
            cache._worth = None
            cache.computed(of.model, 1, 1.0)  # harmless
        else:
            cache._pool.leases._admission = False
        assert cache.lookup(of, "r").chunks == 8
        cache.release("r")


def test_loads_teach_their_tier_what_they_take() -> None:
    of = chain(4)
    with open_local([dict_backend()]) as cache:
        for _ in range(MIN_SAMPLES):
            below(cache, of)
            load(cache, of)
        estimate = cache._pool.tiers[0].costs.estimate(4 * RECORD)
        assert estimate is not None
        assert 0 < estimate < 60


def test_there_is_no_estimate_without_samples_of_about_that_size() -> None:
    costs = Costs()
    for _ in range(MIN_SAMPLES - 1):
        costs.sample(1000, 1.0)
    assert costs.estimate(1000) is None
    costs.sample(1000, 1.0)
    assert costs.estimate(1000) == pytest.approx(1.0)
    assert costs.estimate(2000) == pytest.approx(2.0)
    assert costs.estimate(10_000) is None
    assert costs.estimate(100) is None
    assert costs.estimate(1000, context=1000) is None
    assert costs.estimate(0) is None


def test_one_stall_changes_no_estimate() -> None:
    costs = Costs()
    for _ in range(MIN_SAMPLES):
        costs.sample(1000, 1.0)
    costs.sample(1000, 500.0)
    costs.sample(1000, float("nan"))
    costs.sample(-5, 1.0)
    assert costs.estimate(1000) == pytest.approx(1.0)


def test_estimates_are_bounded_whatever_is_sampled() -> None:
    costs, worth = Costs(), Worth()
    for bits in range(200):
        for context in (0, 1, 1 << 20, 1 << 190):
            for _ in range(20):
                costs.sample(1 << bits, 1.0, context)
    assert len(costs._buckets) <= 49 * 49
    assert max(len(bucket.samples) for bucket in costs._buckets.values()) <= 15
    for number in range(2 * MAX_FAMILIES):
        worth.computed(chain(1, of=tenant(number)).model, 10, 1.0)
    assert len(worth._families) == MAX_FAMILIES


def tenant(number: int) -> Any:
    from tiny import model

    return model(weights=f"w{number}")


def test_estimates_are_the_same_from_many_threads() -> None:
    costs = Costs()

    def sample() -> None:
        for _ in range(200):
            costs.sample(1000, 1.0)
            costs.estimate(1000)

    in_threads(*[sample] * 4)
    assert costs._count == 800
    assert costs.estimate(1000) == pytest.approx(1.0)
