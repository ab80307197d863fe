"""What the tests work with: stores in a folder, records, and the disk backend beside them."""

from __future__ import annotations

import hashlib
import mmap
import os
from pathlib import Path
from typing import Any

from lmcache_core import ChunkKey, Context, DiskBackend, DiskOptions
from lmcache_gds import GdsBackend, GdsOptions

NBYTES = 12_288


def new_key() -> ChunkKey:
    return ChunkKey(os.urandom(48))


def payload(key: ChunkKey, nbytes: int = NBYTES) -> bytes:
    """Bytes that belong to `key` and to nothing else, wherever one looks."""
    return hashlib.shake_128(key).digest(nbytes)


def buffer(nbytes: int = NBYTES) -> memoryview:
    """Page-aligned, of bytes that are no record's."""
    view = memoryview(mmap.mmap(-1, -(-nbytes // 4096) * 4096))[:nbytes]
    view[:] = b"\xa5" * nbytes
    return view


def record(key: ChunkKey, nbytes: int = NBYTES) -> memoryview:
    view = buffer(nbytes)
    view[:] = payload(key, nbytes)
    return view.toreadonly()


def open_gds(path: Path, timeout_s: float = 10.0, capacity_nbytes: int | None = None, **more: Any) -> GdsBackend:
    return GdsBackend(GdsOptions(path=str(path), **more), Context(timeout_s=timeout_s, capacity_nbytes=capacity_nbytes))


def open_disk(path: Path) -> DiskBackend:
    return DiskBackend(DiskOptions(path=str(path)), Context())


def holds(backend: GdsBackend | DiskBackend, key: ChunkKey, nbytes: int = NBYTES) -> bool:
    """Whether the record is there, whole."""
    into = buffer(nbytes)
    found = backend.get(key, into)
    return found == nbytes and bytes(into) == payload(key, nbytes)
