"""The memory tier: 32 MiB chunks stored and loaded in batches of 8, through LocalCache.

Ours goes from an engine's pages (32 layers, blocks of 64 KiB in random order) into the slab and back: reserve, copy,
commit; lookup, copy, release.  The limit copies the same bytes, chunk by chunk, between a private buffer and a warm
shared mapping whose pages are as large as the slab's.  The peer is its LocalCPUBackend, from and to contiguous tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from harness.caches import Opened, layout_of, memory_cache, model_of, new_chain, paged
from harness.measure import (
    GiB,
    MiB,
    Options,
    Timings,
    check_equal,
    gibps,
    paired,
    private_buffer,
    random_bytes,
    seconds,
    shared_buffer,
)
from harness.report import Must, Row

BATCH = 8
CHUNK_NBYTES = 32 * MiB
LAYERS, BLOCKS, BLOCK_NBYTES = 32, 16, 64 << 10
TIMEOUT_S = 60.0


def rows(options: Options) -> Iterator[Row]:
    nbytes = BATCH * CHUNK_NBYTES
    layout = layout_of(layers=LAYERS, blocks=BLOCKS, block_nbytes=BLOCK_NBYTES)
    assert layout.nbytes == CHUNK_NBYTES
    model, shard = model_of(layout)
    block_ids = np.random.default_rng(0).permutation(BATCH * BLOCKS).tolist()
    with memory_cache(2 * BATCH, layout) as opened:
        huge = _is_huge(opened)
        source, target = private_buffer(nbytes, huge=huge), private_buffer(nbytes, huge=huge)
        source[:] = random_bytes(nbytes, seed=0)
        source_pages, target_pages = paged(source, layout), paged(target, layout)
        shared = shared_buffer(nbytes, huge=huge)
        private = private_buffer(nbytes, huge=True), private_buffer(nbytes, huge=True)

        def ours() -> Timings:
            chain = new_chain(model, BATCH)
            request = chain.digests[0].hex()
            span = range(BATCH)
            target.fill(0)

            def store() -> None:
                job = opened.cache.store(chain, shard, span, source_pages, block_ids, request=request)
                result = job.wait(TIMEOUT_S)
                assert result is not None, "the store did not end"
                assert result.ok_chunks == BATCH, result

            def load() -> None:
                hit = opened.cache.lookup(chain, request)
                result = opened.cache.retrieve(hit, shard, span, target_pages, block_ids).wait(TIMEOUT_S)
                opened.cache.release(request)
                assert result is not None, "the load did not end"
                assert result.ok_chunks == BATCH, result

            figures = {"store": seconds(store), "load": seconds(load)}
            check_equal(target, source, "memory tier")
            return figures

        def limit() -> Timings:
            return {
                "store": seconds(lambda: _copy(source, shared)),
                "load": seconds(lambda: _copy(shared, target)),
                "huge": seconds(lambda: _copy(*private)),
            }

        measured = paired(
            options, {"ours": ours, "limit": limit}, "memory", chunks=BATCH, capacity_gib=2 * nbytes / GiB
        )
    size = f"{BATCH} chunks of 32 MiB"
    pages = "huge pages" if huge else "4 KiB pages"
    must = Must(ratio_limit=0.95, ratio_peer=1.0)
    for what in ("store", "load"):
        yield measured.row(
            "memory", what, "GiB/s", what, gibps(nbytes), must=must,
            note=f"{size}, slab in {pages}; limit: np.copyto between private and shared memory in {pages}",
        )  # fmt: skip
        yield measured.row(
            "memory", f"{what}, beside private memory", "GiB/s", what, gibps(nbytes), limit="huge", peer="none",
            note="limit: np.copyto from private to private memory, huge pages on both sides",
        )  # fmt: skip


def _copy(source: np.ndarray, target: np.ndarray) -> None:  # type: ignore[type-arg]
    for start in range(0, len(source), CHUNK_NBYTES):
        np.copyto(target[start : start + CHUNK_NBYTES], source[start : start + CHUNK_NBYTES])


def _is_huge(opened: Opened) -> bool:
    """Whether the kernel backs the slab with huge pages: fill one slot and ask it."""
    slot = opened.slab.take(CHUNK_NBYTES)
    assert slot is not None
    np.frombuffer(opened.slab.view(slot), np.uint8).fill(1)
    ours = False
    found = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, _, rest = line.partition(" ")
        if not head.endswith(":"):
            ours = "memfd:lmcache-extent" in rest
        elif ours and head == "ShmemPmdMapped:":
            found += int(rest.split()[0])
    opened.slab.give(slot)
    return found * 1024 >= CHUNK_NBYTES // 2
