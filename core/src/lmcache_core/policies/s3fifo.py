"""S3-FIFO: a small queue that one-time scans pass through, a main queue for what was used again, a ghost of keys."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from ..keys import ChunkKey
from ..policy import EvictionPolicy, Item
from ._line import Line, Node

_MAX_USES: Final = 3
_SMALL_SHARE: Final = 10
"""The small queue gives victims while it holds more than one part in this many of the bytes."""


class S3FIFO(EvictionPolicy):
    """Scan-resistant: a record must be used after it was stored to stay longer than a scan takes to pass."""

    api_version = (1, 0)

    def __init__(self) -> None:
        self._small = Line()
        self._main = Line()
        self._ghost: OrderedDict[ChunkKey, None] = OrderedDict()

    def on_put(self, item: Item) -> None:
        key = item.key
        again = self._small.remove(key)
        if again is not None:  # stored with its request again: young again, but not used more
            again.nbytes = item.nbytes
            self._small.append(key, again)
        elif (node := self._main.get(key)) is not None:
            self._main.nbytes += item.nbytes - node.nbytes
            node.nbytes = item.nbytes
        elif key in self._ghost:
            del self._ghost[key]
            self._main.append(key, Node(item.nbytes))
        else:
            self._small.append(key, Node(item.nbytes))

    def on_get(self, key: ChunkKey) -> None:
        node = self._small.get(key) or self._main.get(key)
        if node is not None and node.uses < _MAX_USES:
            node.uses += 1

    def on_remove(self, key: ChunkKey) -> None:
        if self._small.remove(key) is not None:
            self._ghost[key] = None
            while len(self._ghost) > max(64, len(self._small) + len(self._main)):
                self._ghost.popitem(last=False)
        else:
            self._main.remove(key)

    def victims(self, nbytes: int, is_pinned: Callable[[ChunkKey], bool]) -> list[ChunkKey]:
        small, main = self._small, self._main
        total = small.nbytes + main.nbytes
        chosen: list[ChunkKey] = []
        leaving: tuple[list[tuple[ChunkKey, Node]], list[tuple[ChunkKey, Node]]] = ([], [])
        looked = False
        while nbytes > 0:
            if not looked and (small.stale or main.stale or not (small.waits or main.waits)):
                small.look_again(is_pinned)
                main.look_again(is_pinned)
                looked = True
            from_small = small.waits and (small.nbytes * _SMALL_SHARE > total or not main.waits)
            taken = (small if from_small else main).take(is_pinned)
            if taken is None:
                if looked and not (small.waits or main.waits):
                    break
                continue
            key, node = taken
            if node.uses:
                node.uses = 0 if from_small else node.uses - 1
                main.append(key, node)
            else:
                leaving[0 if from_small else 1].append(taken)
                chosen.append(key)
                nbytes -= node.nbytes
        small.put_back(leaving[0])
        main.put_back(leaving[1])
        return chosen if nbytes <= 0 else []
