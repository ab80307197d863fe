"""What a restart keeps: records on disk are there at once, counted, and trimmed to a smaller limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import RECORD, chain, load, model, store

from lmcache_core import CacheConfig, LocalCache, RawOptions, TierConfig, open_cache

WRITER = """
import sys
sys.path.insert(0, {here!r})
from tiny import chain, store
from test_restart import opened
cache = opened({root!r}, {limit})
for seed in range(50):
    store(cache, chain(1, seed=seed))
    assert cache._pool.tiers[0].drain(10)
print("stored", flush=True)
sys.stdin.read()
"""


def opened(root: str | Path, records: int) -> LocalCache:
    # One more, for the manifest of the one shard.
    disk = TierConfig("disk", "disk", (records + 1) * RECORD, options=RawOptions.of({"path": str(root)}))
    return open_cache(CacheConfig(chunk_tokens=16, tiers=(TierConfig("host", "memory", 1 << 20), disk)))


def test_a_killed_writers_records_are_there_at_once_and_trimmed_oldest_first(tmp_path):  # S25
    root = tmp_path / "store"
    code = WRITER.format(here=str(Path(__file__).parent), root=str(root), limit=60)
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"stored\n"
        writer.send_signal(signal.SIGKILL)
    foreign = root / "v1" / "notes.txt"
    foreign.write_text("not ours")
    files = sorted(root.rglob("*"))
    age = {p: os.stat(p).st_mtime_ns for p in files}
    with opened(root, 60) as cache:
        assert cache.status().tiers[0].records == 50
        assert cache.status().tiers[0].used_nbytes == 51 * RECORD
        assert load(cache, chain(1, seed=7))[1].ok_chunks == 1
    with opened(root, 30) as cache:
        assert cache.status().tiers[0].records == 30
        assert cache.status().tiers[0].used_nbytes == 31 * RECORD
        assert [load(cache, chain(1, seed=seed))[0] for seed in range(50)] == [0] * 20 + [1] * 30
        store(cache, chain(1, seed=99))
        assert cache.drain(5)
        assert cache.status().tiers[0].used_nbytes <= 31 * RECORD
    assert foreign.read_text() == "not ours"
    assert age[foreign] == os.stat(foreign).st_mtime_ns
    assert [p.name for p in (root / "v1").rglob("*.*")] == ["notes.txt"]


def test_other_weights_see_nothing_and_the_first_ones_are_still_there_when_they_return(tmp_path):  # S9
    first, second = model(weights="w1"), model(weights="w2")
    for weights, hits in ((first, 0), (second, 0), (first, 3), (second, 3)):
        with opened(tmp_path / "store", 60) as cache:
            prompt = chain(3, of=weights)
            assert load(cache, prompt)[0] == hits
            store(cache, prompt)
            assert cache.drain(5)


def test_every_identity_field_keeps_its_own_payload_on_disk(tmp_path):  # S2, S3
    changes = [
        {},
        {"model": "org/other"},
        {"model": "ORG/tiny"},
        {"model": "org%2Ftiny"},
        {"model": "../../etc/x"},
        {"model": "caf\u00e9"},
        {"model": "cafe\u0301"},
        {"weights": "w2"},
        {"kv_dtype": "bfloat16"},
        {"adapter": "lora@abc"},
        {"tags": (("rope", "yarn"),)},
        {"salt_id": b"0123456789abcdef"},
    ]
    prompts = [chain(2, of=model(**change)) for change in changes] + [
        chain(2, of=model(shards=2)),
    ]
    root = tmp_path / "store"
    with opened(root, 100) as cache:
        for prompt in prompts:
            for shard in prompt.model.shards:
                store(cache, prompt, shard=shard)
        assert cache.drain(5)
    with opened(root, 100) as cache:
        assert all(load(cache, prompt)[1].ok_chunks == 2 for prompt in prompts)
        cache.evict(prompts[0])
        assert cache.drain(5)
    with opened(root, 100) as cache:
        assert load(cache, prompts[0])[0] == 0
        assert all(load(cache, prompt)[1].ok_chunks == 2 for prompt in prompts[1:-1])
    assert {p.name for p in tmp_path.iterdir()} == {"store"}, "nothing is written outside"


def test_a_full_filesystem_drops_goes_on_reading_and_resumes(tmp_path):  # S24
    mount = tmp_path / "small"
    mount.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)], capture_output=True)
    if mounted.returncode:
        pytest.skip("cannot run here: mounting a tmpfs needs root")
    try:
        ballast = mount / "ballast"
        with opened(mount / "store", 100_000) as cache:
            for seed in range(40):
                store(cache, chain(1, seed=seed))
                assert cache._pool.tiers[0].drain(5)
            ballast.write_bytes(b"x" * (os.statvfs(mount).f_bavail * os.statvfs(mount).f_frsize))
            for seed in range(40, 60):
                store(cache, chain(1, seed=seed))
                assert cache._pool.tiers[0].drain(5)
            assert cache.metrics.count("corruptions") == 0
            assert cache.status().tiers[0].breaker == "closed"
            assert cache.metrics.count("evictions", tier="tier1") == cache.metrics.count("evictions", tier="host") == 0
            assert cache.metrics.count("evictions", tier="disk", reason="capacity") >= 19, "room is made and used again"
            assert load(cache, chain(1, seed=59))[1].ok_chunks == 1
            ballast.unlink()
            before = cache.metrics.count("evictions", tier="disk")
            store(cache, chain(1, seed=60))
            assert cache.drain(5)
            assert cache.metrics.count("evictions", tier="disk") == before
            used = cache.status().tiers[0].used_nbytes
            files = [p for p in (mount / "store").rglob("*") if p.is_file() and len(p.name) == 64]
            assert used == sum(p.stat().st_size for p in files)
            assert not list((mount / "store").rglob("*.*"))
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_more_host_memory_than_there_is_is_refused_with_both_numbers_before_anything_opens(tmp_path):  # S28
    from lmcache_core import CapacityError

    tiers = (TierConfig("host", "memory", 1 << 50), TierConfig("disk", "disk", options=RawOptions.of({"path": "/x"})))
    with pytest.raises(CapacityError, match=r"1125899906842624 bytes .* allows \d+ bytes"):
        open_cache(CacheConfig(tiers=tiers))
    assert not Path("/x").exists()


def test_the_start_line_says_for_whom_the_capacity_is(caplog):  # S28
    caplog.set_level("INFO")
    with open_cache(CacheConfig(tiers=(TierConfig("host", "memory", 64 << 20),))) as cache:
        assert "67108864 bytes of host memory" in caplog.text
        assert "this process alone uses the host memory" in caplog.text
        assert cache.status().capacity_nbytes == 64 << 20
        for seed in range(200):
            store(cache, chain(4, seed=seed))
        assert cache.status().used_nbytes <= 64 << 20
