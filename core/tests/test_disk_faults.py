"""What a file system may hold or refuse: files that are not records, failing calls, a full disk."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from disk_helpers import (
    NBYTES,
    assert_counted,
    file_of,
    holds,
    new_key,
    open_disk,
    put,
    record,
    record_files,
    temp_files,
)

from lmcache_core.backends import _io, disk
from lmcache_core.errors import BackendError, BackendFull, BackendUnavailable, ChunkCorrupt
from lmcache_core.keys import ChunkKey
from lmcache_core.testing.memory import buffer


def plant_directory(path: Path) -> None:
    path.mkdir()
    (path / "inside").write_text("mine")


def plant_link(path: Path) -> None:
    path.symlink_to("/etc/hostname")


def plant_dangling_link(path: Path) -> None:
    path.symlink_to("/nonexistent/file")


def plant_fifo(path: Path) -> None:
    os.mkfifo(path)


def plant_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's name is limited to 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def plant_unreadable(path: Path) -> None:
    path.write_bytes(bytes(NBYTES))
    path.chmod(0)


PLANTS = [plant_directory, plant_link, plant_dangling_link, plant_fifo, plant_socket, plant_unreadable]


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("before_open", [True, False])
def test_what_only_has_a_records_name_is_a_miss_and_left_alone(
    tmp_path: Path, plant: Callable[[Path], None], before_open: bool
) -> None:
    foreign = new_key()
    path = file_of(tmp_path, foreign)
    path.parent.mkdir(parents=True)
    if before_open:
        plant(path)
    with open_disk(tmp_path) as backend:
        if not before_open:
            plant(path)
        what = os.lstat(path)
        (key,) = put(backend)
        assert not backend.contains(foreign)
        assert not holds(backend, foreign)
        assert not backend.remove(foreign)
        with pytest.raises(BackendError, match="left alone"):
            backend.put(foreign, record(foreign))
        assert [entry.key for entry in backend.entries()] == [key]
        assert backend.used_nbytes == NBYTES
        assert holds(backend, key)
    now = os.lstat(path)
    assert (now.st_ino, now.st_mode, now.st_mtime) == (what.st_ino, what.st_mode, what.st_mtime)
    assert temp_files(tmp_path) == []


@pytest.mark.parametrize("level", [0, 1])
def test_a_linked_directory_is_not_followed(tmp_path: Path, level: int) -> None:
    root, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    with open_disk(elsewhere) as backend:
        (key,) = put(backend)
    with open_disk(root) as backend:
        link = [file_of(root, key).parent.parent, file_of(root, key).parent][level]
        link.parent.mkdir(exist_ok=True)
        link.symlink_to([file_of(elsewhere, key).parent.parent, file_of(elsewhere, key).parent][level])
        assert not backend.contains(key)
        assert not holds(backend, key)
        assert not backend.remove(key)
        assert list(backend.entries()) == list(backend.entries(key.shard_id)) == []
        with pytest.raises(BackendError, match="not a directory of records"):
            backend.put(key, record(key))
    with open_disk(root) as backend:
        assert backend.used_nbytes == 0
    assert file_of(elsewhere, key).is_file()
    assert link.is_symlink()


def test_foreign_names_are_neither_listed_counted_nor_touched(tmp_path: Path) -> None:
    with open_disk(tmp_path) as backend:
        (key,) = put(backend)
    shard = file_of(tmp_path, key).parent.parent
    text = key.text
    foreign = [
        tmp_path / "notes.txt",
        tmp_path / "v1" / "README",
        tmp_path / "v1" / "tmp" / "upload.part",
        tmp_path / "v1" / text[:32].upper() / text[32:34] / text[32:],
        shard / "manifest.json",
        shard / "xx" / text[32:],
        shard / text[32:34] / (text[32:] + ".bak"),
        shard / text[32:34] / text[32:].upper(),
        shard / text[32:34] / ("ff" + text[34:]) if text[32:34] != "ff" else shard / "ff" / ("00" + text[34:]),
    ]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    with open_disk(tmp_path) as backend:
        assert [entry.key for entry in backend.entries()] == [key]
        assert backend.used_nbytes == NBYTES
    assert all(path.read_text() == "mine" for path in foreign)


@pytest.mark.parametrize("nbytes", [0, NBYTES // 2, NBYTES - 1])
def test_a_truncated_file_reads_as_short_as_it_is(tmp_path: Path, nbytes: int) -> None:
    with open_disk(tmp_path) as backend:
        (key,) = put(backend)
        os.truncate(file_of(tmp_path, key), nbytes)
        assert backend.get(key, buffer(NBYTES, 4096)) == nbytes
        assert [entry.nbytes for entry in backend.entries()] == [nbytes]


def test_an_oversize_file_is_corrupt_and_not_read(tmp_path: Path) -> None:
    with open_disk(tmp_path) as backend:
        (key,) = put(backend)
        with open(file_of(tmp_path, key), "ab") as file:
            file.write(b"x")
        with pytest.raises(ChunkCorrupt, match="16385 bytes"):
            backend.get(key, buffer(NBYTES, 4096))


@pytest.mark.parametrize("direct", ["auto", "off"])
def test_a_file_cut_while_it_is_read_is_corrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: str) -> None:
    with open_disk(tmp_path, direct=direct) as backend:
        (key,) = put(backend)
        real = os.preadv

        def cut(fd: int, buffers: Any, offset: int) -> int:
            os.truncate(file_of(tmp_path, key), NBYTES // 2)
            return real(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", cut)
        with pytest.raises(ChunkCorrupt, match="cut"):
            backend.get(key, buffer(NBYTES, 4096))


@pytest.mark.parametrize("after", [0, 1, 4096, NBYTES - 1])
@pytest.mark.parametrize(
    ("number", "error"),
    [
        (errno.ENOSPC, BackendFull),
        (errno.EDQUOT, BackendFull),
        (errno.EFBIG, BackendFull),
        (errno.EIO, BackendError),
        (errno.ENOMEM, BackendUnavailable),
    ],
)
def test_a_write_that_fails_half_way_leaves_nothing_and_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, number: int, error: type[BackendError]
) -> None:
    with open_disk(tmp_path) as backend:
        real = os.pwritev
        written = 0

        def fail(fd: int, buffers: list[memoryview], offset: int) -> int:
            nonlocal written
            if written >= after:
                raise OSError(number, os.strerror(number))
            written += real(fd, [buffers[0][: max(1, after - written)]], offset)
            return written

        key = new_key()
        monkeypatch.setattr(os, "pwritev", fail)
        with pytest.raises(BackendError, match=os.strerror(number)) as caught:
            backend.put(key, record(key))
        monkeypatch.undo()
        assert type(caught.value) is error
        assert caught.value.retryable == (error is BackendUnavailable)
        assert isinstance(caught.value.__cause__, OSError)
        assert not backend.contains(key)
        assert not temp_files(tmp_path)
        assert not record_files(tmp_path)
        assert backend.used_nbytes == 0
        backend.put(key, record(key))
        assert holds(backend, key)


def test_without_a_rename_that_replaces_nothing_a_second_put_is_still_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_io, "_renameat2", None)
    with open_disk(tmp_path) as backend:
        (key,) = put(backend)
        backend.put(key, record(key))
        assert holds(backend, key)
        assert backend.used_nbytes == NBYTES
        assert_counted(backend, tmp_path)


@pytest.mark.parametrize("call", ["mkdir", "rename"])
def test_a_publication_that_fails_leaves_nothing_and_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with open_disk(tmp_path) as backend:
        monkeypatch.setattr(disk, "rename_new", lambda *args: False)
        monkeypatch.setattr(os, call, fail)
        with pytest.raises(BackendFull):
            put(backend)
        monkeypatch.undo()
        assert not temp_files(tmp_path)
        assert not record_files(tmp_path)
        assert backend.used_nbytes == 0


@pytest.mark.parametrize(("call", "verb"), [("preadv", "get"), ("stat", "contains"), ("unlink", "remove")])
def test_an_io_error_is_a_backend_error_and_never_corruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, verb: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with open_disk(tmp_path) as backend:
        (key,) = put(backend)
        args = (key, buffer(NBYTES, 4096)) if verb == "get" else (key,)
        monkeypatch.setattr(os, call, fail)
        with pytest.raises(BackendError, match="Input/output error") as caught:
            getattr(backend, verb)(*args)
        monkeypatch.undo()
        assert type(caught.value) is BackendError
        assert holds(backend, key)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot run here: mount of a tmpfs: {mounted.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk_refuses_writes_keeps_reads_and_recovers(small_disk: Path) -> None:
    root = small_disk / "store"
    keys: list[ChunkKey] = []
    with open_disk(root, 1 << 30) as backend:

        def fill() -> None:
            for _ in range(100):
                keys.extend(put(backend, nbytes=256 << 10))

        with pytest.raises(BackendFull, match="No space left"):
            fill()
        assert 8 <= len(keys) <= 16
        assert temp_files(root) == []
        assert_counted(backend, root)
        assert all(holds(backend, key, 256 << 10) for key in keys)
        with pytest.raises(BackendFull):
            put(backend, nbytes=256 << 10)
    (small_disk / "filler").write_bytes(b"")
    with contextlib.suppress(OSError), open(small_disk / "filler", "wb", buffering=0) as filler:
        while filler.write(bytes(4096)):
            pass
    with open_disk(root, 1 << 30) as backend:  # also opens on a disk without a free byte
        assert all(holds(backend, key, 256 << 10) for key in keys)
        for key in keys[:2]:
            assert backend.remove(key)
        put(backend, nbytes=256 << 10)
        assert_counted(backend, root)


def test_a_directory_that_somebody_removed_is_made_again(tmp_path: Path) -> None:
    with open_disk(tmp_path) as backend:
        (key,) = put(backend)
        shutil.rmtree(file_of(tmp_path, key).parent.parent)
        assert not holds(backend, key)
        backend.put(key, record(key))
        assert holds(backend, key)
