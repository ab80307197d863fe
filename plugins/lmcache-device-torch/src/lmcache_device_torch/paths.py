"""The ways on which blocks cross the link, behind one interface: each makes steps that a queue runs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from lmcache_core import Layout, Pages

from .geometry import Geometry, geometry_of
from .library import RuntimeLibrary
from .pages import host_bytes, widest
from .plan import Piece, Segment, segments
from .queues import Lane

if TYPE_CHECKING:
    import torch

Numbers = np.ndarray[Any, np.dtype[np.int64]]
Step = Callable[[Lane, "torch.Tensor"], None]
"""Work of a lane's queue; it is given the plan's table on the device."""
Reach = Callable[[int, int], int | None]
"""Pinned host memory (address, nbytes) as the device's kernels see it; None where it is not pinned."""
_FEWEST_NBYTES: Final = 1024
"""In one of the copies of a batch: with less, what a copy costs by itself is most of it."""
_BLOCK: Final = 1024
"""Most numbers that one turn of a program copies."""
_SMALLEST: Final = 32
_PROGRAMS: Final = 64
"""Enough to fill a link, and few beside those of the engine's kernels."""
_AXES: Final = 4
"""Inside a block, that the kernel can take."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One gather or scatter, checked."""

    to_host: bool
    pages: Pages
    ids: Numbers
    layout: Layout
    buffers: Sequence[memoryview | torch.Tensor]
    layers: range | None
    skip_blocks: int
    reach: Reach

    @property
    def blocks(self) -> int:
        """Of each chunk."""
        return self.layout.blocks(self.layout.regions[0])

    def places(self) -> list[tuple[int, int | None]]:
        """(address, the same as kernels see it) of each buffer; None for host memory that is not pinned."""
        found: list[tuple[int, int | None]] = []
        for buffer in self.buffers:
            if isinstance(buffer, memoryview):
                address = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
                found.append((address, self.reach(address, self.layout.nbytes)))
            else:  # of a TorchRecord
                found.append((buffer.data_ptr(), buffer.data_ptr()))
        return found

    def planes(self) -> Iterator[tuple[torch.Tensor, int, int]]:
        """(pages of one layer, its place in a chunk, bytes of a block) for each layer that is wanted."""
        offset = 0
        for region, pages in zip(self.layout.regions, self.pages, strict=True):
            for layer, page in enumerate(pages):
                if self.layers is None or layer in self.layers:
                    yield page, offset, region.block_nbytes
                offset += self.blocks * region.block_nbytes


@dataclass(frozen=True, slots=True)
class Plan:
    table: Numbers
    """What each queue that runs a step has on the device first; empty: nothing."""
    steps: Iterator[Step] | Sequence[Step]


class CopyPath(Protocol):
    def missing(self) -> str:
        """Why it cannot be used on this machine at all; empty where it can."""
        ...

    def plan(self, copy: Transfer) -> Plan | str:
        """The steps, or why this one cannot go this way."""
        ...


class Staged:
    """Torch's kernels bring blocks together in a staging buffer, which crosses the link in one large copy."""

    def __init__(self, staging_nbytes: int) -> None:
        self._staging_nbytes = staging_nbytes

    def missing(self) -> str:
        return ""

    def plan(self, copy: Transfer) -> Plan:
        hosts = [host_bytes(buffer) for buffer in copy.buffers]
        parts = segments(
            copy.layout, len(hosts), layers=copy.layers, skip_blocks=copy.skip_blocks, limit_nbytes=self._staging_nbytes
        )
        return Plan(copy.ids, (self._step(copy, part, hosts[part.buffer]) for part in parts))

    def _step(self, copy: Transfer, part: Segment, host: torch.Tensor) -> Step:
        def step(lane: Lane, ids: torch.Tensor) -> None:
            nbytes = part.stop - part.start
            staging = lane.staging(max(nbytes, self._staging_nbytes))[:nbytes]
            (_gather if copy.to_host else _scatter)(part.pieces, copy.pages, ids, staging, host[part.start : part.stop])

        return step


def _gather(
    pieces: Sequence[Piece], pages: Pages, ids: torch.Tensor, staging: torch.Tensor, host: torch.Tensor
) -> None:
    import torch

    for piece in pieces:
        page, staged = _matched(piece, pages, staging)
        torch.index_select(page, 0, ids[piece.first : piece.first + piece.count], out=staged)
    host.copy_(staging, non_blocking=True)


def _scatter(
    pieces: Sequence[Piece], pages: Pages, ids: torch.Tensor, staging: torch.Tensor, host: torch.Tensor
) -> None:
    staging.copy_(host, non_blocking=True)
    for piece in pieces:
        page, staged = _matched(piece, pages, staging)
        page.index_copy_(0, ids[piece.first : piece.first + piece.count], staged)


def _matched(piece: Piece, pages: Pages, staging: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The pages of one piece, and its place in the staging buffer as the same kind of blocks."""
    page = widest(pages[piece.region][piece.layer])
    shape = (piece.count, *page.shape[1:])
    nbytes = page.element_size()
    for size in shape:
        nbytes *= size
    return page, staging[piece.start : piece.start + nbytes].view(page.dtype).view(shape)


class Kernel:
    """A kernel reads and writes pinned memory itself: nothing is brought together first, no staging memory."""

    def __init__(self, library: RuntimeLibrary | None, *, block: int = _BLOCK, programs: int = _PROGRAMS) -> None:
        self._library = library
        self._block = block
        self._programs = programs

    def missing(self) -> str:
        if self._library is None:
            return "no way is known here to reach pinned memory from a kernel"
        return "" if importlib.util.find_spec("triton") is not None else "triton is not installed"

    def plan(self, copy: Transfer) -> Plan | str:
        places = copy.places()
        hosts = [reached for _, reached in places if reached is not None]
        if len(hosts) < len(places):
            return "host memory that is not pinned"
        groups: dict[tuple[Geometry, int, int], list[tuple[int, int]]] = {}
        for page, offset, nbytes in copy.planes():
            geometry = geometry_of(page)
            width = geometry.width(page.data_ptr(), offset, nbytes, *hosts)
            if len(geometry.as_integers(width)[0]) > _AXES:
                return f"blocks with {len(geometry.sizes)} axes"
            groups.setdefault((geometry, nbytes, width), []).append((page.data_ptr(), offset))
        table = [*copy.ids.tolist(), *hosts]
        steps = []
        for (geometry, nbytes, width), planes in groups.items():
            pages_at = len(table)
            table += [page for page, _ in planes]
            table += [offset for _, offset in planes]
            steps.append(self._step(copy, geometry, nbytes, width, pages_at, len(planes)))
        return Plan(np.array(table, np.int64), steps if len(copy.ids) else [])

    def _step(self, copy: Transfer, geometry: Geometry, nbytes: int, width: int, pages_at: int, planes: int) -> Step:
        sizes, strides = geometry.as_integers(width)
        axes, unit = len(sizes), strides[-1] == 1
        sizes = (*[1] * (_AXES - axes), *sizes)
        strides = (*[0] * (_AXES - axes), *strides)
        elements = nbytes // width
        block = min(self._block, max(_SMALLEST, 1 << (elements - 1).bit_length()))
        parts = -(-elements // block)
        items = planes * len(copy.buffers) * copy.blocks * parts

        def step(lane: Lane, table: torch.Tensor) -> None:
            from .kernel import TYPES

            self.launch(
                (min(items, self._programs),),
                table, pages_at, len(copy.ids), pages_at + planes, len(copy.buffers), copy.blocks, copy.skip_blocks,
                items, parts, elements, geometry.block_stride // width, *sizes[1:], *strides,
                TO_HOST=copy.to_host, UNIT=unit, AXES=axes, TYPE=TYPES[width], BLOCK=block,
            )  # fmt: skip

        return step

    def launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        from .kernel import copy_blocks

        copy_blocks[grid](*arguments, **constants)


class Batch:
    """One call of the runtime for thousands of copies, each of what lies in one piece on both sides."""

    def __init__(self, library: RuntimeLibrary | None, *, fewest_nbytes: int = _FEWEST_NBYTES) -> None:
        self._library = library
        self._fewest_nbytes = fewest_nbytes

    def missing(self) -> str:
        return self._library.without_batches() if self._library is not None else "no batched copy is known here"

    def plan(self, copy: Transfer) -> Plan | str:
        assert self._library is not None, "a path that is missing"
        places = copy.places()
        if any(reached is None for _, reached in places):
            return "host memory that is not pinned"
        there: list[Numbers] = []
        here: list[Numbers] = []
        sizes: list[Numbers] = []
        for page, offset, nbytes in copy.planes():
            geometry = geometry_of(page)
            run = geometry.run_nbytes
            if run < self._fewest_nbytes:
                return f"blocks in pieces of {run} bytes"
            starts = page.data_ptr() + copy.ids[:, None] * geometry.block_stride + np.array(geometry.runs)[None, :]
            there.append(starts.reshape(-1)[copy.skip_blocks * (nbytes // run) :])
            in_chunk = offset + np.arange(copy.blocks * (nbytes // run)) * run
            into = (np.array([address for address, _ in places], np.int64)[:, None] + in_chunk[None, :]).reshape(-1)
            here.append(into[copy.skip_blocks * (nbytes // run) :])
            sizes.append(np.full(len(there[-1]), run, np.int64))
        if not there or not len(copy.ids):
            return Plan(np.empty(0, np.int64), [])
        joined = _joined(np.concatenate(there), np.concatenate(here), np.concatenate(sizes))
        return Plan(np.empty(0, np.int64), [self._step(copy, *joined)])

    def _step(self, copy: Transfer, there: Numbers, here: Numbers, sizes: Numbers) -> Step:
        library = self._library
        assert library is not None
        ends = (here, there) if copy.to_host else (there, here)

        def step(lane: Lane, table: torch.Tensor) -> None:
            targets, sources = (each.view(np.uint64) for each in ends)
            library.copy_batch(targets, sources, sizes.view(np.uint64), lane.queue.handle)

        return step


def _joined(there: Numbers, here: Numbers, sizes: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Copies that continue each other on both sides are one."""
    apart = (there[1:] != there[:-1] + sizes[:-1]) | (here[1:] != here[:-1] + sizes[:-1])
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))
    return there[first], here[first], np.add.reduceat(sizes, first)
