"""What was stored first goes first, used or not."""

from __future__ import annotations

from collections.abc import Callable

from ..keys import ChunkKey
from ..policy import EvictionPolicy, Item
from ._line import Line, Node, oldest


class FIFO(EvictionPolicy):
    """The cheapest there is, and a yardstick: what a policy knows of uses must beat this."""

    api_version = (1, 0)

    def __init__(self) -> None:
        self._line = Line()

    def on_put(self, item: Item) -> None:
        if self._line.get(item.key) is None:
            self._line.append(item.key, Node(item.nbytes))
        else:
            self._line.resize(item.key, item.nbytes)

    def on_get(self, key: ChunkKey) -> None:
        return None

    def on_remove(self, key: ChunkKey) -> None:
        self._line.remove(key)

    def victims(self, nbytes: int, is_pinned: Callable[[ChunkKey], bool]) -> list[ChunkKey]:
        return oldest([self._line], nbytes, is_pinned, lambda: self._line if self._line.waits else None)
