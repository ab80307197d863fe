"""Tenants share a cache: each within its quota, and who floods pays with its own records."""

from __future__ import annotations

import os
from pathlib import Path

from disk_helpers import open_disk
from tiny import RECORD, chain, load, model, open_local, store, until

from lmcache_core import CacheConfig, LocalCache, Model, RawOptions, TierConfig, manifest, open_cache, salt_id
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
    (path,) = [p for p in (tmp_path / "s").rglob("*") if p.is_file() and b"org/tiny" in p.read_bytes()]
    data = bytearray(path.read_bytes())
    data[4100] ^= 1
    path.write_bytes(data)
    run(4)
    assert b"org/tiny" in path.read_bytes()
    assert path.read_bytes() != data


def test_records_without_bytes_are_records():
    shares = Shares(LRU)
    key = chain(1).keys(model().shards[0])[0]
    shares.put(Item(key, 0, 0))
    shares.remove(key)
    shares.remove(key)
    assert shares.victims(1, b"", lambda key: False) == []


def files_of(root: Path) -> tuple[set[str], set[str]]:
    """The shards that have records on disk, and those that have a manifest."""
    found = [path for path in (root / "v1").glob("*/*/*") if path.is_file()]
    with_manifest = {path.parent.parent.name for path in found if path.name == manifest.DIGEST.hex()}
    return {path.parent.parent.name for path in found if path.name != manifest.DIGEST.hex()}, with_manifest


def visitor(number: int) -> Model:
    return model(salt_id=salt_id(f"visitor-{number}"))


def test_what_says_whose_records_were_leaves_with_the_last_of_them_and_makes_room(tmp_path: Path) -> None:
    capacity = 40 * RECORD
    with open_local([open_disk(tmp_path, capacity)], chunks=400, tier_capacity_nbytes=capacity) as cache:
        for number in range(200):
            store(cache, chain(4, of=visitor(number)))
            assert cache._pool.tiers[0].drain(5)
        (tier,) = cache._pool.tiers
        records, manifests = files_of(tmp_path)
        assert records == manifests
        assert len(tier.known) >= 28, "at most one manifest for each four records"
        assert len(tier.ledger._tenants) == len(tier.ledger._families) == len(manifests) <= 10
        assert tier.ledger.used_nbytes == tier.backend.used_nbytes <= capacity
        assert not tier.ledger._records.keys() - {bytes.fromhex(each) for each in records}
        assert len(list((tmp_path / "v1").iterdir())) == 2 + len(manifests), "directories go too"


def test_a_tenant_that_comes_when_the_tier_is_full_is_known_for_one_and_held_to_its_quota(tmp_path: Path) -> None:
    capacity = 40 * RECORD
    settings = {"tier_capacity_nbytes": capacity, "tenant_quota_nbytes": 5 * RECORD}
    with open_local([open_disk(tmp_path, capacity)], chunks=400, **settings) as cache:
        fill(cache, model(), range(60))
        fill(cache, ALICE, range(12))
        (tier,) = cache._pool.tiers
        assert sum(key[:16] == ALICE.shards[0].shard_id for key in tier.known) == 5
    assert files_of(tmp_path)[1] == {model().shards[0].shard_id.hex(), ALICE.shards[0].shard_id.hex()}


def test_what_says_whose_records_were_and_was_left_behind_goes_at_the_next_start(tmp_path: Path) -> None:
    with open_local([open_disk(tmp_path)]) as cache:
        for number in range(3):
            store(cache, chain(1, of=visitor(number)))
        assert cache.drain(5)
    gone, young, kept = (visitor(number).shards[0].shard_id.hex() for number in range(3))
    for path in (tmp_path / "v1").glob("*/*/*"):
        if path.parent.parent.name in (gone, young) and path.name != manifest.DIGEST.hex():
            path.unlink()
        elif path.parent.parent.name == gone:
            os.utime(path, (1e9, 1e9))
    with open_local([open_disk(tmp_path)]) as cache:
        assert files_of(tmp_path) == ({kept}, {kept, young}), "one that is new may be of a record under way"
        store(cache, chain(1, of=visitor(0)))
        assert cache.drain(5)
    assert files_of(tmp_path) == ({kept, gone}, {kept, young, gone})


def test_a_manifest_stays_while_others_have_records_that_are_not_known_here(tmp_path: Path) -> None:
    capacity = 20 * RECORD
    with (
        open_local([open_disk(tmp_path)], tier_capacity_nbytes=capacity) as here,
        open_local([open_disk(tmp_path)]) as there,
    ):
        fill(here, ALICE, range(2))
        fill(there, ALICE, range(2, 4))
        for cache, left in ((here, {ALICE.shards[0].shard_id.hex()}), (there, set())):
            (tier,) = cache._pool.tiers
            tier.remove(list(tier.known), "clear")
            assert tier.drain(5)
            assert until(lambda left=left: files_of(tmp_path) == (left, left))
