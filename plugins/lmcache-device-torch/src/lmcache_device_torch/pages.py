"""An engine's KV tensors as rows of whole numbers: what is copied are bits, whatever they mean."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lmcache_core import DeviceError, Layout, Pages, checked_block_ids

if TYPE_CHECKING:
    import torch

_INTEGERS = ((8, "int64"), (4, "int32"), (2, "int16"), (1, "uint8"))


def same_width(page: torch.Tensor) -> torch.Tensor:
    """The same memory as integers as wide as its elements, with any strides."""
    import torch

    return page.view(getattr(torch, dict(_INTEGERS)[page.element_size()]))


def widest(page: torch.Tensor) -> torch.Tensor:
    """The same memory as the widest integers that its strides and its place allow.

    Kernels copy element by element, so wide ones are fewer.
    """
    import torch

    page = same_width(page)
    size = page.element_size()
    if page.dim() < 2 or page.stride(-1) != 1:
        return page
    outer = [page.stride(axis) * size for axis in range(page.dim() - 1) if page.shape[axis] > 1]
    multiples = [page.shape[-1] * size, page.storage_offset() * size, page.data_ptr(), *outer]
    for width, name in _INTEGERS:
        if width > size and not any(number % width for number in multiples):
            return page.view(getattr(torch, name))
    return page


def host_bytes(buffer: memoryview | torch.Tensor) -> torch.Tensor:
    """A buffer of the slab as a tensor of bytes: no copy, and no complaint about one that is read-only."""
    import torch

    if isinstance(buffer, torch.Tensor):  # of a TorchRecord
        return buffer
    array = np.frombuffer(buffer, np.uint8)
    memory: Any = (ctypes.c_char * buffer.nbytes).from_address(array.ctypes.data)
    memory.kept = array  # as long as the tensor is
    return torch.frombuffer(memory, dtype=torch.uint8)


def as_arrays(pages: Pages) -> list[list[Any]]:
    """Tensors of the CPU as numpy arrays over the same memory."""
    return [[same_width(page).numpy() for page in planes] for planes in pages]


def checked(
    pages: Pages, block_ids: Sequence[int], layout: Layout, buffers: Sequence[memoryview], layers: range | None
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The ids as an array, after everything that a kernel would not notice, or only half-way."""
    ids = checked_block_ids(pages, block_ids, layout, buffers, layers)
    where = {page.device for planes in pages for page in planes}
    if len(where) > 1:
        raise DeviceError(f"pages on several devices: {', '.join(sorted(map(str, where)))}")
    low, high = (int(ids.min()), int(ids.max())) if len(ids) else (0, -1)
    for region, planes in zip(layout.regions, pages, strict=True):
        if len(planes) != region.layers:
            raise DeviceError(f"region {region.name!r}: {len(planes)} layers of pages, the layout has {region.layers}")
        for page in planes:
            nbytes = page[:1].numel() * page.element_size()
            if nbytes not in (region.block_nbytes, 0):
                raise DeviceError(
                    f"region {region.name!r}: blocks of {nbytes} bytes, the layout has {region.block_nbytes}"
                )
            if page.element_size() not in dict(_INTEGERS):
                raise DeviceError(
                    f"elements of {page.element_size()} bytes ({page.dtype}) cannot be copied as integers"
                )
            if not 0 <= low <= high + 1 or high >= len(page):
                raise DeviceError(f"block ids {low} to {high}, region {region.name!r} has {len(page)} blocks")
    return ids
