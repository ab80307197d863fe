"""Backing memory ahead of its use, in nobody's way."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tiny import until

from lmcache_core.buffers import Extent
from lmcache_core.client.link import MappedExtent
from lmcache_core.local import Prefaults

NBYTES = 64 << 20


def backed(extent: Extent) -> int:
    return os.fstat(extent.fd).st_blocks * 512


def test_mapping_an_extent_of_the_daemon_waits_for_none_of_its_pages() -> None:
    extent = Extent(1, NBYTES)
    mapped = MappedExtent(1, NBYTES, extent.fd)
    assert backed(extent) == 0
    mapped.prefault(lambda: False)
    assert backed(extent) == NBYTES
    del mapped
    extent.close()


class Slow:
    """An extent whose pages come when they are let."""

    nbytes = NBYTES

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.let = threading.Event()
        self.thread: threading.Thread | None = None

    def prefault(self, stop: Callable[[], bool]) -> None:
        self.thread = threading.current_thread()
        self.begun.set()
        while not stop() and not self.let.wait(0.001):
            pass


def test_where_it_is_nice_it_gives_way_to_whoever_computes_and_nobody_else_does() -> None:
    prefaults, extent = Prefaults(nice=10), Slow()
    here = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    prefaults.start(extent)
    assert extent.begun.wait(5)
    assert extent.thread is not None
    assert extent.thread.native_id is not None
    assert os.getpriority(os.PRIO_PROCESS, extent.thread.native_id) == max(here, 10)
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == here
    extent.let.set()
    prefaults.join()


def test_one_thread_backs_extents_one_after_the_other_and_starting_waits_for_none() -> None:
    prefaults, extents = Prefaults(), [Slow() for _ in range(3)]
    began = time.monotonic()
    for extent in extents:
        prefaults.start(extent)
    assert time.monotonic() - began < 5
    assert extents[0].begun.wait(5)
    assert not extents[1].begun.is_set()
    for extent in extents:
        extent.let.set()
        assert extent.begun.wait(5)
    assert len({extent.thread for extent in extents}) == 1
    prefaults.join()
    assert extents[0].thread is not None
    assert not extents[0].thread.is_alive()


def test_the_end_waits_for_no_page_that_is_not_backed_yet() -> None:
    prefaults, first, second = Prefaults(), Slow(), Slow()
    prefaults.start(first)
    prefaults.start(second)
    assert first.begun.wait(5)
    prefaults.join()  # would wait for ever
    prefaults.join()
    assert first.thread is not None
    assert not first.thread.is_alive()
    prefaults.start(Slow())
    assert not any(thread.name == "lmcache-prefault" for thread in threading.enumerate())


def test_small_extents_need_no_thread() -> None:
    prefaults = Prefaults()
    extent = Extent(1, 1 << 20)
    prefaults.start(extent)
    assert not any(thread.name == "lmcache-prefault" for thread in threading.enumerate())
    extent.close()
    prefaults.join()


def test_an_extent_is_let_go_when_it_is_backed() -> None:
    prefaults = Prefaults()
    extent = Extent(1, NBYTES)
    inode = os.fstat(extent.fd).st_ino
    prefaults.start(extent)
    assert until(lambda: backed(extent) == NBYTES, 30)
    extent.close()
    assert until(lambda: f" {inode} /memfd" not in Path("/proc/self/maps").read_text())
    prefaults.join()
