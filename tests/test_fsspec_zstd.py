"""Host memory, disk and a filesystem of fsspec's, both compressed: what goes down comes back up the same."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmcache_core import Chain, Family, Group, GroupKind, Layout, LocalCache, Model, Region, Shard, open_cache

CHUNKS, CHUNK_TOKENS, LAYERS, BLOCKS, BLOCK_NBYTES = 6, 64, 2, 4, 65_536
REGION = Region(
    name="kv",
    layers=LAYERS,
    block_tokens=CHUNK_TOKENS // BLOCKS,
    block_nbytes=BLOCK_NBYTES,
    dtype="bfloat16",
    packing="test",
)
LAYOUT = Layout(chunk_tokens=CHUNK_TOKENS, regions=(REGION,))
RAW_NBYTES = CHUNKS * LAYOUT.nbytes
FAMILY = Family(model="org/tiny", weights="w1", kv_dtype="bfloat16", chunk_tokens=CHUNK_TOKENS)
SHARD = Shard.of(FAMILY, LAYOUT, layers=(0, LAYERS))
MODEL = Model(FAMILY, (Group(GroupKind.FULL, (SHARD,)),))
CHAIN = Chain.of(MODEL, np.arange(CHUNKS * CHUNK_TOKENS, dtype=np.uint32))
IDS = list(range(CHUNKS * BLOCKS))


def kv(layer: int) -> np.ndarray:
    """Numbers as a model computes them, which compress, in bfloat16."""
    floats = np.random.default_rng(layer).normal(0, 1, (CHUNKS * BLOCKS, BLOCK_NBYTES // 2)).astype("<f4")
    return (floats.view("<u4") >> 16).astype("<u2").view(np.uint8)


WANTED = [kv(layer) for layer in range(LAYERS)]


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path}/cold" if request.param == "file" else f"memory://{uuid.uuid4().hex}"


def opened(folder: Path, url: str, codec: str = "zstd") -> LocalCache:
    config = folder / "lmcache.yaml"
    config.write_text(f"""
chunk_tokens: {CHUNK_TOKENS}
device: cpu
write: through
tiers:
  - {{name: host, backend: memory, capacity: 64MiB}}
  - {{name: disk, backend: disk, capacity: 64MiB, codec: {codec}, options: {{path: {folder / "disk"}}}}}
  - {{name: cold, backend: fsspec, capacity: 64MiB, codec: {codec}, options: {{url: "{url}"}}}}
""")
    return open_cache(config)


def store(cache: LocalCache) -> None:
    result = cache.store(CHAIN, SHARD, range(CHUNKS), [WANTED], IDS).wait(20)
    assert result is not None
    assert result.ok_chunks == CHUNKS
    assert cache.drain(20)


def load(cache: LocalCache) -> int:
    """How many chunks came back, each of them byte for byte; where others should be, nothing was written."""
    hit = cache.lookup_answered(CHAIN, "request", timeout_s=20)
    pages = [np.full_like(layer, 0xA5) for layer in WANTED]
    ids = IDS[: hit.chunks * BLOCKS]
    result = cache.retrieve(hit, SHARD, range(hit.chunks), [pages], ids).wait(20)
    assert result is not None
    cache.release("request")
    assert cache.drain(20)
    wanted = [layer.copy() for layer in WANTED]
    for start, stop, _ in result.failed:
        for layer in wanted:
            layer[start * BLOCKS : stop * BLOCKS] = 0xA5
    assert all(np.array_equal(got[ids], want[ids]) for got, want in zip(pages, wanted, strict=True))
    return int(result.ok_chunks)


def tiers(cache: LocalCache) -> dict[str, Any]:
    return {tier.name: tier for tier in cache.status().tiers}


def test_what_is_stored_is_on_every_tier_compressed(tmp_path: Path, url: str) -> None:
    with opened(tmp_path, url) as cache:
        store(cache)
        for name in ("disk", "cold"):
            assert tiers(cache)[name].records == CHUNKS
            assert 0.5 * RAW_NBYTES < tiers(cache)[name].used_nbytes < 0.85 * RAW_NBYTES


def test_after_a_restart_it_comes_from_the_disk(tmp_path: Path, url: str) -> None:
    with opened(tmp_path, url) as cache:
        store(cache)
    with opened(tmp_path, url) as cache:
        assert load(cache) == CHUNKS
        assert cache.metrics.count("tier_reads", tier="disk", result="ok") == CHUNKS
        assert cache.metrics.count("tier_reads", tier="cold") == 0


def test_without_the_disk_it_comes_from_below_and_is_promoted_on_use(tmp_path: Path, url: str) -> None:
    with opened(tmp_path, url) as cache:
        store(cache)
    shutil.rmtree(tmp_path / "disk")
    with opened(tmp_path, url) as cache:
        assert (tiers(cache)["disk"].records, tiers(cache)["cold"].records) == (0, CHUNKS)
        assert load(cache) == CHUNKS
        assert cache.metrics.count("tier_reads", tier="cold", result="ok") == CHUNKS
        assert tiers(cache)["disk"].records == CHUNKS
        assert load(cache) == CHUNKS
        assert cache.metrics.count("tier_reads", tier="cold") == CHUNKS, "the second time from host memory"


def test_records_say_how_they_are_encoded_whatever_the_tier_is_set_to_now(tmp_path: Path, url: str) -> None:
    with opened(tmp_path, url) as cache:
        store(cache)
    with opened(tmp_path, url, codec="identity") as cache:
        assert load(cache) == CHUNKS
        assert cache.metrics.count("corruptions") == 0


def test_a_record_that_was_damaged_below_is_a_miss_and_is_removed(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/cold"
    with opened(tmp_path, url) as cache:
        store(cache)
    shutil.rmtree(tmp_path / "disk")
    records = {path.name: path for path in (tmp_path / "cold").rglob("*") if path.is_file()}
    third = records[CHAIN.keys(SHARD)[2].text[32:]]
    data = bytearray(third.read_bytes())
    data[len(data) // 2] ^= 1
    third.write_bytes(data)
    with opened(tmp_path, url) as cache:
        assert load(cache) == 2, "the chunks before it"
        assert cache.metrics.count("corruptions", tier="cold") == 1
        assert not third.exists()
