"""Extents, slots and copies: capacity is the total, memory goes back, slots never overlap, the GIL stays free."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import tiny
from gil_probe import releases_gil
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lmcache_core import buffers
from lmcache_core.buffers import Extent, Slab, Slot, check_host_memory, copy_bytes, host_limits
from lmcache_core.config import parse_config
from lmcache_core.errors import CapacityError
from lmcache_core.opening import open_cache

PAGE = 4096


def maps() -> list[str]:
    """The lines of this process's memory map that are extents."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "lmcache-extent" in line]


def fds() -> list[str]:
    """The descriptors of extents that are open here."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue  # that of the listing itself
    return [target for target in found if "lmcache-extent" in target]


# Copies.


def test_copy_bytes_copies_every_byte_and_nothing_beside() -> None:
    source = np.random.default_rng(1).integers(0, 256, 10_000, np.uint8).tobytes()
    target = bytearray(b"\xa5" * 10_002)
    copy_bytes(source, memoryview(target)[1:-1])
    assert bytes(target) == b"\xa5" + source + b"\xa5"


@pytest.mark.parametrize(("source", "target"), [(1, 8), (0, 8), (7, 8), (9, 8), (8, 1), (8, 0)])
def test_copy_bytes_refuses_lengths_that_differ_and_writes_nothing(source: int, target: int) -> None:
    into = bytearray(b"\xa5" * target)
    with pytest.raises(ValueError, match=f"{source} bytes.*{target}"):
        copy_bytes(b"x" * source, memoryview(into))
    assert into == b"\xa5" * target


def test_copy_bytes_takes_empty_views() -> None:
    copy_bytes(b"", memoryview(bytearray()))


def test_copy_bytes_does_not_write_to_read_only_memory() -> None:
    with pytest.raises(ValueError):
        copy_bytes(b"abcd", memoryview(b"1234"))


def test_copy_bytes_releases_the_gil_and_a_slice_assignment_would_not() -> None:
    source, target = memoryview(bytearray(32 << 20)), memoryview(bytearray(32 << 20))

    def assign() -> None:
        target[:] = source

    assert releases_gil(lambda: copy_bytes(source, target))
    assert not releases_gil(assign)


# Extents.


def test_an_extents_memory_and_descriptors_go_when_it_is_closed() -> None:
    extent = Extent(1, 4 * PAGE)
    assert len(maps()) == 1
    assert fds()
    extent.close()
    assert not maps()
    assert not fds()


def test_memory_under_a_live_view_stays_readable_after_close_and_goes_with_the_view() -> None:
    extent = Extent(2, 4 * PAGE)
    view = extent.view[PAGE : 2 * PAGE]
    view[:5] = b"alive"
    array = np.frombuffer(view, np.uint8)
    extent.close()  # no BufferError
    assert bytes(view[:5]) == b"alive"
    assert len(maps()) == 1
    del view
    assert array[:5].tobytes() == b"alive"
    del array
    gc.collect()
    assert not maps()
    assert not fds()


def test_a_sealed_extent_cannot_be_resized_by_a_holder_of_its_descriptor() -> None:
    extent = Extent(3, 4 * PAGE)
    try:
        for nbytes in (0, PAGE, 8 * PAGE):
            with pytest.raises(OSError) as caught:
                os.ftruncate(extent.fd, nbytes)
            assert caught.value.errno == errno.EPERM
        assert os.fstat(extent.fd).st_size == 4 * PAGE
    finally:
        extent.close()


def test_two_maps_of_one_descriptor_share_their_bytes() -> None:
    import mmap

    extent = Extent(4, 4 * PAGE)
    with mmap.mmap(extent.fd, 4 * PAGE) as other:
        extent.view[100:105] = b"hello"
        assert other[100:105] == b"hello"
    extent.close()


def test_an_extents_address_is_where_its_view_is() -> None:
    import ctypes

    extent = Extent(5, 4 * PAGE)
    extent.view[10:13] = b"abc"
    assert extent.address % PAGE == 0
    assert ctypes.string_at(extent.address + 10, 3) == b"abc"
    extent.close()


def test_private_memory_has_no_descriptor_and_goes_with_its_last_view() -> None:
    extent = Extent(9, 4 << 20, shared=False)
    mapped, view = f"{extent.address:x}-", extent.view
    assert not fds()
    with pytest.raises(RuntimeError, match="extent 9 has no descriptor"):
        _ = extent.fd
    view[100:105] = b"hello"
    extent.close()
    assert bytes(view[100:105]) == b"hello"
    assert mapped in Path("/proc/self/maps").read_text()
    del view
    assert mapped not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("shared", [True, False])
def test_a_forked_child_does_not_inherit_the_memory(shared: bool) -> None:
    code = """
import os, sys
from lmcache_core.buffers import Extent
extent = Extent(0, 1 << 20, shared=sys.argv[1] == "True")
def count():
    with open("/proc/self/maps") as lines:
        spans = [[int(part, 16) for part in line.split()[0].split("-")] for line in lines]
    return sum(start <= extent.address < stop for start, stop in spans)
here = count()
child = os.fork()
if not child:
    os._exit(count())
_, status = os.waitpid(child, 0)
print(here, os.waitstatus_to_exitcode(status))
"""
    command = [sys.executable, "-c", code, str(shared)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.split() == ["1", "0"]


def test_a_cache_of_one_process_has_private_memory() -> None:
    config = parse_config("{device: cpu, tiers: [{name: host, backend: memory, capacity: 1MiB}]}", "test", environ={})
    with open_cache(config) as cache:
        assert tiny.store(cache, tiny.chain(2)).ok_chunks == 2
        assert not fds()
        assert not maps()


def test_a_child_program_does_not_inherit_the_descriptor() -> None:
    extent = Extent(6, PAGE)
    try:
        listing = "import os; print(*[os.path.realpath(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd')])"
        ran = subprocess.run(
            [sys.executable, "-c", listing], capture_output=True, text=True, check=True, timeout=60, close_fds=False
        )
        assert "lmcache-extent" not in ran.stdout
    finally:
        extent.close()


def test_prefault_backs_every_page_and_keeps_what_is_there() -> None:
    extent = Extent(7, 40 << 20)  # more than one step
    extent.view[5:10] = b"there"
    before = os.fstat(extent.fd).st_blocks
    extent.prefault()
    assert before * 512 < extent.nbytes
    assert os.fstat(extent.fd).st_blocks * 512 == extent.nbytes
    assert bytes(extent.view[:12]) == b"\0" * 5 + b"there\0\0"
    extent.close()


def test_prefault_of_a_closed_extent_does_nothing() -> None:
    extent = Extent(8, 1 << 20)
    extent.close()
    extent.prefault()


def test_prefault_does_not_hold_the_gil() -> None:
    extent = Extent(9, 64 << 20)
    try:
        assert releases_gil(extent.prefault)
    finally:
        extent.close()


def test_a_kernel_without_the_advice_we_give_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import mmap

    class OldKernel(mmap.mmap):
        def madvise(self, option: int, *args: int) -> None:
            if option == mmap.MADV_HUGEPAGE:
                raise OSError(errno.EINVAL, "Invalid argument")
            super().madvise(option, *args)

    monkeypatch.setattr(buffers.mmap, "mmap", OldKernel)
    monkeypatch.setattr(buffers, "_MADV_POPULATE_WRITE", 9999)
    extent = Extent(10, 4 << 20)
    extent.prefault()
    extent.close()
    assert not fds()


def test_an_extent_that_cannot_be_mapped_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, nbytes: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(buffers.mmap, "mmap", refuse)
    with pytest.raises(OSError, match="Cannot allocate"):
        Extent(11, PAGE)
    assert not fds()


def test_an_extent_in_use_does_not_change_its_class() -> None:
    extent = Extent(12, 4 * PAGE)
    extent.divide(PAGE)
    assert extent.slots == 4
    extent.free.pop()
    with pytest.raises(RuntimeError, match="extent 12 has slots in use"):
        extent.divide(2 * PAGE)
    extent.close()


# The slab.


def test_the_capacity_is_the_total_whatever_the_sizes() -> None:
    slab = Slab(64 * PAGE, extent_nbytes=8 * PAGE)
    slots = []
    for pages in (1, 3, 5, 7, 11) * 20:
        slot = slab.take(pages * PAGE)
        if slot is not None:
            slots.append(slot)
        backed = sum(extent.nbytes for extent in slab.extents.values())
        assert slab.used_nbytes == backed <= 64 * PAGE
        assert sum(os.fstat(extent.fd).st_size for extent in slab.extents.values()) == backed
    assert sum(slot.nbytes for slot in slots) <= 64 * PAGE
    slab.close()


def test_a_slab_filled_with_one_class_uses_its_whole_capacity() -> None:
    slab = Slab(64 * PAGE, extent_nbytes=8 * PAGE)
    slots = [slab.take(PAGE) for _ in range(64)]
    assert None not in slots
    assert slab.take(PAGE) is None
    slab.close()


def test_the_last_extent_is_as_large_as_what_is_left() -> None:
    slab = Slab(10 * PAGE, extent_nbytes=4 * PAGE)
    assert all(slab.take(PAGE) for _ in range(10))
    assert slab.take(1) is None
    assert slab.used_nbytes == 10 * PAGE
    slab.close()


def test_a_record_is_given_whole_pages() -> None:
    slab = Slab(16 * PAGE)
    slot = slab.take(PAGE + 1)
    assert slot is not None
    assert (slot.nbytes, len(slab.view(slot)), slot.offset % PAGE) == (2 * PAGE, 2 * PAGE, 0)
    slab.close()


def test_a_record_larger_than_an_extent_has_one_of_its_own() -> None:
    slab = Slab(64 * PAGE, extent_nbytes=4 * PAGE)
    slot = slab.take(33 * PAGE)
    assert slot is not None
    assert slab.extents[slot.extent_id].nbytes == 33 * PAGE
    slab.close()


def test_a_record_larger_than_the_capacity_never_has_a_slot() -> None:
    slab = Slab(8 * PAGE)
    assert not slab.fits(8 * PAGE + 1)
    assert slab.take(8 * PAGE + 1) is None
    assert slab.fits(8 * PAGE)
    assert slab.take(8 * PAGE) is not None
    slab.close()


def test_an_empty_extent_changes_class_instead_of_a_new_one() -> None:
    slab = Slab(16 * PAGE, extent_nbytes=8 * PAGE)
    small = [slab.take(PAGE) for _ in range(8)]
    for slot in small:
        assert slot is not None
        slab.give(slot)
    big = slab.take(4 * PAGE)
    assert big is not None
    assert big.extent_id == small[0].extent_id  # type: ignore[union-attr]
    assert slab.used_nbytes == 8 * PAGE
    slab.close()


def test_what_an_extent_has_beyond_its_last_whole_slot_is_not_given_out() -> None:
    slab = Slab(8 * PAGE, extent_nbytes=8 * PAGE)
    small = slab.take(PAGE)
    assert small is not None
    slab.give(small)
    slots = [slab.take(3 * PAGE) for _ in range(3)]
    assert [slot is not None for slot in slots] == [True, True, False]
    slab.close()


def test_an_extent_too_small_for_a_larger_class_is_dropped_to_make_room() -> None:
    slab = Slab(16 * PAGE, extent_nbytes=4 * PAGE)
    dropped: list[int] = []
    slab.on_drop = lambda extent: dropped.append(extent.extent_id)
    slots = [slab.take(PAGE) for _ in range(16)]
    for slot in slots:
        assert slot is not None
        slab.give(slot)
    big = slab.take(10 * PAGE)
    assert big is not None
    assert len(slab.view(big)) == 10 * PAGE
    assert slab.used_nbytes <= 16 * PAGE
    assert len(maps()) == len(slab.extents)
    assert dropped
    slab.close()


def test_no_extent_is_dropped_when_that_would_not_make_enough_room() -> None:
    slab = Slab(16 * PAGE, extent_nbytes=4 * PAGE)
    slots = [slab.take(PAGE) for _ in range(16)]
    for slot in slots[:8]:
        assert slot is not None
        slab.give(slot)  # two extents are empty, two are not
    before = dict(slab.extents)
    assert slab.take(10 * PAGE) is None
    assert slab.extents == before
    slab.close()


def test_no_more_extents_are_dropped_than_the_room_needs() -> None:
    slab = Slab(16 * PAGE, extent_nbytes=4 * PAGE)
    for slot in [slab.take(PAGE) for _ in range(16)]:
        assert slot is not None
        slab.give(slot)
    assert slab.take(8 * PAGE) is not None
    assert len(slab.extents) == 3
    slab.close()


def test_an_extent_in_use_is_not_dropped() -> None:
    slab = Slab(8 * PAGE)
    slot = slab.take(PAGE)
    assert slot is not None
    with pytest.raises(RuntimeError, match="slots in use"):
        slab.drop(slab.extents[slot.extent_id])
    slab.close()


def test_extents_of_other_classes_come_least_recently_used_first() -> None:
    slab = Slab(64 * PAGE, extent_nbytes=8 * PAGE)
    taken = [slab.take(pages * PAGE) for pages in (1, 2, 4, 8)]
    for age, slot in zip((7, 3, 9, 1), taken, strict=True):
        assert slot is not None
        slab.extents[slot.extent_id].last_used = age
    order = [extent.slot_nbytes // PAGE for extent in slab.others(8 * PAGE)]
    assert order == [2, 1, 4]
    slab.close()


def test_closing_a_slab_twice_is_fine_and_tells_of_each_extent_once() -> None:
    slab = Slab(16 * PAGE, extent_nbytes=4 * PAGE)
    dropped: list[int] = []
    slab.on_drop = lambda extent: dropped.append(extent.extent_id)
    views = [slab.view(slot) for slot in (slab.take(3 * PAGE), slab.take(PAGE)) if slot is not None]
    slab.close()
    slab.close()
    assert len(dropped) == len(set(dropped)) == 2
    assert len(maps()) == 2
    del views
    gc.collect()
    assert not maps()
    assert not fds()


def test_a_listener_that_fails_does_not_keep_memory_at_close() -> None:
    slab = Slab(16 * PAGE, extent_nbytes=4 * PAGE)
    assert slab.take(3 * PAGE) is not None
    assert slab.take(PAGE) is not None

    def fail(extent: Extent) -> None:
        raise RuntimeError("the driver is gone")

    slab.on_drop = fail
    with pytest.raises(RuntimeError, match="driver"):
        slab.close()
    assert not maps()
    assert not fds()


@pytest.mark.parametrize("capacity", [0, -1, PAGE - 1])
def test_a_capacity_without_room_for_a_page_is_refused(capacity: int) -> None:
    with pytest.raises(CapacityError, match=str(capacity)):
        Slab(capacity)


@pytest.mark.parametrize("capacity", [PAGE, 65 * PAGE, 1 << 20, (1 << 26) + PAGE, 65 << 20, 1 << 34])
def test_default_extents_are_whole_pages_within_the_capacity(capacity: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "host_limits", list)
    slab = Slab(capacity)
    assert PAGE <= slab.extent_nbytes <= min(capacity, buffers.MAX_EXTENT_NBYTES)
    assert slab.extent_nbytes % PAGE == 0


# More than there is.


@pytest.mark.parametrize("source", ["this host's memory", "the control group"])
def test_more_than_a_limit_is_refused_with_both_numbers_before_allocation(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "host_limits", lambda: [("roomy", 1 << 50), (source, 1_000_000)])
    monkeypatch.setattr(buffers, "Extent", None)
    with pytest.raises(CapacityError) as caught:
        Slab(1_000_001)
    for part in ("1000001", "1000000", source):
        assert part in str(caught.value)


def test_exactly_the_limit_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "host_limits", lambda: [("this host's memory", 1_000_000)])
    check_host_memory(1_000_000)


def test_the_hosts_memory_is_a_limit_here() -> None:
    limits = dict(host_limits())
    assert limits["this host's memory"] > 1 << 20
    with pytest.raises(CapacityError):
        check_host_memory(1 << 60)


def test_every_control_group_above_this_process_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unified, legacy = tmp_path / "unified", tmp_path / "memory"
    for folder, name, text in (
        (unified / "a/b", "memory.max", "3000"),
        (unified / "a", "memory.max", "max"),
        (unified, "memory.max", "5000\n"),
        (legacy / "job", "memory.limit_in_bytes", "4000"),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    listing = tmp_path / "cgroup"
    listing.write_text("12:cpu,cpuacct:/elsewhere\n4:memory:/job\n0::/a/b\n")
    monkeypatch.setattr(buffers, "_CGROUP", (listing, unified, legacy))
    limits = [nbytes for source, nbytes in host_limits() if source == "the control group"]
    assert sorted(limits) == [3000, 4000, 5000]
    listing.unlink()  # a kernel without groups, or a container that shows only its own root
    assert [nbytes for source, nbytes in host_limits() if source == "the control group"] == [5000]


# Slots never overlap.


class SlotMachine(RuleBasedStateMachine):
    """Takes and gives in any order: slots are disjoint, keep their bytes, and the total holds."""

    @initialize(capacity=st.integers(1, 40), extent=st.integers(1, 20))
    def open(self, capacity: int, extent: int) -> None:
        self.slab = Slab(capacity * PAGE, extent_nbytes=extent * PAGE)
        self.capacity = capacity * PAGE
        self.taken: dict[Slot, bytes] = {}
        self.mark = 0

    @rule(nbytes=st.integers(1, 12 * PAGE))
    def take(self, nbytes: int) -> None:
        slot = self.slab.take(nbytes)
        if slot is None:
            return
        assert slot.nbytes >= nbytes
        self.mark += 1
        pattern = self.mark.to_bytes(8, "little")
        view = self.slab.view(slot)
        assert len(view) == slot.nbytes
        view[:] = pattern * (slot.nbytes // 8)
        self.taken[slot] = pattern

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.taken, key=lambda s: (s.extent_id, s.offset))))
        del self.taken[slot]
        self.slab.give(slot)

    @precondition(lambda self: not self.taken)
    @rule()
    def an_empty_slab_has_room_for_all_of_its_capacity(self) -> None:
        slot = self.slab.take(self.capacity)
        assert slot is not None
        self.slab.give(slot)

    @invariant()
    def slots_keep_what_was_written(self) -> None:
        for slot, pattern in getattr(self, "taken", {}).items():
            assert bytes(self.slab.view(slot)) == pattern * (slot.nbytes // 8)

    @invariant()
    def the_total_holds(self) -> None:
        if hasattr(self, "slab"):
            assert self.slab.used_nbytes == sum(e.nbytes for e in self.slab.extents.values()) <= self.capacity
            assert len(maps()) == len(self.slab.extents)
            held = sum(e.slots - len(e.free) for e in self.slab.extents.values())
            assert held == len(self.taken)

    def teardown(self) -> None:
        if hasattr(self, "slab"):
            self.slab.close()
        assert not maps()


TestSlots = SlotMachine.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_prefaulting_while_the_slab_closes_touches_no_memory_that_is_gone() -> None:
    for _ in range(20):
        slab = Slab(32 << 20, extent_nbytes=16 << 20)
        started = threading.Event()
        threads: list[threading.Thread] = []

        def grow(extent: Extent, started: threading.Event = started, threads: list[threading.Thread] = threads) -> None:
            def run() -> None:
                started.set()
                extent.prefault()

            threads.append(threading.Thread(target=run))
            threads[-1].start()

        slab.on_grow = grow
        assert slab.take(PAGE) is not None
        assert started.wait(10)
        slab.close()
        for thread in threads:
            thread.join(10)
        gc.collect()
        assert not maps()


def test_extents_are_spread_over_numa_nodes_where_there_are_several(monkeypatch):
    """A stand-in for libnuma: this host may have one node."""
    calls = []

    class Library:
        def numa_interleave_memory(self, address, nbytes, nodes):
            calls.append((address.value, nbytes.value))

    class NumaNodes(ctypes.c_void_p):
        @classmethod
        def in_dll(cls, library, name):
            assert name == "numa_all_nodes_ptr"
            return cls()

    monkeypatch.setattr(buffers, "_libnuma", Library)
    monkeypatch.setattr(buffers.ctypes, "c_void_p", NumaNodes)
    slab = Slab(1 << 20)
    slot = slab.take(4096)
    extent = slab.extents[slot.extent_id]
    assert calls == [(extent.address, extent.nbytes)]
    slab.close()
