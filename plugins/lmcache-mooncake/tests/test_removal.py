"""A removal goes through under a lease, and takes no bytes from under whoever reads them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from records import comes_back, empty, keys, new_key, open_backend, record, registered, round_trip
from servers import Store, running

from lmcache_core import BackendFull, BackendUnavailable, ChunkCorrupt
from lmcache_mooncake import MooncakeBackend, mark
from lmcache_mooncake.regions import address_of

MARKS = (32, 40, 48)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Store]:
    """Its master gives leases of 5 s."""
    with running(tmp_path, nbytes=64 << 20) as started:
        yield started


@pytest.mark.parametrize("nbytes", [*MARKS, 2 << 20])
def test_the_bytes_of_a_removed_record_stay_for_who_is_reading_them(own: Store, nbytes: int) -> None:
    """A read in two steps: it has learned where they are, then they are removed and the store is filled."""
    with (
        open_backend(own) as backend,
        open_backend(own, threads=2) as other,
        registered(other, 2 << 20) as into,
    ):
        key = round_trip(backend, nbytes)
        other.contains(key)
        reader, name = other._session._store, other._transfers.name(key)
        assert reader.batch_get_session_start([name]) == [0]
        assert backend.remove(key)
        assert not other.contains(key)
        assert other.get(key, into) is None
        _fill(backend, nbytes)
        answer = reader.batch_get_into_multi_buffer_ranges([name], [[address_of(into)]], [[nbytes]], [[0]])
        reader.batch_get_session_end([name])
        assert answer == [nbytes]
        assert into[:nbytes] == record(key, nbytes), "another record came into its place while it was read"


def _fill(backend: MooncakeBackend, nbytes: int) -> None:
    names = keys(64)
    results = backend.put_many(names, [record(key, nbytes) for key in names], timeout_s=10.0)
    assert nbytes < 1 << 20 or any(isinstance(result, BackendFull) for result in results), "the store has room left"


def test_a_reader_in_a_loop_never_has_the_bytes_of_another_record(tmp_path: Path) -> None:
    nbytes = 2 << 20
    with running(tmp_path) as store, open_backend(store) as backend, registered(backend, nbytes) as into:
        key = new_key()
        data = record(key, nbytes)
        wrong: list[object] = []
        done = threading.Event()

        def read() -> None:
            while not done.is_set():
                found = backend.get(key, into)
                if found is not None and into != data:
                    wrong.append(found)

        reader = threading.Thread(target=read)
        reader.start()
        try:
            for _ in range(60):
                backend.put(key, data)
                assert backend.contains(key)
                assert backend.remove(key)
                assert not backend.contains(key)
                other = new_key()
                backend.put(other, record(other, nbytes))
                backend.remove(other)
        finally:
            done.set()
            reader.join(30)
        assert not wrong


def test_a_record_that_nobody_reads_makes_room_at_once(tmp_path: Path) -> None:
    nbytes = 4 << 20
    with running(tmp_path, nbytes=16 << 20) as store, open_backend(store) as backend:
        for key in keys(20):
            backend.put(key, record(key, nbytes))
            assert backend.remove(key)


def test_a_read_that_outlasts_its_lease_is_a_fault(tmp_path: Path) -> None:
    """What keeps a record's bytes from the store's own eviction has ended: they may be those of another by then."""
    nbytes = 32 << 20
    with running(tmp_path, lease_ms=1) as store, open_backend(store) as backend, registered(backend, nbytes) as into:
        key = new_key()
        backend.put(key, record(key, nbytes))
        with pytest.raises(BackendUnavailable, match="lease ended"):
            backend.get(key, into)


def test_a_mark_that_a_removal_left_half_way_is_no_record_and_goes(own: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_backend(own) as backend:
        key = new_key()
        assert not backend.contains(key)
        left = empty(MARKS[0])
        mark.write(left)
        backend.put(key, left)
        assert backend.get(key, empty(1000)) is None, "somebody is removing it"
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 3600)
        with pytest.raises(ChunkCorrupt, match="not finished"):
            backend.get(key, empty(1000))
        assert backend.remove(key)
        backend.put(key, record(key, 1000))
        assert comes_back(backend, key, 1000)


@pytest.mark.parametrize("nbytes", MARKS)
def test_a_record_as_long_as_a_mark_is_a_record(own: Store, nbytes: int) -> None:
    with open_backend(own) as backend:
        key = round_trip(backend, nbytes)
        assert backend.remove(key)
        assert not backend.contains(key)


class Older:
    """The client of a version that cannot replace a record."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        if name == "upsert_from":
            raise AttributeError(name)
        return getattr(self._client, name)


@contextmanager
def older(backend: MooncakeBackend) -> Iterator[None]:
    session = backend._session
    client, session._store = session._store, Older(session._store)
    try:
        yield
    finally:
        session._store = client


def test_a_library_that_cannot_replace_waits_for_the_lease_to_end(tmp_path: Path) -> None:
    with running(tmp_path, lease_ms=700) as store, open_backend(store) as backend:
        key = round_trip(backend)
        with older(backend):
            assert backend.remove(key)
            assert not backend.contains(key)


def test_what_is_held_until_the_deadline_is_unavailable_and_stays(own: Store) -> None:
    with open_backend(own, timeout_s=1.0) as backend:
        key = round_trip(backend)
        with older(backend):
            with pytest.raises(BackendUnavailable, match="in use"):
                backend.remove(key)
            assert comes_back(backend, key, 100_000)
