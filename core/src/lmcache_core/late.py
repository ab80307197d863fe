"""Copies that a device did not end in time: what they use stays theirs until they have ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from .device import Fence

log = logging.getLogger(__name__)

_unending: Final[list[_Copy]] = []
"""Of caches that are closed: memory that a device may still use is never given back."""


@dataclass(frozen=True, slots=True)
class _Copy:
    fence: Fence
    then: Callable[[], None]
    extents: frozenset[object]
    records: Sequence[memoryview]
    """Keep the memory mapped."""


class LateCopies:
    """Of one cache; called by its mover, and by whoever closes it when that has ended."""

    def __init__(self) -> None:
        self._copies: list[_Copy] = []

    def __len__(self) -> int:
        return len(self._copies)

    def add(
        self, fence: Fence, then: Callable[[], None], extents: Iterable[object], records: Sequence[memoryview]
    ) -> None:
        """Call `then` when the copy has ended and `look` finds that out."""
        self._copies.append(_Copy(fence, then, frozenset(extents), records))

    def look(self) -> bool:
        """Give back what copies used that have ended by now; whether there were any."""
        copies, self._copies = self._copies, []
        for copy in copies:
            if _ended(copy.fence):
                copy.then()
            else:
                self._copies.append(copy)
        return len(self._copies) < len(copies)

    def wait(self, timeout_s: float) -> None:
        """`look` until all have ended, for `timeout_s` at most; what a device never ends stays as it is for good."""
        deadline = time.monotonic() + timeout_s
        for copy in self._copies:
            _ended(copy.fence, max(0.0, deadline - time.monotonic()))
        self.look()
        if self._copies:
            log.error("a device has not ended %d copies: the memory that they use stays", len(self._copies))
            _unending.extend(self._copies)

    def uses(self, extent: object) -> bool:
        """Whether a copy may still read or write there."""
        return any(extent in copy.extents for copy in self._copies)


def _ended(fence: Fence, timeout_s: float = 0.0) -> bool:
    """A device plugin may raise anything: then its copy has not ended."""
    try:
        return fence.wait(timeout_s) if timeout_s else fence.done()
    except Exception:
        log.exception("a device's fence raised; this is its bug")
        return False
