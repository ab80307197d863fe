"""The model that the laws describe: a backend in a dict, correct and of no use."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from ..backend import ApiVersion, Backend, Context, Entry, NoOptions, Traits
from ..errors import BackendError, BackendFull, ChunkCorrupt
from ..keys import ChunkKey


@dataclass(slots=True)
class DictStore:
    """What one or several `DictBackend`s keep their records in; it outlives them."""

    records: dict[ChunkKey, tuple[bytes, float]] = field(default_factory=dict)
    nbytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class DictBackend(Backend[NoOptions]):
    """Records in memory; pass the same `store` to several to share it, or to a later one to survive."""

    api_version: ClassVar[ApiVersion] = (1, 0)
    traits: ClassVar[Traits] = Traits()
    Options: ClassVar[type] = NoOptions

    def __init__(
        self, options: NoOptions | None = None, context: Context | None = None, *, store: DictStore | None = None
    ) -> None:
        super().__init__(options or NoOptions(), context or Context())
        self.store = store or DictStore()
        self.closed = False

    def contains(self, key: ChunkKey) -> bool:
        self._check_open()
        with self.store.lock:
            return key in self.store.records

    def get(self, key: ChunkKey, into: memoryview) -> int | None:
        self._check_open()
        with self.store.lock:
            record = self.store.records.get(key)
        if record is None:
            return None
        data = record[0]
        if len(data) > len(into):
            raise ChunkCorrupt(f"{key!r} has {len(data)} bytes, at most {len(into)} were expected")
        into[: len(data)] = data
        return len(data)

    def put(self, key: ChunkKey, data: memoryview) -> None:
        self._check_open()
        copy = bytes(data)
        capacity = self.context.capacity_nbytes
        with self.store.lock:
            old = self.store.records.get(key)
            nbytes = self.store.nbytes + len(copy) - (len(old[0]) if old else 0)
            if capacity is not None and nbytes > capacity:
                raise BackendFull(f"{len(copy)} bytes do not fit: {self.store.nbytes} of {capacity} are in use")
            self.store.records[key] = (copy, time.time())
            self.store.nbytes = nbytes

    def remove(self, key: ChunkKey) -> bool:
        self._check_open()
        with self.store.lock:
            old = self.store.records.pop(key, None)
            if old is not None:
                self.store.nbytes -= len(old[0])
        return old is not None

    def entries(self, shard_id: bytes | None = None) -> Iterator[Entry]:
        self._check_open()
        with self.store.lock:
            records = list(self.store.records.items())
        for key, (data, stored_at) in records:
            if shard_id is None or key.shard_id == shard_id:
                yield Entry(key, len(data), stored_at)

    def close(self) -> None:
        self.closed = True

    def _check_open(self) -> None:
        if self.closed:
            raise BackendError("this backend is closed")
