"""What a request asks for: a model's shards, and the chain of digests of its prompt."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .keys import ChunkKey, Family, chain_digests, pack_tokens, shard_id
from .layout import Layout


class GroupKind(enum.Enum):
    """Which chunks of a prefix a layer group needs before the engine can go on from there."""

    FULL = "full"
    """Every chunk (full attention)."""
    WINDOW = "window"
    """The chunks that hold the last `window_tokens` tokens (sliding-window attention)."""
    STATE = "state"
    """The last chunk only, whose record is the state at its end (Mamba, linear attention)."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One rectangle (layer range x head range) of a layer group, and the shape of its records."""

    shard_id: bytes
    layout: Layout

    @classmethod
    def of(
        cls,
        family: Family,
        layout: Layout,
        *,
        group: int = 0,
        layers: tuple[int, int],
        heads: tuple[int, int] = (0, 0),
    ) -> Shard:
        """The shard that `family` keeps under these coordinates; see `keys.shard_id`."""
        identity = shard_id(family.family_id, layout.fingerprint, group=group, layers=layers, heads=heads)
        return cls(identity, layout)


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share one rule of reuse; a prefix needs every shard of it."""

    kind: GroupKind
    shards: tuple[Shard, ...]
    window_tokens: int = 0

    def __post_init__(self) -> None:
        if not self.shards:
            raise ValueError("a layer group needs at least one shard")
        if (self.kind is GroupKind.WINDOW) != (self.window_tokens > 0):
            raise ValueError(f"window_tokens {self.window_tokens} does not fit a {self.kind.value} group")


@dataclass(frozen=True, slots=True)
class Model:
    """One model for one tenant: its family and all its layer groups, on all ranks."""

    family: Family
    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError("a model needs at least one layer group")
        for shard in self.shards:
            if shard.layout.chunk_tokens != self.family.chunk_tokens:
                raise ValueError(
                    f"a layout of {shard.layout.chunk_tokens} tokens in a family of {self.family.chunk_tokens}"
                )

    @property
    def shards(self) -> tuple[Shard, ...]:
        return tuple(shard for group in self.groups for shard in group.shards)


@dataclass(frozen=True, slots=True)
class Chain:
    """The digests of a prompt's whole chunks: hashed once, frozen, picklable, the same for every shard and rank."""

    model: Model
    digests: tuple[bytes, ...]
    tail: bytes = field(default=b"", repr=False)
    """Packed tokens after the last whole chunk."""

    @classmethod
    def of(cls, model: Model, tokens: Sequence[int] | Any, extra: Mapping[int, bytes] | None = None) -> Chain:
        """Hash `tokens`; `extra` maps chunk indices to what is not a token, see `keys.chain_digests`."""
        family = model.family
        packed = pack_tokens(tokens)
        digests = chain_digests(family.family_id, packed, family.chunk_tokens, extra=extra)
        return cls(model, tuple(digests), bytes(packed[4 * family.chunk_tokens * len(digests) :]))

    def extend(self, tokens: Sequence[int] | Any, extra: Mapping[int, bytes] | None = None) -> Chain:
        """The chain of this prompt followed by `tokens`; hashes only what is new."""
        family = self.model.family
        packed = self.tail + bytes(pack_tokens(tokens))
        parent = self.digests[-1] if self.digests else family.family_id
        more = chain_digests(parent, packed, family.chunk_tokens, extra=extra, first_chunk=len(self.digests))
        return Chain(self.model, self.digests + tuple(more), packed[4 * family.chunk_tokens * len(more) :])

    def __len__(self) -> int:
        """Whole chunks."""
        return len(self.digests)

    @property
    def tokens(self) -> int:
        """Tokens in all, the tail included."""
        return len(self.digests) * self.model.family.chunk_tokens + len(self.tail) // 4

    def keys(self, shard: Shard, span: range | None = None) -> list[ChunkKey]:
        """The keys of `shard`'s records for the chunks of `span` (all by default)."""
        prefix = shard.shard_id
        digests = self.digests if span is None else self.digests[span.start : span.stop]
        return [ChunkKey(prefix + digest) for digest in digests]
