"""A backend that fails on purpose, the same way for the same seed whatever the order of the threads."""

from __future__ import annotations

import enum
import hashlib
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from ..backend import ApiVersion, Backend, NoOptions, SupportsListing, SupportsRegistration, SupportsUnregistration
from ..errors import BackendError, BackendFull, BackendUnavailable
from ..keys import ChunkKey


class Fault(enum.StrEnum):
    """What may go wrong with one call."""

    UNAVAILABLE = "unavailable"
    """A retryable BackendError; the store is not touched."""
    BROKEN = "broken"
    """A BackendError that is not retryable; the store is not touched."""
    FOREIGN = "foreign"
    """An exception that no backend may raise."""
    STALL = "stall"
    """Wait for `release_stalls()`, then work."""
    VANISH = "vanish"
    """The record is removed before the call is answered.  get, contains."""
    FLIP = "flip"
    """One bit of what is read is wrong.  get."""
    TRUNCATE = "truncate"
    """Half of the record is read, and its length says so.  get."""
    SHORT_PUT = "short_put"
    """The first `short_put_nbytes` become readable as the record, then the put fails.  put."""
    FULL = "full"
    """BackendFull; nothing is stored.  put."""


_ANY = frozenset((Fault.UNAVAILABLE, Fault.BROKEN, Fault.FOREIGN, Fault.STALL))
_FAULTS: Mapping[str, frozenset[Fault]] = {
    "contains": _ANY | {Fault.VANISH},
    "get": _ANY | {Fault.VANISH, Fault.FLIP, Fault.TRUNCATE},
    "put": _ANY | {Fault.SHORT_PUT, Fault.FULL},
    "remove": _ANY,
}


class ForeignError(RuntimeError):
    """Stands for whatever a plugin with a bug may raise."""


class FaultBackend(Backend[Any]):
    """Another backend, with faults.

    `script` is consumed first, one element for each call (of `verbs`, all by default), `None` for a call that works.
    After it `rates` gives each fault's probability; the choice depends on the seed, the verb, the key and how often
    that key was asked for with that verb, and on nothing else.  A fault that a verb cannot have is no fault.
    """

    api_version: ClassVar[ApiVersion] = (1, 0)
    Options: ClassVar[type] = NoOptions

    def __init__(
        self,
        inner: Backend[Any],
        *,
        seed: int = 0,
        rates: Mapping[Fault, float] | None = None,
        script: Iterable[Fault | None] = (),
        verbs: Iterable[str] = ("contains", "get", "put", "remove"),
        short_put_nbytes: int | None = None,
    ) -> None:
        super().__init__(inner.options, inner.context)
        self.inner = inner
        self.traits = inner.traits  # type: ignore[misc]  # those of the instance it wraps
        self.seed = seed
        self.rates = dict(rates or {})
        self.script = list(script)
        self.verbs = frozenset(verbs)
        self.short_put_nbytes = short_put_nbytes
        """Bytes that a SHORT_PUT leaves; half of the record by default."""
        self.log: list[tuple[str, ChunkKey, Fault]] = []
        """Every fault that was injected, in the order of the calls."""
        self.stalled = threading.Semaphore(0)
        """Released once for each call that has stalled, so that a test can wait for it."""
        # Capabilities of the backend inside are ours, and only those.
        if isinstance(inner, SupportsListing):
            self.entries = inner.entries
        if isinstance(inner, SupportsRegistration):
            self.register = inner.register
        if isinstance(inner, SupportsUnregistration):
            self.unregister = inner.unregister
        self._go = threading.Event()
        self._calls: Counter[tuple[str, ChunkKey]] = Counter()
        self._lock = threading.Lock()

    def release_stalls(self) -> None:
        """Let every stalled call go on; later ones do not stall."""
        self._go.set()

    def heal(self) -> None:
        """No faults from now on."""
        with self._lock:
            self.rates.clear()
            self.script.clear()
        self.release_stalls()

    def contains(self, key: ChunkKey) -> bool:
        self._before("contains", key)
        return self.inner.contains(key)

    def get(self, key: ChunkKey, into: memoryview) -> int | None:
        fault, draw = self._before("get", key)
        nbytes = self.inner.get(key, into)
        if nbytes and fault is Fault.FLIP:
            into[draw % nbytes] ^= 1 << draw % 8
        if nbytes and fault is Fault.TRUNCATE:
            return nbytes // 2
        return nbytes

    def put(self, key: ChunkKey, data: memoryview) -> None:
        fault, _ = self._before("put", key)
        if fault is Fault.FULL:
            raise BackendFull("injected: no room")
        if fault is Fault.SHORT_PUT:
            nbytes = len(data) // 2 if self.short_put_nbytes is None else self.short_put_nbytes
            self.inner.put(key, data[: min(nbytes, len(data))])
            raise BackendUnavailable(f"injected: the connection broke after {nbytes} of {len(data)} bytes")
        self.inner.put(key, data)

    def remove(self, key: ChunkKey) -> bool:
        self._before("remove", key)
        return self.inner.remove(key)

    def close(self) -> None:
        self.release_stalls()
        self.inner.close()

    def _before(self, verb: str, key: ChunkKey) -> tuple[Fault | None, int]:
        fault, draw = self._choose(verb, key)
        match fault:
            case Fault.UNAVAILABLE:
                raise BackendUnavailable(f"injected: {verb} was refused")
            case Fault.BROKEN:
                raise BackendError(f"injected: {verb} failed")
            case Fault.FOREIGN:
                raise ForeignError(f"injected: {verb} has a bug")
            case Fault.STALL:
                self.stalled.release()
                self._go.wait()
            case Fault.VANISH:
                self.inner.remove(key)
        return fault, draw

    def _choose(self, verb: str, key: ChunkKey) -> tuple[Fault | None, int]:
        """The fault of this call, and a number for its details."""
        with self._lock:
            call = self._calls[verb, key]
            self._calls[verb, key] += 1
            material = f"{self.seed} {verb} {key.text} {call}".encode()
            draw = int.from_bytes(hashlib.blake2b(material, digest_size=16).digest(), "little")
            fault: Fault | None = None
            if verb in self.verbs:
                fault = self.script.pop(0) if self.script else self._by_rate(verb, (draw >> 64) / 2**64)
            if fault not in _FAULTS[verb]:
                fault = None
            if fault is not None:
                self.log.append((verb, key, fault))
        return fault, draw & (2**64 - 1)

    def _by_rate(self, verb: str, point: float) -> Fault | None:
        for fault in Fault:
            if fault in _FAULTS[verb]:
                point -= self.rates.get(fault, 0.0)
                if point < 0:
                    return fault
        return None
