"""What stands in a record's place between the two steps of a removal under a lease."""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Iterator
from typing import Final

_MAGIC: Final = b"lmcache: removed\0"
_HEAD: Final = struct.Struct(f"<{len(_MAGIC)}sd")
_SIZES: Final = (32, 40, 48)
MAX_NBYTES: Final = max(_SIZES)
_UNFINISHED_S: Final = 60.0
"""Older than this, whoever wrote it does not go on."""


def sizes(record_nbytes: int) -> Iterator[int]:
    """The lengths of one mark after another: each differs from what it replaces, or the store would write in place."""
    return itertools.cycle([nbytes for nbytes in _SIZES if nbytes != record_nbytes])


def write(view: memoryview) -> None:
    """Of any length: the rest is zero."""
    view[:] = _HEAD.pack(_MAGIC, time.time()).ljust(len(view), b"\0")


def is_one(view: memoryview) -> bool:
    """Whether these are a whole mark, not a record."""
    return len(view) in _SIZES and bytes(view[: len(_MAGIC)]) == _MAGIC and not any(view[_HEAD.size :])


def is_unfinished(view: memoryview) -> bool:
    """Whether the process that wrote this mark ended before the removal did."""
    _, written_at = _HEAD.unpack_from(view)
    return bool(time.time() - written_at > _UNFINISHED_S)
