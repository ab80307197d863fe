"""Backends and records for the tests: each byte says which record it belongs to."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from servers import Store

from lmcache_core import ChunkKey, Context
from lmcache_mooncake import MooncakeBackend, MooncakeOptions
from lmcache_mooncake.regions import address_of


def new_key() -> ChunkKey:
    return ChunkKey(os.urandom(48))


def keys(count: int) -> list[ChunkKey]:
    return [new_key() for _ in range(count)]


def record(key: ChunkKey, nbytes: int) -> memoryview:
    return memoryview(hashlib.shake_128(key).digest(nbytes))


def empty(nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes))


def open_backend(store: Store, *, timeout_s: float = 10.0, **options: Any) -> MooncakeBackend:
    given = {"master": store.master.address, "metadata": store.master.metadata, **options}
    return MooncakeBackend(MooncakeOptions(**given), Context(timeout_s=timeout_s))


def comes_back(backend: MooncakeBackend, key: ChunkKey, nbytes: int) -> bool:
    into = empty(nbytes)
    return backend.get(key, into) == nbytes and into == record(key, nbytes)


def round_trip(backend: MooncakeBackend, nbytes: int = 100_000) -> ChunkKey:
    """Store a new record and read it back."""
    key = new_key()
    backend.put(key, record(key, nbytes))
    assert backend.contains(key)
    assert comes_back(backend, key, nbytes)
    return key


@contextmanager
def registered(backend: MooncakeBackend, nbytes: int) -> Iterator[memoryview]:
    """Memory that the store may use, as the slab is."""
    view = memoryview(mmap.mmap(-1, nbytes))
    address = address_of(view)
    backend.register(address, nbytes)
    try:
        yield view
    finally:
        backend.unregister(address, nbytes)
