"""What a tier counts as its own: room that is being written to, manifests, and tenants, all at once."""

from __future__ import annotations

from tiny import RECORD, chain, model, open_local, store, until

from lmcache_core import Context, Traits, salt_id
from lmcache_core.errors import BackendFull
from lmcache_core.keys import ChunkKey
from lmcache_core.ledger import Ledger, Written
from lmcache_core.manifest import key_of
from lmcache_core.policies.lru import LRU
from lmcache_core.testing.dict_backend import DictBackend

SHARD = bytes(16)
ALICE = salt_id("alice")


def key(number: int) -> ChunkKey:
    return ChunkKey(SHARD + number.to_bytes(32, "big"))


class Persistent(DictBackend):
    """Counts what it was asked to store beyond its capacity."""

    api_version = (1, 0)
    traits = Traits(persistent=True)

    def __init__(self, capacity_nbytes: int) -> None:
        super().__init__(context=Context(capacity_nbytes=capacity_nbytes))
        self.refused = 0

    def put(self, key: ChunkKey, data: memoryview) -> None:
        try:
            super().put(key, data)
        except BackendFull:
            self.refused += 1
            raise


def test_writes_at_once_of_one_tenant_stay_within_its_quota_together():
    ledger = Ledger(None, LRU, 5)
    ledger.belongs(SHARD, ALICE, SHARD)
    assert ledger.reserve(3, SHARD)[1]
    assert not ledger.reserve(3, SHARD)[1]
    ledger.written(3, SHARD, [Written(key(1), 2)])
    assert ledger.reserve(3, SHARD)[1]
    assert ledger.used_nbytes == 5


def test_a_write_that_stored_nothing_gives_back_its_room():
    ledger = Ledger(4, LRU)
    assert ledger.reserve(4, SHARD)[1]
    ledger.written(4, SHARD)
    assert (ledger.used_nbytes, ledger.known) == (0, {})


def test_a_manifest_is_counted_once_and_given_back_whole():
    ledger = Ledger(None, LRU)
    ledger.belongs(SHARD, ALICE, SHARD)
    for _ in range(2):  # two threads may write it at once
        ledger.learn_manifest(SHARD, 8192)
    assert ledger.used_nbytes == 8192
    ledger.disown(SHARD)
    assert ledger.used_nbytes == 0


def test_a_full_tier_makes_room_for_a_manifest_as_for_any_record():
    capacity = 4 * RECORD
    backend = Persistent(capacity)
    mine, other = model(), model(salt_id=ALICE)
    with open_local([backend], tier_capacity_nbytes=capacity) as cache:
        for of, seed in ((mine, 1), (mine, 2), (mine, 3), (other, 1)):
            store(cache, chain(1, seed=seed, of=of))
            assert cache.drain(10)
        assert key_of(other.shards[0].shard_id) in backend.store.records
        assert chain(1, seed=1, of=other).keys(other.shards[0])[0] in backend.store.records
        assert not backend.refused
        assert cache.status().tiers[0].used_nbytes == backend.store.nbytes <= capacity


def test_a_backend_that_answers_for_fewer_records_than_asked_is_left_alone_and_its_room_given_back():
    class Forgetful(DictBackend):
        api_version = (1, 0)

        def put_many(self, keys, data, *, timeout_s):
            return []

    with open_local([Forgetful()], tier_capacity_nbytes=4 * RECORD) as cache:
        store(cache, chain(2))
        assert until(lambda: cache.status().tiers[0].breaker == "open")
        assert cache._pool.tiers[0].drain(10)
        assert cache.status().tiers[0].used_nbytes == 0
        assert cache.metrics.count("tier_writes", result="fault") == 2
