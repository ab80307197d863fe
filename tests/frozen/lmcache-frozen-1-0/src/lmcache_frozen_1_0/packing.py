"""A codec of plugin API 1.0: zlib, and raw bytes where that would not make them fewer."""

from __future__ import annotations

import zlib
from typing import Final

from lmcache_core import ChunkCorrupt, Codec, Layout, copy_bytes

_RAW: Final = 0
_PACKED: Final = 1
_HEAD_NBYTES: Final = 1


class FrozenCodec(Codec):
    """Stateless and called from several threads at once.  Its name and `version` are in each record."""

    api_version = (1, 0)
    version = 1
    lossy = False

    def max_nbytes(self, layout: Layout) -> int:
        return _HEAD_NBYTES + layout.nbytes

    def encode(self, raw: memoryview, layout: Layout, out: memoryview) -> int:
        packed = _pack(raw)
        if len(packed) < raw.nbytes:
            out[0] = _PACKED
            body: memoryview | bytes = packed
        else:
            out[0] = _RAW
            body = raw
        nbytes = _HEAD_NBYTES + len(body)
        copy_bytes(body, out[_HEAD_NBYTES:nbytes])  # does not keep other threads waiting
        return nbytes

    def decode(self, data: memoryview, layout: Layout, out: memoryview) -> None:
        """Exactly `layout.nbytes`, or ChunkCorrupt: `data` may be anything."""
        if data.nbytes < _HEAD_NBYTES:
            raise ChunkCorrupt("frozen-1-0: empty")
        body = data[_HEAD_NBYTES:]
        if data[0] == _RAW:
            raw: memoryview | bytes = body
        elif data[0] == _PACKED:
            raw = _unpack(body, layout.nbytes)
        else:
            raise ChunkCorrupt(f"frozen-1-0: unknown form {data[0]}")
        if len(raw) != layout.nbytes:
            raise ChunkCorrupt(f"frozen-1-0: {len(raw)} bytes, the layout has {layout.nbytes}")
        copy_bytes(raw, out)


def _pack(raw: memoryview) -> bytes:
    return zlib.compress(raw, 1)


def _unpack(packed: memoryview, nbytes: int) -> bytes:
    """At most one byte more than `nbytes`, however much the data would unpack to."""
    unpacker = zlib.decompressobj()
    try:
        raw = unpacker.decompress(packed, nbytes + 1)
    except zlib.error as error:
        raise ChunkCorrupt(f"frozen-1-0: {error}") from error
    if not unpacker.eof or unpacker.unused_data:
        raise ChunkCorrupt("frozen-1-0: the data does not end where it should")
    return raw
