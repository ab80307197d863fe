"""Records past host memory: from the engine's pages through the device's own memory to a store's files, and back."""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
from disk_helpers import file_of, open_disk
from tiny import RAW, RECORD, chain, load, open_local, store, until

from lmcache_core import LocalCache, frame, open_cache, plugins
from lmcache_core.backend import Context, DeviceIO
from lmcache_core.backends.disk import DiskBackend
from lmcache_core.config import parse_config
from lmcache_core.device import DeviceRecord, Pages
from lmcache_core.devices.cpu import CpuDevice
from lmcache_core.direct import DirectPool
from lmcache_core.errors import BackendUnavailable, ChunkCorrupt, DeviceError
from lmcache_core.keys import ChunkKey
from lmcache_core.testing import in_threads

CHUNKS = 6
Hook = Callable[[str, ChunkKey], None]


def no_hook(verb: str, key: ChunkKey) -> None:
    return None


class FileIO:
    """`DeviceIO` of the CPU, whose memory is the host's: files read into and written from its records."""

    def __init__(self, disk: FileStore) -> None:
        self._disk = disk
        self.calls: list[str] = []

    def get(self, key: ChunkKey, into: DeviceRecord) -> int | None:
        self.calls.append("get")
        self._disk.before("get", key)
        with self._disk.reading(key) as file:
            if file is None:
                return None
            if file.nbytes > into.nbytes:
                raise ChunkCorrupt("too long")
            return os.preadv(file.fd, [into.memory], 0)

    def put(self, key: ChunkKey, data: DeviceRecord) -> None:
        self.calls.append("put")
        self._disk.before("put", key)
        with self._disk.writing(key, data.nbytes) as file:
            os.pwritev(file.fd, [data.memory], 0)


class FileStore(DiskBackend):
    """A disk store with device I/O."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    before: Hook = staticmethod(no_hook)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.io = FileIO(self)

    def device_io(self) -> DeviceIO:
        return self.io


@pytest.fixture(autouse=True)
def offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """`backend: files`, as if it were installed."""
    real = plugins.load

    def load_(group: str, name: str, *more: Any) -> Any:
        return FileStore if (group, name) == (plugins.BACKENDS, "files") else real(group, name, *more)

    monkeypatch.setattr(plugins, "load", load_)


@contextmanager
def direct_cache(root: Path, *, staging: int = 64 * RECORD, more: str = "") -> Iterator[LocalCache]:
    text = f"staging: {max(staging, 1 << 20)}\ndevice: cpu\nadmission: always\ntiers:\n"
    config = parse_config(
        f"{text}{more}  - {{name: files, backend: files, options: {{path: {root}}}}}\n", "test", environ={}
    )
    cache = open_cache(config)
    assert isinstance(cache, LocalCache)
    if isinstance(cache._pool, DirectPool):
        cache._pool._staging._capacity_nbytes = staging
    try:
        yield cache
        if isinstance(cache._pool, DirectPool):
            assert until(lambda: cache._pool._staging.in_use_nbytes() == 0), "device memory was not given back"
    finally:
        cache.close()


def files_of(cache: LocalCache) -> FileStore:
    (tier,) = cache._pool.tiers
    assert isinstance(tier.backend, FileStore)
    return tier.backend


def files(root: Path, chunks: int) -> list[Path]:
    """The files of a prompt's records."""
    of = chain(chunks)
    return [file_of(root, key) for key in of.keys(of.model.shards[0], range(chunks))]


def direct_records(cache: LocalCache, operation: str) -> float:
    return cache.metrics.count("direct_records", operation=operation)


def test_chunks_go_past_host_memory_both_ways_and_every_byte_is_right(tmp_path: Path) -> None:
    with direct_cache(tmp_path) as cache:
        assert store(cache, chain(CHUNKS)).ok_chunks == CHUNKS
        assert cache.drain(10)
        assert cache.status().used_nbytes == 0  # nothing was in the slab
    with direct_cache(tmp_path) as cache:
        hits, result = load(cache, chain(CHUNKS))
        assert (hits, result.ok_chunks, result.failed) == (CHUNKS, CHUNKS, ())
        assert cache.status().used_nbytes == 0
        assert files_of(cache).io.calls == ["get"] * CHUNKS
        assert direct_records(cache, "load") == CHUNKS


def test_the_file_is_that_of_any_other_way_with_its_header_and_without_a_checksum(tmp_path: Path) -> None:
    with direct_cache(tmp_path) as cache:
        store(cache, chain(CHUNKS))
        assert cache.drain(10)
    found = [frame.parse(memoryview(path.read_bytes())) for path in files(tmp_path, CHUNKS)]
    assert sorted(one.depth for one in found) == list(range(CHUNKS))
    assert {(one.checksum_kind, one.raw_nbytes, one.codec) for one in found} == {(frame.CHECKSUM_NONE, RAW, "identity")}


def test_what_one_way_wrote_the_other_reads(tmp_path: Path) -> None:
    with direct_cache(tmp_path) as cache:
        store(cache, chain(CHUNKS))
        assert cache.drain(10)
    with open_local([open_disk(tmp_path)]) as cache:
        assert load(cache, chain(CHUNKS))[1].ok_chunks == CHUNKS
        store(cache, chain(CHUNKS, seed=1))
        assert cache.drain(10)
    with direct_cache(tmp_path) as cache:
        assert load(cache, chain(CHUNKS, seed=1))[1].ok_chunks == CHUNKS
        assert direct_records(cache, "load") == CHUNKS


def test_a_second_store_of_what_is_there_copies_nothing(tmp_path: Path) -> None:
    with direct_cache(tmp_path) as cache:
        store(cache, chain(CHUNKS))
        assert cache.drain(10)
        result = store(cache, chain(CHUNKS))
        assert (result.skipped, files_of(cache).io.calls.count("put")) == (CHUNKS, CHUNKS)


def test_what_finds_no_device_memory_goes_through_host_memory(tmp_path: Path) -> None:
    with direct_cache(tmp_path, staging=2 * RECORD) as cache:
        assert store(cache, chain(CHUNKS)).ok_chunks == CHUNKS
        assert cache.drain(10)
        assert 0 < direct_records(cache, "store") <= 2
    with direct_cache(tmp_path, staging=2 * RECORD) as cache:
        hits, result = load(cache, chain(CHUNKS))
        assert (hits, result.ok_chunks) == (CHUNKS, CHUNKS)
        assert 0 < direct_records(cache, "load") < CHUNKS


class Exhausted(CpuDevice):
    """Has no memory of its own left."""

    def staging(self, nbytes: int, pages: Pages) -> DeviceRecord:
        raise DeviceError("out of memory")


def test_a_device_without_memory_left_is_said_once_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(CpuDevice, "staging", Exhausted.staging)
    with direct_cache(tmp_path) as cache:
        assert store(cache, chain(CHUNKS)).ok_chunks == CHUNKS
        assert cache.drain(10)
        assert load(cache, chain(CHUNKS))[1].ok_chunks == CHUNKS
    assert [r.getMessage() for r in caplog.records if "device memory" in r.getMessage()] == [
        "no device memory for records, they go through host memory: out of memory"
    ]


def test_a_read_that_fails_is_tried_through_host_memory(tmp_path: Path) -> None:
    with direct_cache(tmp_path) as cache:
        store(cache, chain(CHUNKS))
        assert cache.drain(10)

        def fail(verb: str, key: ChunkKey) -> None:
            raise BackendUnavailable("cuFile is gone")

        files_of(cache).before = fail  # type: ignore[method-assign]
        assert load(cache, chain(2))[1].ok_chunks == 2


def test_many_requests_at_once_with_faults_and_little_device_memory_get_no_wrong_byte_and_leave_none_taken(
    tmp_path: Path,
) -> None:
    rng = random.Random(7)
    with direct_cache(tmp_path, staging=3 * RECORD) as cache:

        def sometimes(verb: str, key: ChunkKey) -> None:
            if rng.random() < 0.1:
                raise BackendUnavailable("now and then")

        files_of(cache).before = sometimes  # type: ignore[method-assign]
        (tier,) = cache._pool.tiers
        tier.breaker._failures_allowed = 1 << 30  # an open one would keep all the rest away

        def work(seed: int) -> Callable[[], None]:
            def run() -> None:
                for round_ in range(20):
                    of = chain(CHUNKS, seed=(seed * round_) % 41)  # more prompts than the slab has room for
                    store(cache, of)
                    if round_ % 4 == 0:
                        assert cache.drain(30)  # what is being written holds all of the device memory
                    load(cache, of, request=f"{seed} {round_}")  # which compares every byte that it was given

            return run

        in_threads(*(work(seed) for seed in range(6)))
        assert cache.drain(30)
        for seed in range(41):
            load(cache, chain(CHUNKS, seed=seed), request=f"after {seed}")
        files_of(cache).before = no_hook  # type: ignore[method-assign]
        before = [direct_records(cache, operation) for operation in ("store", "load")]
        store(cache, chain(3, seed=41))
        assert cache.drain(30)
        assert load(cache, chain(3, seed=41))[1].ok_chunks == 3
        after = [direct_records(cache, operation) for operation in ("store", "load")]
        assert after == [count + 3 for count in before], "device memory is used as ever"


def test_a_write_that_fails_is_a_dropped_store_with_its_reason(tmp_path: Path) -> None:
    with direct_cache(tmp_path) as cache:

        def fail(verb: str, key: ChunkKey) -> None:
            raise BackendUnavailable("cuFile is gone")

        files_of(cache).before = fail  # type: ignore[method-assign]
        store(cache, chain(1))
        assert cache.drain(10)
        assert cache.metrics.count("drops", tier="files", reason="fault") == 1
        files_of(cache).before = no_hook  # type: ignore[method-assign]
        assert load(cache, chain(1))[0] == 0


@pytest.mark.parametrize("at", [0, 20, 70, 100])
def test_a_header_that_is_not_the_records_is_a_miss_and_the_record_is_removed(tmp_path: Path, at: int) -> None:
    with direct_cache(tmp_path) as cache:
        store(cache, chain(1))
        assert cache.drain(10)
    (path,) = files(tmp_path, 1)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with direct_cache(tmp_path) as cache:
        hits, result = load(cache, chain(1))
        assert (hits, result.ok_chunks) == (1, 0)
        assert not path.exists()
        assert cache.metrics.count("corruptions", tier="files") == 1


def test_a_record_in_the_place_of_another_is_a_miss(tmp_path: Path) -> None:
    with direct_cache(tmp_path) as cache:
        store(cache, chain(2))
        assert cache.drain(10)
    first, second = files(tmp_path, 2)
    second.write_bytes(first.read_bytes())
    with direct_cache(tmp_path) as cache:
        hits, result = load(cache, chain(2))
        assert (hits, result.ok_chunks) == (2, 1)
        assert cache.metrics.count("corruptions", tier="files") == 1


def test_device_memory_that_a_late_read_may_still_write_to_is_not_used_again(tmp_path: Path) -> None:
    go = threading.Event()
    with direct_cache(tmp_path) as cache:
        store(cache, chain(1))
        assert cache.drain(10)
        transfers = cache._pool.tiers[0]._pool
        with transfers._lock:  # its watch sleeps for what was the deadline
            transfers._deadline_s = 0.2
            transfers._wake_watch.notify()

        def hang(verb: str, key: ChunkKey) -> None:
            go.wait(60)

        files_of(cache).before = hang  # type: ignore[method-assign]
        try:
            _, result = load(cache, chain(1))
            assert [reason for _, _, reason in result.failed] == ["late"]
            pool = cache._pool
            assert isinstance(pool, DirectPool)
            assert pool._staging.in_use_nbytes() == RECORD
        finally:
            go.set()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("  - {name: host, backend: memory, capacity: 1MiB}\n", "a tier in host memory keeps what is stored"),
        ("  - {name: other, backend: disk, options: {path: PLACE}}\n", "there is more than one store"),
    ],
)
def test_where_it_is_not_used_one_line_says_why(
    tmp_path: Path, more: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with direct_cache(tmp_path / "a", more=more.replace("PLACE", str(tmp_path / "b"))) as cache:
        assert not isinstance(cache._pool, DirectPool)
        assert store(cache, chain(1)).ok_chunks == 1
    lines = [r.getMessage() for r in caplog.records if "device I/O" in r.getMessage()]
    assert len(lines) == 1
    assert said in lines[0]


def test_where_it_is_used_one_line_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with direct_cache(tmp_path):
        pass
    assert [r.getMessage() for r in caplog.records if "device I/O" in r.getMessage()] == [
        "device I/O: records go between the device and files past host memory, without checksums"
    ]


def test_a_codec_needs_host_memory(tmp_path: Path) -> None:
    backend = FileStore(DiskBackend.Options(path=str(tmp_path)), Context())
    with open_local([backend], codec_name="other") as cache:
        assert cache._pool.tiers[0].device_io is None
