"""Backends and records for the tests: each byte says which record it belongs to."""

from __future__ import annotations

import hashlib
import os
from typing import Any

from lmcache_core import ChunkKey, Context
from lmcache_redis import RedisBackend, ValkeyBackend

BACKENDS = {"redis": RedisBackend, "valkey": ValkeyBackend}


def new_key() -> ChunkKey:
    return ChunkKey(os.urandom(48))


def keys(count: int) -> list[ChunkKey]:
    return [new_key() for _ in range(count)]


def record(key: ChunkKey, nbytes: int) -> memoryview:
    return memoryview(hashlib.shake_128(key).digest(nbytes))


def empty(nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes))


def open_backend(url: str, *, kind: str = "redis", timeout_s: float = 10.0, **options: Any) -> RedisBackend:
    backend = BACKENDS[kind]
    return backend(backend.Options(url=url, **options), Context(timeout_s=timeout_s))


def comes_back(backend: RedisBackend, key: ChunkKey, nbytes: int) -> bool:
    into = empty(nbytes)
    return backend.get(key, into) == nbytes and into == record(key, nbytes)


def round_trip(backend: RedisBackend, nbytes: int = 100_000) -> ChunkKey:
    """Store a new record and read it back."""
    key = new_key()
    backend.put(key, record(key, nbytes))
    assert backend.contains(key)
    assert comes_back(backend, key, nbytes)
    return key
