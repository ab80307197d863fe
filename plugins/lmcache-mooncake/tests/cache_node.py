"""One process with a cache: `python cache_node.py CONFIG store|load` prints what it did."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import ClassVar

import numpy as np

from lmcache_core import (
    ApiVersion,
    Codec,
    Family,
    Group,
    GroupKind,
    Layout,
    Model,
    Region,
    Shard,
    load_config,
    open_cache,
)

CHUNKS, CHUNK_TOKENS, LAYERS, BLOCKS, BLOCK_NBYTES = 6, 64, 2, 4, 8192
REGION = Region(
    name="kv", layers=LAYERS, block_tokens=CHUNK_TOKENS // BLOCKS, block_nbytes=BLOCK_NBYTES, dtype="u1", packing="t"
)
LAYOUT = Layout(chunk_tokens=CHUNK_TOKENS, regions=(REGION,))
FAMILY = Family(model="org/tiny", weights="w1", kv_dtype="uint8", chunk_tokens=CHUNK_TOKENS)
SHARD = Shard.of(FAMILY, LAYOUT, layers=(0, LAYERS))
MODEL = Model(FAMILY, (Group(GroupKind.FULL, (SHARD,)),))
PROMPT = np.random.default_rng(7).integers(0, 50_000, CHUNKS * CHUNK_TOKENS + 3)


class Flipped(Codec):
    """Every bit the other way round, so that records pass through memory that is not the slab."""

    api_version: ClassVar[ApiVersion] = (1, 0)
    lossy: ClassVar[bool] = False

    def max_nbytes(self, layout: Layout) -> int:
        return layout.nbytes

    def encode(self, raw: memoryview, layout: Layout, out: memoryview) -> int:
        np.invert(np.frombuffer(raw, np.uint8), out=np.frombuffer(out[: len(raw)], np.uint8))
        return len(raw)

    def decode(self, data: memoryview, layout: Layout, out: memoryview) -> None:
        np.invert(np.frombuffer(data, np.uint8), out=np.frombuffer(out, np.uint8))


def pages(value: int = 0xA5) -> list[list[np.ndarray]]:
    return [[np.full((CHUNKS * BLOCKS, BLOCK_NBYTES), value, np.uint8) for _ in range(LAYERS)]]


def computed(keys: list[bytes]) -> list[list[np.ndarray]]:
    """KV whose every byte says which chunk and layer it belongs to."""
    made = pages()
    for layer in range(LAYERS):
        for index, key in enumerate(keys):
            stream = hashlib.shake_128(key + bytes([layer])).digest(BLOCKS * BLOCK_NBYTES)
            made[0][layer][index * BLOCKS : (index + 1) * BLOCKS] = np.frombuffer(stream, np.uint8).reshape(BLOCKS, -1)
    return made


def main() -> None:
    with open_cache(load_config(sys.argv[1])) as cache:
        chain = cache.chain(PROMPT, MODEL)
        wanted, blocks = computed(list(chain.keys(SHARD))), list(range(CHUNKS * BLOCKS))
        said: dict[str, object] = {"chunks": CHUNKS}
        if sys.argv[2] == "store":
            result = cache.store(chain, SHARD, range(CHUNKS), wanted, blocks).wait(30)
            assert result is not None
            assert cache.drain(30)
            (tier,) = cache._pool.tiers
            session = tier.backend._session
            known = [session.regions.has(extent.address, extent.nbytes) for extent in cache._pool.slab.extents.values()]
            said |= {"stored": result.ok_chunks, "registered": bool(known) and all(known)}
        else:
            hit = cache.lookup_answered(chain, "request", timeout_s=30)
            target = pages()
            result = cache.retrieve(hit, SHARD, range(hit.chunks), target, blocks[: hit.chunks * BLOCKS]).wait(30)
            assert result is not None
            right = all(np.array_equal(got, want) for got, want in zip(target[0], wanted[0], strict=True))
            reads = cache.metrics.count("tier_reads", tier="pool", result="ok")
            said |= {"loaded": result.ok_chunks, "right": right, "reads": reads}
            cache.release("request")
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
