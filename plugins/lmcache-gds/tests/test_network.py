"""A network file system whose server or FUSE process dies, hangs, comes back: misses in time, and nothing is lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fuse import Network
from stores import buffer, holds, new_key, open_disk, open_gds, record

from lmcache_core import BackendUnavailable, ChunkKey
from lmcache_gds import GdsBackend

SOON_S = 1.0
GENEROUS_S = 60.0


def calls(backend: GdsBackend, key: ChunkKey) -> dict[str, Callable[[], object]]:
    return {
        "contains": lambda: backend.contains(key),
        "get": lambda: backend.get(key, buffer()),
        "put": lambda: backend.put(new_key(), record(key)),
        "remove": lambda: backend.remove(key),
        "entries": lambda: list(backend.entries()),
    }


def until_held(backend: GdsBackend, key: ChunkKey) -> bool:
    """Whether the record is had again before long; what is asked meanwhile may only be unavailable."""
    deadline = time.monotonic() + GENEROUS_S
    while time.monotonic() < deadline:
        try:
            return holds(backend, key)
        except BackendUnavailable:
            continue
    return False


def test_it_says_that_it_is_guarded_and_on_what(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lmcache_gds"), open_gds(folder) as backend:
        said = backend.description()
    assert "I/O on fuse.seaweedfs" in said
    assert "calls are held to their deadlines" in said
    assert [r.getMessage() for r in caplog.records] == [f"gds store {folder}: {said}"]


def test_the_doctor_hears_of_settings_that_do_not_suit_such_a_mount(folder: Path) -> None:
    with open_gds(folder, guard="off") as backend:
        found = {line.remedy: line.level for line in backend.diagnose()}
    assert found["guard: auto"] == "warning"
    assert found["filesystem: fuse.seaweedfs"] == "note"
    with open_gds(folder, filesystem="fuse.seaweedfs") as backend:
        assert not {"guard: auto", "filesystem: fuse.seaweedfs"} & {line.remedy for line in backend.diagnose()}


def test_a_directory_that_one_wrote_is_read_by_the_disk_backend_and_the_other_way(folder: Path) -> None:
    ours, theirs = new_key(), new_key()
    with open_gds(folder) as backend:
        backend.put(ours, record(ours))
    with open_disk(folder) as disk:
        assert holds(disk, ours)
        disk.put(theirs, record(theirs))
    with open_gds(folder) as backend:
        assert holds(backend, theirs)
        assert {entry.key for entry in backend.entries()} == {ours, theirs}


def test_while_the_mount_hangs_each_call_ends_at_its_deadline_and_then_it_goes_on(
    network: Network, folder: Path
) -> None:
    key = new_key()
    with open_gds(folder, timeout_s=SOON_S) as backend:
        backend.put(key, record(key))
        with network.stopped():
            for verb, call in calls(backend, new_key()).items():
                began = time.monotonic()
                with pytest.raises(BackendUnavailable):
                    call()
                assert time.monotonic() - began < GENEROUS_S / 2, verb
        assert until_held(backend, key)


def test_a_read_that_was_given_up_writes_nothing_into_the_callers_buffer(network: Network, folder: Path) -> None:
    key = new_key()
    into = buffer()
    with open_gds(folder, timeout_s=SOON_S) as backend:
        backend.put(key, record(key))
        with network.stopped(), pytest.raises(BackendUnavailable):
            backend.get(key, into)
        assert until_held(backend, key)  # by then the first read has ended as well
        assert into == buffer()


def test_opening_on_a_mount_that_hangs_waits_no_longer_than_it_should(network: Network, folder: Path) -> None:
    key = new_key()
    with open_gds(folder) as backend:
        backend.put(key, record(key))
    with network.stopped():
        began = time.monotonic()
        backend = open_gds(folder, timeout_s=SOON_S)
        assert time.monotonic() - began < GENEROUS_S / 2
        assert "not open" in backend.description()
        with pytest.raises(BackendUnavailable):
            backend.contains(key)
    with backend:
        assert until_held(backend, key)


def test_when_the_server_dies_what_is_asked_is_unavailable_and_with_the_server_the_records_are_back(
    network: Network, folder: Path
) -> None:
    asked, other = new_key(), new_key()
    with open_gds(folder, timeout_s=SOON_S) as backend:
        for key in (asked, other):
            backend.put(key, record(key))
        network.kill_server()
        try:
            began = time.monotonic()
            with pytest.raises(BackendUnavailable):
                backend.get(asked, buffer())
            assert time.monotonic() - began < GENEROUS_S / 2
        finally:
            network.start_server()
        assert until_held(backend, other)
        # That file system goes on trying what was asked first, for longer than a test should take.
        network.kill_mount()
        network.unmount()
        network.start_mount()
        assert until_held(backend, asked)


def test_when_the_mount_dies_and_is_mounted_again_the_store_opens_by_itself(network: Network, folder: Path) -> None:
    key = new_key()
    with open_gds(folder, timeout_s=5.0) as backend:
        backend.put(key, record(key))
        network.kill_mount()
        try:
            for call in calls(backend, key).values():
                with pytest.raises(BackendUnavailable):
                    call()
            assert "not connected" in backend.description()
            network.unmount()
            with pytest.raises(BackendUnavailable, match="fuse.seaweedfs is not mounted"):
                backend.put(new_key(), record(key))
            assert list(network.path.iterdir()) == []  # nothing went to the local disk instead
        finally:
            network.start_mount()
        assert until_held(backend, key)


def test_closing_while_the_mount_hangs_returns_and_leaves_nothing_once_it_answers(
    network: Network, folder: Path
) -> None:
    backend = open_gds(folder, timeout_s=SOON_S)
    with network.stopped():
        with pytest.raises(BackendUnavailable):
            backend.contains(new_key())
        began = time.monotonic()
        backend.close()
        backend.close()
        assert time.monotonic() - began < GENEROUS_S / 2
