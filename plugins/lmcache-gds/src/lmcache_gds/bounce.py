"""Page-aligned memory between a caller's buffer and a call that may outlast the caller: taken, given back, reused."""

from __future__ import annotations

import mmap
import threading
from typing import Final

_PAGE_NBYTES: Final = 4096


class Bounce:
    """As many buffers as calls run at once, kept for the next ones: fresh memory costs more than the copy."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[mmap.mmap] = []
        self._closed = False

    def take(self, nbytes: int) -> tuple[mmap.mmap, memoryview]:
        """A buffer of at least `nbytes` and a view of that many; the buffer goes back with `give`."""
        with self._lock:
            mapping = self._idle.pop() if self._idle else None
        if mapping is None or len(mapping) < nbytes:
            mapping = mmap.mmap(-1, max(_PAGE_NBYTES, -(-nbytes // _PAGE_NBYTES) * _PAGE_NBYTES))
        return mapping, memoryview(mapping)[:nbytes]

    def give(self, mapping: mmap.mmap) -> None:
        """Nobody uses the buffer any more."""
        with self._lock:
            if not self._closed:
                self._idle.append(mapping)

    def close(self) -> None:
        """Let go of what is not in use; the rest goes when it is given back."""
        with self._lock:
            self._closed = True
            self._idle.clear()
