"""Chunk keys of a 131,072-token prompt, from an array and from a list.

Ours is `Chain.of`: the digest of every chunk from a prompt as an engine hands it over.  The limit packs the same tokens
and runs the same chain of SHA-256, nothing else.  The peer hashes the same tokens from a list in both rows: from an
array it takes three times as long.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from harness.measure import Options, Timings, milliseconds, paired, seconds
from harness.report import Must, Row

from lmcache_core.chain import Chain, Group, GroupKind, Model, Shard
from lmcache_core.keys import Family
from lmcache_core.layout import Layout, Region

TOKENS = 131_072
CHUNK_TOKENS = 256
SEED = 0


def rows(options: Options) -> Iterator[Row]:
    from_array = np.random.default_rng(SEED).integers(0, 150_000, TOKENS)
    from_list = from_array.tolist()
    model, shard = _model()
    parent = model.family.family_id
    wanted = _hash(parent, from_array.astype("<u4").data.cast("B"))
    chain = Chain.of(model, from_list)

    # Each side is run once before it is timed: whichever came first would else pay for the other's cold caches.
    def ours() -> Timings:
        chains: list[Chain] = [Chain.of(model, from_array)]
        figures = {
            "array": seconds(lambda: chains.append(Chain.of(model, from_array))),
            "list": seconds(lambda: chains.append(Chain.of(model, from_list))),
            "shard": seconds(lambda: chain.keys(shard)),
        }
        assert all(list(made.digests) == wanted for made in chains), "wrong digests"
        return figures

    def limit() -> Timings:
        _hash(parent, from_array.astype("<u4").data.cast("B"))
        return {
            "array": seconds(lambda: _hash(parent, from_array.astype("<u4").data.cast("B"))),
            "list": seconds(lambda: _hash(parent, memoryview(array("I", from_list)).cast("B"))),
        }

    # A round takes milliseconds: more of them cost nothing and make the medians steady.
    many = replace(options, rounds=5 * options.rounds)
    measured = paired(many, {"ours": ours, "limit": limit}, "keys", tokens=TOKENS, chunk_tokens=CHUNK_TOKENS, seed=SEED)
    what = f"{TOKENS:,} tokens in chunks of {CHUNK_TOKENS}"
    yield measured.row(
        "keys", "array of int64", "ms", "array", milliseconds, peer="hash",
        must=Must(ratio_limit=1 / 1.2, ratio_peer=2.0), note=f"{what}; limit: astype and SHA-256; peer: from a list",
    )  # fmt: skip
    yield measured.row(
        "keys", "list of int", "ms", "list", milliseconds, peer="hash",
        must=Must(ratio_limit=1 / 1.2, ratio_peer=1 / 0.8), note=f"{what}; limit: array('I') and SHA-256",
    )  # fmt: skip
    yield measured.row(
        "keys", "keys of one shard", "ms", "shard", milliseconds, note=f"{len(wanted)} 48-byte keys from the digests"
    )


def _model() -> tuple[Model, Shard]:
    family = Family(model="bench", weights="none", kv_dtype="float16", chunk_tokens=CHUNK_TOKENS)
    region = Region(name="kv", layers=1, block_tokens=16, block_nbytes=4096, dtype="float16", packing="bench")
    shard = Shard.of(family, Layout(chunk_tokens=CHUNK_TOKENS, regions=(region,)), layers=(0, 1))
    return Model(family, (Group(GroupKind.FULL, (shard,)),)), shard


def _hash(parent: bytes, packed: memoryview) -> list[bytes]:
    """The chain alone, in the fastest form known: no copy of the packed tokens."""
    step = 4 * CHUNK_TOKENS
    sha256 = hashlib.sha256
    digest = parent.ljust(32, b"\0")
    digests = []
    for start in range(0, len(packed), step):
        hashing = sha256(digest + b"\0\0\0\0")
        hashing.update(packed[start : start + step])
        digest = hashing.digest()
        digests.append(digest)
    return digests
