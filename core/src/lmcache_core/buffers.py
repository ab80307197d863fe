"""Host memory that chunks live in and travel through: extents, shared or private, divided into slots of one size."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np

from .errors import CapacityError
from .forks import not_for_children
from .layout import PAGE_NBYTES, page_align

MAX_EXTENT_NBYTES: Final = 1 << 30
_HUGE_PAGE_NBYTES: Final = 2 << 20
_PREFAULT_STEP_NBYTES: Final = 2 << 20
"""Whoever maps memory or starts a thread meanwhile waits for one step."""
_MADV_POPULATE_WRITE: Final = 23
_F_SEAL_SHRINK_GROW: Final = 0x0002 | 0x0004
_CGROUP: Final = (Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory"))
_libc = ctypes.CDLL(None, use_errno=True)  # a ctypes call releases the GIL, mmap.madvise does not


def copy_bytes(source: memoryview | bytes, target: memoryview) -> None:
    """Copy `source` over the whole of `target`, equally long, without holding the GIL.

    The one place that copies payload: `target[:] = source` and `bytes(source)` stop every other thread meanwhile.
    """
    into, data = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
    if len(into) != len(data):  # numpy would repeat a single byte
        raise ValueError(f"a copy of {len(data)} bytes over {len(into)}")
    np.copyto(into, data)


def populate(view: memoryview, address: int, stop: Callable[[], bool]) -> None:
    """Have the kernel back every page of a map, and map it, in steps until `stop`; the GIL is free meanwhile.

    `view` is all of the map, which stays while we hold it.
    """
    for start in range(0, view.nbytes, _PREFAULT_STEP_NBYTES):
        if stop():
            return
        step = min(_PREFAULT_STEP_NBYTES, view.nbytes - start)
        if _libc.madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(step), _MADV_POPULATE_WRITE):
            return  # an old kernel: pages come at first touch


@dataclass(frozen=True, slots=True)
class Slot:
    """One place in an extent: plain data, which may cross processes."""

    extent_id: int
    offset: int
    nbytes: int


class Extent:
    """One map, of a sealed memfd if it is `shared`; the unit of prefault, pinning and size class.

    A private one needs no descriptor, and has huge pages where the kernel gives them to a program that asks; those of
    shared memory have a switch of their own, which is off by default.
    """

    __slots__ = (
        "_fd", "_mmap", "address", "dropped", "extent_id", "free", "last_used", "nbytes", "slot_nbytes", "slots",
        "view",
    )  # fmt: skip

    def __init__(self, extent_id: int, nbytes: int, *, shared: bool = True) -> None:
        self.dropped = False
        self.extent_id = extent_id
        self.nbytes = nbytes
        self._fd: int | None = None
        if shared:
            self._fd = os.memfd_create(f"lmcache-extent-{extent_id}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(self._fd, nbytes)
                fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _F_SEAL_SHRINK_GROW)
                self._mmap = mmap.mmap(self._fd, nbytes)
            except BaseException:
                os.close(self._fd)
                raise
        else:
            self._mmap = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        not_for_children(self._mmap)
        if nbytes >= _HUGE_PAGE_NBYTES:
            try:
                self._mmap.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # a kernel built without them: small pages do as well
        self.view = memoryview(self._mmap)
        self.address = int(np.frombuffer(self._mmap, np.uint8).__array_interface__["data"][0])
        _interleave(self.address, nbytes)
        self.slot_nbytes = 0
        self.slots = 0
        self.free: list[int] = []
        self.last_used = 0

    @property
    def fd(self) -> int:
        """Of shared memory, for another process to map."""
        if self._fd is None:
            raise RuntimeError(f"extent {self.extent_id} has no descriptor: it is private memory, or closed")
        return self._fd

    def divide(self, slot_nbytes: int) -> None:
        """Make this empty extent one of slots of `slot_nbytes`."""
        if len(self.free) != self.slots:
            raise RuntimeError(f"extent {self.extent_id} has slots in use and cannot change its size class")
        self.slot_nbytes = slot_nbytes
        self.slots = self.nbytes // slot_nbytes
        self.free = [index * slot_nbytes for index in reversed(range(self.slots))]

    def prefault(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Have the kernel back every page now; see `populate`."""
        populate(self.view, self.address, stop)

    def close(self) -> None:
        """Give up the descriptor and our reference: the map goes when the last view of it does."""
        self.close_fd()
        self.view = memoryview(b"")
        del self._mmap

    def close_fd(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class Slab:
    """The host memory of a cache: extents up to a total, `shared` if other processes are to map them.

    Called under its pool's lock, it needs none of its own.
    """

    def __init__(self, capacity_nbytes: int, extent_nbytes: int | None = None, *, shared: bool = True) -> None:
        if capacity_nbytes < PAGE_NBYTES:
            raise CapacityError(f"a capacity of {capacity_nbytes} bytes has no room for a page of {PAGE_NBYTES}")
        check_host_memory(capacity_nbytes)
        self.capacity_nbytes = capacity_nbytes
        self.extent_nbytes = extent_nbytes or _default_extent(capacity_nbytes)
        self.extents: dict[int, Extent] = {}
        self._shared = shared
        self.used_nbytes = 0
        """Sum of the extents, which is what the kernel may have to back."""
        self.on_map: Callable[[Extent], None] = lambda extent: None
        self.on_unmap: Callable[[Extent], None] = lambda extent: None
        """Before the first use of an extent, and after the last."""
        self.on_grow: Callable[[Extent], None] = lambda extent: None
        self.on_drop: Callable[[Extent], None] = lambda extent: None
        self._next_id = 0

    def take(self, nbytes: int) -> Slot | None:
        """A slot for `nbytes` from an extent of that class, a free one, or a new one; `None` when all are in use."""
        slot_nbytes = page_align(nbytes)
        empty: Extent | None = None
        for extent in self.extents.values():
            if extent.slot_nbytes == slot_nbytes:
                if extent.free:
                    return Slot(extent.extent_id, extent.free.pop(), slot_nbytes)
            elif len(extent.free) == extent.slots and extent.nbytes >= slot_nbytes:
                empty = extent
        if empty is None:
            empty = self._grow(slot_nbytes)
        if empty is None:
            return None
        empty.divide(slot_nbytes)
        return Slot(empty.extent_id, empty.free.pop(), slot_nbytes)

    def give(self, slot: Slot) -> None:
        """Return a slot; nothing may read or write it any more."""
        self.extents[slot.extent_id].free.append(slot.offset)

    def view(self, slot: Slot) -> memoryview:
        return self.extents[slot.extent_id].view[slot.offset : slot.offset + slot.nbytes]

    def fits(self, nbytes: int) -> bool:
        """Whether a record of `nbytes` could ever have a slot."""
        return page_align(nbytes) <= self.capacity_nbytes

    def others(self, slot_nbytes: int) -> Iterator[Extent]:
        """Extents of other size classes, least recently used first: empty, they can hold such a slot or make room."""
        fitting = (e for e in self.extents.values() if e.slot_nbytes != slot_nbytes)
        yield from sorted(fitting, key=lambda extent: extent.last_used)

    def close(self) -> None:
        """Drop every extent.  Twice is fine."""
        with ExitStack() as stack:  # goes on when a listener raises
            for extent in self.extents.values():
                stack.callback(self._forget, extent)

    def drop(self, extent: Extent) -> None:
        """Give an empty extent back to the kernel, so that a larger one may be made."""
        if len(extent.free) != extent.slots:
            raise RuntimeError(f"extent {extent.extent_id} has slots in use and cannot be dropped")
        self._forget(extent)

    def _forget(self, extent: Extent) -> None:
        del self.extents[extent.extent_id]
        self.used_nbytes -= extent.nbytes
        with ExitStack() as stack:  # goes on when a listener raises
            stack.callback(extent.close)
            stack.callback(self.on_unmap, extent)
            self.on_drop(extent)

    def _grow(self, slot_nbytes: int) -> Extent | None:
        room = self.capacity_nbytes - self.used_nbytes
        if room < slot_nbytes:
            empty = [e for e in self.extents.values() if len(e.free) == e.slots]
            if room + sum(e.nbytes for e in empty) < slot_nbytes:
                return None
            while room < slot_nbytes:
                room += empty[-1].nbytes
                self.drop(empty.pop())
        nbytes = min(max(self.extent_nbytes, slot_nbytes), room)
        nbytes -= nbytes % slot_nbytes
        if not nbytes:
            return None
        extent = Extent(self._next_id, nbytes, shared=self._shared)
        self._next_id += 1
        self.extents[extent.extent_id] = extent
        self.used_nbytes += nbytes
        self.on_map(extent)
        self.on_grow(extent)
        return extent


@cache
def _libnuma() -> ctypes.CDLL | None:
    """libnuma, where it is installed and the host has more than one node."""
    try:
        library = ctypes.CDLL("libnuma.so.1")
    except OSError:
        return None
    return library if library.numa_available() >= 0 and library.numa_max_node() > 0 else None


def _interleave(address: int, nbytes: int) -> None:
    """Spread an extent over the NUMA nodes: its readers run on all of them."""
    library = _libnuma()
    if library is not None:
        nodes = ctypes.c_void_p.in_dll(library, "numa_all_nodes_ptr")
        library.numa_interleave_memory(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), nodes)


def check_host_memory(capacity_nbytes: int) -> None:
    """Raise CapacityError, before anything is allocated, for more than this host or its control group has."""
    for source, limit in host_limits():
        if capacity_nbytes > limit:
            raise CapacityError(
                f"a capacity of {capacity_nbytes} bytes ({capacity_nbytes / 2**30:.2f} GiB) was asked for, "
                f"{source} allows {limit} bytes ({limit / 2**30:.2f} GiB): lower `capacity`"
            )


def host_limits() -> list[tuple[str, int]]:
    """What bounds memory here, each with its name."""
    limits = [("this host's memory", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))]
    for path in _group_limits():
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            limits.append(("the control group", int(text)))
    return limits


def _group_limits() -> Iterator[Path]:
    """Files that may hold a limit of this process's control group or of one above it, in both versions of groups."""
    listing, unified, legacy = _CGROUP
    try:
        lines = listing.read_text().splitlines()
    except OSError:
        lines = []
    groups = {(unified, "memory.max"): "/", (legacy, "memory.limit_in_bytes"): "/"}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            groups[unified, "memory.max"] = path
        elif "memory" in controllers.split(","):
            groups[legacy, "memory.limit_in_bytes"] = path
    for (root, name), path in groups.items():
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            yield root.joinpath(*parts[:depth], name)


def _default_extent(capacity_nbytes: int) -> int:
    """A sixteenth, so that several size classes find room, in whole huge pages where that is possible."""
    nbytes = min(MAX_EXTENT_NBYTES, max(capacity_nbytes // 16, 1))
    unit = _HUGE_PAGE_NBYTES if nbytes >= _HUGE_PAGE_NBYTES else 4096
    return max(nbytes - nbytes % unit, unit)
