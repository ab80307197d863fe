"""vLLM's KV tensors as the pages that a device copies: raw bytes, whole blocks, no copy."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from lmcache_core import Layout, NamespaceError, Pages


def pages_of(caches: Mapping[str, torch.Tensor], layer_names: Sequence[str], layout: Layout, num_blocks: int) -> Pages:
    """The blocks of a group's layers in the form of `layout`: all layers of a block in one view, or layer by layer.

    Inside a block the bytes are the attention kernel's own affair (on the CPU its keys lie transposed).
    """
    (region,) = layout.regions
    page = region.block_nbytes * region.layers // len(layer_names)
    views = [_blocks(caches[name], num_blocks, page) for name in layer_names]
    if region.layers == len(views):
        return [[_as_array(view) for view in views]]
    first = views[0]
    starts = [view.storage_offset() for view in views]
    steps = {b - a for a, b in itertools.pairwise(starts)}
    same = {(view.untyped_storage().data_ptr(), view.stride(0)) for view in views}
    if len(steps) != 1 or len(same) != 1:
        raise NamespaceError("KV cache layout", "the layers do not lie where vLLM's configuration says")
    fused = first.as_strided((num_blocks, len(views), page), (first.stride(0), steps.pop(), 1))
    return [[_as_array(fused)]]


def _blocks(cache: torch.Tensor, num_blocks: int, page: int) -> torch.Tensor:
    """One layer as `[block, byte]`; kernels that split a block into smaller ones see the same bytes."""
    if cache.shape[0] % num_blocks:
        raise NamespaceError("KV cache layout", f"{cache.shape[0]} kernel blocks for {num_blocks} blocks")
    size = cache.element_size()
    stride = cache.stride(0) * size * (cache.shape[0] // num_blocks)
    if stride < page:
        raise NamespaceError("KV cache layout", f"blocks {stride} bytes apart are too small for {page} bytes")
    raw = torch.empty(0, dtype=torch.uint8, device=cache.device)
    return raw.set_(cache.untyped_storage(), cache.storage_offset() * size, (num_blocks, page), (stride, 1))


def _as_array(view: torch.Tensor) -> Any:
    """Host memory as numpy, which core's CPU device copies; a device plugin takes the tensor itself."""
    if view.device.type != "cpu":
        return view
    array: np.ndarray[Any, Any] = view.numpy()
    return array
