"""What is stored is there whole, is found at once, and whatever else lies there is left alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import servers
from fsspec.implementations.local import LocalFileSystem

from lmcache_core import BackendError, BackendUnavailable, ChunkCorrupt, ChunkKey, Context, RawOptions
from lmcache_core.testing import in_threads, memory
from lmcache_fsspec import FsspecBackend, FsspecOptions

NBYTES = 20_000


def open_url(url: str, *, timeout_s: float = 10.0, **settings: Any) -> FsspecBackend:
    settings = {k: RawOptions.of(v) if k in ("storage", "secrets") else v for k, v in settings.items()}
    return FsspecBackend(FsspecOptions(url=url, **settings), Context(timeout_s=timeout_s))


def new_key() -> ChunkKey:
    return ChunkKey(os.urandom(48))


def look(backend: FsspecBackend, key: ChunkKey) -> bytes | None:
    into = memory.buffer(NBYTES)
    return None if backend.get(key, into) is None else bytes(into)


@pytest.fixture
def local(tmp_path: Path) -> Iterator[FsspecBackend]:
    with open_url(f"file://{tmp_path}/kv") as backend:
        yield backend


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_record_lies_where_the_readme_says(local: FsspecBackend, tmp_path: Path) -> None:
    key = new_key()
    local.put(key, memory.filled(key, NBYTES))
    shard, digest = key.text[:32], key.text[32:]
    assert files(tmp_path) == [tmp_path / "kv" / "records-v1" / shard / digest[:2] / digest]


def test_a_write_that_fails_part_way_is_never_visible_and_leaves_nothing(  # S11
    local: FsspecBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = new_key()
    data = memory.filled(key, NBYTES)
    for written in (0, 1, 4096, NBYTES // 2, NBYTES - 1):

        def fails(self: Any, piece: Any, *args: Any, n: int = written, **kwargs: Any) -> None:
            self.f.write(piece[:n])
            self.f.flush()
            assert files(tmp_path), "the part that was written is somewhere"
            assert not local.contains(key)
            raise OSError(5, "the device is gone")

        monkeypatch.setattr("fsspec.implementations.local.LocalFileOpener.write", fails)
        with pytest.raises(BackendUnavailable, match="the device is gone"):
            local.put(key, data)
        monkeypatch.undo()
        assert look(local, key) is None
        assert files(tmp_path) == []
    local.put(key, data)
    assert look(local, key) == bytes(data)


def test_a_writer_that_is_killed_leaves_no_record_and_its_rest_is_tidied(tmp_path: Path) -> None:
    # The child stops for good with half of the file written.
    key = new_key()
    code = (
        "import sys, time, fsspec.implementations.local as l\n"
        "from lmcache_fsspec import FsspecBackend, FsspecOptions\n"
        "from lmcache_core import ChunkKey, Context\n"
        "def half(self, piece):\n"
        "    self.f.write(piece[:len(piece) // 2]); self.f.flush(); print('half', flush=True); time.sleep(60)\n"
        "l.LocalFileOpener.write = half\n"
        f"FsspecBackend(FsspecOptions(url='file://{tmp_path}/kv'), Context())"
        f".put(ChunkKey(bytes.fromhex('{key.text}')), memoryview(bytes({NBYTES})))\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"half\n"
    writer.kill()
    writer.wait()
    writer.stdout.close()
    with open_url(f"file://{tmp_path}/kv") as backend:
        assert not backend.contains(key)
        assert list(backend.entries()) == []
        (rest,) = files(tmp_path)
    os.utime(rest, (time.time() - 7200,) * 2)
    with open_url(f"file://{tmp_path}/kv") as backend:
        assert list(backend.entries()) == []
    assert files(tmp_path) == []


def test_what_is_no_record_is_passed_over_and_left_alone(local: FsspecBackend, tmp_path: Path) -> None:  # S13
    key, link, folder, empty = (new_key() for _ in range(4))
    local.put(key, memory.filled(key, NBYTES))
    base = tmp_path / "kv" / "records-v1"

    def place(of: ChunkKey) -> Path:
        path = base / of.text[:32] / of.text[32:34] / of.text[32:]
        path.parent.mkdir(parents=True)
        return path

    place(link).symlink_to("/etc/hostname")
    place(folder).mkdir()
    place(empty).write_bytes(b"")
    (base / "notes.txt").write_text("mine")
    (base / key.text[:32] / "readme").write_text("mine")
    assert {entry.key for entry in local.entries()} == {key, empty}
    assert look(local, link) is look(local, folder) is None
    assert not local.contains(link)
    assert not local.remove(link)
    assert local.get(empty, memory.buffer(NBYTES)) == 0
    with pytest.raises(BackendError):
        local.put(folder, memory.filled(folder, NBYTES))
    assert (base / "notes.txt").exists()
    assert os.readlink(base / link.text[:32] / link.text[32:34] / link.text[32:]) == "/etc/hostname"
    assert not any((base / "tmp").iterdir())


def test_a_directory_that_somebody_removed_is_made_again(local: FsspecBackend, tmp_path: Path) -> None:
    one, two = new_key(), new_key()
    local.put(one, memory.filled(one, NBYTES))
    shutil.rmtree(tmp_path / "kv")
    for key in (one, two):
        local.put(key, memory.filled(key, NBYTES))
        assert look(local, key) == memory.payload(key, NBYTES)


def test_instances_are_not_shared_with_others_and_remember_no_listing(tmp_path: Path) -> None:
    mine = fsspec.filesystem("file")
    with open_url(f"file://{tmp_path}/kv") as backend:
        key = new_key()
        backend.put(key, memory.filled(key, NBYTES))
        (runner,) = backend._runners.values()
        ours: Any = runner
        assert ours._fs is not mine
        assert ours._fs.dircache.use_listings_cache is False
    assert not [fs for fs in LocalFileSystem._cache.values() if fs is ours._fs]


def test_a_child_of_fork_uses_connections_of_its_own(tmp_path: Path) -> None:
    """In a process of its own: the one that runs the tests has threads, which must not be forked."""
    server = servers.ftp(tmp_path)
    server.start()
    code = (
        "import os, sys\n"
        "from lmcache_fsspec import FsspecBackend, FsspecOptions\n"
        "from lmcache_core import ChunkKey, Context, RawOptions\n"
        f"options = FsspecOptions(url='ftp://kv@127.0.0.1:{server.port}/kv',\n"
        "                        secrets=RawOptions.of({'password': 'kv-secret-5'}))\n"
        "backend = FsspecBackend(options, Context())\n"
        "one, two = ChunkKey(bytes(48)), ChunkKey(bytes(47) + b'x')\n"
        "backend.put(one, memoryview(b'from the parent'))\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    into = bytearray(15)\n"
        "    ok = backend.get(one, memoryview(into)) == 15 and bytes(into) == b'from the parent'\n"
        "    backend.put(two, memoryview(b'from the child'))\n"
        "    os._exit(0 if ok else 1)\n"
        "status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
        "into = bytearray(14)\n"
        "assert backend.get(two, memoryview(into)) == 14 and bytes(into) == b'from the child'\n"
        "backend.close()\n"
        "sys.exit(status)\n"
    )
    try:
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    finally:
        server.kill()
    assert ran.returncode == 0, ran.stderr


def test_a_client_of_several_threads_shares_no_connection_and_opens_no_more_than_it_may(tmp_path: Path) -> None:
    server = servers.ftp(tmp_path)
    server.start()
    try:
        url = f"ftp://kv@127.0.0.1:{server.port}/kv"
        with open_url(url, secrets={"password": "kv-secret-5"}, connections=2) as backend:

            def work() -> None:
                for _ in range(5):
                    key = new_key()
                    backend.put(key, memory.filled(key, NBYTES))
                    assert look(backend, key) == memory.payload(key, NBYTES)

            in_threads(*[work] * 6)
            (runner,) = backend._runners.values()
            connections: Any = runner
            assert 1 <= len(connections._all) <= 2
    finally:
        server.kill()


def test_a_server_that_comes_up_late_goes_down_and_comes_back_is_used_without_a_restart(tmp_path: Path) -> None:  # S19
    server = servers.ftp(tmp_path)
    key = new_key()
    url = f"ftp://kv@127.0.0.1:{server.port}/kv"
    with open_url(url, secrets={"password": "kv-secret-5"}) as backend:
        started = time.monotonic()
        with pytest.raises(BackendUnavailable):
            backend.get(key, memory.buffer(NBYTES))
        assert time.monotonic() - started < 5.0
        try:
            server.start()
            backend.put(key, memory.filled(key, NBYTES))
            server.kill()
            with pytest.raises(BackendUnavailable):
                backend.contains(key)
            server.start()
            assert look(backend, key) == memory.payload(key, NBYTES)
        finally:
            server.kill()


def test_a_connection_that_was_idle_for_long_is_opened_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # S21
    server = servers.ftp(tmp_path)
    server.start()
    key = new_key()
    try:
        with open_url(f"ftp://kv@127.0.0.1:{server.port}/kv", secrets={"password": "kv-secret-5"}) as backend:
            backend.put(key, memory.filled(key, NBYTES))
            server.kill()
            server.start()
            monkeypatch.setattr("lmcache_fsspec.running.IDLE_S", 0.0)
            assert look(backend, key) == memory.payload(key, NBYTES)
    finally:
        server.kill()


def test_a_wrong_password_is_said_and_nothing_else_is(tmp_path: Path) -> None:
    server = servers.ftp(tmp_path)
    server.start()
    try:
        with open_url(f"ftp://kv@127.0.0.1:{server.port}/kv", secrets={"password": "not-this-one"}) as backend:
            with pytest.raises(BackendError, match="530|[Aa]uthentication") as error:
                backend.contains(new_key())
            assert not error.value.retryable
            assert "not-this-one" not in str(error.value)
    finally:
        server.kill()


def test_a_record_of_any_length_is_refused_by_what_the_store_says_of_it() -> None:
    key = new_key()
    with open_url(f"memory://{uuid.uuid4().hex}") as backend:
        backend.put(key, memory.filled(key, NBYTES))
        with pytest.raises(ChunkCorrupt, match=f"{NBYTES} bytes, at most 100"):
            backend.get(key, memory.buffer(100))
