"""Which rectangle (layers x heads) of each layer group a rank holds, and the shape of its chunks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from lmcache_core import Family, Group, GroupKind, Layout, Model, NamespaceError, Region, Shard

_KINDS: Final = {
    "FullAttentionSpec": GroupKind.FULL,
    "MLAAttentionSpec": GroupKind.FULL,
    "SlidingWindowSpec": GroupKind.WINDOW,
}
"""By exact class: a subclass that is not known may keep something else in its blocks."""


@dataclass(frozen=True, slots=True)
class Rectangle:
    """One rank's part of one KV cache group of vLLM.  Picklable, free of vLLM's classes."""

    group: int
    kind: GroupKind
    window_tokens: int
    block_tokens: int
    layout: Layout
    layers: tuple[int, int]
    heads: tuple[int, int]
    draft: bool
    """Layers of a draft model, whose KV at the last token is a guess."""
    writer: bool
    """Of the ranks with the same bytes, the one that stores them."""

    def shard(self, family: Family) -> Shard:
        return Shard.of(family, self.layout, group=self.group, layers=self.layers, heads=self.heads)


def fitting_chunk(wanted: int, block_tokens: Sequence[int]) -> int:
    """The smallest whole number of every group's blocks that is at least `wanted` tokens."""
    unit = math.lcm(*block_tokens)
    return -(-wanted // unit) * unit


def check_groups(kv_cache_config: Any) -> None:
    """Raise NamespaceError for layer groups of which no prefix can be kept chunk by chunk."""
    allowed = getattr(kv_cache_config, "prefix_cacheable_group_ids", range(len(kv_cache_config.kv_cache_groups)))
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        kind = type(spec).__name__
        if kind not in _KINDS or index not in allowed:
            raise NamespaceError(f"KV cache group {index}", f"{kind} is not supported: no prefix of it can be restored")
        if getattr(spec, "tokens_per_state", 1) != 1 or getattr(spec, "non_causal", False):
            raise NamespaceError(f"KV cache group {index}", "compressed or non-causal states cannot be cut into chunks")


def rectangles_of(
    kv_cache_config: Any, *, chunk_tokens: int, packing: Sequence[str], tp_rank: int, tp_size: int, kv_heads: int
) -> tuple[Rectangle, ...]:
    """This rank's part of each group; `packing` says of each how the attention kernel arranges a block's bytes.

    `kv_heads` are those of the whole model.  NamespaceError where the groups are not supported.
    """
    check_groups(kv_cache_config)
    return tuple(
        _rectangle(kv_cache_config, index, chunk_tokens, packing[index], tp_rank, tp_size, kv_heads)
        for index, group in enumerate(kv_cache_config.kv_cache_groups)
        if group.layer_names  # with pipeline stages a rank may have none of them
    )


def _rectangle(
    config: Any, index: int, chunk_tokens: int, packing: str, tp_rank: int, tp_size: int, kv_heads: int
) -> Rectangle:
    group = config.kv_cache_groups[index]
    spec = group.kv_cache_spec
    numbers = [layer_number(name) for name in group.layer_names]
    if type(spec).__name__ == "MLAAttentionSpec":  # latents: the same on every rank
        heads, writer = (0, 0), tp_rank == 0
    else:
        shards = min(tp_size, max(kv_heads, 1))
        own = tp_rank * shards // tp_size
        heads = (own * spec.num_kv_heads, (own + 1) * spec.num_kv_heads)
        writer = tp_rank == -(-own * tp_size // shards)
    fused = fused_stride(config, group.layer_names) is not None
    count = len(group.layer_names)
    page = spec.page_size_bytes
    window = getattr(spec, "sliding_window", None) if _KINDS[type(spec).__name__] is GroupKind.WINDOW else None
    region = Region(
        name="kv",
        layers=1 if fused else count,
        block_tokens=spec.block_size,
        block_nbytes=page * count if fused else page,
        dtype=str(spec.dtype).removeprefix("torch."),
        packing=f"{'blocks of layers' if fused else 'layers of blocks'}; {packing}; "
        f"{type(spec).__name__} heads {spec.num_kv_heads} size {spec.head_size}+{spec.head_size_v} "
        f"quant {getattr(spec.kv_quant_mode, 'name', '')} layers {','.join(map(str, numbers))}",
    )
    return Rectangle(
        group=index,
        kind=_KINDS[type(spec).__name__],
        # One token more than the kernel needs: after a hit of the whole prompt the last token is computed again.
        window_tokens=window + getattr(spec, "extra_retained_tokens", 0) + 1 if window else 0,
        block_tokens=spec.block_size,
        layout=Layout(chunk_tokens=chunk_tokens, regions=(region,)),
        layers=(min(numbers), max(numbers) + 1),
        heads=heads,
        draft=bool(getattr(group, "is_eagle_group", False)),
        writer=writer,
    )


def model_of(family: Family, ranks: Sequence[Sequence[Rectangle]]) -> Model:
    """The whole model from every rank's rectangles; those that ranks have in common count once."""
    by_group: dict[int, dict[Shard, Rectangle]] = {}
    for rank in ranks:
        for part in rank:
            by_group.setdefault(part.group, {})[part.shard(family)] = part
    groups = []
    for _, shards in sorted(by_group.items()):
        first = next(iter(shards.values()))
        groups.append(Group(first.kind, tuple(shards), first.window_tokens))
    return Model(family, tuple(groups))


def layer_number(name: str) -> int:
    """ "model.layers.12.self_attn.attn" -> 12."""
    found = [int(part) for part in name.split(".") if part.isdigit()]
    if not found:
        raise NamespaceError("layers", f"{name!r} does not say which layer it is")
    return found[0]


def fused_stride(config: Any, layer_names: Sequence[str]) -> int | None:
    """Bytes from a block of one layer to that of the next, where it is the same for the whole group.

    Then a block of all layers is one strided view, and a chunk one copy.
    """
    if len(layer_names) == 1:
        return 0
    for tensor in config.kv_cache_tensors:
        places = {name: index for index, name in enumerate(tensor.layers)}
        found = [places.get(name) for name in layer_names]
        if None in found:
            continue
        steps = {b - a for a, b in itertools.pairwise(found) if a is not None and b is not None}
        if len(steps) == 1 and min(steps) > 0:
            return int(min(steps) * tensor.layer_stride)
    return None
