"""Backends that want to know memory: told of each extent once before its use, and once before it goes."""

from __future__ import annotations

from typing import Any

import numpy as np
from tiny import RECORD, chain, load, open_local, store

from lmcache_core import BackendUnavailable, ChunkKey
from lmcache_core.testing import DictBackend


class Registers(DictBackend):
    """Knows its memory, and whether all buffers lay in it."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, int] = {}
        self.told = 0
        self.outside = 0

    def register(self, address: int, nbytes: int) -> None:
        assert address not in self.known
        self.told += 1
        self.known[address] = nbytes

    def unregister(self, address: int, nbytes: int) -> None:
        assert self.known.pop(address) == nbytes

    def put(self, key: ChunkKey, data: memoryview) -> None:
        self._see(data)
        super().put(key, data)

    def get(self, key: ChunkKey, into: memoryview) -> int | None:
        self._see(into)
        return super().get(key, into)

    def _see(self, view: memoryview) -> None:
        start = int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
        inside = (address <= start and start + len(view) <= address + n for address, n in self.known.items())
        self.outside += not any(inside)


def test_a_backend_knows_every_extent_before_records_lie_in_it_and_until_they_are_gone() -> None:
    backend = Registers()
    with open_local([backend], chunks=8, extent_nbytes=2 * RECORD) as cache:
        assert not backend.told
        assert store(cache, chain(6)).ok_chunks == 6
        assert cache._pool.tiers[0].drain(10)
        assert backend.told == 3
        assert sum(backend.known.values()) == cache._pool.slab.used_nbytes
        seen = backend.outside
    assert not backend.known
    assert seen <= 1, "at most the manifest lies outside of the slab"


def test_an_extent_that_goes_while_the_cache_stays_is_unregistered() -> None:
    backend = Registers()
    with open_local([backend], chunks=4, extent_nbytes=2 * RECORD) as cache:
        slab = cache._pool.slab
        slot = slab.take(RECORD)
        extent = slab.extents[slot.extent_id]
        assert set(backend.known) == {extent.address}
        slab.give(slot)
        slab.drop(extent)
        assert not backend.known


def test_a_backend_that_refuses_memory_still_stores_and_loads() -> None:
    class Refuses(Registers):
        def register(self, address: int, nbytes: int) -> None:
            raise BackendUnavailable("no memory can be pinned")

        def unregister(self, address: int, nbytes: int) -> None:
            raise BackendUnavailable("never was")

    backend: Any = Refuses()
    with open_local([backend], chunks=4) as cache:
        of = chain(3)
        assert store(cache, of).ok_chunks == 3
        assert cache._pool.tiers[0].drain(10)
        assert all(backend.contains(key) for key in of.keys(of.model.shards[0], range(3)))
        assert load(cache, of)[0] == 3
