"""A device of plugin API 1.0: pages are numpy arrays in host memory, copied block by block."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from lmcache_core import Device, DeviceError, DoneFence, Fence, Layout, Pages, Probe


class FrozenDevice(Device):
    """Called from several threads at once; keeps nothing between calls."""

    api_version = (1, 0)
    torch_type = "cpu"

    @classmethod
    def probe(cls) -> Probe:
        """Only where a test asks for it: `device: auto` must not find it on a machine that has it installed."""
        if os.environ.get("LMCACHE_TEST_FROZEN_DEVICE"):
            return Probe(1)
        return Probe(0, "LMCACHE_TEST_FROZEN_DEVICE is not set")

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
        _check(pages, block_ids, layout, len(out))
        if after is not None:
            after.wait()
        for place in _places(layout, block_ids, layers):
            page = pages[place.region][place.layer]
            _copy_out(page[place.block], out[place.buffer][place.start : place.stop])
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
        _check(pages, block_ids, layout, len(src))
        if after is not None:
            after.wait()
        for place in _places(layout, block_ids, layers):
            if place.number >= skip_blocks:
                page = pages[place.region][place.layer]
                _copy_in(src[place.buffer][place.start : place.stop], page[place.block])
        return DoneFence()


class _Place(NamedTuple):
    """One block to copy: where it lies in the engine's pages, and where in the buffers."""

    region: int
    layer: int
    block: int
    number: int
    buffer: int
    start: int
    stop: int


def _places(layout: Layout, block_ids: Sequence[int], layers: range | None) -> Iterator[_Place]:
    """A chunk is region by region, layer by layer, block by block; a layer has its place in any case."""
    offset = 0
    for number, region in enumerate(layout.regions):
        in_chunk = layout.blocks(region)
        for layer in range(region.layers):
            if layers is None or layer in layers:
                for index, block in enumerate(block_ids):
                    buffer, place = divmod(index, in_chunk)
                    start = offset + place * region.block_nbytes
                    stop = start + region.block_nbytes
                    yield _Place(number, layer, block, index, buffer, start, stop)
            offset += in_chunk * region.block_nbytes


def _check(pages: Pages, block_ids: Sequence[int], layout: Layout, buffers: int) -> None:
    """Everything that could be wrong, before anything is copied."""
    in_chunk = layout.blocks(layout.regions[0])
    if any(layout.blocks(region) != in_chunk for region in layout.regions):
        raise DeviceError("regions of one block size are needed")
    if len(block_ids) != buffers * in_chunk:
        raise DeviceError(f"{len(block_ids)} block ids for {buffers} chunks of {in_chunk} blocks")
    for region, planes in zip(layout.regions, pages, strict=True):
        if len(planes) != region.layers:
            raise DeviceError(f"{len(planes)} layers of pages, the layout has {region.layers}")
        for page in planes:
            if len(block_ids) and not 0 <= min(block_ids) <= max(block_ids) < len(page):
                raise DeviceError(f"no such block: {min(block_ids)} or {max(block_ids)}")


def _copy_out(block: Any, target: memoryview) -> None:
    """Bytes, never numbers: a NaN with a payload must come back as it was."""
    there = np.frombuffer(target, np.uint8).view(block.dtype).reshape(block.shape)
    np.copyto(there, block)


def _copy_in(source: memoryview, block: Any) -> None:
    here = np.frombuffer(source, np.uint8).view(block.dtype).reshape(block.shape)
    np.copyto(block, here)
