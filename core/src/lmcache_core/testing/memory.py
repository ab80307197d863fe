"""Buffers and payloads for laws: poisoned, aligned exactly as promised, every byte naming the record it belongs to."""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import mmap
from typing import Any, Final

import numpy as np

POISON: Final = 0xA5
_PAGE: Final = mmap.PAGESIZE


def poison(nbytes: int) -> bytes:
    return bytes((POISON,)) * nbytes


def round_up(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment


def buffer(nbytes: int, alignment: int = 1) -> memoryview:
    """A poisoned buffer whose address is a multiple of `alignment`, and of nothing more if that is below a page."""
    return buffer_in(mapping(nbytes, alignment), nbytes, alignment)


def mapping(nbytes: int, alignment: int = 1) -> mmap.mmap:
    """Private memory with room for a buffer; it can be closed only when nobody holds a view of it."""
    return mmap.mmap(-1, nbytes + 2 * max(alignment, _PAGE))


def buffer_in(memory: mmap.mmap, nbytes: int, alignment: int = 1) -> memoryview:
    start = alignment
    if alignment >= _PAGE:
        start = -address_of(memory) % alignment
    view = memoryview(memory)[start : start + nbytes]
    view[:] = poison(nbytes)
    return view


def address_of(memory: mmap.mmap) -> int:
    anchor = ctypes.c_char.from_buffer(memory)
    return ctypes.addressof(anchor)


def payload(identity: bytes, nbytes: int) -> bytes:
    """Bytes that belong to `identity` and to nothing else, wherever one looks."""
    return hashlib.shake_128(identity).digest(nbytes)


def filled(identity: bytes, nbytes: int, alignment: int = 1) -> memoryview:
    """`payload(identity)` in a buffer."""
    view = buffer(nbytes, alignment)
    view[:] = payload(identity, nbytes)
    return view


def filled_with(data: bytes) -> memoryview:
    """`data` in a buffer."""
    view = buffer(len(data))
    view[:] = data
    return view


def is_poison(view: memoryview) -> bool:
    return bytes(view) == poison(len(view))


def contents(device_memory: Any) -> bytes:
    """What the `memory` of a DeviceRecord, or its payload, holds: a host array, or a torch tensor anywhere."""
    on_host = device_memory.cpu() if hasattr(device_memory, "cpu") else device_memory
    return np.asarray(on_host).tobytes()


def replace(device_memory: Any, data: bytes) -> None:
    """Write `data` to the beginning of such memory, as a library that reads from storage does."""
    new = np.frombuffer(bytearray(data), np.uint8)
    if hasattr(device_memory, "cpu"):
        device_memory[: len(data)].copy_(importlib.import_module("torch").from_numpy(new))
    else:
        np.asarray(device_memory)[: len(data)] = new
