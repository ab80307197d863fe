"""Records on their way to a store and back, with a checksum and without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import LAYOUT, RAW, RECORD, chain, load, pattern, store

from lmcache_core import (
    CacheConfig,
    ChunkCorrupt,
    ChunkKey,
    ConfigError,
    LocalCache,
    RawOptions,
    TierConfig,
    open_cache,
)
from lmcache_core.backends.disk import DiskBackend
from lmcache_core.codec import Codec, Identity
from lmcache_core.frame import CHECKSUM_NONE, CHECKSUM_XXH3_64, Frame, pack, parse
from lmcache_core.layout import PAGE_NBYTES, Layout
from lmcache_core.sealing import Sealer

KEY = ChunkKey(bytes(range(48)))


class Inverted(Codec):
    """Every bit the other way round."""

    version = 1

    def max_nbytes(self, layout: Layout) -> int:
        return layout.nbytes

    def encode(self, raw: memoryview, layout: Layout, out: memoryview) -> int:
        out[: layout.nbytes] = bytes(byte ^ 0xFF for byte in raw)
        return layout.nbytes

    def decode(self, data: memoryview, layout: Layout, out: memoryview) -> None:
        out[:] = bytes(byte ^ 0xFF for byte in data)


CODECS: dict[str, Codec] = {"identity": Identity(), "inverted": Inverted()}


def sealer(name: str, *, checksums: bool) -> Sealer:
    return Sealer(CODECS[name], name, CODECS.get, checksums=checksums)


def slot() -> memoryview:
    """A record in memory, as the device has left it."""
    record = memoryview(bytearray(RECORD))
    pack(Frame(KEY, 3, LAYOUT.fingerprint, RAW, RAW, 1), record[:PAGE_NBYTES])
    record[PAGE_NBYTES : PAGE_NBYTES + RAW] = pattern(KEY)
    return record


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("checksums", [True, False])
def test_what_is_sealed_with_or_without_a_checksum_comes_back_by_either(name: str, checksums: bool) -> None:
    stored = sealer(name, checksums=checksums).seal(slot(), LAYOUT)
    assert parse(stored).checksum_kind == (CHECKSUM_XXH3_64 if checksums else CHECKSUM_NONE)
    for reads in (True, False):
        into = memoryview(bytearray(RECORD))
        found = sealer(name, checksums=reads).unseal(stored, len(stored), KEY, LAYOUT, into)
        assert (found.key, found.depth) == (KEY, 3)
        assert into[PAGE_NBYTES : PAGE_NBYTES + RAW] == pattern(KEY)


@pytest.mark.parametrize("name", CODECS)
def test_a_checksum_that_a_record_has_is_compared_by_a_tier_that_writes_none(name: str) -> None:
    stored = bytearray(sealer(name, checksums=True).seal(slot(), LAYOUT))
    stored[PAGE_NBYTES + RAW - 1] ^= 1
    with pytest.raises(ChunkCorrupt, match="payload checksum"):
        sealer(name, checksums=False).unseal(
            memoryview(stored), len(stored), KEY, LAYOUT, memoryview(bytearray(RECORD))
        )


def test_a_slot_without_a_checksum_gets_one_on_its_way_to_a_tier_that_writes_them() -> None:
    record = slot()
    assert parse(sealer("identity", checksums=False).seal(record, LAYOUT)).checksum_kind == CHECKSUM_NONE
    assert parse(sealer("identity", checksums=True).seal(record, LAYOUT)).checksum_kind == CHECKSUM_XXH3_64
    assert parse(sealer("identity", checksums=False).seal(record, LAYOUT)).checksum_kind == CHECKSUM_XXH3_64


def opened(root: Path, **settings: Any) -> LocalCache:
    disk = TierConfig("disk", "disk", 50 * RECORD, options=RawOptions.of({"path": str(root)}), **settings)
    return open_cache(CacheConfig(chunk_tokens=16, tiers=(TierConfig("host", "memory", 1 << 20), disk)))


def test_a_tier_without_checksums_stores_none_and_its_records_are_hits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DiskBackend, "traits", replace(DiskBackend.traits, may_tear=False))
    for checksum, kind in (("none", CHECKSUM_NONE), ("xxh3", CHECKSUM_XXH3_64)):
        root = tmp_path / checksum
        with opened(root, checksum=checksum) as cache:
            store(cache, chain(2))
            assert cache.drain(10)
        files = [path.read_bytes() for path in root.rglob("*") if path.is_file() and path.stat().st_size == RECORD]
        frames = [parse(memoryview(file)) for file in files]
        assert [frame.checksum_kind for frame in frames if frame.raw_nbytes == RAW] == [kind, kind]
        with opened(root, checksum=checksum) as cache:
            assert load(cache, chain(2))[1].ok_chunks == 2


def test_a_store_that_may_tear_records_keeps_its_checksums(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"tier disk: checksum: none, but after a crash disk may hold records in part"
    ):
        opened(tmp_path / "store", checksum="none")
