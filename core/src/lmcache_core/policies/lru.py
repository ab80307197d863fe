"""Least recently used goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from ..keys import ChunkKey
from ..policy import EvictionPolicy, Item


class LRU(EvictionPolicy):
    """Simple and predictable; one long scan empties it of everything that was hot."""

    api_version = (1, 0)

    def __init__(self) -> None:
        self._nbytes: OrderedDict[ChunkKey, int] = OrderedDict()

    def on_put(self, item: Item) -> None:
        self._nbytes[item.key] = item.nbytes
        self._nbytes.move_to_end(item.key)

    def on_get(self, key: ChunkKey) -> None:
        if key in self._nbytes:
            self._nbytes.move_to_end(key)

    def on_remove(self, key: ChunkKey) -> None:
        self._nbytes.pop(key, None)

    def victims(self, nbytes: int, is_pinned: Callable[[ChunkKey], bool]) -> list[ChunkKey]:
        chosen: list[ChunkKey] = []
        in_use: list[ChunkKey] = []
        for key, size in self._nbytes.items():
            if nbytes <= 0:
                break
            if is_pinned(key):
                in_use.append(key)
            else:
                chosen.append(key)
                nbytes -= size
        for key in in_use:  # in use now is recently used: the next call need not pass them again
            self._nbytes.move_to_end(key)
        return chosen if nbytes <= 0 else []
