"""A queue of records that steps over what is pinned without losing its place in it."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from ..keys import ChunkKey

IsPinned = Callable[[ChunkKey], bool]
_LOOKS_PER_TAKEN: Final = 4
"""Records set aside that are asked again for each one taken, on average: what was pinned long ago may be free now."""


class Node:
    """One record in a line."""

    __slots__ = ("nbytes", "place", "uses")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.place = 0
        self.uses = 0


class Line:
    """First in, first out.  What is found pinned is set aside, so that the next `take` need not pass it again."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._waiting: OrderedDict[ChunkKey, Node] = OrderedDict()
        self._aside: dict[ChunkKey, Node] = {}
        self._places = itertools.count()
        self._taken = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._aside)

    @property
    def waits(self) -> bool:
        """Whether there is a record that was not set aside."""
        return bool(self._waiting)

    @property
    def stale(self) -> bool:
        """Whether so much was taken since the last look that looking again costs little in comparison."""
        return bool(self._aside) and _LOOKS_PER_TAKEN * self._taken > len(self._aside)

    def get(self, key: ChunkKey) -> Node | None:
        return self._waiting.get(key) or self._aside.get(key)

    def append(self, key: ChunkKey, node: Node) -> None:
        node.place = next(self._places)
        self._waiting[key] = node
        self.nbytes += node.nbytes

    def touch(self, key: ChunkKey) -> None:
        """Move a record to the end."""
        node = self._waiting.get(key)
        if node is not None:
            self._waiting.move_to_end(key)
        elif (node := self._aside.pop(key, None)) is not None:
            self._waiting[key] = node
        else:
            return
        node.place = next(self._places)

    def resize(self, key: ChunkKey, nbytes: int) -> None:
        """Another size in the same place."""
        node = self.get(key)
        if node is not None:
            self.nbytes += nbytes - node.nbytes
            node.nbytes = nbytes

    def remove(self, key: ChunkKey) -> Node | None:
        node = self._waiting.pop(key, None) or self._aside.pop(key, None)
        if node is not None:
            self.nbytes -= node.nbytes
        return node

    def take(self, is_pinned: IsPinned) -> tuple[ChunkKey, Node] | None:
        """Remove and return the first record that is not pinned, of those not set aside."""
        while self._waiting:
            key, node = self._waiting.popitem(last=False)
            if not is_pinned(key):
                self.nbytes -= node.nbytes
                self._taken += 1
                return key, node
            self._aside[key] = node
        return None

    def look_again(self, is_pinned: IsPinned) -> None:
        """Let what is no longer pinned wait in its old place."""
        self._taken = 0
        free = [(node.place, key) for key, node in self._aside.items() if not is_pinned(key)]
        self.nbytes -= sum(self._aside[key].nbytes for _, key in free)
        self.put_back([(key, self._aside.pop(key)) for _, key in free])

    def put_back(self, taken: Iterable[tuple[ChunkKey, Node]]) -> None:
        """Let records wait in the places that they had."""
        back = list(taken)
        if not back:
            return
        self.nbytes += sum(node.nbytes for _, node in back)
        last = max(node.place for _, node in back)
        while self._waiting:
            key, node = self._waiting.popitem(last=False)
            back.append((key, node))
            if node.place > last:
                break
        for key, node in sorted(back, key=lambda pair: -pair[1].place):
            self._waiting[key] = node
            self._waiting.move_to_end(key, last=False)


def oldest(
    lines: Sequence[Line], nbytes: int, is_pinned: IsPinned, choose: Callable[[], Line | None]
) -> list[ChunkKey]:
    """The first records of the lines that `choose` names one by one, which free `nbytes`; empty if they do not.

    All stay in their places.
    """
    chosen: list[ChunkKey] = []
    taken_from: list[tuple[Line, tuple[ChunkKey, Node]]] = []
    looked = False
    while nbytes > 0:
        line = choose()
        if not looked and (line is None or any(each.stale for each in lines)):
            for each in lines:
                each.look_again(is_pinned)
            looked = True
            continue
        if line is None:
            break
        taken = line.take(is_pinned)
        if taken is not None:
            taken_from.append((line, taken))
            chosen.append(taken[0])
            nbytes -= taken[1].nbytes
    for line in lines:
        line.put_back([taken for owner, taken in taken_from if owner is line])
    return chosen if nbytes <= 0 else []
