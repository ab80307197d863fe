"""Which bytes of a chunk come from which blocks, cut into segments that fit a staging buffer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from lmcache_core import Layout

_ALIGNMENT: Final = 8


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring blocks of one layer in a segment: those of `ids[first : first + count]`."""

    region: int
    layer: int
    first: int
    count: int
    start: int
    """Where it begins in the segment, at a multiple of 8."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of bytes in one host buffer, and what it consists of."""

    buffer: int
    start: int
    stop: int
    pieces: tuple[Piece, ...]


def segments(
    layout: Layout, chunks: int, *, layers: range | None = None, skip_blocks: int = 0, limit_nbytes: int
) -> Iterator[Segment]:
    """Every byte that is wanted, once, in segments of `limit_nbytes` at most, or of one block where that is larger."""
    for chunk in range(chunks):
        pieces: list[Piece] = []
        start = stop = 0
        for place, piece in _pieces(layout, chunk, layers, 0 if chunk else skip_blocks, limit_nbytes):
            nbytes = piece.count * layout.regions[piece.region].block_nbytes
            apart = place != stop or (place - start) % _ALIGNMENT  # numbers in a segment lie as they do in memory
            if pieces and (apart or place + nbytes - start > limit_nbytes):
                yield Segment(chunk, start, stop, tuple(pieces))
                pieces = []
            if not pieces:
                start = place
            pieces.append(Piece(piece.region, piece.layer, piece.first, piece.count, place - start))
            stop = place + nbytes
        if pieces:
            yield Segment(chunk, start, stop, tuple(pieces))


def _pieces(
    layout: Layout, chunk: int, layers: range | None, skip_blocks: int, limit_nbytes: int
) -> Iterator[tuple[int, Piece]]:
    """(place in the chunk, piece), in the order of the places."""
    offset = 0
    for number, region in enumerate(layout.regions):
        blocks = layout.blocks(region)
        most = max(1, limit_nbytes // region.block_nbytes)
        for layer in range(region.layers):
            if layers is None or layer in layers:
                for block in range(skip_blocks, blocks, most):
                    count = min(most, blocks - block)
                    yield offset + block * region.block_nbytes, Piece(number, layer, chunk * blocks + block, count, 0)
            offset += blocks * region.block_nbytes
