"""What backend laws work with: the plugin under test, and hands that open, put, look and clean up."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Any, Final

from ..backend import ApiVersion, Backend, Context, SupportsListing
from ..errors import BackendError, CacheError
from ..keys import ChunkKey
from . import memory
from .laws import Laws, expect, skip

Open = Callable[[Context], Backend[Any]]
SIZES = (1, 2, 511, 4095, 4096, 4097, 65_536, 1_048_577)


class BackendBench:
    """One law's use of one store.  The store may hold records of others; these are neither read nor touched."""

    def __init__(self, open_backend: Open) -> None:
        self._open = open_backend
        self._opened: list[Backend[Any]] = []
        self._keys: list[ChunkKey] = []
        self._last: Backend[Any] | None = None
        self._survives = False

    def open(self, capacity_nbytes: int | None = None) -> Backend[Any]:
        """Another handle on the store (of a backend that is neither shared nor persistent: on an empty one)."""
        self._last = self._open(Context(capacity_nbytes=capacity_nbytes))
        self._opened.append(self._last)
        self._survives = self._last.traits.persistent or self._last.traits.shared
        return self._last

    @property
    def backend(self) -> Backend[Any]:
        """The handle that was opened last."""
        return self._last or self.open()

    @property
    def alignment(self) -> int:
        return self.backend.traits.alignment

    def close_backend(self) -> None:
        if self._last is not None:
            self._opened.remove(self._last)
            self._last.close()
            self._last = None

    def reopen(self, capacity_nbytes: int | None = None) -> Backend[Any]:
        self.close_backend()
        return self.open(capacity_nbytes)

    def sizes(self) -> list[int]:
        """Record lengths that tempt: around a page and a power of two, as whole multiples of the alignment."""
        limit = self.backend.traits.max_nbytes or max(SIZES) + self.alignment
        sizes = {memory.round_up(nbytes, self.alignment) for nbytes in SIZES}
        return sorted(n for n in sizes if n <= limit) or [self.alignment]

    def size(self, nbytes: int) -> int:
        """`nbytes` or a little more, as the alignment wants it; never over what the store can hold."""
        return min(memory.round_up(nbytes, self.alignment), self.backend.traits.max_nbytes or 1 << 62)

    def key(self, shard_id: bytes | None = None) -> ChunkKey:
        return self.own(ChunkKey((shard_id or os.urandom(16)) + os.urandom(32)))

    def keys(self, count: int, shard_id: bytes | None = None) -> list[ChunkKey]:
        return [self.key(shard_id) for _ in range(count)]

    def own(self, key: ChunkKey) -> ChunkKey:
        """Have the key removed from the store when the law has been checked."""
        self._keys.append(key)
        return key

    def buffer(self, nbytes: int) -> memoryview:
        return memory.buffer(nbytes, self.alignment)

    def record(self, key: ChunkKey, nbytes: int, variant: bytes = b"") -> memoryview:
        """A read-only buffer that holds the record of `key`."""
        return memory.filled(key + variant, nbytes, self.alignment).toreadonly()

    def put(self, key: ChunkKey, nbytes: int) -> None:
        self.backend.put(key, self.record(key, nbytes))

    def look(self, key: ChunkKey, nbytes: int, backend: Backend[Any] | None = None) -> str:
        """What `get` says of the record of `key`: "present", "missing", or what is wrong with it."""
        into = self.buffer(nbytes)
        return verdict(key, nbytes, into, (backend or self.backend).get(key, into))

    def expect_present(self, key: ChunkKey, nbytes: int, when: str, backend: Backend[Any] | None = None) -> None:
        seen = self.look(key, nbytes, backend)
        expect(seen == "present", f"{when}: get of a record of {nbytes} bytes: {seen}")

    def expect_missing(self, key: ChunkKey, nbytes: int, when: str, backend: Backend[Any] | None = None) -> None:
        handle = backend or self.backend
        expect(not handle.contains(key), f"{when}: contains says that the record is there")
        seen = self.look(key, nbytes, handle)
        expect(seen == "missing", f"{when}: get says that the record is {seen}")

    def used_nbytes(self) -> int:
        """What the store holds already, as far as it can say; for capacities that leave room for our records."""
        backend = self.backend
        return sum(entry.nbytes for entry in backend.entries()) if isinstance(backend, SupportsListing) else 0

    def open_for(self, nbytes: int) -> Backend[Any]:
        """A handle with a capacity of `nbytes` beyond what is there; skips the law if the store bounds itself."""
        capacity = self.used_nbytes() + nbytes
        backend = self.reopen(capacity)
        if backend.context.capacity_nbytes is None:
            skip("the store bounds itself: the backend keeps no capacity of ours (its context says None)")
        return backend

    def clean_up(self) -> None:
        """Close every handle and remove what was put where that outlives them."""
        while self._opened:
            self._opened.pop().close()
        if self._keys and self._survives:
            # A store that the law broke stays as it is.
            with contextlib.suppress(CacheError), contextlib.closing(self._open(Context())) as handle:
                for key in self._keys:
                    with contextlib.suppress(BackendError):
                        handle.remove(key)


class BackendSubject(Laws):
    """The backend that laws are checked on; a test-suite supplies `open_backend`."""

    bench: BackendBench

    def open_backend(self, context: Context) -> Backend[Any]:
        """Open a handle on the store of the law being checked.

        Of a persistent or shared backend every call within one law opens the same store.  The store need not be empty.
        """
        raise NotImplementedError

    def break_store(self) -> None:
        """Optional: make the store fail from now on (stop the server, take the directory away)."""
        skip("the test-suite has no break_store()")

    def stall_store(self) -> contextlib.AbstractContextManager[None]:
        """Optional: a context in which the store accepts requests and does not answer."""
        skip("the test-suite has no stall_store()")

    def api_version(self) -> ApiVersion:
        version = getattr(self.bench.backend, "api_version", None)
        return version if isinstance(version, tuple) else (1, 0)  # that it is none is for a law to say

    def setup_law(self) -> None:
        self.bench = BackendBench(self.open_backend)

    def teardown_law(self) -> None:
        self.bench.clean_up()


VANISHED: Final = "missing, but the buffer was written to"
"""A fault, unless the record was removed while it was read."""


def verdict(key: ChunkKey, nbytes: int, into: memoryview, returned: object, variants: Sequence[bytes] = (b"",)) -> str:
    """What a get into a poisoned buffer gave: "present", "missing", or what is wrong with it."""
    if returned is None:
        return "missing" if memory.is_poison(into) else VANISHED
    if isinstance(returned, BackendError):
        return f"{type(returned).__name__}: {returned}"
    if returned != nbytes:
        return f"of {returned!r} bytes"
    got = bytes(into[:nbytes])
    if any(got == memory.payload(key + variant, nbytes) for variant in variants):
        return "present"
    expected = memory.payload(key + variants[0], nbytes)
    first = next(i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b)
    return f"wrong from byte {first} of {nbytes} on (digest {hashlib.sha256(got).hexdigest()[:12]})"
