"""The device of engines that compute on the CPU: numpy copies that release the GIL."""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
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
                np.copyto(target.reshape(plane.layers, blocks, nbytes), plane.run(run))
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
                np.copyto(plane.run(run), source)
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
    """Of bytes, a block each, from the first layer on; None where blocks are not contiguous."""
    offset: int
    layers: int = 1
    distance: int = 0
    """In rows, from one layer to the next."""

    def with_next(self, other: _Plane, step: int) -> _Plane | None:
        """The same and one layer more, if that comes next in a chunk and lies alike, as far on as those before it.

        `step` is how many bytes a layer has in a chunk.
        """
        page, nbytes = self.page, self.region.block_nbytes
        if other.region is not self.region or other.offset != self.offset + self.layers * step:
            return None
        if (self.layers + 1) * step > _STACK_NBYTES or self.rows is None or other.rows is None:
            return None
        if _kind(page) != _kind(other.page):
            return None
        distance, rest = divmod(_address(other.page) - _address(page), self.layers * nbytes)
        if rest or distance < max(len(page), 1) or self.distance not in (0, distance):
            return None
        return self._replace(layers=self.layers + 1, distance=distance)

    def whole(self) -> _Plane:
        """The same with the rows of all its layers, and whatever lies between them."""
        if self.layers == 1:
            return self
        rows = (self.layers - 1) * self.distance + len(self.page)
        return self._replace(rows=as_strided(self.rows, (rows, self.region.block_nbytes)))

    def ids(self, chunk_ids: Any) -> Any:
        """The rows of a chunk's blocks, for each layer."""
        return np.arange(self.layers)[:, None] * self.distance + chunk_ids

    def run(self, run: slice) -> Any:
        """Blocks that are neighbours, of each layer."""
        first = self.rows[run]
        strides = (self.distance * self.region.block_nbytes, *first.strides)
        return as_strided(first, (self.layers, *first.shape), strides)


def _planes(pages: Pages, layout: Layout, layers: range | None) -> list[_Plane]:
    """What is wanted, in the order of a chunk."""
    planes: list[_Plane] = []
    offset = 0
    for region, arrays in zip(layout.regions, pages, strict=True):
        step = layout.blocks(region) * region.block_nbytes
        for layer, page in enumerate(arrays):
            if layers is None or layer in layers:
                plane = _Plane(region, page, _bytes(page, region.block_nbytes), offset)
                stack = planes[-1].with_next(plane, step) if planes else None
                if stack is None:
                    planes.append(plane)
                else:
                    planes[-1] = stack
            offset += step
    return [plane.whole() for plane in planes]


def _kind(page: Any) -> tuple[Any, ...]:
    return page.shape, page.dtype, page.flags.writeable


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
