"""Memory that the store reads and writes itself: what was registered, by address."""

from __future__ import annotations

import bisect
import ctypes
import threading
from typing import Any

import numpy as np


def address_of(view: memoryview) -> int:
    """Where its first byte is; also of a view that is read-only."""
    if not view.readonly and len(view):
        return ctypes.addressof(ctypes.c_char.from_buffer(view))
    array: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(view, np.uint8)
    return int(array.__array_interface__["data"][0])


class Regions:
    """Disjoint pieces of memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._sizes: dict[int, int] = {}

    def add(self, address: int, nbytes: int) -> None:
        with self._lock:
            if address not in self._sizes:
                bisect.insort(self._starts, address)
            self._sizes[address] = nbytes

    def drop(self, address: int) -> bool:
        """Whether there was one that begins there."""
        with self._lock:
            if self._sizes.pop(address, None) is None:
                return False
            self._starts.remove(address)
            return True

    def overlapping(self, address: int, nbytes: int) -> list[int]:
        """Where regions begin that share a byte with this piece."""
        with self._lock:
            return [start for start, size in self._sizes.items() if start < address + nbytes and address < start + size]

    def has(self, address: int, nbytes: int) -> bool:
        """Whether one region has all of this piece."""
        with self._lock:
            index = bisect.bisect_right(self._starts, address) - 1
            if index < 0:
                return False
            start = self._starts[index]
            return address + nbytes <= start + self._sizes[start]
