"""Block ids of a copy, checked before a byte moves: for devices, whose kernels would not notice, or only half-way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .device import Pages
from .errors import DeviceError
from .layout import Layout

BlockIds = np.ndarray[Any, np.dtype[np.int64]]


def checked_block_ids(
    pages: Pages, block_ids: Sequence[int], layout: Layout, buffers: Sequence[memoryview], layers: range | None
) -> BlockIds:
    """The ids as an array, as many as the buffers need; DeviceError otherwise.

    Left to the device is what its kind of pages says: that they have each layer, the layout's bytes, and those blocks.
    """
    given = np.asarray(block_ids)
    if given.ndim != 1 or (len(given) and given.dtype.kind not in "iu"):
        raise DeviceError(f"block ids must be a flat row of whole numbers, got {given.dtype} of shape {given.shape}")
    ids = given.astype(np.int64)
    first = layout.regions[0]
    if any(region.block_tokens != first.block_tokens for region in layout.regions):
        raise DeviceError("regions of one block size are needed")
    if len(pages) != len(layout.regions):
        raise DeviceError(f"{len(pages)} regions of pages for a layout of {len(layout.regions)}")
    if len(ids) != len(buffers) * layout.blocks(first):
        raise DeviceError(f"{len(ids)} block ids for {len(buffers)} chunks of {layout.blocks(first)} blocks")
    for index, buffer in enumerate(buffers):
        if buffer.nbytes != layout.nbytes:
            raise DeviceError(f"buffer {index} has {buffer.nbytes} bytes, a chunk has {layout.nbytes}")
    most = max(region.layers for region in layout.regions)
    if layers and not (min(layers) >= 0 and max(layers) < most):
        raise DeviceError(f"layers {min(layers)} to {max(layers)} of a layout that has {most}")
    return ids


def check_targets(ids: BlockIds, layout: Layout, skip_blocks: int) -> None:
    """DeviceError unless each block that a scatter writes is written once."""
    if not 0 <= skip_blocks <= layout.blocks(layout.regions[0]):
        raise DeviceError(f"skip_blocks {skip_blocks} is not a number of blocks of the first chunk")
    if len(np.unique(ids[skip_blocks:])) != len(ids[skip_blocks:]):
        raise DeviceError("a block id occurs twice: two chunks would overwrite each other")
