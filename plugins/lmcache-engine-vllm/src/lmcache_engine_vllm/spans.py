"""From tokens and block tables to the parts of a load or a store: which chunks of a group, in which blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmcache_core import GroupKind, Hit

from .geometry import Rectangle
from .metadata import Part


def usable_chunks(hit: Hit, parts: Sequence[Rectangle], tokens: int) -> int:
    """Chunks of a hit that a request of `tokens` tokens can go on from: vLLM computes its last token in any case."""
    stop = hit.at_most(tokens)
    if stop * hit.chain.model.family.chunk_tokens < tokens:
        return stop
    for own in parts:
        # vLLM keeps no block that the window of the next token does not reach; the last token's begins one earlier.
        if own.kind is GroupKind.WINDOW and (tokens - own.window_tokens + 2) % own.block_tokens == 0:
            return hit.at_most(tokens - 1)
    return stop


def load_part(own: Rectangle, ids: Sequence[int], start: int, end: int) -> Part | None:
    """The chunks of a group that hold the tokens from `start` to `end`, less blocks that are not to be touched."""
    each = own.layout.chunk_tokens // own.block_tokens
    first = start if own.kind is GroupKind.FULL else max(start, end - own.window_tokens + 1)
    block = max(first // own.block_tokens, -(-start // own.block_tokens))
    last = end // own.block_tokens
    while block < last and ids[block] == 0:  # out of the window
        block += 1
    if block == last:
        return None
    chunk = block // each
    return Part(own.group, chunk, last // each, tuple(ids[chunk * each : last]), block - chunk * each)


def store_part(own: Rectangle, table: Sequence[Any], start: int, stop: int) -> tuple[Part, list[Any]] | None:
    """The chunks of a group from `start` to `stop` that are whole, with vLLM's blocks that hold them."""
    each = own.layout.chunk_tokens // own.block_tokens
    blocks = table[: stop * each]
    for index in range(len(blocks) - 1, start * each - 1, -1):
        if blocks[index].is_null:  # out of the window already: only what follows is whole
            start = index // each + 1
            break
    wanted = list(blocks[start * each :])
    if not wanted:
        return None
    return Part(own.group, start, stop, tuple(block.block_id for block in wanted)), wanted
