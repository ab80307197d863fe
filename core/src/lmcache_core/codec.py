"""The contract of a codec: the raw bytes of a chunk to stored bytes and back, buffer to buffer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from .backend import ApiVersion
from .buffers import copy_bytes
from .errors import ChunkCorrupt
from .layout import Layout


class Codec(ABC):
    """Stateless and thread-safe.  Its entry-point name and `version` are written into each record's header."""

    api_version: ClassVar[ApiVersion]
    version: ClassVar[int] = 1
    """Of the encoding; a new one still decodes the old."""
    lossy: ClassVar[bool] = False
    """Whether decode(encode(x)) may differ from x."""

    @abstractmethod
    def max_nbytes(self, layout: Layout) -> int:
        """Upper bound of what `encode` returns."""

    @abstractmethod
    def encode(self, raw: memoryview, layout: Layout, out: memoryview) -> int:
        """Write the encoded chunk to the front of `out`; return its length in bytes."""

    @abstractmethod
    def decode(self, data: memoryview, layout: Layout, out: memoryview) -> None:
        """Fill `out`, exactly `layout.nbytes` long; ChunkCorrupt rather than a guess, whatever `data` holds."""


class Identity(Codec):
    """Stores raw bytes.  The tier knows it and copies nothing."""

    api_version = (1, 0)

    def max_nbytes(self, layout: Layout) -> int:
        return layout.nbytes

    def encode(self, raw: memoryview, layout: Layout, out: memoryview) -> int:
        copy_bytes(raw, out[: layout.nbytes])
        return layout.nbytes

    def decode(self, data: memoryview, layout: Layout, out: memoryview) -> None:
        if data.nbytes != layout.nbytes:
            raise ChunkCorrupt(f"identity: {data.nbytes} bytes where the layout has {layout.nbytes}")
        copy_bytes(data, out)
