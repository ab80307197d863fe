"""Memory: what is registered is moved without a copy, anything else through a buffer, and what goes is let go."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from records import comes_back, empty, keys, new_key, open_backend, record, registered, round_trip
from servers import Store

from lmcache_core import ChunkCorrupt
from lmcache_mooncake import MooncakeBackend, transfers
from lmcache_mooncake.regions import Regions, address_of

HERE = Path(__file__).parent


@pytest.fixture
def backend(store: Store) -> Iterator[MooncakeBackend]:
    with open_backend(store) as opened:
        yield opened


class Watched:
    """The client, with the addresses that it is given."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.seen: list[int] = []
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def batch_put_from(self, names: list[str], addresses: list[int], sizes: list[int], config: Any) -> list[int]:
        self.seen += addresses
        self.calls += 1
        codes: list[int] = self._client.batch_put_from(names, addresses, sizes, config)
        return codes

    def batch_get_into(self, names: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        self.seen += addresses
        codes: list[int] = self._client.batch_get_into(names, addresses, sizes)
        return codes


@pytest.fixture
def watched(backend: MooncakeBackend) -> Iterator[Watched]:
    backend.contains(new_key())
    session = backend._session
    client, session._store = session._store, Watched(session._store)
    yield session._store
    session._store = client


def test_records_in_registered_memory_are_not_copied(backend: MooncakeBackend, watched: Watched) -> None:
    nbytes = 1 << 20
    with registered(backend, 4 * nbytes) as slab:
        names = keys(2)
        slots = [slab[:nbytes], slab[nbytes : 2 * nbytes]]
        for key, slot in zip(names, slots, strict=True):
            slot[:] = record(key, nbytes)
        assert backend.put_many(names, slots, timeout_s=10.0) == [None, None]
        into = [slab[2 * nbytes : 3 * nbytes], slab[3 * nbytes :]]
        assert backend.get_many(names, into, timeout_s=10.0) == [nbytes, nbytes]
        assert all(view == record(key, nbytes) for key, view in zip(names, into, strict=True))
        start = address_of(slab)
        assert watched.seen == [start + i * nbytes for i in range(4)]
        assert not backend._session.bounces._free


def test_memory_that_is_not_registered_goes_through_a_buffer_that_is_used_again(
    backend: MooncakeBackend, watched: Watched
) -> None:
    for _ in range(3):
        round_trip(backend)
    (bounce,) = backend._session.bounces._free
    assert set(watched.seen) == {bounce.address}
    assert backend._session.regions.has(bounce.address, bounce.nbytes)


def test_a_batch_of_both_kinds_of_memory_keeps_them_apart(backend: MooncakeBackend) -> None:
    nbytes = 50_000
    names = keys(4)
    with registered(backend, 2 * nbytes) as slab:
        views = [slab[:nbytes], empty(nbytes), slab[nbytes:], empty(nbytes)]
        for key, view in zip(names, views, strict=True):
            view[:] = record(key, nbytes)
        assert backend.put_many(names, views, timeout_s=10.0) == [None] * 4
        for view in views:
            view[:] = bytes(nbytes)
        assert backend.get_many(names[::-1], views, timeout_s=10.0) == [nbytes] * 4
        assert all(view == record(key, nbytes) for key, view in zip(names[::-1], views, strict=True))


@pytest.mark.parametrize("known", [True, False])
def test_memory_beyond_a_record_and_too_short_memory_stay_as_they_were(backend: MooncakeBackend, known: bool) -> None:
    nbytes = 10_000
    with registered(backend, 1 << 20) if known else contextlib.nullcontext(empty(1 << 20)) as view:
        key = new_key()
        backend.put(key, record(key, nbytes))
        view[:] = b"\x55" * len(view)
        with pytest.raises(ChunkCorrupt, match="10000 bytes"):
            backend.get(key, view[: nbytes - 1])
        assert view == b"\x55" * len(view)
        assert backend.get(key, view) == nbytes
        assert view[:nbytes] == record(key, nbytes)
        assert view[nbytes:] == b"\x55" * (len(view) - nbytes)


def test_a_batch_larger_than_a_window_is_moved_whole(
    backend: MooncakeBackend, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "_WINDOW_NBYTES", 1 << 20)
    nbytes = 400_000
    names = keys(7)
    into = [empty(nbytes) for _ in names]
    assert backend.put_many(names, [record(key, nbytes) for key in names], timeout_s=30.0) == [None] * 7
    assert watched.calls == 4, "two records in each window"
    assert backend.get_many(names, into, timeout_s=30.0) == [nbytes] * 7
    assert all(view == record(key, nbytes) for key, view in zip(names, into, strict=True))


def test_a_record_larger_than_the_buffers_that_are_kept_comes_back(backend: MooncakeBackend) -> None:
    nbytes = 70 << 20
    key = new_key()
    backend.put(key, record(key, nbytes))
    assert comes_back(backend, key, nbytes)
    assert all(bounce.nbytes <= 64 << 20 for bounce in backend._session.bounces._free)
    assert backend.remove(key)


def test_what_closes_lets_go_of_the_memory_that_it_registered(store: Store) -> None:
    memory = memoryview(mmap.mmap(-1, 1 << 20))
    with open_backend(store) as kept:
        other = open_backend(store)
        other.register(address_of(memory), len(memory))
        round_trip(other)
        assert kept._session.regions.has(address_of(memory), len(memory))
        other.close()
        other.unregister(address_of(memory), len(memory))
        assert not kept._session.regions.has(address_of(memory), len(memory))
        round_trip(kept)


def test_memory_in_the_place_of_memory_that_is_gone_is_registered_anew(backend: MooncakeBackend) -> None:
    memory = memoryview(mmap.mmap(-1, 4 << 20))
    address = address_of(memory)
    backend.register(address, 2 << 20)
    round_trip(backend)
    backend.register(address + (1 << 20), 3 << 20)
    round_trip(backend)
    assert backend._session.regions.has(address + (1 << 20), 3 << 20)
    assert not backend._session.regions.has(address, 4096)


def test_regions_know_what_lies_in_them() -> None:
    regions = Regions()
    regions.add(1000, 100)
    regions.add(5000, 1000)
    assert regions.has(1000, 100)
    assert regions.has(5999, 1)
    assert not any((regions.has(999, 2), regions.has(1050, 51), regions.has(4000, 1), regions.has(6000, 1)))
    assert sorted(regions.overlapping(1099, 4000)) == [1000, 5000]
    assert regions.drop(1000)
    assert not regions.drop(1000)
    assert not regions.has(1000, 1)
