"""S3-FIFO: a small queue that one-time scans pass through, a main queue for what was used again, a ghost of keys."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from ..keys import ChunkKey
from ..policy import EvictionPolicy, Item

_MAX_USES: Final = 3
_SMALL_SHARE: Final = 10
"""The small queue gives victims while it holds more than one part in this many of the bytes."""


class _Node:
    __slots__ = ("depth", "nbytes", "small", "uses")

    def __init__(self, nbytes: int, depth: int, small: bool) -> None:
        self.nbytes = nbytes
        self.depth = depth
        self.small = small
        self.uses = 0


class S3FIFO(EvictionPolicy):
    """Scan-resistant: a record must be used after it was stored to stay longer than a scan takes to pass."""

    api_version = (1, 0)

    def __init__(self) -> None:
        self._small: OrderedDict[ChunkKey, _Node] = OrderedDict()
        self._main: OrderedDict[ChunkKey, _Node] = OrderedDict()
        self._leaving: OrderedDict[ChunkKey, _Node] = OrderedDict()
        self._ghost: OrderedDict[ChunkKey, None] = OrderedDict()
        self._small_nbytes = 0
        self._main_nbytes = 0

    def on_put(self, item: Item) -> None:
        key = item.key
        self._put_back()
        node = self._small.get(key)
        if node is not None:  # stored with its request again: young again, but not used more
            self._small_nbytes += item.nbytes - node.nbytes
            node.nbytes = item.nbytes
            self._small.move_to_end(key)
        elif (node := self._main.get(key)) is not None:
            self._main_nbytes += item.nbytes - node.nbytes
            node.nbytes = item.nbytes
        elif key in self._ghost:
            del self._ghost[key]
            self._main[key] = _Node(item.nbytes, item.depth, small=False)
            self._main_nbytes += item.nbytes
        else:
            self._small[key] = _Node(item.nbytes, item.depth, small=True)
            self._small_nbytes += item.nbytes

    def on_get(self, key: ChunkKey) -> None:
        node = self._small.get(key) or self._main.get(key) or self._leaving.get(key)
        if node is not None and node.uses < _MAX_USES:
            node.uses += 1

    def on_remove(self, key: ChunkKey) -> None:
        for queue in (self._leaving, self._small, self._main):
            node = queue.pop(key, None)
            if node is not None:
                break
        else:
            return
        if node.small:
            self._small_nbytes -= node.nbytes
            self._ghost[key] = None
            while len(self._ghost) > max(64, len(self._small) + len(self._main)):
                self._ghost.popitem(last=False)
        else:
            self._main_nbytes -= node.nbytes

    def victims(self, nbytes: int, is_pinned: Callable[[ChunkKey], bool]) -> list[ChunkKey]:
        self._put_back()
        chosen: list[ChunkKey] = []
        pinned: set[ChunkKey] = set()
        pinned_small = pinned_main = 0
        leaving_small = 0
        while nbytes > 0:
            small_left = len(self._small) > pinned_small
            main_left = len(self._main) > pinned_main
            if not small_left and not main_left:
                return []
            over = (self._small_nbytes - leaving_small) * _SMALL_SHARE > self._small_nbytes + self._main_nbytes
            if small_left and (over or not main_left):
                key, node = self._small.popitem(last=False)
                if key in pinned or is_pinned(key):
                    self._small[key] = node
                    pinned_small += key not in pinned
                    pinned.add(key)
                elif node.uses:
                    node.uses = 0
                    node.small = False
                    self._main[key] = node
                    self._small_nbytes -= node.nbytes
                    self._main_nbytes += node.nbytes
                else:
                    self._leaving[key] = node
                    leaving_small += node.nbytes
                    chosen.append(key)
                    nbytes -= node.nbytes
            else:
                key, node = self._main.popitem(last=False)
                if key in pinned or is_pinned(key):
                    self._main[key] = node
                    pinned_main += key not in pinned
                    pinned.add(key)
                elif node.uses:
                    node.uses -= 1
                    self._main[key] = node
                else:
                    self._leaving[key] = node
                    chosen.append(key)
                    nbytes -= node.nbytes
        return chosen

    def _put_back(self) -> None:
        """Named as victims but not removed: back to the front of their queues, in the order they had."""
        while self._leaving:
            key, node = self._leaving.popitem()
            queue = self._small if node.small else self._main
            queue[key] = node
            queue.move_to_end(key, last=False)
