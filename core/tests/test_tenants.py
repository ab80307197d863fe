"""Tenants share a cache: each within its quota, and who floods pays with its own records."""

from __future__ import annotations

from pathlib import Path

from tiny import RECORD, chain, load, model, open_local, store

from lmcache_core import CacheConfig, LocalCache, Model, RawOptions, TierConfig, open_cache, salt_id
from lmcache_core.policies.lru import LRU
from lmcache_core.policy import Item
from lmcache_core.shares import Shares
from lmcache_core.testing.dict_backend import DictBackend

ALICE, BOB = (model(salt_id=salt_id(name)) for name in ("alice", "bob"))


def stored(cache: LocalCache, of: Model, seeds: range) -> int:
    return sum(load(cache, chain(1, of=of, seed=seed))[0] for seed in seeds)


def fill(cache: LocalCache, of: Model, seeds: range) -> None:
    for seed in seeds:
        store(cache, chain(1, of=of, seed=seed))
        for tier in cache._pool.tiers:
            assert tier.drain(5)


def test_the_same_prompt_of_two_tenants_is_two_records_and_neither_sees_the_others():
    with open_local() as cache:
        store(cache, chain(3, of=ALICE))
        assert load(cache, chain(3, of=ALICE))[0] == 3
        assert load(cache, chain(3, of=BOB))[0] == 0
        assert load(cache, chain(3))[0] == 0


def test_a_tenants_flood_evicts_its_own_records_in_host_memory_and_below():
    backend = DictBackend()
    with open_local([backend], chunks=20, extent_nbytes=RECORD, tier_capacity_nbytes=20 * RECORD) as cache:
        fill(cache, BOB, range(8))
        fill(cache, ALICE, range(100))
        keys = [chain(1, of=BOB, seed=seed).keys(BOB.shards[0])[0] for seed in range(8)]
        assert all(key in cache._pool._index.entries for key in keys)
        assert all(key in backend.store.records for key in keys)
        assert cache._pool._index.used(ALICE.family.salt_id) == 12 * RECORD


def test_a_small_tenant_takes_from_the_largest():
    with open_local(chunks=20, extent_nbytes=RECORD) as cache:
        fill(cache, ALICE, range(20))
        fill(cache, BOB, range(5))
        assert stored(cache, BOB, range(5)) == 5
        assert stored(cache, ALICE, range(20)) == 15


def test_a_quota_holds_in_every_tier_and_counts_what_cannot_be_stored():
    backend = DictBackend()
    with open_local([backend], chunks=40, tenant_quota_nbytes=5 * RECORD) as cache:
        fill(cache, ALICE, range(12))
        fill(cache, model(), range(12))
        assert cache._pool._index.used(ALICE.family.salt_id) == 5 * RECORD
        assert stored(cache, model(), range(12)) == 12, "no tenant, no quota"
        assert sum(key[:16] == ALICE.shards[0].shard_id for key in backend.store.records) == 5
        result = store(cache, chain(9, of=BOB, seed=50))
        assert result.ok_chunks == 5
        assert cache.metrics.count("drops", reason="tenant quota") == 4
        text = cache.metrics.prometheus_text()
        assert "alice" not in text
        assert ALICE.family.salt_id.hex() not in text


def test_a_quota_on_disk_holds_across_a_restart(tmp_path):
    def opened(root: Path) -> LocalCache:
        options = RawOptions.of({"path": str(root)})
        disk = TierConfig("disk", "disk", 100 * RECORD, tenant_quota_nbytes=6 * RECORD, options=options)
        return open_cache(CacheConfig(chunk_tokens=16, tiers=(TierConfig("host", "memory", 1 << 20), disk)))

    with opened(tmp_path / "s") as cache:
        fill(cache, BOB, range(3))
        fill(cache, ALICE, range(5))
    with opened(tmp_path / "s") as cache:
        fill(cache, ALICE, range(5, 30))
    with opened(tmp_path / "s") as cache:
        assert cache.status().tiers[0].records == 9
        assert stored(cache, ALICE, range(30)) == 6
        assert stored(cache, BOB, range(3)) == 3


def test_a_manifest_says_in_clear_text_what_a_store_holds_and_hides_the_salt(tmp_path):
    options = RawOptions.of({"path": str(tmp_path / "s")})
    tiers = (TierConfig("host", "memory", 1 << 20), TierConfig("disk", "disk", 1 << 20, options=options))
    with open_cache(CacheConfig(chunk_tokens=16, tiers=tiers)) as cache:
        fill(cache, ALICE, range(1))
        assert cache.drain(5)
    text = b"".join(p.read_bytes() for p in (tmp_path / "s").rglob("*") if p.is_file())
    assert b'"model": "org/tiny"' in text
    assert b"alice" not in text
    assert ALICE.family.salt_id.hex().encode() in text


def test_a_flipped_manifest_is_removed_and_written_again(tmp_path):
    options = RawOptions.of({"path": str(tmp_path / "s")})
    tiers = (TierConfig("host", "memory", 1 << 20), TierConfig("disk", "disk", 1 << 20, options=options))

    def run(seed: int) -> None:
        with open_cache(CacheConfig(chunk_tokens=16, tiers=tiers)) as cache:
            fill(cache, ALICE, range(seed))
            assert cache.drain(5)
            assert stored(cache, ALICE, range(seed)) == seed

    run(2)
    (manifest,) = [p for p in (tmp_path / "s").rglob("*") if p.is_file() and b"org/tiny" in p.read_bytes()]
    data = bytearray(manifest.read_bytes())
    data[4100] ^= 1
    manifest.write_bytes(data)
    run(4)
    assert b"org/tiny" in manifest.read_bytes()
    assert manifest.read_bytes() != data


def test_records_without_bytes_are_records():
    shares = Shares(LRU)
    key = chain(1).keys(model().shards[0])[0]
    shares.put(Item(key, 0, 0))
    shares.remove(key)
    shares.remove(key)
    assert shares.victims(1, b"", lambda key: False) == []
