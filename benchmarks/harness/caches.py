"""Caches to measure: one process, the CPU device, host memory only, and models whose chunks have the size wanted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

import numpy as np
from lmcache_core.chain import Chain, Group, GroupKind, Model, Shard
from lmcache_core.devices.cpu import CpuDevice
from lmcache_core.events import Events
from lmcache_core.frame import record_nbytes
from lmcache_core.keys import Family
from lmcache_core.layout import Layout, Region, page_align
from lmcache_core.local import LocalCache
from lmcache_core.metrics import Metrics
from lmcache_core.policies.lru import LRU
from lmcache_core.pool import Pool

from lmcache_core.buffers import Slab

from .measure import Bytes

CHUNK_TOKENS = 256
_prompts = count()


@dataclass(frozen=True, slots=True)
class Opened:
    """A cache and the memory below it."""

    cache: LocalCache
    slab: Slab
    metrics: Metrics


@contextmanager
def memory_cache(slots: int, layout: Layout) -> Iterator[Opened]:
    """A cache with room for exactly `slots` records of `layout`."""
    slab = Slab(slots * page_align(record_nbytes(layout.nbytes)))
    metrics, events = Metrics(), Events(None)
    pool = Pool(slab, [], new_policy=LRU, metrics=metrics, events=events)
    with LocalCache(pool, CpuDevice(), metrics=metrics, events=events) as cache:
        yield Opened(cache, slab, metrics)


def layout_of(*, layers: int, blocks: int, block_nbytes: int) -> Layout:
    """Chunks of `layers` x `blocks` x `block_nbytes` bytes."""
    region = Region(
        name="kv",
        layers=layers,
        block_tokens=CHUNK_TOKENS // blocks,
        block_nbytes=block_nbytes,
        dtype="uint8",
        packing="bench",
    )
    return Layout(chunk_tokens=CHUNK_TOKENS, regions=(region,))


def model_of(layout: Layout) -> tuple[Model, Shard]:
    """A model of one group and one shard with that layout."""
    family = Family(model="bench", weights="none", kv_dtype="uint8", chunk_tokens=CHUNK_TOKENS)
    shard = Shard.of(family, layout, layers=(0, layout.regions[0].layers))
    return Model(family, (Group(GroupKind.FULL, (shard,)),)), shard


def new_chain(model: Model, chunks: int) -> Chain:
    """The chain of a prompt that no other shares a chunk with."""
    tokens = np.arange(chunks * CHUNK_TOKENS, dtype=np.uint32)
    tokens[0] = 1_000_000 + next(_prompts)
    return Chain.of(model, tokens)


def paged(memory: Bytes, layout: Layout) -> list[list[Bytes]]:
    """`memory` as an engine's pages: for each layer an array of blocks."""
    region = layout.regions[0]
    return [list(memory.reshape(region.layers, -1, region.block_nbytes))]
