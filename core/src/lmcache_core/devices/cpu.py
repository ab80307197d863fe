"""The device of engines that compute on the CPU: numpy copies that release the GIL."""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ..blocks import check_targets, checked_block_ids
from ..device import Device, DeviceRecord, DoneFence, Fence, Pages, Probe
from ..errors import DeviceError
from ..layout import PAGE_NBYTES, Layout, Region

_MAX_COPY_THREADS: Final = 4
_SHARED_NBYTES: Final = 8 << 20
_PIECE_NBYTES: Final = 32 << 10
"""Below it, threads would take turns with the GIL rather than copy at the same time."""
_STACK_NBYTES: Final = 4 << 20
"""Layers at equal distances are copied together up to so much: between two copies a thread waits for the GIL."""
_LONG_S: Final = 75e-6
"""After a copy as long as this, whoever waits for the GIL has had it; a shorter one is over before another wakes up."""
_AT_MOST_S: Final = 600e-6
"""How long that may go on."""
_NAP_S: Final = 1e-6
"""Some 60 us by the kernel's clock."""
_WORDS_NBYTES: Final = 1 << 20


class HostRecord(DeviceRecord):
    """The CPU's own memory is the host's: page-aligned, for whoever reads files into it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        try:
            self._view = memoryview(mmap.mmap(-1, nbytes))
        except OSError as error:
            raise DeviceError(f"no {nbytes} bytes of host memory: {error}") from error

    @property
    def memory(self) -> memoryview:
        return self._view

    def payload(self, nbytes: int) -> memoryview:
        return self._view[PAGE_NBYTES : PAGE_NBYTES + nbytes]

    def read_header(self) -> memoryview:
        return memoryview(bytes(self._view[:PAGE_NBYTES]))

    def write_header(self, page: memoryview) -> None:
        self._view[:PAGE_NBYTES] = page


@cache
def _is_amd() -> bool:
    try:
        with open("/proc/cpuinfo") as file:
            return "AuthenticAMD" in file.read(4096)
    except OSError:
        return False


def _copy_run(target: Any, source: Any) -> None:
    """`np.copyto` of bytes; large ones on AMD by a loop of numpy's, where the C library's `rep movsb` is slower."""
    words = target.nbytes >= _WORDS_NBYTES and target.shape[-1] % 8 == 0 and _is_amd()
    if words and _address(target) % 8 == _address(source) % 8 == 0:
        np.bitwise_or(source.view(np.uint64), np.uint64(0), out=target.view(np.uint64))
    else:
        np.copyto(target, source)


class CpuDevice(Device):
    """Pages are numpy arrays in host memory.  Copies are complete when a call returns."""

    api_version = (1, 0)
    torch_type = "cpu"

    def __init__(self, copy_threads: int | None = None) -> None:
        self._copy_threads = copy_threads or min(_MAX_COPY_THREADS, os.cpu_count() or 1)
        self._helpers: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            helpers, self._helpers = self._helpers, None
        if helpers is not None:
            helpers.shutdown()

    @classmethod
    def probe(cls) -> Probe:
        return Probe(1)

    def staging(self, nbytes: int, pages: Pages) -> DeviceRecord:
        return HostRecord(nbytes)

    def gather(
        self,
        pages: Pages,
        block_ids: Sequence[int],
        layout: Layout,
        out: Sequence[memoryview],
        *,
        layers: range | None = None,
        after: Fence | None = None,
    ) -> Fence:
        ids = _checked(pages, block_ids, layout, out, layers)
        if after is not None:
            after.wait()

        blocks = layout.blocks(layout.regions[0])
        chunks = _Chunks(ids, blocks, 0, len(out))
        targets = [np.frombuffer(buffer, np.uint8) for buffer in out]

        def copy(plane: _Plane, index: int) -> None:
            chunk_ids, run = chunks[index]
            nbytes = plane.region.block_nbytes
            target = targets[index][plane.offset : plane.offset + plane.layers * blocks * nbytes]
            if plane.rows is None:
                _each_block(plane.page, chunk_ids, target, plane.region, to_page=False)
            elif run is not None:
                _copy_run(target.reshape(plane.layers, blocks, nbytes), plane.run(run))
            else:
                flat = plane.rows.reshape(-1).view(np.dtype((np.void, nbytes)))  # one element a block
                np.take(flat, plane.ids(chunk_ids).reshape(-1), out=target.view(flat.dtype), mode="clip")

        self._share(copy, _planes(pages, layout, layers), len(out), layout.nbytes * len(out))
        return DoneFence()

    def scatter(
        self,
        src: Sequence[memoryview],
        layout: Layout,
        pages: Pages,
        block_ids: Sequence[int],
        *,
        layers: range | None = None,
        skip_blocks: int = 0,
        after: Fence | None = None,
    ) -> Fence:
        ids = _checked(pages, block_ids, layout, src, layers)
        check_targets(ids, layout, skip_blocks)
        if after is not None:
            after.wait()

        blocks = layout.blocks(layout.regions[0])
        chunks = _Chunks(ids, blocks, skip_blocks, len(src))
        sources = [np.frombuffer(buffer, np.uint8) for buffer in src]

        def copy(plane: _Plane, index: int) -> None:
            chunk_ids, run = chunks[index]
            nbytes = plane.region.block_nbytes
            whole = sources[index][plane.offset : plane.offset + plane.layers * blocks * nbytes]
            source = whole.reshape(plane.layers, blocks, nbytes)[:, blocks - len(chunk_ids) :]
            if plane.rows is None:
                _each_block(plane.page, chunk_ids, source.reshape(-1), plane.region, to_page=True)
            elif run is not None:
                _copy_run(plane.run(run), source)
            elif len(chunk_ids):
                plane.rows[plane.ids(chunk_ids)] = source

        self._share(copy, _planes(pages, layout, layers), len(src), layout.nbytes * len(src))
        return DoneFence()

    def _share(self, copy: Callable[[_Plane, int], None], planes: list[_Plane], chunks: int, nbytes: int) -> None:
        """Copy every piece: large copies on several threads, since one cannot use the memory's whole bandwidth.

        Pieces, a plane of a chunk, are made up one by one: a list of thousands would be made without letting go of the
        GIL.
        """
        pieces = len(planes) * chunks
        shared = nbytes >= _SHARED_NBYTES and nbytes // max(pieces, 1) >= _PIECE_NBYTES
        threads = min(self._copy_threads, pieces) if shared else 1

        numbers = itertools.count()  # shared: who is slowed by others takes fewer pieces

        def run() -> None:
            before = let_go = time.perf_counter()
            while (number := next(numbers)) < pieces:
                copy(planes[number // chunks], number % chunks)
                now = time.perf_counter()
                if now - before > _LONG_S:
                    let_go = now
                elif now - let_go > _AT_MOST_S:
                    time.sleep(_NAP_S)
                    now = let_go = time.perf_counter()
                before = now

        if threads == 1:
            run()
            return
        with self._lock:
            if self._helpers is None:
                self._helpers = ThreadPoolExecutor(self._copy_threads - 1, "lmcache-copy")
            others = [self._helpers.submit(run) for _ in range(1, threads)]
        try:
            run()
        finally:
            wait(others)
        for other in others:
            other.result()


def _checked(
    pages: Pages, block_ids: Sequence[int], layout: Layout, buffers: Sequence[memoryview], layers: range | None
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The ids as an array, after everything that "clip" would hide and what would fail half-way."""
    ids = checked_block_ids(pages, block_ids, layout, buffers, layers)
    low, high = (int(ids.min()), int(ids.max())) if len(ids) else (0, -1)
    for region, planes in zip(layout.regions, pages, strict=True):
        if len(planes) != region.layers:
            raise DeviceError(f"region {region.name!r}: {len(planes)} layers of pages, the layout has {region.layers}")
        for page in planes:
            if page[:1].nbytes not in (region.block_nbytes, 0):
                raise DeviceError(
                    f"region {region.name!r}: blocks of {page[:1].nbytes} bytes, the layout has {region.block_nbytes}"
                )
            if len(ids) and not 0 <= low <= high < len(page):
                raise DeviceError(f"block ids {low} to {high}, region {region.name!r} has {len(page)} blocks")
    return ids


class _Plane(NamedTuple):
    """Pages of one layer, or of several at equal distances, and where they are in a chunk."""

    region: Region
    page: Any
    rows: Any
    """Of bytes, a block each: those of all layers and whatever lies between; None where blocks are not contiguous."""
    offset: int
    layers: int
    distance: int
    """In rows, from one layer to the next."""

    def ids(self, chunk_ids: Any) -> Any:
        """The rows of a chunk's blocks, for each layer."""
        return np.arange(self.layers)[:, None] * self.distance + chunk_ids

    def run(self, run: slice) -> Any:
        """Blocks that are neighbours, of each layer."""
        first = self.rows[run]
        strides = (self.distance * self.region.block_nbytes, *first.strides)
        return as_strided(first, (self.layers, *first.shape), strides)


def _planes(pages: Pages, layout: Layout, layers: range | None) -> list[_Plane]:
    """What is wanted, in the order of a chunk; layers that lie alike come together, as many as `_STACK_NBYTES` says."""
    planes: list[_Plane] = []
    start = 0
    for region, arrays in zip(layout.regions, pages, strict=True):
        nbytes = region.block_nbytes
        step = layout.blocks(region) * nbytes
        layer = 0
        while layer < region.layers:
            if layers is not None and layer not in layers:
                layer += 1
                continue
            page = arrays[layer]
            rows, count, distance = _bytes(page, nbytes), 1, 0
            if rows is not None:
                most = min(region.layers - layer, max(1, _STACK_NBYTES // step))
                if layers is not None:
                    most = next((more for more in range(1, most) if layer + more not in layers), most)
                count, distance = _alike(arrays[layer : layer + most], nbytes)
                if count > 1:
                    rows = as_strided(rows, ((count - 1) * distance + len(page), nbytes))
            planes.append(_Plane(region, page, rows, start + layer * step, count, distance))
            layer += count
        start += region.layers * step
    return planes


def _alike(arrays: Sequence[Any], nbytes: int) -> tuple[int, int]:
    """How many of the first arrays are of one kind and at equal distances, and the distance in blocks of `nbytes`."""
    address, kind = _address(arrays[0]), _kind(arrays[0])
    distance, rest = divmod(_address(arrays[1]) - address, nbytes) if len(arrays) > 1 else (0, 0)
    if rest or distance < max(len(arrays[0]), 1):
        return 1, 0
    for count, array in enumerate(arrays):
        if _address(array) != address + count * distance * nbytes or _kind(array) != kind:
            return count, distance
    return len(arrays), distance


def _kind(page: Any) -> tuple[Any, ...]:
    return page.shape, page.strides, page.dtype, page.flags.writeable


def _address(page: Any) -> int:
    address: int = page.__array_interface__["data"][0]
    return address


class _Chunks:
    """The block ids of each chunk, less those skipped, and the run that they are if they are neighbours."""

    def __init__(self, ids: Any, blocks: int, skip_blocks: int, count: int) -> None:
        self._ids = ids
        self._blocks = blocks
        self._skip_blocks = skip_blocks
        self._found: list[tuple[Any, slice | None] | None] = [None] * count

    def __getitem__(self, index: int) -> tuple[Any, slice | None]:
        found = self._found[index]
        if found is None:  # two threads may find the same
            start = index * self._blocks + (0 if index else self._skip_blocks)
            own = self._ids[start : (index + 1) * self._blocks]
            neighbours = len(own) > 0 and bool((np.diff(own) == 1).all())
            found = self._found[index] = own, slice(int(own[0]), int(own[-1]) + 1) if neighbours else None
        return found


def _bytes(page: Any, block_nbytes: int) -> Any:
    """`page` as rows of bytes, or None where its blocks are not contiguous.

    For assignments, which hold the GIL below 500 elements: an opaque block would count as one, however large.
    """
    if not page.flags.c_contiguous:
        return None
    return page.reshape(-1).view(np.uint8).reshape(-1, block_nbytes)


def _each_block(page: Any, ids: Any, flat: Any, region: Region, *, to_page: bool) -> None:
    for index, block in enumerate(ids):
        there = page[block, ...]  # a view, also where a block is one element
        here = (
            flat[index * region.block_nbytes : (index + 1) * region.block_nbytes].view(page.dtype).reshape(there.shape)
        )
        if to_page:
            np.copyto(there, here)
        else:
            np.copyto(here, there)
