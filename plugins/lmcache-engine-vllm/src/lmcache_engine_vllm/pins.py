"""Blocks that a store still reads: kept from reuse by a reference of our own, whatever becomes of the request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Pins:
    """Of one scheduler.  Unlike a request whose blocks are freed late, a pin also outlives preemption and abort."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._held: dict[int, list[Any]] = {}

    def __len__(self) -> int:
        """Stores that hold blocks."""
        return len(self._held)

    def hold(self, store_id: int, blocks: Iterable[Any]) -> None:
        """Keep `blocks` as they are until `let_go(store_id)`."""
        held = list(blocks)
        self._pool.touch(held)
        self._held[store_id] = held

    def let_go(self, store_id: int) -> None:
        """Inverse of `hold`; deepest block first, so that vLLM's prefix cache gives up tails before heads."""
        held = self._held.pop(store_id, None)
        if held is not None:
            self._pool.free_blocks(reversed(held))
