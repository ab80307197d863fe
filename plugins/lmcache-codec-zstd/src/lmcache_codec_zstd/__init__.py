"""KV compressed by zstd without loss, the bytes of each number taken apart first.

The high bytes of floats (sign, exponent) repeat, the low ones (mantissa) are noise, and between them zstd sees neither:
apart they compress.  A chunk is encoded as blocks of at most 1 MiB of one region, one after another:

0     stored length u32, element width u8, zero 3s
8     the block: as it is (width 0), or a zstd frame of its byte planes, low bytes first (width 1, 2, 4 or 8)

What the decoder allocates is one block and its planes, whatever the data says.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, ClassVar, Final

import numpy as np
import zstandard

from lmcache_core import ApiVersion, ChunkCorrupt, Codec, Layout, copy_bytes

__all__ = ["ZstdCodec"]

LEVEL: Final = 1
"""Higher ones find no more in KV and take several times as long."""
BLOCK_NBYTES: Final = 1 << 20
_HEAD: Final = struct.Struct("<IB3x")
_AS_IT_IS: Final = 0
_WIDTHS: Final = {
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "int16": 2,
    "uint16": 2,
    "float32": 4,
    "float": 4,
    "int32": 4,
    "uint32": 4,
    "float64": 8,
    "int64": 8,
    "uint64": 8,
}
"""Bytes of an element by the last word of a region's dtype; 1 for every other, which is then compressed as it is."""


class ZstdCodec(Codec):
    """Stateless: each call has a compressor of its own."""

    api_version: ClassVar[ApiVersion] = (1, 0)
    version: ClassVar[int] = 1
    lossy: ClassVar[bool] = False

    def max_nbytes(self, layout: Layout) -> int:
        return sum(_HEAD.size + nbytes for _, nbytes, _ in _blocks(layout))

    def encode(self, raw: memoryview, layout: Layout, out: memoryview) -> int:
        compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=False)
        at = 0
        for start, nbytes, width in _blocks(layout):
            block = raw[start : start + nbytes]
            stored: Any = compressor.compress(_planes(block, width) if width > 1 else block)
            if len(stored) >= nbytes:
                stored, width = block, _AS_IT_IS
            _HEAD.pack_into(out, at, len(stored), width)
            at += _HEAD.size
            copy_bytes(memoryview(stored), out[at : at + len(stored)])
            at += len(stored)
        return at

    def decode(self, data: memoryview, layout: Layout, out: memoryview) -> None:
        decompressor = zstandard.ZstdDecompressor()
        at = 0
        for start, nbytes, _ in _blocks(layout):
            if data.nbytes - at < _HEAD.size:
                raise ChunkCorrupt(f"zstd: {data.nbytes} bytes end before the block at {start}")
            length, width = _HEAD.unpack_from(data, at)
            at += _HEAD.size
            stored = data[at : at + length]
            if stored.nbytes != length:
                raise ChunkCorrupt(f"zstd: {data.nbytes} bytes end within the block at {start}")
            at += length
            target = out[start : start + nbytes]
            if width == _AS_IT_IS:
                if length != nbytes:
                    raise ChunkCorrupt(f"zstd: the block at {start} has {length} bytes, not {nbytes}")
                copy_bytes(stored, target)
            elif width in (1, 2, 4, 8) and nbytes % width == 0:
                _join(_decompressed(decompressor, stored, nbytes, start), width, target)
            else:
                raise ChunkCorrupt(f"zstd: the block at {start} has elements of {width} bytes")
        if at != data.nbytes:
            raise ChunkCorrupt(f"zstd: {data.nbytes - at} bytes after the last block")


def _blocks(layout: Layout) -> Iterator[tuple[int, int, int]]:
    """(start, length, element width) of each block: whole elements of one region."""
    start = 0
    for region in layout.regions:
        end = start + region.layers * layout.blocks(region) * region.block_nbytes
        width = _WIDTHS.get(region.dtype.rpartition(".")[2].lower(), 1)
        if (end - start) % width:
            width = 1
        while start < end:
            nbytes = min(BLOCK_NBYTES, end - start)
            yield start, nbytes, width
            start += nbytes


def _planes(block: memoryview, width: int) -> memoryview:
    """The first byte of every element, then every second byte, and so on."""
    elements = np.frombuffer(block, f"<u{width}")
    planes = np.empty((width, len(elements)), np.uint8)
    for index in range(width):
        # A shift and a cast run several times as fast as a copy of every n-th byte.
        planes[index] = (elements >> (8 * index)).astype(np.uint8)
    return planes.data.cast("B")


def _join(planes: bytes, width: int, target: memoryview) -> None:
    """The inverse of `_planes`."""
    if width == 1:
        copy_bytes(memoryview(planes), target)
        return
    bytes_of = np.frombuffer(planes, np.uint8).reshape(width, -1)
    elements = bytes_of[0].astype(f"<u{width}")
    for index in range(1, width):
        elements |= bytes_of[index].astype(f"<u{width}") << (8 * index)
    np.copyto(np.frombuffer(target, f"<u{width}"), elements)


def _decompressed(decompressor: zstandard.ZstdDecompressor, frame: memoryview, nbytes: int, start: int) -> bytes:
    """Exactly `nbytes`; the frame's own word for its length is checked before anything is allocated for it."""
    try:
        said = zstandard.get_frame_parameters(frame).content_size
        if said != nbytes:
            raise ChunkCorrupt(f"zstd: the block at {start} says that it has {said} bytes, not {nbytes}")
        block = decompressor.decompress(frame, max_output_size=nbytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ChunkCorrupt(f"zstd: the block at {start}: {error}") from error
    if len(block) != nbytes:
        raise ChunkCorrupt(f"zstd: the block at {start} has {len(block)} bytes, not {nbytes}")
    return block
