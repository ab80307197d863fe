"""The memory tier: 32 MiB chunks stored and loaded in batches of 8, through LocalCache.

Ours goes from an engine's pages (32 layers of 64 KiB blocks) into the slab and back: reserve, copy, commit; lookup,
copy, release.  A chunk's blocks are neighbours, or in random order.  The limit copies the same bytes, chunk by chunk,
between two private buffers whose pages are as large as the slab's, which is private memory too; a shared mapping is
shown beside.  The peer is its LocalCPUBackend, from and to contiguous tensors, or the same pages by torch's
`index_select` and `index_copy_`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from harness.caches import ended, huge_share, layout_of, memory_cache, model_of, mover, new_chain, paged
from harness.measure import (
    Bytes,
    GiB,
    MiB,
    Options,
    Timings,
    gibps,
    paired,
    private_buffer,
    random_bytes,
    seconds,
    shared_buffer,
)
from harness.report import Must, Row

from lmcache_core.chain import Model, Shard
from lmcache_core.local import LocalCache

BATCH = 8
CHUNK_NBYTES = 32 * MiB
LAYERS, BLOCKS, BLOCK_NBYTES = 32, 16, 64 << 10
TIMEOUT_S = 60.0


def rows(options: Options) -> Iterator[Row]:
    nbytes = BATCH * CHUNK_NBYTES
    layout = layout_of(layers=LAYERS, blocks=BLOCKS, block_nbytes=BLOCK_NBYTES)
    assert layout.nbytes == CHUNK_NBYTES
    model, shard = model_of(layout)
    with memory_cache(2 * BATCH, layout) as cache:
        warm = private_buffer(nbytes, huge=False)
        _fill(cache, model, shard, warm)
        huge = huge_share(cache._pool.slab) > 0.5
        source, target = private_buffer(nbytes, huge=huge), private_buffer(nbytes, huge=huge)
        source[:] = random_bytes(nbytes, seed=0)
        like_slab, shared = private_buffer(nbytes, huge=huge), shared_buffer(nbytes, huge=huge)

        def forget() -> int:
            return cache._pool.clear(b"")  # as the peer, which removes what it stored when the time has been taken

        in_order = mover(cache, model, shard, source, target, BATCH, TIMEOUT_S, in_order=True, forget=forget)
        in_disorder = mover(cache, model, shard, source, target, BATCH, TIMEOUT_S, forget=forget)

        def ours() -> Timings:
            return in_order() | {f"paged {name}": figure for name, figure in in_disorder().items()}

        def limit() -> Timings:
            return {
                "store": seconds(lambda: _copy(source, like_slab)),
                "load": seconds(lambda: _copy(like_slab, target)),
                "shared store": seconds(lambda: _copy(source, shared)),
                "shared load": seconds(lambda: _copy(shared, target)),
            }

        # A round is short, and what is compared differs by little.
        many = replace(options, rounds=3 * options.rounds)
        measured = paired(many, {"ours": ours, "limit": limit}, "memory", chunks=BATCH, capacity_gib=2 * nbytes / GiB)
    size = f"{BATCH} chunks of 32 MiB"
    pages = "huge pages" if huge else "4 KiB pages"
    note = f"{size}, slab in {pages}; limit: np.copyto between private buffers in {pages}"
    must = Must(ratio_limit=0.95, ratio_peer=1.0)
    for what in ("store", "load"):
        yield measured.row("memory", what, "GiB/s", what, gibps(nbytes), must=must, note=note)
        yield measured.row(
            "memory", f"{what}, blocks in random order", "GiB/s", f"paged {what}", gibps(nbytes), limit=what, must=must,
            note=note,
        )  # fmt: skip
        yield measured.row(
            "memory", f"{what}, beside shared memory", "GiB/s", what, gibps(nbytes),
            limit=f"shared {what}", peer="none",
            note="limit: np.copyto between a private buffer and a warm shared mapping; peer: the first row",
        )  # fmt: skip


def _fill(cache: LocalCache, model: Model, shard: Shard, memory: Bytes) -> None:
    """Store until every slot has been used once: a slab in service has its memory already."""
    for _ in range(3):
        chain = new_chain(model, BATCH)
        job = cache.store(chain, shard, range(BATCH), paged(memory, shard.layout), range(BATCH * BLOCKS))
        ended(job.wait(TIMEOUT_S))


def _copy(source: Bytes, target: Bytes) -> None:
    for start in range(0, len(source), CHUNK_NBYTES):
        np.copyto(target[start : start + CHUNK_NBYTES], source[start : start + CHUNK_NBYTES])
