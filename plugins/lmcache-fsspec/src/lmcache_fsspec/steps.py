"""What is done with a file, as steps that run alike on a synchronous and on an asynchronous filesystem.

A function here is a generator: it yields a call of the filesystem, is sent what came of it, and returns its result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from lmcache_core import BackendUnavailable, ChunkCorrupt

from .faults import ABSENT, is_absence
from .names import is_file, parent

T = TypeVar("T")
_TRIES: Final = 3


@dataclass(frozen=True, slots=True)
class Call:
    """A method of the filesystem by its synchronous name, or a function of the filesystem and the arguments."""

    what: str | Callable[..., Any]
    arguments: tuple[Any, ...]
    named: dict[str, Any]


Steps = Generator[Call, Any, T]


def call(what: str | Callable[..., Any], *arguments: Any, **named: Any) -> Call:
    return Call(what, arguments, named)


def run(fs: Any, steps: Steps[T]) -> T:
    """The result of `steps` on a synchronous filesystem."""
    outcome: Any = None
    error: Exception | None = None
    while True:
        try:
            each = steps.throw(error) if error else steps.send(outcome)
        except StopIteration as end:
            result: T = end.value
            return result
        outcome, error = None, None
        try:
            outcome = _do(fs, each)
        except Exception as caught:  # for the steps to judge
            error = caught


async def run_async(fs: Any, steps: Steps[T]) -> T:
    """The result of `steps` on an asynchronous filesystem, on its loop."""
    outcome: Any = None
    error: Exception | None = None
    while True:
        try:
            each = steps.throw(error) if error else steps.send(outcome)
        except StopIteration as end:
            result: T = end.value
            return result
        outcome, error = None, None
        try:
            method = getattr(fs, f"_{each.what}", None) if isinstance(each.what, str) else None
            if method is None:
                outcome = await asyncio.to_thread(_do, fs, each)
            else:
                outcome = await method(*each.arguments, **each.named)
        except Exception as caught:
            error = caught


def _do(fs: Any, each: Call) -> Any:
    if isinstance(each.what, str):
        return getattr(fs, each.what)(*each.arguments, **each.named)
    return each.what(fs, *each.arguments, **each.named)


def size(path: str) -> Steps[int | None]:
    """The length of the file, None if there is none.  `exists` would take every fault for absence."""
    try:
        info = yield call("info", path)
    except ABSENT:
        return None
    return int(info.get("size") or 0) if is_file(info) else None


def read(path: str, limit: int) -> Steps[Any]:
    """The file's bytes, None if there is none.

    Asks for the length first, so that no foreign file of any length is fetched; not by a range, since servers differ
    in what they say to one that goes beyond the end.
    """
    refused: Exception | None = None
    for _ in range(_TRIES):
        nbytes = yield from size(path)
        if nbytes is None:
            return None
        if nbytes > limit:
            raise ChunkCorrupt(f"{path} has {nbytes} bytes, at most {limit} were expected")
        try:
            data = yield call("cat_file", path)
        except Exception as error:
            if not is_absence(error):
                raise
            refused = error  # removed or replaced just then; or a client that calls every fault absence
        else:
            return data
    raise BackendUnavailable(f"{path} is there and cannot be read") from refused


def remove(path: str) -> Steps[bool]:
    """Remove the file; whether it was there."""
    refused: Exception | None = None
    for _ in range(_TRIES):
        if (yield from size(path)) is None:
            return False
        try:
            yield call("rm_file", path)
        except Exception as error:
            if is_absence(error):
                return False
            refused = error  # is it there at all?  Not every client says so
        else:
            return True
    assert refused is not None
    raise refused


def put(path: str, data: Any) -> Steps[None]:
    """Write a file that appears when it is whole."""
    yield call("pipe_file", path, data)


def put_moved(path: str, temp: str, move: Any, write: Any, directories: set[str]) -> Steps[None]:
    """Have `write` make the file `temp`, then give it its name; nothing is left of what fails."""
    for attempt in (1, 2):
        try:
            for directory in (parent(temp), parent(path)):
                if directory not in directories:
                    yield from make_directory(directory)
                    directories.add(directory)
            yield write
            yield call(move, temp, path)
            return
        except ABSENT:
            # Somebody removed a directory that we knew.
            directories.difference_update((parent(temp), parent(path)))
            yield from _forget(temp)
            if attempt == 2:
                raise
        except Exception:
            yield from _forget(temp)
            # The same record may have come from another writer, whose file this filesystem will not replace.
            if (yield from _is_there(path)):
                return
            raise


def make_directory(path: str) -> Steps[None]:
    """Make it and those above it; that another does so at the same time is no failure."""
    try:
        yield call("makedirs", path, exist_ok=True)
    except Exception:
        if not (yield from _is_directory(path)):
            raise


def _is_directory(path: str) -> Steps[bool]:
    try:
        info = yield call("info", path)
    except Exception:
        return False
    return bool(info.get("type") == "directory")


def _is_there(path: str) -> Steps[bool]:
    try:
        return (yield from size(path)) is not None
    except Exception:
        return False


def _forget(path: str) -> Steps[None]:
    try:
        yield call("rm_file", path)
    except Exception:  # the failure that led here is the one to report
        return


def listing(path: str) -> Steps[list[dict[str, Any]]]:
    """What lies directly in a directory, nothing if there is none."""
    try:
        found = yield call("ls", path, detail=True)
    except ABSENT:
        return []
    return list(found)


def files_below(path: str) -> Steps[dict[str, dict[str, Any]]]:
    """Every file below a directory by its path."""
    try:
        found = yield call("find", path, detail=True)
    except ABSENT:
        return {}
    return dict(found)
