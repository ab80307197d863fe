"""Records as files of any filesystem that fsspec opens, each of them there whole or not at all."""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, Final

from fsspec.dircache import DirCache  # type: ignore[import-untyped]

from lmcache_core import (
    ApiVersion,
    Backend,
    BackendError,
    ChunkCorrupt,
    ChunkKey,
    Context,
    Entry,
    GetResult,
    Traits,
    copy_bytes,
)

from . import locating, names, steps
from .faults import fault
from .options import FsspecOptions
from .running import Here, OnLoop, OnThreads, Runner

log = logging.getLogger(__name__)

_PIECE: Final = 1 << 20
_KNOWN_DIRECTORIES: Final = 1 << 16
_STALE_S: Final = 3600.0
"""Age from which a file that was never given its name is what a writer that died left behind."""


class FsspecBackend(Backend[FsspecOptions]):
    """Files `URL/records-v1/<shard_id>/<two digits>/<digest>`.

    The store bounds itself: what the tier says of its capacity is enforced by the tier alone, in each process.

    May be used after `os.fork`: the child opens connections of its own, the parent's stay with the parent.
    """

    api_version: ClassVar[ApiVersion] = (1, 0)
    traits: ClassVar[Traits] = Traits(persistent=True, shared=True)
    Options: ClassVar[type] = FsspecOptions

    def __init__(self, options: FsspecOptions, context: Context) -> None:
        super().__init__(options, dataclasses.replace(context, capacity_nbytes=None))
        self._protocol = locating.protocol_of(options.url)
        self._class = locating.class_for(self._protocol)
        self._root = locating.root_of(self._class, options.url)
        self._local = locating.is_local(self._class)
        self._here = self._local or locating.is_memory(self._class)
        elsewhere = not locating.is_memory(self._class)
        self.traits = Traits(  # type: ignore[misc]
            persistent=elsewhere, shared=elsewhere, io_threads=options.connections, may_tear=self._local
        )
        self._arguments = locating.arguments_for(
            self._class, self._protocol, options.url, options.arguments(), context.timeout_s
        )
        self._hidden = options.hidden()
        moves = options.publish == "move" or (options.publish == "auto" and not locating.puts_whole(self._protocol))
        self._move = locating.mover(self._class, self._protocol) if moves else None
        self._directories: set[str] = set()
        self._runners: dict[int, Runner] = {}
        self._closed = False
        self._tidied = False
        host = locating.plain_text_host(self._protocol, options.url, self._arguments)
        if host is not None:
            log.warning("fsspec: records go to %s in plain text, for anyone on the way to read and change", host)

    def contains(self, key: ChunkKey) -> bool:
        return self._one("contains", key, partial(steps.size, self._path(key))) is not None

    def get(self, key: ChunkKey, into: memoryview) -> int | None:
        (result,) = self.get_many([key], [into], timeout_s=self.context.timeout_s)
        if isinstance(result, BackendError):
            raise result
        return result

    def put(self, key: ChunkKey, data: memoryview) -> None:
        (result,) = self.put_many([key], [data], timeout_s=self.context.timeout_s)
        if result is not None:
            raise result

    def remove(self, key: ChunkKey) -> bool:
        return bool(self._one("remove", key, partial(steps.remove, self._path(key))))

    def contains_prefix(self, keys: Sequence[ChunkKey], *, timeout_s: float) -> int:
        found: dict[int, bool] = {}
        count = 0
        sizes = [partial(steps.size, self._path(key)) for key in keys]
        for number, outcome in self._run(sizes, timeout_s):
            if isinstance(outcome, Exception):
                raise self._fault(outcome, f"contains {keys[number]!r}")
            found[number] = outcome is not None
            while found.get(count):
                count += 1
            if found.get(count) is False:
                break
        return count

    def get_many(self, keys: Sequence[ChunkKey], into: Sequence[memoryview], *, timeout_s: float) -> list[GetResult]:
        batch = [self._reading(key, view) for key, view in zip(keys, into, strict=True)]
        results: list[GetResult] = [None] * len(keys)
        for number, outcome in self._run(batch, timeout_s):
            if isinstance(outcome, Exception):
                results[number] = self._fault(outcome, f"get {keys[number]!r}")
            elif outcome is None or isinstance(outcome, int):
                results[number] = outcome
            else:
                results[number] = _placed(outcome, into[number], keys[number])
        return results

    def put_many(
        self, keys: Sequence[ChunkKey], data: Sequence[memoryview], *, timeout_s: float
    ) -> list[BackendError | None]:
        batch = [self._writing(key, view) for key, view in zip(keys, data, strict=True)]
        results: list[BackendError | None] = [None] * len(keys)
        for number, outcome in self._run(batch, timeout_s):
            if isinstance(outcome, Exception):
                results[number] = self._fault(outcome, f"put {keys[number]!r}")
        if len(self._directories) > _KNOWN_DIRECTORIES:
            self._directories.clear()
        return results

    def entries(self, shard_id: bytes | None = None) -> Iterator[Entry]:
        """Every record, one shard after another.  Files that are not records are passed over."""
        base = f"{self._root}/{names.FOLDER}"
        if shard_id is not None:
            shards = [f"{base}/{shard_id.hex()}"]
        else:
            found = self._one("list", None, partial(steps.listing, base))
            shards = [f"{base}/{name}" for name in sorted({_last(i["name"]) for i in found}) if names.is_shard(name)]
            if self._move is not None and not self._tidied:
                self._tidied = True
                self._tidy(f"{base}/{names.TEMP}")
        for shard in shards:
            files = self._one("list", None, partial(steps.files_below, shard))
            for path, info in files.items():
                key = names.key_of(path)
                if key is not None and names.is_file(info):
                    yield Entry(key, int(info.get("size") or 0), names.stored_at(info))

    def close(self) -> None:
        self._closed = True
        runner = self._runners.pop(os.getpid(), None)
        if runner is not None:
            runner.close()

    def _path(self, key: ChunkKey) -> str:
        return names.record_path(self._root, key)

    def _one(self, verb: str, key: ChunkKey | None, work: Callable[[], steps.Steps[Any]]) -> Any:
        ((_, outcome),) = self._run([work], self.context.timeout_s)
        if isinstance(outcome, Exception):
            raise self._fault(outcome, f"{verb} {key!r}" if key is not None else verb)
        return outcome

    def _run(self, batch: Sequence[Callable[[], steps.Steps[Any]]], timeout_s: float) -> Iterator[tuple[int, Any]]:
        if self._closed:
            raise BackendError("fsspec: this store is closed")
        # By process: locks, threads and connections of a parent mean nothing in its child.
        pid = os.getpid()
        runner = self._runners.get(pid) or self._runners.setdefault(pid, self._new_runner())
        return runner.run(batch, timeout_s)

    def _new_runner(self) -> Runner:
        if self._here:
            return Here(self._make)
        if self._class.async_impl:
            return OnLoop(self._make, self.options.connections)
        return OnThreads(self._make, self.options.connections)

    def _make(self) -> Any:
        """A filesystem of our own, which remembers no listing."""
        fs = self._class(**self._arguments, skip_instance_cache=True)
        fs.dircache = DirCache(use_listings_cache=False)
        return fs

    def _reading(self, key: ChunkKey, into: memoryview) -> Callable[[], steps.Steps[Any]]:
        path, limit = self._path(key), into.nbytes
        if self._local:
            return partial(_call, _read_local, path, into)
        return partial(steps.read, path, limit)

    def _writing(self, key: ChunkKey, data: memoryview) -> Callable[[], steps.Steps[None]]:
        path = self._path(key)
        kept = data if self._here else _as_bytes(data)  # work that is given up may go on after the call
        if self._move is None:
            return partial(steps.put, path, kept)
        temp = names.temp_path(self._root)
        write = steps.call(_write_local, temp, kept) if self._local else steps.call("pipe_file", temp, kept)
        return partial(steps.put_moved, path, temp, self._move, write, self._directories)

    def _tidy(self, folder: str) -> None:
        """Remove what writers that died have left."""
        for info in self._one("list", None, partial(steps.listing, folder)):
            written_at = names.stored_at(info)
            if names.is_file(info) and 0 < written_at < time.time() - _STALE_S:
                path = f"{folder}/{_last(info['name'])}"
                self._one("remove", None, partial(steps.remove, path))

    def _fault(self, error: BaseException, what: str) -> BackendError:
        return fault(error, what, self._hidden)


def _call(function: Callable[..., Any], *arguments: Any) -> steps.Steps[Any]:
    result = yield steps.call(function, *arguments)
    return result


def _read_local(fs: Any, path: str, into: memoryview) -> int | None:
    """Read a file into the caller's buffer."""
    try:
        if not names.is_file(fs.info(path)):
            return None
        with fs.open(path, "rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            if nbytes > into.nbytes:
                raise ChunkCorrupt(f"{path} has {nbytes} bytes, at most {into.nbytes} were expected")
            done = 0
            while done < nbytes and (count := file.readinto(into[done:nbytes])):
                done += count
    except FileNotFoundError:
        return None
    return done


def _write_local(fs: Any, path: str, data: memoryview) -> None:
    with fs.open(path, "xb") as file:
        file.write(data)


def _placed(data: Any, into: memoryview, key: ChunkKey) -> GetResult:
    """Copy what was read to where it was wanted."""
    nbytes = len(data)
    if nbytes > into.nbytes:
        return ChunkCorrupt(f"fsspec get {key!r}: more than the {into.nbytes} bytes that were expected")
    if nbytes:
        copy_bytes(memoryview(data), into[:nbytes])
    return nbytes


def _as_bytes(data: memoryview) -> bytes:
    """A copy, made in pieces so that other threads run in between."""
    copy = io.BytesIO()
    for start in range(0, data.nbytes, _PIECE):
        copy.write(data[start : start + _PIECE])
    return copy.getvalue()


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
