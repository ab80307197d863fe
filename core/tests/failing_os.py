"""A fault layer under the disk backend: counts the operations that it does, and makes those fail that a test chooses.

It stands in for `os`, `fcntl` and `open` in the modules of the disk backend, and nowhere else.
"""

from __future__ import annotations

import builtins
import fcntl
import os
import pathlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest.mock import patch

from lmcache_core.backends import _files, _io, _root, _usage, disk

OPERATIONS: Final = frozenset(
    (
        *("open", "close", "stat", "fstat", "lstat", "mkdir", "rmdir", "unlink", "rename", "listdir", "scandir"),
        *("pread", "pwrite", "preadv", "pwritev", "ftruncate"),
    )
)
LOCKS: Final = frozenset(("flock", "fcntl"))
Before = Callable[[int, str], None]
"""Told the number of the operation, from 1 on, and its name; what it raises is what the operation fails with."""


CHANGES: Final = frozenset(("mkdir", "rmdir", "rename", "unlink", "pwrite", "ftruncate"))
"""Those that a network file system may have done when it says that they failed."""


class FailingOs:
    """`os` with every operation on files announced to `before`; with `done`, changes only, once they are made."""

    def __init__(self, before: Before, done: bool = False) -> None:
        self.before = before
        self.done = done
        self.count = 0
        self.names: list[str] = []

    def announce(self, name: str) -> None:
        self.count += 1
        self.names.append(name)
        self.before(self.count, name)

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in OPERATIONS:
            return real

        def operation(*args: Any, **kwargs: Any) -> Any:
            if self.done and name not in CHANGES:
                return real(*args, **kwargs)
            if self.done or name == "close":  # a descriptor is closed even where close says that it failed
                found = real(*args, **kwargs)
                self.announce(name)
                return found
            self.announce(name)
            found = real(*args, **kwargs)
            return Scan(found, self) if name == "scandir" else found

        return operation


class Scan:
    """What scandir gives, whose steps are operations too."""

    def __init__(self, real: Any, through: FailingOs) -> None:
        self.real, self.through = real, through

    def __enter__(self) -> Scan:
        return self

    def __exit__(self, *exc: object) -> None:
        self.real.close()

    def __iter__(self) -> Iterator[os.DirEntry[str]]:
        for entry in self.real:
            if not self.through.done:
                self.through.announce("readdir")
            yield entry


class Locks:
    """`fcntl` through the same counter."""

    def __init__(self, through: FailingOs) -> None:
        self.through = through

    def __getattr__(self, name: str) -> Any:
        real = getattr(fcntl, name)
        if name not in LOCKS:
            return real

        def operation(*args: Any) -> Any:
            unlocks = name == "flock" and args[1] & fcntl.LOCK_UN
            if not self.through.done:
                self.through.announce("unlock" if unlocks else name)
            return real(*args)

        return operation


@contextmanager
def interposed(before: Before, done: bool = False) -> Iterator[FailingOs]:
    """While it lasts, whatever the disk backend asks of the system goes through `before`."""
    through = FailingOs(before, done)

    def opened(*args: Any, **kwargs: Any) -> Any:
        if not done:
            through.announce("open")
        return builtins.open(*args, **kwargs)

    def rename_new(source: str, target: str, dir_fd: int) -> bool:
        try:
            if not done:
                through.announce("rename")
            renamed = _io.rename_new(source, target, dir_fd)
            if done:
                through.announce("rename")
        except OSError:
            return False
        return renamed

    with ExitStack() as stack:
        stack.enter_context(patch.object(disk, "rename_new", rename_new))
        for module in (_files, _io, _root, _usage, disk, pathlib):
            stack.enter_context(patch.object(module, "os", through))
        for module in (_io, _usage):
            stack.enter_context(patch.object(module, "fcntl", Locks(through)))
        stack.enter_context(patch.object(_files, "open", opened, create=True))
        yield through


def failing(number: int, first: int, last: int) -> Before:
    """Operations `first` to `last` fail with the errno `number`."""

    def before(count: int, name: str) -> None:
        if first <= count <= last:
            raise OSError(number, os.strerror(number), name)

    return before
