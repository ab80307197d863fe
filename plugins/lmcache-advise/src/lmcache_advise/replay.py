"""Eviction policies replayed on a trace: the ones that are installed, asked as a tier would ask them.

In miniature: a sample of the blocks, of which each takes the room of all that it stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from itertools import pairwise
from typing import Final

import numpy as np

from lmcache_core import ChunkKey, EvictionPolicy, Item

from .distances import Curve
from .requests import Requests, thinned

MAX_BLOCKS: Final = 150_000
"""Block references of a replay; a policy takes some microseconds for each."""
CORES: Final = ("s3fifo", "arc", "lru", "lfu", "fifo")
DEFAULT: Final = "s3fifo"
BASELINE: Final = "lru"


def shares_of(
    requests: Requests, curve: Curve, capacity_tokens: float, names: Sequence[str] = CORES, *,
    max_blocks: int = MAX_BLOCKS,
) -> dict[str, float]:  # fmt: skip
    """For each policy the share of all prompt tokens that a tier of that size would hit.

    What the miniature says of LRU is known to be wrong by so much, since LRU's share is known exactly: the others are
    put right by the same.
    """
    small = thinned(requests, max_blocks)
    room = int(capacity_tokens / requests.block_tokens)
    if room < 1 or not requests.tokens:
        return dict.fromkeys(names, 0.0)
    known = curve.share(capacity_tokens)
    kinds = {name: policy_named(name) for name in {*names, BASELINE}}
    found = {name: hit_blocks(small, kind(), room) for name, kind in kinds.items()}
    scale = requests.block_tokens / requests.tokens
    return {name: min(curve.best, max(0.0, known + (found[name] - found[BASELINE]) * scale)) for name in names}


def policy_named(name: str) -> Callable[[], EvictionPolicy]:
    """A policy of core."""
    (point,) = (
        point for point in entry_points(group="lmcache_core.policies", name=name)
        if point.dist is not None and point.dist.name == "lmcache-core"
    )  # fmt: skip
    kind: Callable[[], EvictionPolicy] = point.load()
    return kind


def hit_blocks(requests: Requests, policy: EvictionPolicy, capacity: int) -> int:
    """Blocks that are found; each prompt is stored after it was looked up, in a tier of `capacity` blocks.

    A block of a sample takes the room of all that it stands for.
    """
    there: dict[ChunkKey, int] = {}
    used = found = 0
    keys = {int(each): ChunkKey(int(each).to_bytes(8, "big").ljust(48, b"\0")) for each in np.unique(requests.blocks)}
    blocks, starts, weights = requests.blocks.tolist(), requests.starts.tolist(), requests.weights().tolist()
    for begin, end in pairwise(starts):
        prompt = [(keys[each], weight) for each, weight in zip(blocks[begin:end], weights[begin:end], strict=True)]
        hits = next((index for index, (key, _) in enumerate(prompt) if key not in there), len(prompt))
        found += sum(weights[begin : begin + hits])
        for key, _ in reversed(prompt[:hits]):
            policy.on_get(key)
        missing = [(depth, key, weight) for depth, (key, weight) in enumerate(prompt) if key not in there]
        needed = used + sum(weight for _, _, weight in missing) - capacity
        if needed > 0:
            pinned = {key for key, _ in prompt}
            free = used - sum(there.get(key, 0) for key in pinned)
            for key in policy.victims(min(needed, free), pinned.__contains__) if free else ():
                used -= there.pop(key)
                policy.on_remove(key)
        stored = []
        for depth, key, weight in missing:
            if used + weight > capacity:
                break
            used += weight
            there[key] = weight
            stored.append(Item(key, depth, weight))
        for item in reversed(stored):
            policy.on_put(item)
    return found
