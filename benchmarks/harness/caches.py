"""Caches to measure: one process, host memory only, opened as a user does; models whose chunks have the size wanted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from lmcache_core.buffers import Slab
from lmcache_core.cache import JobResult
from lmcache_core.chain import Chain, Group, GroupKind, Model, Shard
from lmcache_core.config import parse_config
from lmcache_core.frame import record_nbytes
from lmcache_core.keys import Family
from lmcache_core.layout import Layout, Region
from lmcache_core.local import LocalCache
from lmcache_core.opening import open_cache

from .measure import Bytes, Timings, check_equal, seconds

CHUNK_TOKENS = 256
_prompts = count()


def memory_cache(slots: int, layout: Layout) -> LocalCache:
    """A cache with room for exactly `slots` records of `layout`."""
    capacity_nbytes = slots * record_nbytes(layout.nbytes)
    text = f"{{device: cpu, tiers: [{{name: host, backend: memory, capacity: {capacity_nbytes}}}]}}"
    return open_cache(parse_config(text, "benchmark", environ={}))


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
    """The chain of a prompt that no other of this process shares a chunk with."""
    return chain_from(model, chunks, 1_000_000 + next(_prompts))


def chain_from(model: Model, chunks: int, first_token: int) -> Chain:
    """The chain of a prompt that begins with that token."""
    tokens = np.arange(chunks * CHUNK_TOKENS, dtype=np.uint32)
    tokens[0] = first_token
    return Chain.of(model, tokens)


def paged(memory: Bytes, layout: Layout) -> list[list[Bytes]]:
    """`memory` as an engine's pages: for each layer an array of blocks."""
    region = layout.regions[0]
    return [list(memory.reshape(region.layers, -1, region.block_nbytes))]


def backed_nbytes(slab: Slab) -> int:
    """Bytes of the slab that the kernel has backed with memory."""
    return _mapped(slab)["Rss:"]


def huge_share(slab: Slab) -> float:
    """The share of what is backed of the slab that the kernel maps with huge pages."""
    found = _mapped(slab)
    huge = sum(found[kind] for kind in ("AnonHugePages:", "ShmemPmdMapped:", "Private_Hugetlb:", "Shared_Hugetlb:"))
    return huge / found["Rss:"] if found["Rss:"] else 0.0


def _mapped(slab: Slab) -> Counter[str]:
    """Bytes by kind, as the kernel tells them of the maps that the slab's extents lie in."""
    wanted = [(extent.address, extent.address + extent.nbytes) for extent in list(slab.extents.values())]
    ours, found = False, Counter[str]()
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, _, rest = line.partition(" ")
        if head.endswith(":"):
            if ours and rest.endswith("kB"):
                found[head] += int(rest.split()[0]) << 10
        else:
            start, stop = (int(part, 16) for part in head.split("-"))
            ours = any(start < end and begin < stop for begin, end in wanted)
    return found


def ended(result: JobResult | None) -> JobResult:
    """The result of a job that was waited for."""
    assert result is not None, "a job did not end in time"
    return result


def mover(
    cache: Any,
    model: Model,
    shard: Shard,
    source: Bytes,
    target: Bytes,
    batch: int,
    timeout_s: float,
    *,
    in_order: bool = False,
    forget: Callable[[], object] = lambda: None,
) -> Callable[[], Timings]:
    """One round: a new prompt of `batch` chunks stored, looked up and loaded, and its bytes compared.

    Its blocks lie in the pages in random order, or one behind another where `in_order`.  `forget` is called after it.
    """
    layout = shard.layout
    blocks = np.arange(batch * layout.blocks(layout.regions[0]))
    block_ids = (blocks if in_order else np.random.default_rng(0).permutation(blocks)).tolist()
    source_pages, target_pages = paged(source, layout), paged(target, layout)

    def go() -> Timings:
        chain = new_chain(model, batch)
        request, span = chain.digests[0].hex(), range(batch)
        target.fill(0)

        def store() -> None:
            job = cache.store(chain, shard, span, source_pages, block_ids, request=request)
            assert ended(job.wait(timeout_s)).ok_chunks == batch, "not all was stored"

        def load() -> None:
            hit = cache.lookup(chain, request)
            job = cache.retrieve(hit, shard, span, target_pages, block_ids)
            assert ended(job.wait(timeout_s)).ok_chunks == batch, "not all was loaded"
            cache.release(request)

        figures = {"store": seconds(store), "load": seconds(load)}
        check_equal(target, source, "what was loaded")
        forget()
        return figures

    return go
