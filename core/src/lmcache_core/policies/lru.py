"""Least recently used goes first."""

from __future__ import annotations

from collections.abc import Callable

from ..keys import ChunkKey
from ..policy import EvictionPolicy, Item
from ._line import Line, Node


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
        line = self._line
        chosen: list[tuple[ChunkKey, Node]] = []
        looked = False
        while nbytes > 0:
            if not looked and (line.stale or not line.waits):
                line.look_again(is_pinned)
                looked = True
            taken = line.take(is_pinned)
            if taken is not None:
                chosen.append(taken)
                nbytes -= taken[1].nbytes
            elif looked:
                break
        line.put_back(chosen)
        return [key for key, _ in chosen] if nbytes <= 0 else []
