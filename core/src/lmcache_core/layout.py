"""What the raw bytes of one chunk mean: a list of regions, opaque to core, told apart by fingerprint."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Final

PAGE_NBYTES: Final = 4096
MAX_CHUNK_NBYTES: Final = 16 << 30


def page_align(nbytes: int) -> int:
    """`nbytes` rounded up to whole 4 KiB pages."""
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """One run of equal blocks in a chunk: `layers` x (chunk_tokens / block_tokens) blocks of `block_nbytes` each."""

    name: str
    """What the engine calls it, e.g. "kv", "k", "v", "latent", "conv_state"."""
    layers: int
    block_tokens: int
    block_nbytes: int
    dtype: str
    """Element type tag, e.g. "bfloat16": part of the fingerprint, never interpreted by core."""
    packing: str
    """How a block's bytes are arranged, e.g. "HND" or "vllm-cpu-attn": opaque, part of the fingerprint."""

    def __post_init__(self) -> None:
        for field in ("layers", "block_tokens", "block_nbytes"):
            if getattr(self, field) < 1:
                raise ValueError(f"region {self.name!r}: {field} must be at least 1, got {getattr(self, field)}")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The shape of one rectangle of a chunk.  Its bytes are region by region, layer by layer, block by block."""

    chunk_tokens: int
    regions: tuple[Region, ...]

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be at least 1, got {self.chunk_tokens}")
        if not self.regions:
            raise ValueError("a layout needs at least one region")
        for region in self.regions:
            if self.chunk_tokens % region.block_tokens:
                raise ValueError(
                    f"region {region.name!r}: chunk_tokens {self.chunk_tokens} is not a whole number of its "
                    f"blocks of {region.block_tokens} tokens"
                )
        if self.nbytes > MAX_CHUNK_NBYTES:
            raise ValueError(f"a chunk of {self.nbytes} bytes is over the limit of {MAX_CHUNK_NBYTES}")

    def blocks(self, region: Region) -> int:
        """Blocks of `region` in one chunk and layer."""
        return self.chunk_tokens // region.block_tokens

    @cached_property
    def nbytes(self) -> int:
        """Raw bytes of one chunk."""
        return sum(r.layers * self.blocks(r) * r.block_nbytes for r in self.regions)

    @cached_property
    def fingerprint(self) -> bytes:
        """16 bytes; KV is shared between engines only when these are equal."""
        fields = [str(self.chunk_tokens)]
        for r in self.regions:
            fields += [r.name, str(r.layers), str(r.block_tokens), str(r.block_nbytes), r.dtype, r.packing]
        encoded = b"".join(len(f.encode()).to_bytes(4, "little") + f.encode() for f in fields)
        return hashlib.blake2b(encoded, digest_size=16, person=b"lmcache layout").digest()
