"""Least recently used goes first."""

from __future__ import annotations

from collections.abc import Callable

from ..keys import ChunkKey
from ..policy import EvictionPolicy, Item
from ._line import Line, Node, oldest


class LRU(EvictionPolicy):
    """Simple and predictable; one long scan empties it of everything that was hot."""

    api_version = (1, 0)

    def __init__(self) -> None:
        self._line = Line()

    def on_put(self, item: Item) -> None:
        self._line.remove(item.key)
        self._line.append(item.key, Node(item.nbytes))

    def on_get(self, key: ChunkKey) -> None:
        self._line.touch(key)

    def on_remove(self, key: ChunkKey) -> None:
        self._line.remove(key)

    def victims(self, nbytes: int, is_pinned: Callable[[ChunkKey], bool]) -> list[ChunkKey]:
        return oldest([self._line], nbytes, is_pinned, lambda: self._line if self._line.waits else None)
