"""The disk backend: the laws in each I/O mode, how records lie, which roots are refused, close."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

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
    temp_files,
)

from lmcache_core.backend import Context, Traits
from lmcache_core.backends.disk import DiskBackend, DiskOptions
from lmcache_core.errors import BackendError, BackendFull, ConfigError
from lmcache_core.testing import BackendLaws, in_threads
from lmcache_core.testing.memory import payload


class DiskLaws(BackendLaws):
    direct: ClassVar[str] = "auto"
    backend_class: ClassVar[type[DiskBackend]] = DiskBackend

    @pytest.fixture(autouse=True)
    def root(self, tmp_path: Path) -> None:
        self.path = tmp_path / "store"

    def open_backend(self, context: Context) -> DiskBackend:
        return self.backend_class(DiskOptions(path=str(self.path), direct=self.direct), context)  # type: ignore[arg-type]

    def break_store(self) -> None:
        shutil.rmtree(self.path)


class TestLawsAsProbed(DiskLaws):
    pass


class TestLawsBuffered(DiskLaws):
    direct = "off"


class UnalignedDisk(DiskBackend):
    """Tells the laws to use odd addresses and lengths, which the backend takes too."""

    traits = Traits(persistent=True, shared=True, alignment=1)


class TestLawsOnUnalignedBuffers(DiskLaws):
    backend_class = UnalignedDisk


class TestLawsOnUnalignedBuffersBuffered(DiskLaws):
    backend_class = UnalignedDisk
    direct = "off"


def test_a_record_is_one_file_named_by_its_key_and_private(tmp_path: Path) -> None:
    root = tmp_path / "a" / "store"
    with open_disk(root) as backend:
        (key,) = put(backend)
    assert file_of(root, key).read_bytes() == payload(key, NBYTES)
    assert sorted(os.listdir(root / "v1")) == sorted(["lock", "usage", key.text[:32]])
    assert temp_files(root) == []
    for path in (root, root / "v1", file_of(root, key).parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE(file_of(root, key).stat().st_mode) == 0o600


def test_a_path_may_start_with_a_tilde_and_contain_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    name = "a b\n\u00e9\U0001f600%2F"
    with open_disk(Path("~") / name) as backend:
        (key,) = put(backend)
    assert file_of(tmp_path / name, key).is_file()


@pytest.mark.parametrize("nbytes", [1, 511, 4095, 4096, 4097, 12_289])
def test_files_are_as_long_as_their_records(tmp_path: Path, nbytes: int) -> None:
    with open_disk(tmp_path) as backend:
        (key,) = put(backend, nbytes=nbytes)
        assert file_of(tmp_path, key).stat().st_size == nbytes
        assert_counted(backend, tmp_path)


def flags_seen(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether O_DIRECT was set, for each read and write to come."""
    seen: list[bool] = []
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)

        def spy(fd: int, buffers: Any, offset: int, real: Callable[..., int] = real) -> int:
            seen.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
            return real(fd, buffers, offset)

        monkeypatch.setattr(os, name, spy)
    return seen


def test_aligned_records_go_past_the_page_cache_in_one_call_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_disk(tmp_path) as backend:
        if backend.io_mode == "buffered":
            pytest.skip(f"cannot run here: O_DIRECT does not work in {tmp_path}")
        seen = flags_seen(monkeypatch)
        (key,) = put(backend, nbytes=1 << 20)
        assert holds(backend, key, 1 << 20)
        assert seen == [True, True]


def test_direct_off_goes_through_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_disk(tmp_path, direct="off") as backend:
        assert backend.io_mode == "buffered"
        seen = flags_seen(monkeypatch)
        (key,) = put(backend)
        assert holds(backend, key)
        assert seen == [False, False]


@pytest.fixture
def no_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without O_DIRECT."""
    real = os.open

    def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)


def test_without_direct_io_the_store_is_buffered_and_says_so_in_one_line(
    tmp_path: Path, no_direct: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "lmcache_core"), open_disk(tmp_path) as backend:
        assert backend.io_mode == "buffered"
        (key,) = put(backend)
        assert holds(backend, key)
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == 1
    assert "buffered" in lines[0]
    assert str(tmp_path) in lines[0]


def test_direct_on_without_direct_io_is_a_config_error(tmp_path: Path, no_direct: None) -> None:
    with pytest.raises(ConfigError, match="direct is on"):
        open_disk(tmp_path, direct="on")


def test_an_unknown_direct_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="direct must be auto, on or off, got 'yes'"):
        open_disk(tmp_path, direct="yes")


@pytest.mark.parametrize("path", ["", "store", "./store", "a\0b", "~nobody-of-this-name/store"])
def test_a_path_that_is_no_absolute_directory_name_is_a_config_error(path: str) -> None:
    with pytest.raises(ConfigError, match="path"):
        DiskBackend(DiskOptions(path=path), Context())


def spoil_with_file(root: Path) -> None:
    root.write_text("mine")


def spoil_with_link(root: Path) -> None:
    (root.parent / "elsewhere").mkdir()
    root.symlink_to(root.parent / "elsewhere")


def spoil_with_dangling_link(root: Path) -> None:
    root.symlink_to("nowhere")


def spoil_with_file_as_parent(root: Path) -> None:
    root.parent.rmdir()
    root.parent.write_text("mine")


def spoil_version_directory(root: Path) -> None:
    root.mkdir()
    (root / "v1").symlink_to("/etc")


def spoil_usage(root: Path) -> None:
    (root / "v1").mkdir(parents=True)
    (root / "v1" / "usage").symlink_to("/etc/hostname")


@pytest.mark.parametrize(
    "spoil",
    [
        spoil_with_file,
        spoil_with_link,
        spoil_with_dangling_link,
        spoil_with_file_as_parent,
        spoil_version_directory,
        spoil_usage,
    ],
)
def test_a_root_that_cannot_be_used_is_a_config_error_that_names_it(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    root = tmp_path / "parent" / "store"
    root.parent.mkdir()
    spoil(root)
    with pytest.raises(ConfigError, match=str(root)):
        open_disk(root)
    if (root.parent / "elsewhere").exists():
        assert os.listdir(root.parent / "elsewhere") == []


def test_a_root_that_cannot_be_written_is_a_config_error_that_says_why() -> None:
    with pytest.raises(ConfigError, match=r"/proc/lmcache: .+"):
        open_disk(Path("/proc/lmcache"))


def test_a_call_under_way_ends_well_after_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = open_disk(tmp_path)
    real = os.pwritev
    writing, go_on = threading.Event(), threading.Event()

    def slow(fd: int, buffers: Any, offset: int) -> int:
        writing.set()
        assert go_on.wait(30)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", slow)
    key = new_key()

    def close() -> None:
        assert writing.wait(30)
        backend.close()
        with pytest.raises(BackendError, match="closed"):
            backend.contains(key)
        go_on.set()

    in_threads(lambda: backend.put(key, record(key)), close)
    monkeypatch.undo()
    with open_disk(tmp_path) as again:
        assert holds(again, key)
        assert_counted(again, tmp_path)


def test_the_directories_of_the_last_record_go_with_it(tmp_path: Path) -> None:
    with open_disk(tmp_path) as backend:
        keys = [new_key() for _ in range(20)]
        for key in keys:
            backend.put(key, record(key))
        for key in keys:
            assert backend.remove(key)
        assert sorted(path.name for path in (tmp_path / "v1").iterdir()) == ["lock", "usage"]
        for key in keys:
            backend.put(key, record(key))
            assert holds(backend, key)


def test_what_else_lies_in_a_directory_of_records_keeps_it(tmp_path: Path) -> None:
    with open_disk(tmp_path) as backend:
        (key,) = put(backend)
        (file_of(tmp_path, key).parent.parent / "notes").write_text("mine")
        assert backend.remove(key)
        assert (file_of(tmp_path, key).parent.parent / "notes").read_text() == "mine"


# What other backends build on.


def test_a_file_that_is_written_is_a_record_once_the_body_has_ended(tmp_path: Path) -> None:
    key = new_key()
    with open_disk(tmp_path / "s") as backend:
        with backend.writing(key, NBYTES) as file:
            assert (file.nbytes, os.fstat(file.fd).st_size) == (NBYTES, 0)
            os.pwrite(file.fd, payload(key, NBYTES), 0)
            assert not backend.contains(key)
            assert backend.used_nbytes == NBYTES
        assert holds(backend, key)
        with backend.reading(key) as found:
            assert found is not None
            assert os.pread(found.fd, found.nbytes, 0) == payload(key, NBYTES)
        assert_counted(backend, tmp_path / "s")


def fail_with(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("body", "raised"),
    [
        (lambda file: fail_with(ZeroDivisionError()), ZeroDivisionError),
        (lambda file: fail_with(OSError(errno.ENOSPC, "full")), BackendFull),
        (lambda file: fail_with(OSError(errno.EIO, "broken")), BackendError),
        (lambda file: os.pwrite(file.fd, b"short", 0), BackendError),
        (lambda file: os.pwrite(file.fd, b"long", NBYTES), BackendError),
    ],
)
def test_a_file_whose_body_fails_or_is_of_another_length_leaves_nothing(
    tmp_path: Path, body: Callable[[Any], object], raised: type[BaseException]
) -> None:
    key = new_key()
    with open_disk(tmp_path / "s") as backend:
        with pytest.raises(raised), backend.writing(key, NBYTES) as file:
            body(file)
        assert not backend.contains(key)
        assert temp_files(tmp_path / "s") == []
        assert backend.used_nbytes == 0


def test_a_file_for_which_there_is_no_room_is_not_begun(tmp_path: Path) -> None:
    with open_disk(tmp_path / "s", NBYTES) as backend:
        put(backend)
        with pytest.raises(BackendFull), backend.writing(new_key(), NBYTES):
            pytest.fail("the body ran")


def test_reading_finds_records_and_nothing_else(tmp_path: Path) -> None:
    key = new_key()
    with open_disk(tmp_path / "s") as backend:
        with backend.reading(key) as found:
            assert found is None
        path = file_of(tmp_path / "s", key)
        path.parent.mkdir(parents=True)
        os.mkfifo(path)
        with backend.reading(key) as found:
            assert found is None
        path.unlink()
        path.symlink_to("/etc/hostname")
        with backend.reading(key) as found:
            assert found is None


def test_it_says_how_it_works_and_why_not_better(tmp_path: Path, no_direct: None) -> None:
    with open_disk(tmp_path / "s") as backend:
        assert backend.description().startswith("buffered I/O: O_DIRECT does not work on ")
    with open_disk(tmp_path / "s", direct="off") as backend:
        assert backend.description() == "buffered I/O: direct is off"
