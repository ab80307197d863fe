"""Clients: shared, found in both ways, with segments, replicas and pins, closed without a trace, not forked."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import isolation
import pytest
from records import comes_back, empty, open_backend, round_trip
from servers import Store, running, until

from lmcache_core import BackendUnavailable

HERE = Path(__file__).parent


def test_these_tests_have_a_network_of_their_own() -> None:
    assert isolation.interfaces() == ["lo"]


def test_handles_with_equal_settings_share_a_client_and_others_have_their_own(store: Store) -> None:
    with open_backend(store) as one, open_backend(store) as same, open_backend(store, prefix="other:") as other:
        assert one._session is same._session
        assert one._session is not other._session
        key = round_trip(one)
        same.close()
        with pytest.raises(BackendUnavailable, match="closed"):
            same.contains(key)
        assert one.contains(key)
        assert not other.contains(key), "prefixes keep records apart"


def test_the_last_handle_that_closes_leaves_nothing(store: Store) -> None:
    def taken() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    with open_backend(store) as backend:
        round_trip(backend)
    before = taken()
    for _ in range(3):
        with open_backend(store) as backend:
            round_trip(backend)
            assert taken()[1] > before[1]
    until(lambda: taken()[0] <= before[0] and taken()[1] <= before[1], f"descriptors and threads are back at {before}")


class Slow:
    """The client, whose reads end when they are told to."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.reading = threading.Event()
        self.go_on = threading.Event()
        self.ended: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def batch_get_into(self, names: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        self.reading.set()
        assert self.go_on.wait(60)
        codes: list[int] = self._client.batch_get_into(names, addresses, sizes)
        self.ended.append("read")
        return codes

    def close(self) -> None:
        self.ended.append("close")
        self._client.close()


def test_a_client_that_is_in_use_is_closed_when_that_has_ended(store: Store) -> None:
    backend = open_backend(store)
    key = round_trip(backend)
    session = backend._session
    session._store = slow = Slow(session._store)
    found: list[object] = []
    reader = threading.Thread(target=lambda: found.append(backend.get(key, empty(100_000))))
    closer = threading.Thread(target=backend.close)
    reader.start()
    assert slow.reading.wait(60)
    closer.start()
    until(lambda: session._closed, "closing has begun")
    assert not slow.ended
    slow.go_on.set()
    reader.join(60)
    closer.join(60)
    assert found == [100_000]
    assert slow.ended == ["read", "close"]


def test_a_client_whose_call_never_ends_is_left_as_it_is(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    backend = open_backend(store, timeout_s=2.0)
    key = round_trip(backend)
    session = backend._session
    session._store = slow = Slow(session._store)

    def read() -> None:
        with contextlib.suppress(BackendUnavailable):
            backend.get(key, empty(100_000))

    reader = threading.Thread(target=read)
    reader.start()
    assert slow.reading.wait(60)
    backend.close()
    assert any("stuck" in entry.message for entry in caplog.records)
    slow.go_on.set()
    reader.join(60)
    assert slow.ended == ["read"]
    slow._client.close()


def test_a_forked_child_is_told_so_and_its_parent_goes_on(store: Store) -> None:
    with open_backend(store) as backend:
        key = round_trip(backend)
        pid = os.fork()
        if not pid:
            ok = False
            try:
                backend.contains(key)
            except BackendUnavailable as error:
                ok = "fork" in str(error)
            backend.close()
            os._exit(0 if ok else 1)
        _, status = os.waitpid(pid, 0)
        assert status == 0
        assert comes_back(backend, key, 100_000)


def test_nothing_connects_before_it_is_needed_unless_memory_is_offered(store: Store) -> None:
    with open_backend(store) as client:
        assert client._session._attempt is None
        assert client.traits.persistent
    with open_backend(store, segment_nbytes=64 << 20) as member:
        until(lambda: member._session._store, "the segment is offered without anybody asking")
        assert not member.traits.persistent


def test_a_segment_of_our_own_is_where_records_go_if_that_is_preferred(store: Store) -> None:
    with open_backend(store) as other:
        with open_backend(store, segment_nbytes=64 << 20, prefer_local=True) as member:
            stored = [round_trip(member) for _ in range(8)]
            assert all(comes_back(other, key, 100_000) for key in stored)
        found = [other.get(key, empty(100_000)) for key in stored]
        assert found == [None] * 8, "what lay in a process goes with it"


@pytest.fixture
def lan() -> Iterator[str]:
    """An address of this host as others see it: the library finds none for a metadata server on a loopback alone."""
    with contextlib.ExitStack() as stack:
        try:
            yield stack.enter_context(isolation.lan("192.0.2.1"))
        except OSError as error:
            pytest.skip(f"cannot run here: no network interface can be made: {error}")


@pytest.mark.keeps_running  # the library's connections to that server stay for the process
def test_clients_find_each_other_by_a_metadata_server_too(tmp_path: Path, lan: str) -> None:
    with running(tmp_path, metadata_server=True, hostname=lan) as served:
        assert served.master.metadata.startswith("http://")
        with open_backend(served, hostname=lan) as backend:
            round_trip(backend)
            assert backend._session._store.get_hostname().startswith(f"{lan}:")


def test_replicas_outlive_a_node(tmp_path: Path) -> None:
    with running(tmp_path, nodes=2) as pair, open_backend(pair, replicas=2, timeout_s=2.0) as backend:
        name = round_trip(backend, 100_000)
        replicas = backend._session._store.get_replica_desc(backend._transfers.name(name))
        assert len(replicas) == 2
        pair.nodes[0].kill()

        def still() -> bool:
            try:
                return comes_back(backend, name, 100_000)
            except BackendUnavailable:
                return False

        until(still, "the other replica is read")


@pytest.mark.parametrize("ttl_s", [None, 60.0])
def test_soft_pins_are_what_the_store_is_told(store: Store, ttl_s: float | None) -> None:
    with open_backend(store, soft_pin=True, soft_pin_ttl_s=ttl_s) as backend:
        round_trip(backend)
        config = backend._session.config
        assert config.soft_pin_action.name == "ENABLE"
        assert config.soft_pin_ttl_ms == (60_000 if ttl_s else type(config)().soft_pin_ttl_ms)
