"""The byte total that all processes with one disk store share: reserved before a write, given back by whoever unlinks.

Two files below the version directory.  `lock` is held shared by every open backend; the one that gets it exclusively
at open counts the directory anew.  `usage` holds the total and the smallest limit, then one line for each open
backend; its flock guards them, and every replacement and unlink of a record, so that the total nets out.

A process that is killed leaves at worst a total that is too high, until the next exclusive open.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import struct
import threading
import time
from collections.abc import Callable
from typing import Final

from ..errors import BackendError, BackendFull, BackendUnavailable
from ._files import MAX_NBYTES, Temp, Writer, close_fd, is_ours, parse_temp, walk, walk_temps

logger = logging.getLogger(__name__)

_HEAD: Final = struct.Struct("<8sqq")
_MAGIC: Final = b"LMCuse\x01\n"
_NO_LIMIT: Final = -1
_OPEN_TIMEOUT_S: Final = 120.0
_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class SharedTotal:
    """The total of one store, seen by one open backend."""

    def __init__(self, root_fd: int, writer: Writer, limit_nbytes: int | None, timeout_s: float) -> None:
        self._root_fd = root_fd
        self._writer = writer
        self._timeout_s = timeout_s
        self._mutex = threading.Lock()
        self._line = b""
        self._owed_lock = threading.Lock()
        self._owed_nbytes = 0
        """In use no more, and not taken off the total yet."""
        self._settling_nbytes = 0
        """What of that is to be with the next write of the total."""
        self._fd = -1
        self._lock_fd = os.open("lock", _FLAGS, 0o600, dir_fd=root_fd)
        try:
            self._fd = os.open("usage", _FLAGS, 0o600, dir_fd=root_fd)
            self._join(limit_nbytes)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> None:
        if not self._mutex.acquire(timeout=self._timeout_s):
            raise BackendUnavailable(f"the usage lock was busy for {self._timeout_s} s")
        try:
            _flock(self._fd, fcntl.LOCK_EX, self._timeout_s)
        except BaseException:
            self._mutex.release()
            raise

    def __exit__(self, *exc: object) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        except OSError:
            self._drop_lock()
        finally:
            self._mutex.release()

    def _drop_lock(self) -> None:
        """A lock that cannot be let go goes with its descriptor.  What was done under it stays done."""
        with contextlib.suppress(OSError):
            fresh = os.open("usage", _FLAGS, 0o600, dir_fd=self._root_fd)
            try:
                os.dup2(fresh, self._fd, inheritable=False)
            finally:
                close_fd(fresh)

    def reserve(self, nbytes: int) -> None:
        """Count `nbytes` before they are written; raises BackendFull, having counted nothing, beyond the limit."""
        with self:
            total, limit = self._read()
            if limit == _NO_LIMIT or total + nbytes <= limit:
                self._write(total + nbytes, limit)
                return
        # What killed writers had reserved is not in use.
        freed = self._bury()
        with self:
            total, limit = self._read()
            if total + nbytes > limit:
                raise BackendFull(f"{nbytes} bytes do not fit: {total} of {limit} bytes are in use")
            self._write(total + nbytes, limit)
        logger.info("gave back %d bytes that writers which have ended had reserved", freed)

    def give_back(self, nbytes: int) -> None:
        """Take off the total what is in use no more; if that fails, it comes off with the next change."""
        self._owe(nbytes)
        with self:
            self._write(*self._read())

    def give_back_locked(self, nbytes: int) -> None:
        """The same for a caller that holds the lock (`with total:`)."""
        self._owe(nbytes)
        self._write(*self._read())

    def read(self) -> tuple[int, int | None]:
        """Bytes in use, reservations included, and the limit that holds."""
        with self:
            total, limit = self._read()
        return total, None if limit == _NO_LIMIT else limit

    def close(self) -> None:
        """Take back our limit and let go of both locks."""
        fd, self._fd = self._fd, -1
        lock_fd, self._lock_fd = self._lock_fd, -1
        try:
            if self._line and fd >= 0:
                # A busy lock at this point costs a limit that outlives us until the next exclusive open.
                with contextlib.suppress(OSError, BackendError):
                    _flock(fd, fcntl.LOCK_EX, self._timeout_s)
                    total = _parse(os.pread(fd, _HEAD.size, 0))[0]
                    _rewrite(fd, total, [line for line in _lines(fd) if line != self._line])
        finally:
            for each in (fd, lock_fd):
                if each >= 0:
                    close_fd(each)

    def _join(self, limit_nbytes: int | None) -> None:
        """Enter the circle of open backends, counting first where we are the only one."""
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        else:
            self._recount(exclusive=True)
        # The change to a shared lock is not atomic: another process may count in between, which changes nothing.
        _flock(self._lock_fd, fcntl.LOCK_SH, _OPEN_TIMEOUT_S)
        with self:
            try:
                self._read()
            except BackendError:
                logger.warning("the usage file of the disk store is damaged; counting anew")
                self._recount(exclusive=False)
            self._line = f"{self._writer.temp_name(min(limit_nbytes or 0, MAX_NBYTES))}\n".encode()
            lines = [*_lines(self._fd), self._line]
            self._rewrite(lines)
        self._bury()
        limits = sorted({limit for writer, limit in map(_parsed, lines) if limit and not writer.is_dead(self._writer)})
        if limit_nbytes is not None and len(limits) > 1:
            logger.warning(
                "processes share this disk store with different limits, %s bytes (ours is %d): the smallest holds",
                " and ".join(map(str, limits)),
                limit_nbytes,
            )

    def _bury(self) -> int:
        """Unlink what processes of this host that have ended were writing; returns the bytes given back.

        The line of such a process is the sign that there may be something, and goes when that has been seen to.
        """
        with self:
            dead = {line for line in _lines(self._fd) if _parsed(line)[0].is_dead(self._writer)}
        if not dead:
            return 0
        freed = 0
        for temp in walk_temps(self._root_fd):
            if temp.writer.is_dead(self._writer) and _unlink(temp):
                self.give_back(temp.nbytes)
                freed += temp.nbytes
        with self:
            self._rewrite([line for line in _lines(self._fd) if line not in dead])
        return freed

    def _recount(self, *, exclusive: bool) -> None:
        total = 0
        # Before the records: one that is published meanwhile is counted twice, not missed.
        for temp in walk_temps(self._root_fd):
            # Alone, nobody else is writing, on whatever host: a temporary file is garbage, but never a live process's.
            ended = temp.writer.host != self._writer.host or temp.writer.is_dead(self._writer)
            if not (exclusive and ended and _unlink(temp)):
                total += temp.nbytes
        total += sum(entry.nbytes for entry in walk(self._root_fd))
        _rewrite(self._fd, total, [] if exclusive else _lines(self._fd))

    def _owe(self, nbytes: int) -> None:
        with self._owed_lock:
            self._owed_nbytes += nbytes

    def _read(self) -> tuple[int, int]:
        """The total without what is owed, and the limit."""
        try:
            total, limit = _parse(os.pread(self._fd, _HEAD.size, 0))
        except BackendError:
            with self._owed_lock:
                self._owed_nbytes = 0  # whoever counts anew does not find it
            raise
        with self._owed_lock:
            self._settling_nbytes = self._owed_nbytes
        return max(0, total - self._settling_nbytes), limit

    def _write(self, total: int, limit: int) -> None:
        """Write what was made of `_read()`.  It may have been done also where it fails: that debt is not kept."""
        with self._owed_lock:
            self._owed_nbytes -= self._settling_nbytes
        self._settling_nbytes = 0
        os.pwrite(self._fd, _HEAD.pack(_MAGIC, total, limit), 0)

    def _rewrite(self, lines: list[bytes]) -> None:
        """`_write` of the same total, with other lines."""
        total, _ = self._read()
        with self._owed_lock:
            self._owed_nbytes -= self._settling_nbytes
        self._settling_nbytes = 0
        _rewrite(self._fd, total, lines)


def _parse(head: bytes) -> tuple[int, int]:
    if len(head) == _HEAD.size:
        magic, total, limit = _HEAD.unpack(head)
        if magic == _MAGIC and 0 <= total <= MAX_NBYTES and limit >= _NO_LIMIT:
            return int(total), int(limit)
    raise BackendError("the usage file of the disk store is damaged; it is counted anew at the next start")


def _lines(fd: int) -> list[bytes]:
    """One `Writer.temp_name(limit)` for each open backend, 0 for none; whatever else is there is passed over."""
    text = os.pread(fd, 1 << 20, _HEAD.size)
    lines = text.split(b"\n")[:-1]  # what follows the last line's end is no line, and would spoil the next one
    return [line + b"\n" for line in lines if parse_temp(line.decode("ascii", "replace"))]


def _unlink(temp: Temp) -> bool:
    try:
        if not is_ours(os.stat(temp.name, dir_fd=temp.dir_fd, follow_symlinks=False)):
            return False
        os.unlink(temp.name, dir_fd=temp.dir_fd)
    except FileNotFoundError:
        return False
    return True


def _parsed(line: bytes) -> tuple[Writer, int]:
    parsed = parse_temp(line.decode()[:-1])
    assert parsed is not None
    return parsed


def _rewrite(fd: int, total: int, lines: list[bytes]) -> None:
    limit = min((limit for _, limit in map(_parsed, lines) if limit), default=_NO_LIMIT)
    content = _HEAD.pack(_MAGIC, total, limit) + b"".join(lines)
    os.pwrite(fd, content, 0)
    os.ftruncate(fd, len(content))


def _flock(fd: int, operation: int, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
    """flock with a deadline: a process that was stopped while it held the lock must not stop ours."""
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
        return
    except BlockingIOError:
        pass
    deadline = clock() + timeout_s
    pause_s = 20e-6
    while True:
        try:
            fcntl.flock(fd, operation | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if clock() >= deadline:
                message = f"another process has held the disk store's lock for {timeout_s} s"
                raise BackendUnavailable(message) from error
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 1e-3)
