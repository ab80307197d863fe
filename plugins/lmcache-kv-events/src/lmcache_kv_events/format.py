"""KV events as vLLM publishes them: msgpack arrays, each event with its name first."""

from __future__ import annotations

import msgspec

BlockHash = bytes | int


class KvEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """One change of what is cached."""


class BlockStored(KvEvent):
    """Chunks that can be found from now on, in the order of their prefix."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    """Of the chunk before the first; None at the beginning of a prompt."""
    token_ids: list[int]
    """Of all these chunks; empty where they are not known."""
    block_size: int
    """Tokens of a chunk."""
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(KvEvent):
    """Chunks that left a medium."""

    block_hashes: list[BlockHash]
    medium: str | None


class AllBlocksCleared(KvEvent):
    """Nothing is cached any more."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one message carries."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


encode = msgspec.msgpack.Encoder().encode
