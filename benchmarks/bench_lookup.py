"""Lookup of a 512-chunk prefix that is in memory, from its Chain, leases taken and released.

The limit makes the same 512 keys and finds them in a dict, nothing else.  The peer looks up 512 keys of its own through
its StorageManager and gives them back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from harness.caches import ended, layout_of, memory_cache, model_of, new_chain, paged
from harness.measure import Options, Timings, paired, private_buffer, seconds
from harness.report import Must, Row

CHUNKS = 512
REPEAT = 20
TIMEOUT_S = 60.0


def rows(options: Options) -> Iterator[Row]:
    layout = layout_of(layers=1, blocks=1, block_nbytes=4096)
    model, shard = model_of(layout)
    chain = new_chain(model, CHUNKS)
    pages = paged(private_buffer(CHUNKS * 4096, huge=False), layout)
    with memory_cache(CHUNKS, layout) as cache:
        stored = ended(cache.store(chain, shard, range(CHUNKS), pages, range(CHUNKS)).wait(TIMEOUT_S))
        assert stored.ok_chunks == CHUNKS, stored
        held: list[int] = []

        def look() -> None:
            for number in range(REPEAT):
                request = f"request {number}"
                hit = cache.lookup(chain, request)
                held.append(hit.resident)
                cache.release(request)

        def ours() -> Timings:
            held.clear()
            taken = seconds(look)
            assert held == [CHUNKS] * REPEAT, "not the whole prefix"
            return {"lookup": taken / REPEAT}

        entries = {shard.shard_id + digest: digest for digest in chain.digests}

        def probe() -> None:
            get = entries.get
            for _ in range(REPEAT):
                prefix = shard.shard_id
                for digest in chain.digests:
                    get(prefix + digest)

        def limit() -> Timings:
            return {"lookup": seconds(probe) / REPEAT}

        many = replace(options, rounds=5 * options.rounds)
        measured = paired(many, {"ours": ours, "limit": limit}, "lookup", chunks=CHUNKS)
        in_use = cache.status().records_in_use
        assert not in_use, f"{in_use} records are still leased"
    yield measured.row(
        "lookup", f"{CHUNKS} chunks in memory", "us/chunk", "lookup", lambda taken: taken * 1e6 / CHUNKS,
        must=Must(at_most=1.0), note="lookup, leases and release; limit: the same keys in a dict",
    )  # fmt: skip
