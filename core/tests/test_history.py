"""The rings of recent losses and lookups: bounded, and true to what happened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from daemons import serving
from tiny import LRU, RECORD, chain, load, open_local, store, until

from lmcache_core.backend import Context, NoOptions
from lmcache_core.client.cache import connect
from lmcache_core.client.control import Control
from lmcache_core.history import BEING_STORED, NEVER_STORED, TIER_DOWN, History
from lmcache_core.keys import ChunkKey
from lmcache_core.testing import DictBackend
from lmcache_core.testing.faults import Fault, FaultBackend


def key(number: int, shard: int = 0) -> ChunkKey:
    return ChunkKey(bytes([shard]) * 16 + number.to_bytes(32, "big"))


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def dict_backend() -> DictBackend:
    return DictBackend(NoOptions(), Context(capacity_nbytes=None, timeout_s=5.0))


def test_the_last_loss_in_each_tier_is_told_newest_first() -> None:
    now = iter(range(100))
    history = History(clock=lambda: float(next(now)))
    history.lost([key(1), key(2)], "host", "capacity", "lru")
    history.lost([key(1)], "disk", "not stored: queue full")
    history.lost([key(1, shard=9)], "host", "removed")
    assert [(loss.tier, loss.reason, loss.policy) for loss in history.why(digest(1))] == [
        ("host", "removed", ""),
        ("disk", "not stored: queue full", ""),
    ]
    assert [(loss.at, loss.reason, loss.policy) for loss in history.why(digest(2))] == [(0.0, "capacity", "lru")]
    assert history.why(digest(3)) == ()


def test_the_oldest_losses_are_forgotten_first_and_each_tier_by_itself() -> None:
    history = History(max_losses=10)
    history.lost([key(0)], "disk", "corrupt")
    for number in range(25):
        history.lost([key(number)], "host", "capacity")
    assert [bool(history.why(digest(n))) for n in range(25)] == [True] + [False] * 14 + [True] * 10
    assert [loss.tier for loss in history.why(digest(0))] == ["disk"]


def test_lookups_are_bounded_and_a_request_is_found_by_the_name_that_an_engine_gave_it() -> None:
    with open_local() as cache:
        cache._pool.history._max_lookups = 3
        for name in ("1/a", "2/a", "a", "b", "c/d"):
            load(cache, chain(1), request=name, chunks=0)
        history = cache.history
        assert [one.request for one in history.lookups()] == ["c/d", "b", "a"]
        assert [one.request for one in history.lookups(limit=1)] == ["c/d"]
        found = history.lookup("d")
        assert found is not None
        assert found.request == "c/d"
        assert history.lookup("1/a") is None


def test_a_miss_says_why_never_stored_or_evicted_by_which_policy() -> None:
    with open_local(chunks=4, policy=LRU) as cache:
        load(cache, chain(3), request="first", chunks=0)
        found = cache.history.lookup("first")
        assert (found.result, found.reason, found.hit_chunks) == ("miss", NEVER_STORED, 0)
        assert found.missing == chain(3).digests[0]
        store(cache, chain(3))
        store(cache, chain(3, seed=1))
        load(cache, chain(3), request="second")
        found = cache.history.lookup("second")
        assert (found.result, found.reason, found.hit_chunks) == ("partial", "capacity", 1)
        assert [(loss.tier, loss.policy) for loss in cache.history.why(found.missing)] == [("host", "LRU")]
        load(cache, chain(3, seed=1), request="third")
        assert cache.history.lookup("third").reason == ""
        cache.evict(chain(3, seed=1))
        load(cache, chain(3, seed=1), request="fourth", chunks=0)
        assert cache.history.lookup("fourth").reason == "removed"


def test_a_chunk_that_is_being_stored_was_not_lost() -> None:
    with open_local() as cache:
        of = chain(2)
        reservation = cache._pool.reserve(of, of.model.shards[0], range(2))
        load(cache, of, request="early", chunks=0)
        assert cache.history.lookup("early").reason == BEING_STORED
        cache._pool.abort([entry for _, entry in reservation.new], "given up")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [(Fault.FLIP, "corrupt"), (Fault.VANISH, "lost"), (Fault.BROKEN, "fault: injected: get failed")],
)
def test_a_record_that_could_not_be_read_says_why(fault: Fault, reason: str) -> None:
    backend = FaultBackend(dict_backend(), script=[fault], verbs=["get"])
    with open_local([backend], chunks=2) as cache:
        of = chain(1)
        store(cache, of)
        assert cache.drain(10)
        with cache._pool._lock:
            cache._pool._evict(list(cache._pool._index.entries.values()))
        load(cache, of)
        assert until(lambda: reason in [loss.reason for loss in cache.history.why(of.digests[0])])


def test_a_store_that_a_tier_did_not_take_says_why() -> None:
    backend = FaultBackend(dict_backend(), script=[Fault.FULL] * 2, verbs=["put"])
    with open_local([backend]) as cache:
        of = chain(1)
        store(cache, of)
        assert until(lambda: bool(cache.history.why(of.digests[0])))
        (loss,) = cache.history.why(of.digests[0])
        assert (loss.tier, loss.reason) == ("tier1", "not stored: full: injected: no room")


def test_what_only_a_tier_has_that_is_down_is_not_called_lost() -> None:
    with open_local([dict_backend()], probe_interval_s=1e9) as cache:
        of = chain(1)
        store(cache, of)
        assert cache.drain(10)
        with cache._pool._lock:
            cache._pool._evict(list(cache._pool._index.entries.values()))
        cache._pool.tiers[0].breaker.failed("pulled out", fatal=True)
        load(cache, of, request="down", chunks=0)
        assert cache.history.lookup("down").reason == TIER_DOWN


def test_a_daemon_recalls_over_its_socket(tmp_path: Path) -> None:
    with serving(tmp_path / "s", chunks=2) as daemon, connect(tmp_path / "s", call_timeout_s=5.0) as cache:
        first, second = chain(2), chain(2, seed=1)
        store(cache, first)
        store(cache, second)
        load(cache, first, request="mine", chunks=0)
        with Control.unix(tmp_path / "s", timeout_s=10.0) as control:
            found = control.recall("mine", [second.digests[0]], timeout_s=10.0)
        json.dumps(found)
        assert found["lookup"]["request"].endswith("/mine")
        assert found["lookup"]["result"] == "miss"
        assert found["lookup"]["reason"] == "capacity"
        assert [loss["reason"] for loss in found["losses"][first.digests[0].hex()]] == ["capacity"]
        assert found["losses"][second.digests[0].hex()] == []
        assert found["latest"][0] == found["lookup"]
        assert daemon._pool.slab.used_nbytes <= 2 * RECORD
