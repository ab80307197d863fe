"""What goes wrong with a store: a master or a node that dies, stalls or comes back, no room, and what is said of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from records import comes_back, empty, keys, new_key, open_backend, record, registered, round_trip
from servers import Store, free_port, running, until

from lmcache_core import BackendError, BackendFull, BackendUnavailable, Context
from lmcache_mooncake import MooncakeBackend, MooncakeOptions

TIMEOUT_S = 2.0
SLACK_S = 8.0
"""On a loaded machine; what is told apart is whether a call takes its timeout or the library's half a minute."""


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Store]:
    """A store that the test may break."""
    with running(tmp_path) as started:
        yield started


def test_a_port_where_nothing_listens_is_known_at_once_and_the_store_is_used_as_soon_as_it_is_there(
    tmp_path: Path,
) -> None:
    with running(tmp_path) as store:
        store.nodes[0].kill()
        store.master.kill()
        with open_backend(store, timeout_s=30.0) as backend:
            began = time.monotonic()
            for call in (lambda: backend.contains(new_key()), lambda: backend.get(new_key(), empty(8))):
                with pytest.raises(BackendUnavailable, match=store.master.address):
                    call()
            assert time.monotonic() - began < SLACK_S
            store.start()
            until(lambda: _stores(backend), "the store is used")


def test_a_master_that_dies_is_unavailable_within_the_deadline_and_used_again_when_it_is_back(own: Store) -> None:
    with open_backend(own, timeout_s=TIMEOUT_S) as backend:
        key = round_trip(backend)
        own.master.kill()
        for again in range(3):
            for call in (
                lambda: backend.contains(key),
                lambda: backend.get(key, empty(100_000)),
                lambda: backend.put(new_key(), record(key, 1000)),
                lambda: backend.remove(key),
            ):
                began = time.monotonic()
                with pytest.raises(BackendUnavailable) as caught:
                    call()
                assert time.monotonic() - began < TIMEOUT_S + SLACK_S
                assert not again or "no connection" in str(caught.value), "the library is asked, and waits for seconds"
        own.start()
        until(lambda: _stores(backend), "the new master is used")
        assert backend.get(key, empty(100_000)) is None, "the new master knows nothing of what was stored before"


def test_the_librarys_own_health_check_is_not_believed(own: Store) -> None:
    """It says that all is well of a master that is gone, which is why calls find it out themselves."""
    with open_backend(own, timeout_s=TIMEOUT_S) as backend:
        round_trip(backend)
        client = backend._session._store
        own.master.kill()
        assert client.health_check() == 0
        with pytest.raises(BackendUnavailable):
            backend.contains(new_key())


def test_a_node_that_dies_takes_its_records_and_the_others_go_on(tmp_path: Path) -> None:
    with running(tmp_path, nodes=1) as store, open_backend(store, timeout_s=TIMEOUT_S) as backend:
        of_the_dead = [round_trip(backend) for _ in range(4)]
        store.nodes[0].kill()

        def lost() -> bool:
            answers = []
            for key in of_the_dead:
                try:
                    answers.append(backend.get(key, empty(100_000)))
                except BackendUnavailable:  # the master has not noticed yet
                    answers.append(0)
            return answers == [None] * 4

        until(lost, "records of a node that died are misses")
        assert not backend.contains(of_the_dead[0])
        with pytest.raises(BackendError):
            backend.put(new_key(), record(new_key(), 1000))
        store.start()
        until(lambda: _stores(backend), "another node is used")


def test_a_node_that_stalls_is_a_fault_and_nothing_is_written_after_the_call(own: Store) -> None:
    nbytes = 16 << 20
    with open_backend(own, timeout_s=TIMEOUT_S) as backend, registered(backend, nbytes) as into:
        key = new_key()
        backend.put(key, record(key, nbytes))
        assert backend.get(key, into) == nbytes
        with own.nodes[0].stalled():
            began = time.monotonic()
            results = backend.get_many([key], [into], timeout_s=TIMEOUT_S)
            assert isinstance(results[0], BackendError), results
            assert time.monotonic() - began < TIMEOUT_S + SLACK_S
            into[:] = b"\x55" * nbytes
        until(lambda: _stores(backend), "the node is used again")
        assert into == b"\x55" * nbytes, "a late answer was written into memory that the caller has back"


def test_a_master_that_stalls_is_left_at_the_deadline_of_each_verb(own: Store) -> None:
    with open_backend(own, timeout_s=TIMEOUT_S) as backend:
        key = round_trip(backend, 1000)
        with own.master.stalled():
            for call in (
                lambda: backend.contains_prefix([key], timeout_s=0.2),
                lambda: backend.get_many([key], [empty(1000)], timeout_s=0.2),
                lambda: backend.put_many([new_key()], [record(key, 1000)], timeout_s=0.2),
                lambda: backend.remove(key),
            ):
                began = time.monotonic()
                answer: object
                try:
                    answer = call()
                except BackendUnavailable as error:
                    answer = [error]
                assert isinstance(answer, list)
                assert isinstance(answer[0], BackendUnavailable)
                assert time.monotonic() - began < TIMEOUT_S + SLACK_S
        until(lambda: comes_back_now(backend, key), "the master is used again")


def comes_back_now(backend: MooncakeBackend, key: object) -> bool:
    try:
        return comes_back(backend, key, 1000)  # type: ignore[arg-type]
    except BackendUnavailable:
        return False


def test_a_store_without_room_is_full_and_what_was_there_stays_right(tmp_path: Path) -> None:
    nbytes = 4 << 20
    flags = {"eviction_high_watermark_ratio": 1.0, "eviction_ratio": 0.05}
    with running(tmp_path, nbytes=16 << 20, **flags) as store, open_backend(store) as backend:
        full = 0
        stored = []
        for key in keys(12):
            try:
                backend.put(key, record(key, nbytes))
                stored.append(key)
            except BackendFull:
                full += 1
        assert stored
        assert full, "12 records of 4 MiB were taken by 16 MiB"
        found = [key for key in stored if backend.contains(key)]
        assert all(comes_back(backend, key, nbytes) for key in found)


def test_a_record_larger_than_every_segment_is_full(tmp_path: Path) -> None:
    with running(tmp_path, nbytes=16 << 20) as store, open_backend(store) as backend:
        with pytest.raises(BackendFull):
            backend.put(new_key(), empty(32 << 20))
        round_trip(backend)


def test_a_client_that_cannot_start_says_which_and_does_not_raise_anything_else(own: Store) -> None:
    options = MooncakeOptions(master=own.master.address, metadata=f"http://127.0.0.1:{free_port()}/metadata")
    with MooncakeBackend(options, Context(timeout_s=TIMEOUT_S)) as backend, pytest.raises(BackendUnavailable):
        backend.contains(new_key())


def _stores(backend: MooncakeBackend) -> bool:
    """Whether a new record can be stored and read now."""
    try:
        round_trip(backend, 1000)
    except (BackendError, AssertionError):
        return False
    return True
