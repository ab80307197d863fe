"""The disk backend: one file per record, written directly, published by rename, shared by processes under one total."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final, Literal

from ..backend import ApiVersion, Backend, Context, Entry, Traits
from ..diagnosis import Diagnosis
from ..errors import BackendError, ChunkCorrupt, ConfigError
from ..keys import ChunkKey
from ..layout import PAGE_NBYTES
from ._diagnosis import diagnose, file_system
from ._faults import fault
from ._files import Writer, close_fd, is_ours, record_dir, walk
from ._io import O_DIRECT, probe_io, read_file, rename_new, write_file
from ._root import VERSION_DIR, naming, open_version_dir, root_path
from ._usage import SharedTotal

logger = logging.getLogger(__name__)

_KNOWN_DIRS: Final = 1 << 14
# O_NONBLOCK: opening a FIFO that somebody put there must not wait for its writer.  Regular files ignore it.
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NEW: Final = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITE: Final = os.O_WRONLY | _NEW
_WRITE_READ: Final = os.O_RDWR | _NEW
_NOT_A_RECORD: Final = frozenset(
    (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENXIO, errno.ESTALE)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskOptions:
    """Settings of the disk backend."""

    path: str
    """Directory of the store: absolute, or from "~".  Created (mode 0700) if it is missing.  No default."""
    direct: Literal["auto", "on", "off"] = field(default="auto", metadata={"measure": ("on", "off")})
    """O_DIRECT, past the page cache: "auto" where it works, "on" or an error, "off".  Default "auto"."""


@dataclass(frozen=True, slots=True)
class RecordFile:
    """The file of one record; the descriptor is the store's, which closes it.

    A library that wants a name opens `/proc/self/fd/<fd>`: that is this file, whatever happens to names meanwhile.
    """

    fd: int
    nbytes: int


class DiskBackend(Backend[DiskOptions]):
    """Records as files `PATH/v1/<shard_id>/<two digits>/<digest>`, complete from the moment they have that name.

    Nothing is synced: the checksums of the layer above decide after a crash.  What is counted against the capacity is
    the length of the files, so a record of 4 KiB header and padded payload counts as that many bytes; directories are
    not counted.  Files, links and directories that are not records are neither followed, counted, nor touched.

    Processes of one host may share a store, each record visible to all at once and the capacity holding for their sum.
    On a network file system that needs one whose flock works between the hosts.  Not for use across `os.fork`.

    Backends that move the bytes in their own way build on it by holding one: `reading` and `writing` give them the file
    of a record, while names, total, publishing and clean-up stay those of the disk store.
    """

    api_version: ClassVar[ApiVersion] = (1, 0)
    traits: ClassVar[Traits] = Traits(persistent=True, shared=True, alignment=PAGE_NBYTES, io_threads=5, may_tear=True)
    Options: ClassVar[type] = DiskOptions

    def __init__(self, options: DiskOptions, context: Context) -> None:
        super().__init__(options, context)
        if options.direct not in ("auto", "on", "off"):
            raise ConfigError(f"disk: direct must be auto, on or off, got {options.direct!r}")
        self._root = root_path(options.path)
        self._guard = threading.Lock()
        self._active = 0
        self._closed = False
        self._dirs: set[str] = set()
        self._fd = -1
        with contextlib.ExitStack() as undo:
            with naming(self._root):
                self._writer = Writer.current()
                self._fd = open_version_dir(self._root)
                undo.callback(close_fd, self._fd)
                probe = self._writer.temp_name(0)
                self._direct = probe_io(probe, self._fd, allow_direct=options.direct != "off")
                self._total = SharedTotal(self._fd, self._writer, context.capacity_nbytes, context.timeout_s)
                undo.callback(self._total.close)
                used, limit = self._total.read()
                # Some file systems in user space remove a directory together with a file that was just made in it.
                self._prunes = not file_system(self._root).startswith("fuse")
            if options.direct == "on" and not self._direct:
                raise ConfigError(f"disk: direct is on, but O_DIRECT does not work in {self._root}")
            undo.pop_all()
        self.io_mode: Final[Literal["direct", "buffered"]] = "direct" if self._direct else "buffered"
        self.io_reason: Final = "" if self._direct else _why_buffered(options.direct, self._root)
        """Why I/O is not direct; empty where it is."""
        logger.info("disk store %s: %s I/O, %d bytes in use, limit %s", self._root, self.io_mode, used, limit)

    @property
    def used_nbytes(self) -> int:
        """Bytes in use by all processes: files, and what is reserved for writes under way."""
        self._enter()
        try:
            return self._total.read()[0]
        except OSError as error:
            raise fault(error, "count", None) from error
        finally:
            self._leave()

    def description(self) -> str:
        """For `lmc status`."""
        return f"{self.io_mode} I/O" + (f": {self.io_reason}" if self.io_reason else "")

    def contains(self, key: ChunkKey) -> bool:
        self._enter()
        try:
            directory, name = record_dir(key)
            if directory not in self._dirs and not self._is_safe(directory):
                return False
            return is_ours(os.stat(f"{directory}/{name}", dir_fd=self._fd, follow_symlinks=False))
        except OSError as error:
            if error.errno in _NOT_A_RECORD:
                return False
            raise fault(error, "stat", key) from error
        finally:
            self._leave()

    def get(self, key: ChunkKey, into: memoryview) -> int | None:
        self._enter()
        try:
            opened = self._open(key, direct=self._direct)
            if opened is None:
                return None
            fd, nbytes, direct = opened
            try:
                if nbytes > len(into):
                    raise ChunkCorrupt(f"{key!r} has {nbytes} bytes on disk, at most {len(into)} were expected")
                return read_file(fd, nbytes, into, direct)
            finally:
                close_fd(fd)
        except OSError as error:
            raise fault(error, "read", key) from error
        finally:
            self._leave()

    def put(self, key: ChunkKey, data: memoryview) -> None:
        direct = self._direct and len(data) >= PAGE_NBYTES
        with self._publishing(key, len(data)) as (directory, temp):
            fd = self._create(directory, temp, _WRITE | (O_DIRECT if direct else 0))
            try:
                write_file(fd, data, direct)
            finally:
                os.close(fd)

    @contextlib.contextmanager
    def reading(self, key: ChunkKey) -> Iterator[RecordFile | None]:
        """The file of a record, open for reading inside the `with`; `None` where there is none.

        An OSError of the body is one of the store, and raised as a BackendError.
        """
        self._enter()
        try:
            opened = self._open(key, direct=False)
            if opened is None:
                yield None
                return
            fd, nbytes, _ = opened
            try:
                yield RecordFile(fd, nbytes)
            finally:
                close_fd(fd)
        except OSError as error:
            raise fault(error, "read", key) from error
        finally:
            self._leave()

    @contextlib.contextmanager
    def writing(self, key: ChunkKey, nbytes: int) -> Iterator[RecordFile]:
        """A new file for a record of `nbytes`, open inside the `with`; published at its end, or, if that raises, gone.

        BackendFull where the capacity has no room, BackendError where the file has not exactly `nbytes` in the end.
        """
        with self._publishing(key, nbytes) as (directory, temp):
            fd = self._create(directory, temp, _WRITE_READ)
            try:
                yield RecordFile(fd, nbytes)
                length = os.fstat(fd).st_size
            finally:
                os.close(fd)
            if length != nbytes:
                raise BackendError(f"{length} bytes of {nbytes} were written for {key!r}")

    def remove(self, key: ChunkKey) -> bool:
        directory, name = record_dir(key)
        path = f"{directory}/{name}"
        self._enter()
        held = -1
        try:
            if directory not in self._dirs and not self._is_safe(directory):
                return False
            with self._total:
                # Held open across the unlink, so that the blocks are freed after the lock is.
                held = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd)
                status = os.fstat(held)
                if not is_ours(status):
                    return False
                os.unlink(path, dir_fd=self._fd)
                self._prune(directory)
                self._total.give_back_locked(status.st_size)
            return True
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                return False
            raise fault(error, "remove", key) from error
        finally:
            if held >= 0:
                close_fd(held)
            self._leave()

    def entries(self, shard_id: bytes | None = None) -> Iterator[Entry]:
        """Every record, its file's time of modification as `stored_at`.  Files that are not records are passed over."""
        self._enter()
        try:
            yield from walk(self._fd, shard_id)
        except OSError as error:
            raise fault(error, "list", None) from error
        finally:
            self._leave()

    def diagnose(self) -> Iterator[Diagnosis]:
        """For `lmc doctor`."""
        self._enter()
        try:
            used, limit = self._total.read()
            yield from diagnose(self._root, direct=self._direct, used_nbytes=used, limit_nbytes=limit)
        finally:
            self._leave()

    def close(self) -> None:
        with self._guard:
            self._closed = True
            if self._active:
                return  # the last call under way closes: a descriptor's number must not be reused under it
            fd, self._fd = self._fd, -1
        if fd >= 0:
            self._total.close()
            close_fd(fd)

    def _enter(self) -> None:
        with self._guard:
            if self._closed:
                raise BackendError(f"the disk store {self._root} is closed")
            self._active += 1

    def _leave(self) -> None:
        with self._guard:
            self._active -= 1
            last = self._closed and not self._active
        if last:
            self.close()

    def _open(self, key: ChunkKey, *, direct: bool) -> tuple[int, int, bool] | None:
        """Descriptor and length of a record, and whether the descriptor has O_DIRECT; `None` where there is none."""
        directory, name = record_dir(key)
        if directory not in self._dirs and not self._is_safe(directory):
            return None
        try:
            fd, direct = self._open_file(f"{directory}/{name}", direct=direct)
        except OSError as error:
            if error.errno in _NOT_A_RECORD:
                return None
            raise
        ours = False
        try:
            status = os.fstat(fd)
            ours = is_ours(status)
        finally:
            if not ours:
                close_fd(fd)
        return (fd, status.st_size, direct) if ours else None

    def _open_file(self, path: str, *, direct: bool) -> tuple[int, bool]:
        if direct:
            try:
                return os.open(path, _READ | O_DIRECT, dir_fd=self._fd), True
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        return os.open(path, _READ, dir_fd=self._fd), False

    @contextlib.contextmanager
    def _publishing(self, key: ChunkKey, nbytes: int) -> Iterator[tuple[str, str]]:
        """Room for a record, its directory, and the name to write it under; published at the end, or, if that raises,
        gone."""
        directory, name = record_dir(key)
        # Beside where the record goes: one directory for all writers would have them wait for each other in the kernel.
        temp = f"{directory}/{self._writer.temp_name(nbytes)}"
        self._enter()
        try:
            self._total.reserve(nbytes)
            written = False
            try:
                yield directory, temp
                written = True
                self._publish(temp, f"{directory}/{name}")
            except BaseException:
                self._discard(temp, nbytes, written)
                raise
        except OSError as error:
            raise fault(error, "write", key) from error
        finally:
            self._leave()

    def _create(self, directory: str, temp: str, flags: int) -> int:
        if directory in self._dirs:
            try:
                return os.open(temp, flags, 0o600, dir_fd=self._fd)
            except FileNotFoundError:
                pass  # somebody removed the directory that we knew
        with self._total:  # without which none of us removes one
            self._dirs.discard(directory)
            self._make_dir(directory)
            return os.open(temp, flags, 0o600, dir_fd=self._fd)

    def _publish(self, temp: str, path: str) -> None:
        if rename_new(temp, path, self._fd):
            return  # replaced nothing, so the total holds
        with self._total:
            replaced = self._size_of(path)
            os.rename(temp, path, src_dir_fd=self._fd, dst_dir_fd=self._fd)
            if replaced:
                # The record is there by now; failing here would say that it is not.
                with contextlib.suppress(OSError, BackendError):
                    self._total.give_back_locked(replaced)

    def _prune(self, directory: str) -> None:
        """Remove the directories of a record if they are empty now; who makes one holds the lock, too."""
        if not self._prunes:
            return
        with contextlib.suppress(OSError):
            os.rmdir(directory, dir_fd=self._fd)
            self._dirs.discard(directory)
            os.rmdir(directory[:32], dir_fd=self._fd)

    def _size_of(self, path: str) -> int:
        try:
            status = os.stat(path, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return 0
        if not is_ours(status):
            raise BackendError(f"{self._root}/{VERSION_DIR}/{path} is in the way and not a record; it is left alone")
        return status.st_size

    def _discard(self, temp: str, nbytes: int, written: bool) -> None:
        # Trouble here leaves the total too high until the store is counted again, never too low.
        with contextlib.suppress(OSError, BackendError):
            try:
                os.unlink(temp, dir_fd=self._fd)
            except FileNotFoundError:
                if written:
                    return  # it was renamed, whatever the call said
            self._total.give_back(nbytes)

    def _is_safe(self, directory: str) -> bool:
        """Whether both levels are real directories; remembered, since that is asked for each record."""
        try:
            for path in (directory[:32], directory):
                if not stat.S_ISDIR(os.stat(path, dir_fd=self._fd, follow_symlinks=False).st_mode):
                    return False
        except (FileNotFoundError, NotADirectoryError):
            return False
        if len(self._dirs) >= _KNOWN_DIRS:
            self._dirs.clear()
        self._dirs.add(directory)
        return True

    def _make_dir(self, directory: str) -> None:
        if directory in self._dirs:
            return
        for path in (directory[:32], directory):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700, dir_fd=self._fd)
        if not self._is_safe(directory):
            raise BackendError(f"{self._root}/{VERSION_DIR}/{directory} is in the way and not a directory of records")


def _why_buffered(direct: str, root: Path) -> str:
    return "direct is off" if direct == "off" else f"O_DIRECT does not work on {file_system(root)}"
