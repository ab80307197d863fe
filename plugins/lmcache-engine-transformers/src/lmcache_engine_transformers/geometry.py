"""The shape of a model's KV, and its tensors seen as the pages that a cache copies."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from lmcache_core import Layout, Region

from .errors import Unsupported

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Numpy has no bfloat16 and no float8: bytes travel as integers of the same width."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Keys and values of every layer: heads, elements per head, element type, and where each layer lives."""

    k_heads: int
    k_dim: int
    v_heads: int
    v_dim: int
    dtype: torch.dtype
    devices: tuple[torch.device, ...]

    @property
    def layers(self) -> int:
        return len(self.devices)

    def layout(self, chunk_tokens: int) -> Layout:
        """A chunk is one block per layer of keys, then of values: `[heads, tokens, elements]`."""
        dtype = str(self.dtype).removeprefix("torch.")

        def region(name: str, heads: int, dim: int) -> Region:
            nbytes = heads * chunk_tokens * dim * self.dtype.itemsize
            return Region(
                name=name,
                layers=self.layers,
                block_tokens=chunk_tokens,
                block_nbytes=nbytes,
                dtype=dtype,
                packing=f"heads{heads}-tokens-elements{dim}",
            )

        return Layout(
            chunk_tokens=chunk_tokens,
            regions=(region("k", self.k_heads, self.k_dim), region("v", self.v_heads, self.v_dim)),
        )

    def allocate(self, tokens: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Host tensors for the keys and the values of each layer, not initialised."""
        shapes = ((1, self.k_heads, tokens, self.k_dim), (1, self.v_heads, tokens, self.v_dim))
        keys, values = ([torch.empty(shape, dtype=self.dtype) for _ in self.devices] for shape in shapes)
        return keys, values


def probe(model: Any) -> Geometry:
    """Run one token through `model` and look at its cache: right for every attention variant, unlike the config.

    Raises Unsupported when the model has layers whose KV of a prefix cannot be kept chunk by chunk.
    """
    config = model.config
    if config.is_encoder_decoder:
        raise Unsupported("model", "an encoder-decoder model; only decoder-only models have a prefix to reuse")
    cache = DynamicCache(config=config)
    _plain_layers(cache)
    if model.training:
        raise Unsupported("model", "in training mode, where dropout changes its KV; call model.eval() first")
    with torch.no_grad():
        token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
        model(input_ids=token, use_cache=True, **{cache_argument(model): cache})
    keys, values = tensors_of(cache, "model")
    shapes = {(tuple(k.shape), tuple(v.shape)) for k, v in zip(keys, values, strict=True)}
    dtypes = {tensor.dtype for tensor in (*keys, *values)}
    if len(shapes) != 1 or len(dtypes) != 1:
        raise Unsupported(
            "model", f"layers of several KV shapes or types: {sorted(shapes)}, {sorted(map(str, dtypes))}"
        )
    ((k_shape, v_shape),) = shapes
    (dtype,) = dtypes
    if len(k_shape) != 4 or k_shape[0] != 1 or k_shape[2] != 1 or v_shape[2] != 1:
        raise Unsupported("model", f"keys of one token have the shape {k_shape}, not [batch, heads, tokens, elements]")
    return Geometry(k_shape[1], k_shape[3], v_shape[1], v_shape[3], dtype, tuple(k.device for k in keys))


def cache_argument(model: Any) -> str:
    """What this release of transformers calls the cache argument: "cache", before 5.20 or so "past_key_values"."""
    names = inspect.signature(model.prepare_inputs_for_generation).parameters
    return "cache" if "cache" in names else "past_key_values"


def tensors_of(cache: Any, what: str = "cache") -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The keys and the values of each layer; Unsupported(what) unless all of them are kept, and nothing else."""
    if not isinstance(cache, DynamicCache):
        raise Unsupported(what, f"a {type(cache).__name__}; only a DynamicCache can be saved")
    keys, values = [], []
    for index, layer in enumerate(_plain_layers(cache)):
        if layer.keys is None or layer.values is None:
            raise Unsupported(what, f"layer {index} is empty")
        keys.append(layer.keys)
        values.append(layer.values)
    if not keys:
        raise Unsupported(what, "it has no layers")
    return keys, values


def checked_tensors(cache: Any, geometry: Geometry, tokens: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """`tensors_of(cache)`, or Unsupported unless they hold at least `tokens` tokens in the form of `geometry`."""
    keys, values = tensors_of(cache)
    if len(keys) != geometry.layers:
        raise Unsupported("cache", f"{len(keys)} layers where the model has {geometry.layers}")
    for name, tensors, heads, dim in (
        ("keys", keys, geometry.k_heads, geometry.k_dim),
        ("values", values, geometry.v_heads, geometry.v_dim),
    ):
        for index, tensor in enumerate(tensors):
            if tensor.dtype != geometry.dtype or tensor.shape[1::2] != (heads, dim) or tensor.shape[2] < tokens:
                raise Unsupported(
                    "cache",
                    f"{name} of layer {index} are {tensor.dtype} {tuple(tensor.shape)} where "
                    f"{geometry.dtype} [batch, {heads}, {tokens} or more, {dim}] is needed",
                )
    return keys, values


def pages_of(tensors: Sequence[torch.Tensor], chunk_tokens: int) -> list[np.ndarray]:
    """Each `[batch, heads, tokens, elements]` as an array `[chunk, heads, tokens x elements]` of its first row.

    A view where the tensor is in host memory with whole rows of elements, as DynamicCache makes them; else a copy.
    """
    return [_page(tensor.detach()[0], chunk_tokens) for tensor in tensors]


def filled_cache(model: Any, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> DynamicCache:
    """A DynamicCache that holds these tensors themselves: `update` would copy them once more."""
    cache = DynamicCache(config=model.config)
    for layer, k, v in zip(_plain_layers(cache), keys, values, strict=True):
        layer.lazy_initialization(k, v)
        layer.keys, layer.values = k, v
    return cache


def _page(row: torch.Tensor, chunk_tokens: int) -> np.ndarray:
    row = row.to("cpu")
    heads, tokens, dim = row.shape
    if row.stride(2) != 1 or row.stride(1) != dim:
        row = row.contiguous()
    chunks = tokens // chunk_tokens
    integers = row.view(_INTEGERS[row.element_size()])
    size = (chunks, heads, chunk_tokens * dim)
    return integers.as_strided(size, (chunk_tokens * dim, integers.stride(0), 1)).numpy()


def _plain_layers(cache: DynamicCache) -> list[DynamicLayer]:
    """The layers, if all are plain DynamicLayers: only those hold every token of a prefix, as keys and values alone."""
    layers = [layer for layer in cache.layers if type(layer) is DynamicLayer]
    if len(layers) != len(cache.layers):
        odd = [(index, type(x).__name__) for index, x in enumerate(cache.layers) if type(x) is not DynamicLayer]
        kinds = ", ".join(sorted({kind for _, kind in odd}))
        raise Unsupported(
            "model",
            f"{len(odd)} of {len(cache.layers)} layers, from layer {odd[0][0]} on, are of kind {kinds}: "
            "sliding-window, linear and shared layers do not keep the KV of every token, so no prefix can be restored",
        )
    return layers
