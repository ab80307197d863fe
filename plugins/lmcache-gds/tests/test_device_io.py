"""Device I/O with a stand-in for kvikio (`fake_kvikio`): files, faults, and a whole cache that uses it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_kvikio
import numpy as np
import pytest
from stores import NBYTES, holds, new_key, open_disk, open_gds, payload, record

from lmcache_core import (
    BackendError,
    BackendFull,
    ChunkCorrupt,
    Context,
    CpuDevice,
    DeviceIO,
    DeviceRecord,
    Family,
    Group,
    GroupKind,
    Layout,
    LocalCache,
    Model,
    Region,
    Shard,
    open_cache,
)
from lmcache_core.testing import DeviceIOLaws
from lmcache_gds import GdsBackend, backend

LAYOUT = Layout(
    chunk_tokens=16,
    regions=(Region(name="kv", layers=2, block_tokens=4, block_nbytes=64, dtype="float16", packing="test"),),
)


@pytest.fixture(autouse=True)
def kvikio(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setitem(sys.modules, "kvikio", fake_kvikio)
    monkeypatch.setattr(backend, "why_no_device", lambda: "")
    fake_kvikio.calls.clear()
    yield fake_kvikio
    fake_kvikio.problem, fake_kvikio.short = "", 0


def io_of(gds: GdsBackend) -> DeviceIO:
    found = gds.device_io()
    assert found is not None
    return found


def staged(nbytes: int = NBYTES, data: bytes = b"") -> DeviceRecord:
    made = CpuDevice().staging(nbytes, [])
    if data:
        made.memory[:nbytes] = data
    return made


class TestLaws(DeviceIOLaws):
    """Of device I/O, on the stand-in."""

    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path) -> None:
        self.path = tmp_path / "s"

    def open_backend(self, context: Context) -> GdsBackend:
        return open_gds(self.path, capacity_nbytes=context.capacity_nbytes)

    def break_store(self) -> None:
        shutil.rmtree(self.path)


def test_a_record_goes_from_device_memory_to_a_file_and_back(tmp_path: Path) -> None:
    key = new_key()
    with open_gds(tmp_path / "s") as gds:
        assert gds.description().startswith("device I/O (cuFile) where a cache can use it, else ")
        io = io_of(gds)
        into = staged()
        assert io.get(key, into) is None
        io.put(key, staged(data=payload(key)))
        assert io.get(key, into) == NBYTES
        assert bytes(into.memory) == payload(key)
        assert holds(gds, key)  # the same record through host memory
    assert fake_kvikio.calls == [("w", "write"), ("r", "read")]
    with open_disk(tmp_path / "s") as disk:
        assert holds(disk, key)
        assert disk.used_nbytes == NBYTES


@pytest.mark.parametrize("guard", ["on", "off"])
def test_what_fails_half_way_is_an_error_and_leaves_nothing(tmp_path: Path, guard: str) -> None:
    key = new_key()
    with open_gds(tmp_path / "s", guard=guard) as gds:
        fake_kvikio.problem = "cuFile error 5011: GPU memory pinning failed"
        with pytest.raises(BackendError, match="pinning failed"):
            io_of(gds).put(key, staged(data=payload(key)))
        fake_kvikio.problem, fake_kvikio.short = "", 4096
        with pytest.raises(BackendError, match="8192 bytes of 12288 could be written"):
            io_of(gds).put(key, staged(data=payload(key)))
        assert not gds.contains(key)
        assert list(gds.entries()) == []
    with open_disk(tmp_path / "s") as disk:
        assert disk.used_nbytes == 0


def test_a_read_that_fails_is_an_error_and_one_that_is_short_or_too_long_is_corrupt(tmp_path: Path) -> None:
    key = new_key()
    with open_gds(tmp_path / "s") as gds:
        gds.put(key, record(key))
        with pytest.raises(ChunkCorrupt, match="at most 8192 were expected"):
            io_of(gds).get(key, staged(8192))
        fake_kvikio.short = 4096
        with pytest.raises(ChunkCorrupt, match="8192 bytes of 12288"):
            io_of(gds).get(key, staged())
        fake_kvikio.short, fake_kvikio.problem = 0, "cuFile error"
        with pytest.raises(BackendError, match="cuFile error"):
            io_of(gds).get(key, staged())
        fake_kvikio.problem = ""
        assert io_of(gds).get(key, staged()) == NBYTES


def test_the_capacity_holds_for_it_as_well(tmp_path: Path) -> None:
    with open_gds(tmp_path / "s", capacity_nbytes=2 * NBYTES) as gds:
        for _ in range(2):
            io_of(gds).put(new_key(), staged(data=payload(new_key())))
        with pytest.raises(BackendFull):
            io_of(gds).put(new_key(), staged(data=payload(new_key())))


def test_io_that_is_not_wanted_is_not_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for io in ("direct", "buffered"):
        with open_gds(tmp_path / "s", io=io) as gds:
            assert gds.device_io() is None
    with open_gds(tmp_path / "s", io="device") as gds:
        assert gds.device_io() is not None
    monkeypatch.setattr(backend, "why_no_device", lambda: "there is no NVIDIA driver")
    with open_gds(tmp_path / "s") as gds:
        assert gds.device_io() is None


def open_with(path: Path, folder: Path) -> LocalCache:
    file = folder / "lmcache.yaml"
    file.write_text(
        "chunk_tokens: 16\nstaging: 1MiB\ndevice: cpu\nadmission: always\n"
        f"tiers:\n  - {{name: fast, backend: gds, options: {{path: {path}}}}}\n"
    )
    cache = open_cache(file)
    assert isinstance(cache, LocalCache)
    return cache


def test_a_cache_without_host_memory_stores_and_loads_chunks_by_device_io_alone(tmp_path: Path) -> None:
    family = Family(model="m", weights="w", kv_dtype="float16", chunk_tokens=16)
    shard = Shard.of(family, LAYOUT, layers=(0, 2))
    model = Model(family, (Group(GroupKind.FULL, (shard,)),))
    rng = np.random.default_rng(1)
    pages = [[rng.integers(0, 255, (32, 64), dtype=np.uint8) for _ in range(2)]]
    wanted = [plane[:12].copy() for plane in pages[0]]
    with open_with(tmp_path / "s", tmp_path) as cache:
        chain = cache.chain(list(range(50)), model)
        stored = cache.store(chain, shard, range(3), pages, range(12)).wait(30)
        assert stored is not None
        assert stored.ok_chunks == 3
        assert cache.drain(30)
    assert fake_kvikio.calls == [("w", "write")] * 3
    with open_with(tmp_path / "s", tmp_path) as cache:
        hit = cache.lookup_answered(chain, "r", timeout_s=30)
        assert hit.chunks == 3
        loaded = cache.retrieve(hit, shard, range(3), pages, range(16, 28)).wait(30)
        assert loaded is not None
        assert loaded.ok_chunks == 3
        assert cache.status().used_nbytes == 0
        assert "device I/O (cuFile)" in cache.status().tiers[0].description
        cache.release("r")
    assert fake_kvikio.calls[3:] == [("r", "read")] * 3
    for plane, was in zip(pages[0], wanted, strict=True):
        assert np.array_equal(plane[16:28], was)
