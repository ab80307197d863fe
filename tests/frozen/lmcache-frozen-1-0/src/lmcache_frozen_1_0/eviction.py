"""An eviction policy of plugin API 1.0: what was used least recently leaves first."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from lmcache_core import ChunkKey, EvictionPolicy, Item


@dataclass(slots=True)
class _Record:
    nbytes: int
    rank: int


class FrozenPolicy(EvictionPolicy):
    """Called under the tier's lock, so it needs none; no call may take long.

    The heap holds (rank, key), among them old ranks, which are recognised and dropped.  What was found
    pinned waits aside, so that it is not asked again by every call.
    """

    api_version = (1, 0)

    def __init__(self) -> None:
        self._records: dict[ChunkKey, _Record] = {}
        self._heap: list[tuple[int, ChunkKey]] = []
        self._aside: dict[ChunkKey, int] = {}
        self._ranks = itertools.count()
        self._named = 0

    def on_put(self, item: Item) -> None:
        self._records[item.key] = _Record(item.nbytes, 0)
        self._rank(item.key)

    def on_get(self, key: ChunkKey) -> None:
        if key in self._records:
            self._rank(key)

    def on_remove(self, key: ChunkKey) -> None:
        self._records.pop(key, None)
        self._aside.pop(key, None)

    def victims(self, nbytes: int, is_pinned: Callable[[ChunkKey], bool]) -> list[ChunkKey]:
        if nbytes <= 0:
            return []
        looked = 4 * self._named > len(self._aside)
        if looked:
            self._look_again(is_pinned)
        chosen: list[tuple[int, ChunkKey]] = []
        while nbytes > 0:
            if not self._heap:
                if looked or not self._aside:
                    break
                looked = True
                self._look_again(is_pinned)
                continue
            rank, key = heapq.heappop(self._heap)
            record = self._records.get(key)
            if record is None or record.rank != rank or key in self._aside:
                continue
            if is_pinned(key):
                self._aside[key] = rank
                continue
            chosen.append((rank, key))
            nbytes -= record.nbytes
        for entry in chosen:  # they stay known until they are removed
            heapq.heappush(self._heap, entry)
        if nbytes > 0:
            return []
        self._named += len(chosen)
        return [key for _, key in chosen]

    def _rank(self, key: ChunkKey) -> None:
        """Higher leaves later.  Prompts are reported deepest chunk first, so their heads stay longest."""
        self._aside.pop(key, None)
        rank = next(self._ranks)
        self._records[key].rank = rank
        heapq.heappush(self._heap, (rank, key))
        if len(self._heap) > 64 + 2 * len(self._records):
            self._heap = [(record.rank, key) for key, record in self._records.items() if key not in self._aside]
            heapq.heapify(self._heap)

    def _look_again(self, is_pinned: Callable[[ChunkKey], bool]) -> None:
        self._named = 0
        for key, rank in list(self._aside.items()):
            if not is_pinned(key):
                del self._aside[key]
                heapq.heappush(self._heap, (rank, key))
