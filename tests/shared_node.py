"""One node of a fleet: `python shared_node.py CONFIG store|load`, prints what it did, stays until its input ends."""

from __future__ import annotations

import hashlib
import json
import sys

import numpy as np

from lmcache_core import Cache, Family, Group, GroupKind, Layout, LocalCache, Model, Region, Shard, open_cache

CHUNKS, CHUNK_TOKENS, LAYERS, BLOCKS, BLOCK_NBYTES = 6, 64, 2, 4, 8192
REGION = Region(
    name="kv", layers=LAYERS, block_tokens=CHUNK_TOKENS // BLOCKS, block_nbytes=BLOCK_NBYTES, dtype="u1", packing="t"
)
LAYOUT = Layout(chunk_tokens=CHUNK_TOKENS, regions=(REGION,))
FAMILY = Family(model="org/tiny", weights="w1", kv_dtype="uint8", chunk_tokens=CHUNK_TOKENS)
SHARD = Shard.of(FAMILY, LAYOUT, layers=(0, LAYERS))
MODEL = Model(FAMILY, (Group(GroupKind.FULL, (SHARD,)),))
PROMPT = np.random.default_rng(7).integers(0, 50_000, CHUNKS * CHUNK_TOKENS + 3)


def pages(chunks: int) -> list[list[np.ndarray]]:
    return [[np.full((chunks * BLOCKS, BLOCK_NBYTES), 0xA5, np.uint8) for _ in range(LAYERS)]]


def computed(keys: list[bytes]) -> list[list[np.ndarray]]:
    """KV whose every byte says which chunk and layer it belongs to."""
    made = pages(len(keys))
    for layer in range(LAYERS):
        for index, key in enumerate(keys):
            stream = hashlib.shake_128(key + bytes([layer])).digest(BLOCKS * BLOCK_NBYTES)
            block = np.frombuffer(stream, np.uint8).reshape(BLOCKS, BLOCK_NBYTES)
            made[0][layer][index * BLOCKS : (index + 1) * BLOCKS] = block
    return made


def store(cache: Cache, prompt: np.ndarray = PROMPT) -> dict[str, int]:
    chain = cache.chain(prompt, MODEL)
    keys = list(chain.keys(SHARD))
    result = cache.store(chain, SHARD, range(len(keys)), computed(keys), list(range(len(keys) * BLOCKS))).wait(20)
    assert result is not None
    return {"stored": result.ok_chunks, "drained": cache.drain(20)}


def load(cache: Cache, prompt: np.ndarray = PROMPT) -> dict[str, int]:
    chain = cache.chain(prompt, MODEL)
    hit = cache.lookup_answered(chain, "request", timeout_s=20)
    target = pages(hit.chunks)
    result = cache.retrieve(hit, SHARD, range(hit.chunks), target, list(range(hit.chunks * BLOCKS))).wait(20)
    assert result is not None
    wanted = computed(list(chain.keys(SHARD, range(hit.chunks))))
    for start, stop, _ in result.failed:  # nothing is written there
        for layer in wanted[0]:
            layer[start * BLOCKS : stop * BLOCKS] = 0xA5
    right = all(np.array_equal(got, want) for got, want in zip(target[0], wanted[0], strict=True))
    cache.release("request")
    return {"hit": hit.chunks, "loaded": result.ok_chunks, "right": right, "drained": cache.drain(20)}


def reads(cache: LocalCache) -> dict[str, float]:
    """Records that came from each tier."""
    return {tier.name: cache.metrics.count("tier_reads", tier=tier.name, result="ok") for tier in cache.status().tiers}


def main() -> None:
    with open_cache(sys.argv[1]) as cache:
        done = store(cache) if sys.argv[2] == "store" else load(cache)
        print(json.dumps({**done, "reads": reads(cache)}), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
