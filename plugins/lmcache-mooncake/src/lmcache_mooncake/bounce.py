"""Buffers of ours for records in memory that is not registered: registered, reused, as many as calls at once."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from .regions import address_of

_UNIT_NBYTES: Final = 2 << 20
_KEPT_NBYTES: Final = 64 << 20
"""A larger one is given back after its use."""


@dataclass(slots=True, eq=False)
class Bounce:
    """One buffer, in whole units: a few sizes, so that the next call fits one that is there."""

    nbytes: int
    view: memoryview = field(init=False)
    address: int = field(init=False)

    def __post_init__(self) -> None:
        self.view = memoryview(mmap.mmap(-1, self.nbytes))
        self.address = address_of(self.view)

    def at(self, address: int, nbytes: int) -> memoryview | None:
        """The piece of it that begins at `address`; None for an address elsewhere."""
        start = address - self.address
        return self.view[start : start + nbytes] if 0 <= start < self.nbytes else None


class Bounces:
    """Buffers that are not in use."""

    def __init__(self, unregister: Callable[[int], None]) -> None:
        self._unregister = unregister
        self._lock = threading.Lock()
        self._free: list[Bounce] = []

    @contextlib.contextmanager
    def one(self, nbytes: int) -> Iterator[Bounce]:
        """One of at least `nbytes`, for its user to register if it is not."""
        bounce = self._take(nbytes)
        try:
            yield bounce
        finally:
            if bounce.nbytes > _KEPT_NBYTES:
                self._unregister(bounce.address)
            else:
                with self._lock:
                    self._free.append(bounce)

    def _take(self, nbytes: int) -> Bounce:
        with self._lock:
            for bounce in self._free:
                if bounce.nbytes >= nbytes:
                    self._free.remove(bounce)
                    return bounce
            small = self._free.pop() if self._free else None
        if small is not None:
            self._unregister(small.address)
        return Bounce(-(-max(nbytes, 1) // _UNIT_NBYTES) * _UNIT_NBYTES)
