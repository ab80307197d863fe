"""Failure is a miss and only a miss: whatever a store does, no wrong byte, no hang, no leak."""

from __future__ import annotations

import hashlib
import logging
import random
import threading

import pytest
from tiny import (
    BLOCKS,
    RAW,
    RECORD,
    Engine,
    chain,
    load,
    open_local,
    store,
    until,
)

from lmcache_core import Codec, Traits
from lmcache_core.backends.disk import DiskBackend
from lmcache_core.codec import Identity
from lmcache_core.errors import ChunkCorrupt
from lmcache_core.events import Events
from lmcache_core.layout import PAGE_NBYTES
from lmcache_core.ledger import Written
from lmcache_core.metrics import Metrics
from lmcache_core.policies.lru import LRU
from lmcache_core.sealing import Sealer
from lmcache_core.testing.dict_backend import DictBackend, DictStore
from lmcache_core.testing.faults import Fault, FaultBackend
from lmcache_core.tier import Tier


def filled(chunks: int = 8) -> DictStore:
    """A store that holds `chain(chunks)`."""
    backend = DictBackend()
    with open_local([backend]) as cache:
        store(cache, chain(chunks))
        assert cache.drain(5)
    assert len(backend.store.records) == chunks
    return backend.store


def breaker(cache, tier: int = 0) -> str:
    return cache._pool.tiers[tier].status().breaker


@pytest.mark.parametrize("nbytes", [0, 1, PAGE_NBYTES - 1, PAGE_NBYTES, RECORD // 2, RECORD - 1])
def test_a_store_that_fails_half_way_is_a_miss_every_time(nbytes, caplog):  # S11
    inner = DictBackend()
    faulty = FaultBackend(inner, script=[Fault.SHORT_PUT] * 4, verbs=["put"], short_put_nbytes=nbytes)
    with open_local([faulty]) as cache:
        store(cache, chain(4))
        assert cache._pool.tiers[0].drain(5)
        assert cache.metrics.count("tier_writes", result="ok") == 0
        assert cache.metrics.count("tier_writes", result="fault") >= 3
        assert cache.status().tiers[0].used_nbytes == 0
    (line,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "tier1" in line
    assert "ChunkKey(" in line
    assert "the connection broke" in line
    partial = len(inner.store.records)
    with open_local([DictBackend(store=inner.store)]) as cache:
        result = load(cache, chain(4))[1]
        assert result.nbytes == 0
        assert cache.metrics.count("corruptions") == sum(stop - start for start, stop, _ in result.failed) == partial
        assert store(cache, chain(4)).ok_chunks == 4
        assert cache.drain(5)
    with open_local([DictBackend(store=inner.store)]) as cache:
        assert load(cache, chain(4))[1].ok_chunks == 4, "the next store repairs it"


@pytest.mark.parametrize("where", ["magic", "version", "key", "layout", "length", "header checksum", "payload", "end"])
def test_one_flipped_bit_is_a_miss_is_removed_and_is_repaired_by_the_next_store(where, tmp_path):  # S12
    at = {
        "magic": 0,
        "version": 8,
        "key": 20,
        "layout": 70,
        "length": 81,
        "header checksum": 4081,
        "payload": 4096,
        "end": 4096 + RAW - 1,
    }[where]

    def disk() -> DiskBackend:
        from lmcache_core import Context

        return DiskBackend(DiskBackend.Options(path=str(tmp_path / "store")), Context())

    with open_local([disk()]) as cache:
        store(cache, chain(3))
        assert cache.drain(5)
    digest = chain(3).keys(chain(3).model.shards[0])[1].digest.hex()
    (path,) = (tmp_path / "store").rglob(digest)
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
    with open_local([disk()]) as cache:
        result = load(cache, chain(3))[1]
        assert result.ok_chunks == 1
        assert [(start, stop) for start, stop, _ in result.failed] == [(1, 2)]
        assert "corrupt" in result.failed[0][2]
        assert cache.metrics.count("corruptions") == 1
        assert not path.exists()
        assert load(cache, chain(3))[0] == 1
        assert store(cache, chain(3)).ok_chunks == 1
        assert cache.drain(5)
    with open_local([disk()]) as cache:
        assert load(cache, chain(3))[1].ok_chunks == 3


@pytest.mark.parametrize("fault", [Fault.FLIP, Fault.TRUNCATE, Fault.VANISH, Fault.UNAVAILABLE, Fault.BROKEN])
def test_a_gap_in_the_middle_leaves_the_prefix_usable_and_names_the_gap(fault):  # S15
    backend = FaultBackend(DictBackend(store=filled()), script=[None] * 4 + [fault] + [None] * 3, verbs=["get"])
    with open_local([backend]) as cache:
        hit, result = load(cache, chain(8))
        assert hit == 8
        assert result.ok_chunks == 4
        assert [(start, stop) for start, stop, _ in result.failed] == [(4, 5)]
        assert cache._pool.usage()[:2] == (7, 0)


def test_a_thousand_gaps_leak_nothing():  # S15
    kept = filled()
    with open_local([FaultBackend(DictBackend(store=kept), seed=3, rates={Fault.FLIP: 0.2}, verbs=["get"])]) as cache:
        for _ in range(1000):
            load(cache, chain(8))
            store(cache, chain(8))
            assert cache.drain(5)
            cache.evict(chain(2, seed=1))
            with cache._pool._lock:
                ready = [e for e in cache._pool._index.entries.values() if not e.holds]
                cache._pool._evict(ready)
        assert cache._pool.usage()[:2] == (0, 0)
        slab = cache._pool.slab
        assert sum(len(extent.free) for extent in slab.extents.values()) == sum(e.slots for e in slab.extents.values())


def test_a_record_of_another_key_in_the_right_place_is_never_served():
    kept = filled(2)
    first, second = chain(2).keys(chain(2).model.shards[0])
    kept.records[first], kept.records[second] = kept.records[second], kept.records[first]
    with open_local([DictBackend(store=kept)]) as cache:
        result = load(cache, chain(2))[1]
        assert result.ok_chunks == 0
        assert cache.metrics.count("corruptions") == 2


def test_a_stalled_store_is_answered_by_its_deadline_and_its_memory_waits_for_it():
    faulty = FaultBackend(DictBackend(store=filled(2)), script=[Fault.STALL], verbs=["get"])
    with open_local([faulty], timeout_s=0.05, chunks=4, extent_nbytes=4 * RECORD) as cache:
        result = load(cache, chain(2))[1]
        assert {reason for _, _, reason in result.failed} == {"late"}
        assert cache.metrics.count("loads", result="late") == 2
        (extent,) = cache._pool.slab.extents.values()
        assert len(extent.free) == 2, "a slot with I/O in flight is not reused"
        assert store(cache, chain(4, seed=1)).ok_chunks == 2
        faulty.release_stalls()
        assert until(lambda: len(extent.free) == 2)
        assert load(cache, chain(2))[1].ok_chunks == 2, "and the tier is in use again"


def test_a_stalled_write_keeps_its_slot_until_it_returns():
    faulty = FaultBackend(DictBackend(), script=[Fault.STALL], verbs=["put"])
    with open_local([faulty], timeout_s=0.05, chunks=2) as cache:
        store(cache, chain(2))
        assert faulty.stalled.acquire(timeout=5)
        assert until(lambda: cache.metrics.count("drops", reason="late") == 2)
        assert store(cache, chain(1, seed=1)).failed == ((0, 1, "no room"),)
        faulty.release_stalls()
        assert until(lambda: cache._pool.usage()[1] == 0)
        assert store(cache, chain(1, seed=1)).ok_chunks == 1


def test_a_plugin_that_raises_anything_opens_its_breaker_at_once_with_one_traceback(caplog):
    faulty = FaultBackend(DictBackend(store=filled()), script=[Fault.FOREIGN] * 8, verbs=["get"])
    with open_local([faulty]) as cache:
        result = load(cache, chain(8))[1]
        assert result.ok_chunks == 0
        assert len(result.failed) >= 1
        assert breaker(cache) == "open"
        assert "ForeignError" in cache.status().tiers[0].reason
        assert load(cache, chain(8))[0] == 0, "an open tier is not offered"
    assert sum(record.exc_info is not None for record in caplog.records) == 1
    caplog.clear()  # the traceback holds the memory that the call was given


def test_a_tier_that_is_down_costs_no_wait_and_is_back_by_itself():  # S19
    now = [100.0]
    faulty = FaultBackend(DictBackend(), rates={Fault.UNAVAILABLE: 1.0})
    with open_local([faulty], clock=lambda: now[0], probe_interval_s=1.0) as cache:
        for seed in range(4):
            store(cache, chain(2, seed=seed))
            cache._pool.tiers[0].drain(5)
        assert breaker(cache) == "open"
        before = faulty.log.copy()
        store(cache, chain(2, seed=9))
        assert faulty.log == before, "left alone while it is open"
        assert cache.metrics.count("drops", reason="tier unavailable") >= 2
        faulty.heal()
        now[0] += 1.0
        store(cache, chain(2, seed=10))
        assert cache._pool.tiers[0].drain(5)
        assert breaker(cache) == "closed"
        assert cache.metrics.count("tier_writes", result="ok") == 2


def test_a_full_store_evicts_and_is_tried_once_more_then_the_record_is_dropped():  # S24
    faulty = FaultBackend(DictBackend(), script=[None, None, Fault.FULL, None, Fault.FULL, Fault.FULL], verbs=["put"])
    with open_local([faulty]) as cache:
        for seed in range(4):
            store(cache, chain(1, seed=seed))
            assert cache._pool.tiers[0].drain(5)
        assert cache.metrics.count("evictions", reason="capacity") == 2
        assert cache.metrics.count("drops", reason="full") == 1
        assert cache.metrics.count("corruptions") == 0
        assert breaker(cache) == "closed", "a full store is healthy"
        store(cache, chain(1, seed=5))
        assert cache._pool.tiers[0].drain(5)
        assert cache.metrics.count("tier_writes", result="ok") == 4


def test_the_capacity_of_a_tier_is_the_total_whatever_is_stored():
    backend = DictBackend()
    with open_local([backend], tier_capacity_nbytes=5 * RECORD) as cache:
        for seed in range(30):
            store(cache, chain(2, seed=seed))
            assert cache._pool.tiers[0].drain(5)
            assert backend.store.nbytes <= 5 * RECORD
            assert backend.store.nbytes == cache.status().tiers[0].used_nbytes
        assert store(cache, chain(9, seed=99)).ok_chunks == 9
        assert cache._pool.tiers[0].drain(5)
        assert backend.store.nbytes <= 5 * RECORD


def test_a_record_larger_than_the_tier_or_its_store_is_dropped_without_evicting_anything():
    class Small(DictBackend):
        api_version = (1, 0)
        traits = Traits(max_nbytes=RECORD - 1)

    with open_local([Small()]) as cache:
        store(cache, chain(2))
        assert cache._pool.tiers[0].drain(5)
        assert cache.metrics.count("drops", reason="full") == 2
        assert cache.metrics.count("evictions") == 0
    with open_local([DictBackend()], tier_capacity_nbytes=RECORD - 1) as cache:
        store(cache, chain(2))
        assert cache._pool.tiers[0].drain(5)
        assert cache.metrics.count("drops", reason="full") == 2


def test_a_store_queue_that_is_full_drops_and_never_waits():
    faulty = FaultBackend(DictBackend(), rates={Fault.STALL: 1.0}, verbs=["put"])
    with open_local([faulty], max_queued_nbytes=2 * RECORD, chunks=64) as cache:
        for seed in range(30):
            assert store(cache, chain(1, seed=seed)).ok_chunks == 1
        assert cache.metrics.count("drops", reason="queue full") > 20
        faulty.release_stalls()


class Xor(Codec):
    """Halves nothing, but changes every byte and the length."""

    api_version = (1, 0)

    def max_nbytes(self, layout):
        return layout.nbytes + 8

    def encode(self, raw, layout, out):
        data = bytes(byte ^ 0x5A for byte in raw)
        out[: len(data) + 8] = data + hashlib.blake2b(data, digest_size=8).digest()
        return len(data) + 8

    def decode(self, data, layout, out):
        raw = bytes(byte ^ 0x5A for byte in data[:-8])
        if data.nbytes != layout.nbytes + 8 or hashlib.blake2b(data[:-8], digest_size=8).digest() != bytes(data[-8:]):
            raise ChunkCorrupt("xor")
        out[:] = raw


def test_a_codec_changes_what_is_stored_and_nothing_else():
    backend = DictBackend()
    with open_local([backend], codec=Xor(), codec_name="xor") as cache:
        store(cache, chain(4))
        assert cache.drain(5)
    raw = chain(4).keys(chain(4).model.shards[0])[0]
    assert all(b"xor" in record for record, _ in backend.store.records.values())
    assert backend.store.records[raw][0][PAGE_NBYTES] == hashlib.sha256(raw).digest()[0] ^ 0x5A
    with open_local([DictBackend(store=backend.store)], codec=Xor(), codec_name="xor") as cache:
        assert load(cache, chain(4))[1].ok_chunks == 4


def test_a_record_is_read_by_the_codec_in_its_header_not_by_the_configuration():
    plain = filled(2)
    with open_local([DictBackend(store=plain)], codec=Xor(), codec_name="xor") as cache:
        assert load(cache, chain(2))[1].ok_chunks == 2


def test_a_record_whose_codec_is_not_installed_is_a_miss_and_stays():
    backend = DictBackend()
    with open_local([backend], codec=Xor(), codec_name="xor") as cache:
        store(cache, chain(1))
        assert cache.drain(5)
    with open_local([DictBackend(store=backend.store)]) as cache:
        result = load(cache, chain(1))[1]
        assert "codec 'xor'" in result.failed[0][2]
    assert len(backend.store.records) == 1


def test_a_mixed_faulty_load_tells_no_lie_holds_its_limits_and_its_counters_add_up():  # S34 in one process
    rates = {
        Fault.FLIP: 0.03,
        Fault.TRUNCATE: 0.02,
        Fault.VANISH: 0.03,
        Fault.UNAVAILABLE: 0.02,
        Fault.BROKEN: 0.02,
        Fault.SHORT_PUT: 0.02,
        Fault.FULL: 0.02,
    }
    inner = DictBackend()
    faulty = FaultBackend(inner, seed=11, rates=rates)
    with open_local(
        [faulty], chunks=24, extent_nbytes=RECORD, tier_capacity_nbytes=60 * RECORD, probe_interval_s=0.0, policy=LRU
    ) as cache:
        errors: list[BaseException] = []

        def work(seed: int) -> None:
            rng = random.Random(seed)
            try:
                for n in range(250):
                    prompt = chain(rng.randrange(1, 8), seed=rng.randrange(12))
                    if rng.random() < 0.5:
                        store(cache, prompt)
                    else:
                        load(cache, prompt, f"{seed}-{n}")
                    assert cache._pool.slab.used_nbytes <= 24 * RECORD
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert cache._pool.tiers[0].drain(10)
        assert until(lambda: cache._pool.usage()[1] == 0)
        m = cache.metrics
        assert m.count("lookups") == m.count("lookups", result="full") + m.count("lookups", result="partial") + m.count(
            "lookups", result="miss"
        )
        assert m.count("lookups", result="full") > 0
        assert m.count("loads", result="failed") > 0
        assert cache.status().tiers[0].used_nbytes <= 60 * RECORD
        known = cache._pool.tiers[0].known
        assert sum(known.values()) == cache.status().tiers[0].used_nbytes
        slab = cache._pool.slab
        free = sum(len(extent.free) for extent in slab.extents.values())
        assert free + cache._pool.usage()[0] == sum(extent.slots for extent in slab.extents.values())


def test_a_slot_that_was_reused_under_a_reader_is_a_failed_load_not_wrong_bytes():
    with open_local() as cache:
        prompt = chain(2)
        store(cache, prompt)
        key = prompt.keys(prompt.model.shards[0])[1]
        entry = cache._pool._index.entries[key]
        entry.generation += 1
        hit = cache.lookup(prompt, "r")
        engine = Engine()
        shard = prompt.model.shards[0]
        result = cache.retrieve(hit, shard, range(2), engine.pages, list(range(2 * BLOCKS))).wait(5)
        assert result.ok_chunks == 1
        assert result.failed == ((1, 2, "overwritten"),)
        assert engine.poisoned(BLOCKS)


def test_a_store_that_takes_forever_to_list_keeps_nobody_from_starting():
    go = threading.Event()

    class Slow(DictBackend):
        api_version = (1, 0)

        def entries(self, shard_id=None):
            go.wait()
            yield from super().entries(shard_id)

    tier = Tier(
        "slow",
        Slow(store=filled(3)),
        backend_name="slow",
        sealer=Sealer(Identity(), "identity", lambda name: None),
        new_policy=LRU,
        capacity_nbytes=2 * RECORD,
        timeout_s=5.0,
        max_queued_nbytes=1 << 20,
        metrics=Metrics(),
        events=Events(None),
    )
    tier.start(wait_s=0.0)
    assert not tier.known
    go.set()
    assert until(lambda: len(tier.known) == 2), "learned later, and trimmed"
    tier.close()


def test_a_tier_that_stalls_holds_up_neither_stores_nor_lookups():  # S30
    faulty = FaultBackend(DictBackend(), rates={Fault.STALL: 1.0}, verbs=["put"])
    with open_local([faulty], chunks=512) as cache:
        for seed in range(200):
            assert store(cache, chain(1, seed=seed)).ok_chunks == 1
        assert all(cache.lookup(chain(1, seed=seed), f"r{seed}").resident == 1 for seed in range(200))
        assert faulty.stalled.acquire(blocking=False), "while the tier hangs in its first write"
        assert not cache._pool.tiers[0].status().records
        faulty.release_stalls()


def test_a_store_that_always_answers_too_late_is_left_alone():
    faulty = FaultBackend(DictBackend(), rates={Fault.STALL: 1.0}, verbs=["put"])
    with open_local([faulty], timeout_s=0.02) as cache:
        for seed in range(3):
            store(cache, chain(1, seed=seed))
            assert until(lambda least=seed + 1: cache.metrics.count("drops", reason="late") >= least)
        assert breaker(cache) == "open"
        faulty.release_stalls()
        assert cache._pool.tiers[0].drain(5)
        assert until(lambda: cache._pool.usage()[1] == 0)
        assert breaker(cache) == "open", "an answer that came too late is no success"


def test_a_manifest_is_written_beside_an_encoded_record_and_not_over_it():
    class Kept(DictBackend):
        api_version = (1, 0)
        traits = Traits(persistent=True)

    first = Kept()
    with open_local([first], codec=Xor(), codec_name="xor") as cache:
        store(cache, chain(3))
        assert cache.drain(5)
    with open_local([Kept(store=first.store)], codec=Xor(), codec_name="xor") as cache:
        assert load(cache, chain(3))[1].ok_chunks == 3


def test_what_asks_the_store_for_nothing_does_not_use_up_the_trial_of_its_recovery():
    now = [100.0]
    faulty = FaultBackend(DictBackend(), rates={Fault.UNAVAILABLE: 1.0}, verbs=["put"])
    with open_local([faulty], clock=lambda: now[0]) as cache:
        tier = cache._pool.tiers[0]
        known, new = chain(1).keys(chain(1).model.shards[0])[0], chain(1, seed=9)
        tier.ledger.written(0, stored=[Written(known, RECORD)])
        for seed in range(1, 4):
            store(cache, chain(1, seed=seed))
            assert tier.drain(5)
        assert breaker(cache) == "open"
        assert not tier.ready
        faulty.heal()
        now[0] += 1.0
        store(cache, chain(1))  # the tier has it
        assert tier.drain(5)
        store(cache, new)
        assert tier.drain(5)
        assert breaker(cache) == "closed"


def test_a_question_that_has_no_answer_is_a_fault():
    class Hangs(DictBackend):
        api_version = (1, 0)
        traits = Traits(shared=True)

        def contains_prefix(self, keys, *, timeout_s):
            go.wait()
            return 0

    go = threading.Event()
    with open_local([Hangs()], timeout_s=0.01) as cache:
        for seed in range(3):
            cache.lookup_answered(chain(1, seed=seed), f"r{seed}", timeout_s=10)
        assert until(lambda: breaker(cache) == "open")
        go.set()


def test_a_header_that_an_earlier_record_left_in_the_slot_vouches_for_nothing():
    class HeaderLost(DictBackend):
        """Says that it has read a record, and has read only what is behind the header, wrong."""

        api_version = (1, 0)

        def get(self, key, into):
            into[PAGE_NBYTES:] = bytes(len(into) - PAGE_NBYTES)
            return len(into)

    with open_local([HeaderLost(store=filled(1))], write="second_use") as cache:
        store(cache, chain(1))  # its header has no checksum until it is written below
        pool = cache._pool
        with pool._lock:
            pool._evict(list(pool._index.entries.values()))
        assert load(cache, chain(1), chunks=1)[1].ok_chunks == 0
        assert cache.metrics.count("corruptions") == 1
