"""Records from the caller's memory into the store and back: in windows, under one deadline, an answer for each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from lmcache_core import BackendError, BackendUnavailable, ChunkCorrupt, ChunkKey, GetResult, copy_bytes

from . import answers
from .bounce import Bounce
from .regions import address_of
from .session import Session

_WINDOW_NBYTES: Final = 256 << 20
_WINDOW_KEYS: Final = 512
_CAREFUL_S: Final = 10.0
"""After a miss, how long it is asked first what is there."""
_TRIES: Final = 3
"""Of a read that a removal overtook."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A record as the master has it.  At the same places before and after a read are the same bytes."""

    nbytes: int
    places: tuple[tuple[str, int], ...]


class Transfers:
    """Moves payload on the caller's thread, from and to registered memory; other memory through a buffer of ours."""

    def __init__(self, session: Session, prefix: str) -> None:
        self._session = session
        self._prefix = prefix
        self._master = str(session.master)
        self._careful_until = 0.0

    def name(self, key: ChunkKey) -> str:
        return self._prefix + key.text

    def count_present(self, keys: Sequence[ChunkKey], deadline: float) -> int:
        """How many leading keys are there; BackendUnavailable at the deadline."""
        with self._session.use(deadline, "exists") as store:
            for start in range(0, len(keys), _WINDOW_KEYS * 8):
                window = [self.name(key) for key in keys[start : start + _WINDOW_KEYS * 8]]
                for index, code in enumerate(self._exist(store, window, deadline, "exists")):
                    if code < 0:
                        raise self._fault(code, "exists")
                    if not code:
                        return start + index
        self._session.trust()
        return len(keys)

    def remove(self, key: ChunkKey, deadline: float) -> bool:
        """Whether it was there.  A lease does not stop it, and a read that it overtakes is told so, see `_read`."""
        name = self.name(key)
        with self._session.use(deadline, "remove") as store:
            code = self._ask(lambda: store.remove(name), deadline, "remove")
            if code in answers.HELD:
                code = self._ask(lambda: store.remove(name, True), deadline, "remove")
        if code and code not in answers.MISSES:
            raise self._fault(code, "remove")
        self._session.trust()
        return not code

    def get(self, keys: Sequence[ChunkKey], into: Sequence[memoryview], deadline: float) -> list[GetResult]:
        results: list[GetResult] = [None] * len(keys)
        self._in_windows([len(view) for view in into], deadline, "get", results, self._get_window(keys, into, results))
        return results

    def put(self, keys: Sequence[ChunkKey], data: Sequence[memoryview], deadline: float) -> list[BackendError | None]:
        results: list[BackendError | None] = [None] * len(keys)
        self._in_windows([len(view) for view in data], deadline, "put", results, self._put_window(keys, data, results))
        return results

    def _in_windows(
        self,
        sizes: Sequence[int],
        deadline: float,
        verb: str,
        results: list[Any],
        move: Callable[[Any, range, float], None],
    ) -> None:
        """`move(store, window, deadline)` for each window; what the deadline or a lost master leaves out is told so."""
        for window in _windows(sizes):
            try:
                if time.monotonic() >= deadline:
                    raise BackendUnavailable(f"mooncake {verb}: not reached in time")
                with self._session.use(deadline, verb) as store:
                    move(store, window, deadline)
            except BackendError as error:
                for index in range(window.start, len(sizes)):
                    results[index] = error.plain()
                return

    def _get_window(
        self, keys: Sequence[ChunkKey], into: Sequence[memoryview], results: list[GetResult]
    ) -> Callable[[Any, range, float], None]:
        def move(store: Any, window: range, deadline: float) -> None:
            left = list(window)
            stored = self._describe(store, [keys[index] for index in left], deadline)
            for _ in range(_TRIES):
                left = self._read(store, left, keys, into, results, stored, deadline)
                if not left:
                    return

        return move

    def _read(
        self,
        store: Any,
        wanted: list[int],
        keys: Sequence[ChunkKey],
        into: Sequence[memoryview],
        results: list[GetResult],
        stored: dict[ChunkKey, Stored],
        deadline: float,
    ) -> list[int]:
        """Read what is there; returns what was stored anew meanwhile, with `stored` brought up to date.

        A forced removal frees memory under whoever reads it, and the next record goes there.  So a record counts only
        if it is still where it was when the read began; until then, unregistered memory is left as it was.
        """
        reading: list[int] = []
        for index in wanted:
            entry = stored.get(keys[index])
            if entry is None:
                results[index] = None
            elif entry.nbytes > len(into[index]):
                results[index] = ChunkCorrupt(
                    f"{keys[index]!r} has {entry.nbytes} bytes in mooncake, at most {len(into[index])} were expected"
                )
            else:
                reading.append(index)
        if not reading:
            return []
        sizes = [stored[keys[index]].nbytes for index in reading]
        targets = [into[index][:nbytes] for index, nbytes in zip(reading, sizes, strict=True)]
        with ExitStack() as stack:
            addresses, bounce = self._placed(store, targets, stack)
            codes = store.batch_get_into([self.name(keys[index]) for index in reading], addresses, sizes)
            now = self._look(store, [keys[index] for index in reading], deadline)
            again: list[int] = []
            for index, code, nbytes, address, target in zip(reading, codes, sizes, addresses, targets, strict=True):
                before, after = stored[keys[index]], now.get(keys[index])
                if before != after:
                    results[index] = None
                    if after is not None:
                        stored[keys[index]] = after
                        again.append(index)
                elif code == nbytes:
                    piece = None if bounce is None else bounce.at(address, nbytes)
                    if piece is not None:
                        copy_bytes(piece, target)
                    results[index] = nbytes
                else:
                    results[index] = self._unread(keys[index], code, nbytes)
        return again

    def _unread(self, key: ChunkKey, code: int, nbytes: int) -> GetResult:
        if code in answers.MISSES:
            return None
        if code >= 0:
            return ChunkCorrupt(f"{key!r}: {code} bytes came of {nbytes}")
        if code == answers.CHECKSUM:
            return ChunkCorrupt(f"{key!r}: its bytes are not those that were stored, says mooncake ({code})")
        return self._fault(code, "get")

    def _put_window(
        self, keys: Sequence[ChunkKey], data: Sequence[memoryview], results: list[BackendError | None]
    ) -> Callable[[Any, range, float], None]:
        def move(store: Any, window: range, deadline: float) -> None:
            names = [self.name(keys[index]) for index in window]
            if self._session.is_short(deadline):  # a question that can be left, before a call that cannot
                (code,) = self._exist(store, names[:1], deadline, "put")
                if code < 0:
                    raise self._fault(code, "put")
            views = [data[index] for index in window]
            with ExitStack() as stack:
                addresses, bounce = self._placed(store, views, stack)
                for address, view in zip(addresses, views, strict=True):
                    piece = None if bounce is None else bounce.at(address, len(view))
                    if piece is not None:
                        copy_bytes(view, piece)
                sizes = [len(view) for view in views]
                codes = store.batch_put_from(names, addresses, sizes, self._session.config)
            for index, code in zip(window, codes, strict=True):
                results[index] = self._fault(code, "put") if code and code != answers.EXISTS else None
            if not any(codes):
                self._session.trust()

        return move

    def _placed(self, store: Any, views: Sequence[memoryview], stack: ExitStack) -> tuple[list[int], Bounce | None]:
        """Where the store is to read or write: the views themselves, or their places in a buffer of ours."""
        addresses = [address_of(view) if len(view) else 0 for view in views]
        has = self._session.regions.has
        outside = [i for i, view in enumerate(views) if not has(addresses[i], len(view))]
        if not outside:
            return addresses, None
        bounce = stack.enter_context(self._session.bounces.one(sum(_aligned(len(views[i])) for i in outside)))
        if not has(bounce.address, bounce.nbytes):
            self._session.register_now(store, bounce.address, bounce.nbytes)
        place = bounce.address
        for i in outside:
            addresses[i] = place
            place += _aligned(len(views[i]))
        return addresses, bounce

    def _describe(self, store: Any, keys: Sequence[ChunkKey], deadline: float) -> dict[ChunkKey, Stored]:
        """Those of `keys` that are there."""
        # Asked for the places of what is not there, the library logs an error for each: once in a while is enough.
        if time.monotonic() >= self._careful_until:
            found = self._look(store, keys, deadline)
            if len(found) < len(keys):
                self._careful_until = time.monotonic() + _CAREFUL_S
            return found
        codes = self._exist(store, [self.name(key) for key in keys], deadline, "get")
        for code in codes:
            if code < 0:
                raise self._fault(code, "get")
        self._session.trust()
        return self._look(store, [key for key, code in zip(keys, codes, strict=True) if code], deadline)

    def _look(self, store: Any, keys: Sequence[ChunkKey], deadline: float) -> dict[ChunkKey, Stored]:
        """The same, of keys that should be there."""
        if not keys:
            return {}
        names = {self.name(key): key for key in keys}
        listed = self._ask(lambda: store.batch_get_replica_desc(list(names)), deadline, "get")
        if not listed:  # all are gone at once, or the master is: then the next question would take seconds
            self._session.knock(deadline, "get")
            codes = self._exist(store, list(names), deadline, "get")
            if min(codes) < 0:
                raise self._fault(min(codes), "get")
        self._session.trust()
        found = {names[name]: _stored(replicas) for name, replicas in listed.items() if replicas}
        for key, entry in found.items():
            if not entry.nbytes:  # on a node's own disk: only the master knows how long it is
                nbytes = self._ask(partial(store.get_size, self.name(key)), deadline, "get")
                found[key] = Stored(max(nbytes, 0), entry.places)
        return found

    def _exist(self, store: Any, names: list[str], deadline: float, verb: str) -> list[int]:
        """For each 1 or 0, or a negative code."""
        codes: list[int] = self._ask(lambda: store.batch_is_exist(names), deadline, verb)
        return codes

    def _ask(self, call: Callable[[], Any], deadline: float, verb: str) -> Any:
        return self._session.ask(call, deadline, verb)

    def _fault(self, code: int, verb: str) -> BackendError:
        if code in answers.NO_MASTER:
            self._session.doubt()
        return answers.fault(code, verb, self._master)


def _stored(replicas: Sequence[Any]) -> Stored:
    nbytes = 0
    places: list[tuple[str, int]] = []
    for replica in replicas:
        if replica.is_memory_replica():
            piece = replica.get_memory_descriptor().buffer_descriptor
            nbytes = piece.size
            places.append((piece.transport_endpoint, piece.buffer_address))
        elif replica.is_disk_replica():
            disk = replica.get_disk_descriptor()
            nbytes = nbytes or disk.object_size
            places.append((disk.file_path, 0))
        else:
            places.append(("", 0))
    return Stored(nbytes, tuple(sorted(places)))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 4096) * 4096


def _windows(sizes: Sequence[int]) -> Iterator[range]:
    start = 0
    while start < len(sizes):
        end, room = start, _WINDOW_NBYTES
        while end < len(sizes) and end - start < _WINDOW_KEYS and (end == start or sizes[end] <= room):
            room -= sizes[end]
            end += 1
        yield range(start, end)
        start = end
