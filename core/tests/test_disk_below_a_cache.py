"""A cache over a disk whose operations fail, one after the other, or take their time: misses, never a wrong byte."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from disk_helpers import open_disk, record_files, temp_files
from failing_os import failing, interposed
from tiny import RECORD, chain, load, open_local, store, until

CHUNKS = 4
SOAK = bool(os.environ.get("LMCACHE_SOAK"))
FAULTS = [(errno.EIO, 0), (errno.EIO, 5), (errno.ENOSPC, 0)][: 3 if SOAK else 1]
"""The errno, and how many more operations fail with it."""
STEP = 1 if SOAK else 5
"""Each operation, or as many as there is time for in the tests."""
MANIFEST = 8192
CAPACITY = 8 * RECORD + MANIFEST


def fill(root: Path, prompts: int) -> None:
    with open_local([open_disk(root)]) as cache:
        for seed in range(prompts):
            store(cache, chain(CHUNKS, seed=seed))
            assert cache.drain(10)


def on_disk(root: Path) -> int:
    return sum(path.stat().st_size for path in record_files(root))


@pytest.mark.parametrize(("number", "more"), FAULTS)
def test_whichever_operation_fails_while_a_store_is_trimmed_its_capacity_holds_and_it_serves(
    tmp_path: Path, number: int, more: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL")
    fill(tmp_path / "full", 3)
    for first in itertools.count(1, STEP):
        root = tmp_path / str(first)
        shutil.copytree(tmp_path / "full", root)
        backend = open_disk(root, CAPACITY)
        assert on_disk(root) > CAPACITY
        with (
            interposed(failing(number, first, first + more)) as calls,
            open_local([backend], tier_capacity_nbytes=CAPACITY, probe_interval_s=0.0) as cache,
        ):
            trimmed = calls.count
            for seed in range(3):
                load(cache, chain(CHUNKS, seed=seed))  # which compares every byte that it was given
            # What is known is within the capacity; what was not to be listed or removed is met by later stores.
            for seed in range(3, 6):
                store(cache, chain(CHUNKS, seed=seed))
                assert cache._pool.tiers[0].drain(10)
            assert cache.status().tiers[0].used_nbytes <= CAPACITY
            assert until(lambda: cache._pool.usage()[1] == 0)
            assert load(cache, chain(CHUNKS, seed=5))[1].ok_chunks == CHUNKS
        assert backend._fd == -1
        assert temp_files(root) == [] or "unlink" in calls.names[first - 1 : first + more]
        with open_local([open_disk(root, CAPACITY)], tier_capacity_nbytes=CAPACITY) as cache:
            assert on_disk(root) <= CAPACITY
            for seed in range(6):
                load(cache, chain(CHUNKS, seed=seed))
        if trimmed < first:
            break
    assert first > 20, "a trim that does so little is not the one this is for"


def slowly(pause_s: float) -> Callable[[int, str], None]:
    never = threading.Event()
    return lambda count, name: bool(never.wait(pause_s)) and None


def test_a_slow_disk_is_slow_and_otherwise_right(tmp_path: Path) -> None:
    with interposed(slowly(0.002)), open_local([open_disk(tmp_path)], timeout_s=20.0) as cache:
        for seed in range(3):
            assert store(cache, chain(CHUNKS, seed=seed)).ok_chunks == CHUNKS
        assert cache.drain(30)
        for seed in range(3):
            cache._pool._evict([e for e in cache._pool._index.entries.values() if not e.holds])
            assert load(cache, chain(CHUNKS, seed=seed))[1].ok_chunks == CHUNKS
    assert temp_files(tmp_path) == []


@pytest.mark.parametrize("stuck", ["open", "preadv", "close", "stat"])
def test_a_disk_that_hangs_in_a_read_is_a_late_miss_and_in_use_again_when_it_goes_on(
    tmp_path: Path, stuck: str
) -> None:
    fill(tmp_path, 1)
    hangs, goes_on = threading.Event(), threading.Event()

    def before(count: int, name: str) -> None:
        if hangs.is_set() and name == stuck:
            assert goes_on.wait(60)

    with interposed(before), open_local([open_disk(tmp_path)], timeout_s=0.1, probe_interval_s=0.0) as cache:
        hangs.set()
        started = time.monotonic()
        result = load(cache, chain(CHUNKS))[1]
        if stuck == "stat":  # of the directories alone, and once they are known
            goes_on.set()
        else:
            assert result.ok_chunks == 0
            assert time.monotonic() - started < 30, "the job ended though the disk did not answer"
        hangs.clear()
        goes_on.set()
        assert until(lambda: load(cache, chain(CHUNKS))[1].ok_chunks == CHUNKS)
        assert until(lambda: cache._pool.usage()[1] == 0)


@pytest.mark.parametrize("stuck", ["open", "pwritev", "rename", "flock", "close"])
def test_a_disk_that_hangs_in_a_write_costs_no_store_and_no_byte(tmp_path: Path, stuck: str) -> None:
    hangs, goes_on = threading.Event(), threading.Event()

    def before(count: int, name: str) -> None:
        if hangs.is_set() and name == stuck:
            assert goes_on.wait(60)

    with interposed(before), open_local([open_disk(tmp_path)], timeout_s=0.1, probe_interval_s=0.0) as cache:
        hangs.set()
        assert store(cache, chain(CHUNKS)).ok_chunks == CHUNKS, "it is in memory"
        assert until(lambda: cache.metrics.count("drops", reason="late") == CHUNKS)
        assert load(cache, chain(CHUNKS))[1].ok_chunks == CHUNKS
        hangs.clear()
        goes_on.set()
        assert cache._pool.tiers[0].drain(20)
        assert until(lambda: cache._pool.usage()[1] == 0)
        store(cache, chain(CHUNKS, seed=1))
        assert until(lambda: cache.drain(5))
    assert temp_files(tmp_path) == []
    with open_local([open_disk(tmp_path)]) as cache:
        load(cache, chain(CHUNKS))
        assert load(cache, chain(CHUNKS, seed=1))[1].ok_chunks == CHUNKS
