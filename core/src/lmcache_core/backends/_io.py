"""Whole files read and written past the page cache where that works, through it where it does not."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from typing import Any, Final

from ..errors import ChunkCorrupt
from ..layout import PAGE_NBYTES, page_align
from ._files import close_fd

O_DIRECT: Final = os.O_DIRECT
_ONE_CALL_NBYTES: Final = 1 << 30
"""Below the 2 GiB that one preadv or pwritev moves at most."""
_RENAME_NOREPLACE: Final = 1
_renameat2: Final[Any] = getattr(ctypes.CDLL(None), "renameat2", None)


def read_file(fd: int, nbytes: int, into: memoryview, direct: bool) -> int:
    """Read a file of `nbytes` into the front of `into`; with `direct`, up to the next whole page may be written."""
    stop = page_align(nbytes) if direct else nbytes
    done = 0
    while done < nbytes:
        try:
            count = os.preadv(fd, [into[done : min(stop, done + _ONE_CALL_NBYTES)]], done)
        except OSError as error:
            if error.errno != errno.EINVAL or not direct:
                raise
            direct, stop = _make_buffered(fd), nbytes  # the buffer is not aligned, or not as long
            continue
        if not count:
            raise ChunkCorrupt(f"the file was cut from {nbytes} to {done} bytes while it was read")
        done += count
    return nbytes


def write_file(fd: int, data: memoryview, direct: bool) -> None:
    """Write all of `data`; `direct` says that the descriptor has O_DIRECT."""
    nbytes = len(data)
    done = 0
    while done < nbytes:
        stop = min(nbytes, done + _ONE_CALL_NBYTES)
        if direct:
            # Direct I/O takes whole pages; a tail of less goes through the page cache.
            stop = stop // PAGE_NBYTES * PAGE_NBYTES
            if stop <= done:
                direct = _make_buffered(fd)
                continue
        try:
            done += os.pwritev(fd, [data[done:stop]], done)
        except OSError as error:
            if error.errno != errno.EINVAL or not direct:
                raise
            direct = _make_buffered(fd)  # the buffer is not aligned


def rename_new(source: str, target: str, dir_fd: int) -> bool:
    """Rename where nothing has the name `target`; False, with nothing done, where something has or that fails."""
    if _renameat2 is None:
        return False
    return bool(_renameat2(dir_fd, os.fsencode(source), dir_fd, os.fsencode(target), _RENAME_NOREPLACE) == 0)


def probe_io(path: str, dir_fd: int, *, allow_direct: bool) -> bool:
    """Write a page to a new file and read it back; returns whether O_DIRECT works.  OSError where nothing does."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    close_fd(os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=dir_fd))
    try:
        for mode in (O_DIRECT, 0) if allow_direct else (0,):
            try:
                fd = os.open(path, flags | mode, dir_fd=dir_fd)
                try:
                    if _echoes(fd):
                        return bool(mode)
                finally:
                    os.close(fd)
            except OSError as error:
                if not mode or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
        raise OSError(errno.EIO, "a page that was written did not read back")
    finally:
        os.unlink(path, dir_fd=dir_fd)


def _echoes(fd: int) -> bool:
    with mmap.mmap(-1, PAGE_NBYTES) as page, mmap.mmap(-1, PAGE_NBYTES) as back:
        page[:] = os.urandom(64) * (PAGE_NBYTES // 64)
        try:
            os.pwritev(fd, [page], 0)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return True  # a full disk can still be read from, and written to when there is room again
            raise
        return os.preadv(fd, [back], 0) == PAGE_NBYTES and back[:] == page[:]


def _make_buffered(fd: int) -> bool:
    """Take O_DIRECT off a descriptor; returns False, for `direct`."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~O_DIRECT)
    return False
