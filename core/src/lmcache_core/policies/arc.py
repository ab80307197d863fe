"""Recency and frequency side by side, after the idea of ARC: what returns soon after it left shifts the balance."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from ..keys import ChunkKey
from ..policy import EvictionPolicy, Item
from ._line import Line, Node, oldest


class ARC(EvictionPolicy):
    """Records that were not used since they were stored wait in one line, the others in a second one.

    The keys of what left either are remembered, at most as many as there are records.  One that comes back to the
    first line's memory says that this line was too short, and so for the second; `_target` is the first one's share.
    """

    api_version = (1, 0)

    def __init__(self) -> None:
        self._once, self._again = Line(), Line()
        self._left_once: OrderedDict[ChunkKey, int] = OrderedDict()
        self._left_again: OrderedDict[ChunkKey, int] = OrderedDict()
        self._target = 0.0
        """Bytes that the first line should have."""

    def on_put(self, item: Item) -> None:
        key = item.key
        for line in (self._once, self._again):
            if line.get(key) is not None:
                line.resize(key, item.nbytes)
                return
        total = self._once.nbytes + self._again.nbytes
        if key in self._left_once:
            step = max(1.0, len(self._left_again) / len(self._left_once))
            self._target = min(self._target + step * item.nbytes, float(total))
            del self._left_once[key]
            self._again.append(key, Node(item.nbytes))
        elif key in self._left_again:
            step = max(1.0, len(self._left_once) / len(self._left_again))
            self._target = max(self._target - step * item.nbytes, 0.0)
            del self._left_again[key]
            self._again.append(key, Node(item.nbytes))
        else:
            self._once.append(key, Node(item.nbytes))

    def on_get(self, key: ChunkKey) -> None:
        node = self._once.remove(key)
        if node is not None:
            self._again.append(key, node)
        else:
            self._again.touch(key)

    def on_remove(self, key: ChunkKey) -> None:
        for line, left in ((self._once, self._left_once), (self._again, self._left_again)):
            node = line.remove(key)
            if node is not None:
                left[key] = node.nbytes
                while len(left) > max(64, len(self._once) + len(self._again)):
                    left.popitem(last=False)

    def victims(self, nbytes: int, is_pinned: Callable[[ChunkKey], bool]) -> list[ChunkKey]:
        once, again = self._once, self._again

        def line() -> Line | None:
            if once.waits and (once.nbytes > self._target or not again.waits):
                return once
            return again if again.waits else None

        return oldest([once, again], nbytes, is_pinned, line)
