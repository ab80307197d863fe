"""Records from the caller's memory into the store and back: in windows, under one deadline, an answer for each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Final

from lmcache_core import BackendError, BackendUnavailable, ChunkCorrupt, ChunkKey, GetResult, copy_bytes

from . import answers, mark
from .bounce import Bounce
from .regions import address_of
from .session import Session

_WINDOW_NBYTES: Final = 256 << 20
_WINDOW_KEYS: Final = 512
_AGAIN_S: Final = 0.02
"""Until a removal that was refused is tried again."""


class Transfers:
    """Moves payload on the caller's thread, from and to registered memory; other memory through a buffer of ours."""

    def __init__(self, session: Session, prefix: str) -> None:
        self._session = session
        self._prefix = prefix
        self._master = str(session.master)

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
        """Whether it was there.  A lease does not stop it, nor does it take a record's bytes from under a reader."""
        name = self.name(key)
        with self._session.use(deadline, "remove") as store:
            code = self._ask(lambda: store.remove(name), deadline, "remove")
            held = code in answers.HELD
            if held:
                code = self._replace_and_remove(store, name, deadline)
        if code and code not in answers.MISSES:
            raise self._fault(code, "remove")
        self._session.trust()
        return held or not code

    def _replace_and_remove(self, store: Any, name: str, deadline: float) -> int:
        """The answer to a removal of what has a lease.

        By force it would go at once, and the next record come into its place while somebody reads it there.  Of what is
        replaced by something of another length, the store keeps the bytes for a while; and what has just replaced it
        has no lease.
        """
        with ExitStack() as stack:
            stack.enter_context(self._session.turns.replacing(name, deadline))
            nbytes = self._ask(lambda: store.get_size(name), deadline, "remove")
            bounce = self._bounce(store, mark.MAX_NBYTES, stack)
            for mark_nbytes in mark.sizes(nbytes):
                if time.monotonic() + 2 * _AGAIN_S > deadline:
                    break
                mark.write(bounce.view[:mark_nbytes])
                code: int = answers.LEASED
                if hasattr(store, "upsert_from"):  # an older library waits for the lease to end
                    code = store.upsert_from(name, bounce.address, mark_nbytes)
                if code in answers.NO_MASTER:
                    return code
                if code in answers.HELD:
                    time.sleep(_AGAIN_S)
                code = self._ask(lambda: store.remove(name), deadline, "remove")
                if code not in answers.HELD:
                    return code
        raise BackendUnavailable("mooncake remove: in use until the deadline")

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
            names = [self.name(keys[index]) for index in window]
            self._ask_first(store, names[0], deadline, "get")
            views = [into[index] for index in window]
            with ExitStack() as stack:
                addresses, bounce = self._placed(store, views, stack)
                rooms = [max(len(view), mark.MAX_NBYTES) for view in views]
                codes = store.batch_get_into(names, addresses, rooms)
                for index, code, address, view in zip(window, codes, addresses, views, strict=True):
                    piece = None if bounce is None else bounce.at(address, max(code, 0))
                    results[index] = self._outcome(store, keys[index], code, view, piece, deadline)
            if answers.NO_MASTER.isdisjoint(codes):
                self._session.trust()

        return move

    def _outcome(
        self, store: Any, key: ChunkKey, code: int, view: memoryview, piece: memoryview | None, deadline: float
    ) -> GetResult:
        """What the answer `code` to a read is for us, with the bytes of `piece`, where there is one, in `view`."""
        if code >= 0:
            read = view[:code] if piece is None else piece
            if mark.is_one(read):
                return ChunkCorrupt(f"{key!r}: its removal was not finished") if mark.is_unfinished(read) else None
            if code > len(view):
                return _too_long(key, code, view)
            if piece is not None:
                copy_bytes(piece, view[:code])
            return code
        if code in answers.MISSES:
            return None
        if code == answers.TOO_SMALL:
            name = self.name(key)
            nbytes = self._ask(lambda: store.get_size(name), deadline, "get")
            if nbytes in answers.MISSES:
                return None
            if nbytes > len(view):
                return _too_long(key, nbytes, view)
        if code == answers.CHECKSUM:
            return ChunkCorrupt(f"{key!r}: its bytes are not those that were stored, says mooncake ({code})")
        return self._fault(code, "get")

    def _put_window(
        self, keys: Sequence[ChunkKey], data: Sequence[memoryview], results: list[BackendError | None]
    ) -> Callable[[Any, range, float], None]:
        def move(store: Any, window: range, deadline: float) -> None:
            names = [self.name(keys[index]) for index in window]
            self._ask_first(store, names[0], deadline, "put")
            views = [data[index] for index in window]
            with ExitStack() as stack:
                addresses, bounce = self._placed(store, views, stack)
                for address, view in zip(addresses, views, strict=True):
                    piece = None if bounce is None else bounce.at(address, len(view))
                    if piece is not None:
                        copy_bytes(view, piece)
                sizes = [len(view) for view in views]
                stack.enter_context(self._session.turns.putting(names, deadline))
                codes = store.batch_put_from(names, addresses, sizes, self._session.config)
            for index, code in zip(window, codes, strict=True):
                results[index] = self._fault(code, "put") if code and code != answers.EXISTS else None
            if not any(codes):
                self._session.trust()

        return move

    def _placed(self, store: Any, views: Sequence[memoryview], stack: ExitStack) -> tuple[list[int], Bounce | None]:
        """Where the store is to read or write: the views themselves, or their places in a buffer of ours.

        There every place has room for a mark, and those of views that have not are there.
        """
        addresses = [address_of(view) if len(view) else 0 for view in views]
        has = self._session.regions.has
        outside = [i for i, view in enumerate(views) if len(view) < mark.MAX_NBYTES or not has(addresses[i], len(view))]
        if not outside:
            return addresses, None
        bounce = self._bounce(store, sum(_aligned(len(views[i])) for i in outside), stack)
        place = bounce.address
        for i in outside:
            addresses[i] = place
            place += _aligned(len(views[i]))
        return addresses, bounce

    def _bounce(self, store: Any, nbytes: int, stack: ExitStack) -> Bounce:
        """A buffer of ours that the store knows."""
        bounce = stack.enter_context(self._session.bounces.one(nbytes))
        if not self._session.regions.has(bounce.address, bounce.nbytes):
            self._session.register_now(store, bounce.address, bounce.nbytes)
        return bounce

    def _ask_first(self, store: Any, name: str, deadline: float, verb: str) -> None:
        """A question that can be left, before a call that cannot, where that might wait beyond the deadline."""
        if self._session.is_short(deadline):
            (code,) = self._exist(store, [name], deadline, verb)
            if code < 0:
                raise self._fault(code, verb)

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


def _too_long(key: ChunkKey, nbytes: int, view: memoryview) -> ChunkCorrupt:
    return ChunkCorrupt(f"{key!r} has {nbytes} bytes in mooncake, at most {len(view)} were expected")


def _aligned(nbytes: int) -> int:
    return -(-max(nbytes, 1) // 4096) * 4096


def _windows(sizes: Sequence[int]) -> Iterator[range]:
    start = 0
    while start < len(sizes):
        end, room = start, _WINDOW_NBYTES
        while end < len(sizes) and end - start < _WINDOW_KEYS and (end == start or sizes[end] <= room):
            room -= sizes[end]
            end += 1
        yield range(start, end)
        start = end
