"""File names of the disk store: where a record lies, what a temporary file says of its writer, which files are ours."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from ..backend import Entry
from ..keys import ChunkKey

_HEX: Final = {length: re.compile(f"[0-9a-f]{{{length}}}") for length in (2, 32, 64)}
_TEMP: Final = re.compile(r"([A-Za-z0-9_-]{1,100})\.([0-9]{1,10})\.([0-9]{1,20})\.[0-9]{1,20}\.([0-9]{1,19})")
MAX_NBYTES: Final = 1 << 62
"""No store holds more, nor twice as much."""
_counter = itertools.count()


@dataclass(frozen=True, slots=True)
class Writer:
    """A process that writes into a store, told apart from a later one with the same pid."""

    host: str
    """Node name and pid namespace, since pids mean something only there."""
    pid: int
    start: int
    """Clock ticks since boot at which the process started."""

    @classmethod
    def current(cls) -> Writer:
        pid = os.getpid()
        node = re.sub(r"[^A-Za-z0-9_-]", "-", os.uname().nodename)[:64]
        return cls(f"{node}-{os.stat('/proc/self/ns/pid').st_ino}", pid, _start_ticks(pid) or 0)

    def is_dead(self, seen_from: Writer) -> bool:
        """Whether the process is known to have ended; False for another host, where nobody here can know."""
        return self.host == seen_from.host and _start_ticks(self.pid) != self.start

    def temp_name(self, nbytes: int) -> str:
        """A new name that also says how many bytes were reserved for the file, so that anybody can give them back."""
        return f"{self.host}.{self.pid}.{self.start}.{next(_counter)}.{nbytes}"


@dataclass(frozen=True, slots=True)
class Temp:
    """A temporary file; `dir_fd` is open only until the next one is asked for."""

    dir_fd: int
    name: str
    writer: Writer
    nbytes: int
    """What was reserved for it."""


def parse_temp(name: str) -> tuple[Writer, int] | None:
    """Writer and reserved bytes of a temporary file; `None` for a name that is not one of ours."""
    match = _TEMP.fullmatch(name)
    if match is None or int(match[4]) > MAX_NBYTES:
        return None
    return Writer(match[1], int(match[2]), int(match[3])), int(match[4])


def record_dir(key: ChunkKey) -> tuple[str, str]:
    """The directory of a record and its file name, below the version directory."""
    text = key.hex()
    return f"{text[:32]}/{text[32:34]}", text[32:]


def is_ours(status: os.stat_result) -> bool:
    """Whether a file with a record's name is a record: regular, and readable by its owner.  The rest is left alone."""
    return stat.S_ISREG(status.st_mode) and bool(status.st_mode & stat.S_IRUSR)


def walk(root_fd: int, shard_id: bytes | None = None) -> Iterator[Entry]:
    """Every record below a version directory; symbolic links and names that are not ours are passed over."""
    shards = [shard_id.hex()] if shard_id is not None else _subdirectories(root_fd, ".", 32)
    for shard in shards:
        for head in _subdirectories(root_fd, shard, 2):
            yield from _records(root_fd, shard, head)


def walk_temps(root_fd: int) -> Iterator[Temp]:
    """Every temporary file of the store: those of records beside where they go, those of probes at the top."""
    yield from _temps(root_fd, ".")
    for shard in _subdirectories(root_fd, ".", 32):
        for head in _subdirectories(root_fd, shard, 2):
            yield from _temps(root_fd, shard, head)


def open_directory(name: str, dir_fd: int) -> int:
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)


def close_fd(fd: int) -> None:
    """Close what was not written to: it is closed also where the system says that this failed."""
    with contextlib.suppress(OSError):
        os.close(fd)


def _subdirectories(root_fd: int, parent: str, length: int) -> list[str]:
    try:
        fd = open_directory(parent, root_fd)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []
    try:
        with os.scandir(fd) as found:
            return [e.name for e in found if _HEX[length].fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
    finally:
        close_fd(fd)


def _records(root_fd: int, shard: str, head: str) -> list[Entry]:
    entries: list[Entry] = []
    fd = _opened(root_fd, shard, head)
    if fd is None:
        return entries
    try:
        with os.scandir(fd) as found:
            for item in found:
                if not (_HEX[64].fullmatch(item.name) and item.name.startswith(head)):
                    continue
                try:
                    status = item.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if is_ours(status):
                    entries.append(Entry(ChunkKey.from_text(shard + item.name), status.st_size, status.st_mtime))
    finally:
        close_fd(fd)
    return entries


def _temps(root_fd: int, *path: str) -> Iterator[Temp]:
    fd = _opened(root_fd, *path)
    if fd is None:
        return
    try:
        for name in os.listdir(fd):
            parsed = parse_temp(name)
            if parsed is not None:
                yield Temp(fd, name, *parsed)
    finally:
        close_fd(fd)


def _opened(root_fd: int, *path: str) -> int | None:
    """A directory, opened name by name: in one call, a link before the last would be followed."""
    fd = -1
    try:
        for name in path:
            parent, fd = fd, open_directory(name, root_fd if fd < 0 else fd)
            if parent >= 0:
                close_fd(parent)
    except OSError as error:
        if fd >= 0:
            close_fd(fd)
        if isinstance(error, (FileNotFoundError, NotADirectoryError, PermissionError)):
            return None
        raise
    return fd


def _start_ticks(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # A zombie still has an entry but writes no more.
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
