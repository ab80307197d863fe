"""The backend `gds`: the disk store's files, moved in the fastest way that the machine has, never beyond a deadline."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar, Final, TypeVar

from lmcache_core import (
    ApiVersion,
    Backend,
    BackendError,
    BackendUnavailable,
    ChunkKey,
    ConfigError,
    Context,
    DeviceIO,
    Diagnosis,
    DiskBackend,
    DiskOptions,
    Entry,
    GetResult,
    Traits,
    copy_bytes,
)

from .bounce import Bounce
from .cufile import CuFileIO, why_no_device
from .guard import Guard
from .mounts import Mount, mount_at
from .options import GdsOptions

logger = logging.getLogger(__name__)

T = TypeVar("T")
_LOST: Final = frozenset((errno.ENOTCONN, errno.ESTALE, errno.ENODEV, errno.ESHUTDOWN, errno.ECONNABORTED))
"""What a mount says whose other side is gone: opened anew, it may be there again."""
_LISTED: Final = 512
_OPEN_WAIT_S: Final = 10.0
_CLOSE_WAIT_S: Final = 1.0
_RESOLVE_WAIT_S: Final = 1.0


class GdsBackend(Backend[GdsOptions]):
    """A disk store (`lmcache_core.DiskBackend`; the same directory can be used by both) on a mount that may be remote.

    On a file system that somebody else answers for, every call runs on a thread of its own with memory of its own: when
    the mount hangs, the call ends at its deadline and that thread stays behind.  A store that is not there at start, or
    goes, is opened at the next call that finds it.
    """

    api_version: ClassVar[ApiVersion] = (1, 0)
    traits: ClassVar[Traits] = Traits(persistent=True, shared=True, alignment=4096, io_threads=5, may_tear=True)
    Options: ClassVar[type] = GdsOptions

    def __init__(self, options: GdsOptions, context: Context) -> None:
        super().__init__(options, context)
        self.traits = replace(type(self).traits, io_threads=options.io_threads)  # type: ignore[misc]
        self._path = _absolute(options.path)
        # The tier's threads, one that lists, one that asks, one that opens.
        guard = Guard("gds", options.io_threads + 3)
        self._mount = _mount(self._path, guard)
        guarded = options.guard == "on" or (options.guard == "auto" and self._mount.may_hang)
        if not guarded:
            guard.close()
        self._guard = guard if guarded else None
        self._bounce = Bounce()
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._closed = False
        self._disk: DiskBackend | None = None
        self._kind = options.filesystem
        """What must be mounted there: as was configured, or as it was at first."""
        self._was_open = False
        self._attempting = False
        self._absent = "it was not tried yet"
        self._no_device = why_no_device()
        if options.io == "device" and self._no_device:
            raise ConfigError(f"gds: io is device, but {self._no_device}")
        try:
            self._open(min(context.timeout_s, _OPEN_WAIT_S))
        except BackendUnavailable as error:
            logger.warning("gds: %s is not there yet, what is in it is a miss: %s", self._path, str(error))
        except BaseException:
            self.close()
            raise

    def device_io(self) -> DeviceIO | None:
        """Through cuFile, where the machine has all of it."""
        wanted = self.options.io in ("auto", "device") and not self._no_device
        return CuFileIO(self._run_here) if wanted else None

    def description(self) -> str:
        """For `lmc status`."""
        disk = self._disk
        if disk is None:
            return f"not open: {self._absent}"
        guard = "; calls are held to their deadlines" if self._guard is not None else ""
        why = self._why_not_faster(disk)
        device = "" if why else "device I/O (cuFile) where a cache can use it, else "
        return f"{device}{disk.io_mode} I/O on {self._kind}{f' ({why})' if why else ''}{guard}"

    def contains(self, key: ChunkKey) -> bool:
        return self._run(lambda disk: disk.contains(key), self.context.timeout_s)

    def get(self, key: ChunkKey, into: memoryview) -> int | None:
        return self._get(key, into, self.context.timeout_s)

    def put(self, key: ChunkKey, data: memoryview) -> None:
        self._put(key, data, self.context.timeout_s)

    def remove(self, key: ChunkKey) -> bool:
        return self._run(lambda disk: disk.remove(key), self.context.timeout_s)

    def contains_prefix(self, keys: Sequence[ChunkKey], *, timeout_s: float) -> int:
        return self._run(lambda disk: disk.contains_prefix(keys, timeout_s=timeout_s), timeout_s)

    def get_many(self, keys: Sequence[ChunkKey], into: Sequence[memoryview], *, timeout_s: float) -> list[GetResult]:
        deadline = time.monotonic() + timeout_s
        return [self._answer(partial(self._get, key, buffer), deadline) for key, buffer in zip(keys, into, strict=True)]

    def put_many(
        self, keys: Sequence[ChunkKey], data: Sequence[memoryview], *, timeout_s: float
    ) -> list[BackendError | None]:
        deadline = time.monotonic() + timeout_s
        return [self._answer(partial(self._put, key, buffer), deadline) for key, buffer in zip(keys, data, strict=True)]

    def entries(self, shard_id: bytes | None = None) -> Iterator[Entry]:
        """Every record; asked for in parts, each of which has the tier's deadline."""
        listing: Iterator[Entry] = self._run(lambda disk: disk.entries(shard_id), self.context.timeout_s)
        while part := self._run(lambda disk: list(itertools.islice(listing, _LISTED)), self.context.timeout_s):
            yield from part

    def diagnose(self) -> Iterator[Diagnosis]:
        """For `lmc doctor`."""
        yield from self._run(lambda disk: list(disk.diagnose()), self.context.timeout_s)
        disk = self._disk
        if disk is not None:
            yield Diagnosis("ok", f"{self._path}: {self.description()}")
        if self._mount.may_hang and self._guard is None:
            yield Diagnosis(
                "warning",
                f"{self._path}: guard is off on {self._mount.kind}: a mount that hangs keeps threads of the tier",
                "guard: auto",
            )
        if self._mount.may_hang and not self.options.filesystem:
            yield Diagnosis(
                "note",
                f"{self._path}: where {self._mount.kind} is not mounted at start, records go to the local disk",
                f"filesystem: {self._mount.kind}",
            )

    def close(self) -> None:
        with self._lock:
            self._closed = True
            disk, self._disk = self._disk, None
            self._absent = "it is closed"
        if disk is not None:
            self._put_away(disk)
        if self._guard is not None:
            self._guard.close()
        self._bounce.close()

    def _get(self, key: ChunkKey, into: memoryview, timeout_s: float) -> int | None:
        if self._guard is None:
            return self._run(lambda disk: disk.get(key, into), timeout_s)
        size = len(into)
        bounce = self._bounce

        def read(disk: DiskBackend) -> tuple[int | None, memoryview | None, Callable[[], None]]:
            mapping, view = bounce.take(size)
            give = partial(bounce.give, mapping)
            try:
                nbytes = disk.get(key, view)
            except BaseException:
                give()
                raise
            return nbytes, view, give

        nbytes, view, give = self._run(read, timeout_s, lambda answer: answer[2]())
        try:
            if nbytes is not None and view is not None:
                copy_bytes(view[:nbytes], into[:nbytes])
        finally:
            give()
        return nbytes

    def _put(self, key: ChunkKey, data: memoryview, timeout_s: float) -> None:
        if self._guard is None:
            return self._run(lambda disk: disk.put(key, data), timeout_s)
        began = time.monotonic()
        mapping, view = self._bounce.take(len(data))
        copy_bytes(data, view)
        bounce = self._bounce

        def write(disk: DiskBackend) -> None:
            try:
                disk.put(key, view)
            finally:
                bounce.give(mapping)

        return self._run(write, timeout_s - (time.monotonic() - began))

    def _answer(self, call: Callable[[float], T], deadline: float) -> T | BackendError:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return BackendUnavailable("not reached before the deadline")
        try:
            return call(left_s)
        except BackendError as error:
            return error.plain()

    def _run(
        self, work: Callable[[DiskBackend], T], timeout_s: float, on_late: Callable[[T], object] | None = None
    ) -> T:
        """`work` on the open store, by its deadline where it is guarded.  A store that is lost is opened anew."""
        deadline = time.monotonic() + timeout_s
        disk = self._disk or self._open(timeout_s)
        guard = self._guard
        if guard is None:
            return self._told(disk, work)
        return self._told(disk, lambda disk: guard.call(partial(work, disk), deadline - time.monotonic(), on_late))

    def _run_here(self, work: Callable[[DiskBackend], T]) -> T:
        """`work` on the open store, on this thread, however long that takes."""
        return self._told(self._disk or self._open(self.context.timeout_s), work)

    def _told(self, disk: DiskBackend, work: Callable[[DiskBackend], T]) -> T:
        try:
            return work(disk)
        except BackendError as error:
            if _is_lost(error):
                self._lose(disk, str(error))
                raise BackendUnavailable(str(error)) from error
            if self._mount.may_hang and isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EIO:
                raise BackendUnavailable(str(error)) from error  # what a mount says whose server is away
            raise

    def _open(self, timeout_s: float) -> DiskBackend:
        """The open store.  One caller at a time opens it; while an attempt hangs, nobody begins another."""
        deadline = time.monotonic() + timeout_s
        if not self._opening.acquire(timeout=max(0.0, timeout_s)):
            raise BackendUnavailable(f"{self._path} is being opened")
        try:
            if self._disk is None:
                if self._closed:
                    raise BackendError("this gds backend is closed")
                self._adopt(self._attempt(deadline - time.monotonic()))
            if self._disk is None:
                raise BackendError("this gds backend is closed")
            return self._disk
        finally:
            self._opening.release()

    def _attempt(self, timeout_s: float) -> DiskBackend:
        if self._attempting:
            raise BackendUnavailable(f"{self._path} has not answered since it was asked to open")
        try:
            if self._guard is None:
                return self._new_disk()
            return self._guard.call(self._new_disk_at_last, timeout_s, self._adopt)
        except BackendUnavailable as error:
            self._absent = str(error)
            raise
        except ConfigError as error:
            if not self._was_open and not _is_lost(error):
                raise
            self._absent = str(error)
            raise BackendUnavailable(str(error)) from error

    def _new_disk_at_last(self) -> DiskBackend:
        self._attempting = True
        try:
            return self._new_disk()
        finally:
            self._attempting = False

    def _new_disk(self) -> DiskBackend:
        kind = mount_at(os.path.realpath(self._path)).kind
        if self._kind not in ("", kind):
            raise BackendUnavailable(f"{self._path} is on {kind}: {self._kind} is not mounted")
        direct = {"direct": "on", "buffered": "off"}.get(self.options.io, "auto")
        disk = DiskBackend(DiskOptions(path=self._path, direct=direct), self.context)  # type: ignore[arg-type]
        self._kind = kind
        return disk

    def _adopt(self, disk: DiskBackend) -> None:
        with self._lock:
            taken = self._disk is None and not self._closed
            if taken:
                self._disk, self._was_open = disk, True
        if taken:
            logger.info("gds store %s: %s", self._path, self.description())
        else:
            self._put_away(disk)

    def _lose(self, disk: DiskBackend, reason: str) -> None:
        with self._lock:
            if self._disk is not disk:
                return
            self._disk, self._absent = None, reason
        self._put_away(disk)

    def _put_away(self, disk: DiskBackend) -> None:
        if self._guard is None:
            disk.close()
            return
        with contextlib.suppress(BackendError):  # the kernel keeps it, or the guard is closed
            self._guard.call(disk.close, _CLOSE_WAIT_S)

    def _why_not_faster(self, disk: DiskBackend) -> str:
        wanted = self.options.io
        if wanted in ("direct", "buffered"):
            return f"io is {wanted}"
        return "; ".join(
            f"not {way}: {why}" for way, why in (("direct", disk.io_reason), ("device", self._no_device)) if why
        )


def _is_lost(error: BaseException) -> bool:
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in _LOST


def _mount(path: str, guard: Guard) -> Mount:
    """What is mounted there, links resolved; where that hangs, by the name alone."""
    try:
        return mount_at(guard.call(lambda: os.path.realpath(path), _RESOLVE_WAIT_S))
    except BackendUnavailable:
        return mount_at(path)


def _absolute(path: str) -> str:
    try:
        return os.path.abspath(Path(path).expanduser())
    except RuntimeError as error:
        raise ConfigError(f"gds: path {path!r}: {error}") from error
