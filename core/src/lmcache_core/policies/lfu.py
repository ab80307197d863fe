"""What was used least often goes first, where old uses fade as others leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ..keys import ChunkKey
from ..policy import EvictionPolicy, Item
from ._line import Line, Node, oldest

_MAX_USES: Final = 15


class LFU(EvictionPolicy):
    """A record's rank is its uses, at most 15, on top of the rank at which records were leaving when it was last used.

    So what was hot last week and is not used now is overtaken.  Ranks differ by at most 15, but for what is pinned
    for long: one line each.
    """

    api_version = (1, 0)

    def __init__(self) -> None:
        self._lines: dict[int, Line] = {}
        self._ranks: dict[ChunkKey, int] = {}
        self._leaving = 0
        """Rank of the last record that left because it was named."""
        self._named: ChunkKey | None = None

    def on_put(self, item: Item) -> None:
        rank = self._ranks.get(item.key)
        if rank is None:
            self._enter(item.key, Node(item.nbytes))
        else:  # stored with its request again: as young and as much used as before
            self._lines[rank].resize(item.key, item.nbytes)

    def on_get(self, key: ChunkKey) -> None:
        if key in self._ranks:
            node = self._leave(key)
            node.uses = min(node.uses + 1, _MAX_USES)
            self._enter(key, node)

    def on_remove(self, key: ChunkKey) -> None:
        if key in self._ranks:
            if key == self._named:
                self._leaving = max(self._leaving, self._ranks[key])
            self._leave(key)

    def victims(self, nbytes: int, is_pinned: Callable[[ChunkKey], bool]) -> list[ChunkKey]:
        ranks = sorted(self._lines)
        lines = [self._lines[rank] for rank in ranks]
        chosen = oldest(lines, nbytes, is_pinned, lambda: next((line for line in lines if line.waits), None))
        self._named = chosen[-1] if chosen else None
        return chosen

    def _enter(self, key: ChunkKey, node: Node) -> None:
        rank = self._ranks[key] = self._leaving + node.uses
        line = self._lines.get(rank)
        if line is None:
            line = self._lines[rank] = Line()
        line.append(key, node)

    def _leave(self, key: ChunkKey) -> Node:
        rank = self._ranks.pop(key)
        line = self._lines[rank]
        node = line.remove(key)
        assert node is not None
        if not len(line):
            del self._lines[rank]
        return node
