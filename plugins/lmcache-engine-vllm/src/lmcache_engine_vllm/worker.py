"""The half of the connector in a worker: starts loads and stores, and reports when they have ended."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from lmcache_core import Cache, CacheError, Family, Fence, JobResult, Pages, Shard

from .geometry import Rectangle
from .metadata import Load, Part, Store, WorkerReport
from .stats import Stats

log = logging.getLogger("vllm.lmcache.worker")

_MAX_SHARDS: Final = 1024
_OTHERS_S: Final = 0.001


@dataclass(slots=True, eq=False)
class _Load:
    """A request's load on its way: parts that are out, blocks that failed."""

    load: Load
    outstanding: int
    failed_blocks: set[int] = field(default_factory=set)
    failed_chunk: int | None = None


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Loads that have ended since the last step."""

    requests: set[str]
    failed: dict[str, int]
    """Request -> first chunk that was not loaded."""
    failed_blocks: set[int]


class WorkerHalf:
    """Of one rank.  Calls come from the engine's thread, ends of jobs from the cache's."""

    def __init__(self, cache: Cache, rectangles: Sequence[Rectangle], pages: Mapping[int, Pages]) -> None:
        self._stats = Stats()
        self._cache = cache
        self._rectangles = {own.group: own for own in rectangles}
        self._pages = pages
        self._shards: dict[tuple[bytes, int], Shard] = {}
        self._changed = threading.Condition()
        self._loading: dict[str, _Load] = {}
        self._arrived: list[_Load] = []
        self._storing: dict[int, int] = {}
        """Stores whose blocks are still read: how many parts."""
        self._stored: list[int] = []
        self._dropped: set[int] = set()

    def load(self, load: Load) -> None:
        """Start to load; every load ends in `arrivals`, whatever fails."""
        own_parts = [part for part in load.parts if part.group in self._rectangles]
        state = _Load(load, len(own_parts) or 1)
        with self._changed:
            self._loading[load.request_id] = state
        if not own_parts:
            self._part_arrived(state, None, None)
        for part in own_parts:
            own = self._rectangles[part.group]
            shard = self._shard(load.hit.chain.model.family, own)
            try:
                job = self._cache.retrieve(
                    load.hit,
                    shard,
                    range(part.start, part.stop),
                    self._pages[part.group],
                    part.block_ids,
                    skip_tokens=part.skip_blocks * own.block_tokens,
                )
            except CacheError as error:
                log.warning("%s: not loaded: %s", load.request_id, error)
                self._part_arrived(state, part, None)
                continue
            job.add_done_callback(lambda result, part=part: self._part_arrived(state, part, result))  # type: ignore[misc]

    def store(self, store: Store, after: Fence | None) -> None:
        """Start to store what the step has computed; the blocks are reported as soon as they are no longer read."""
        own_parts = [part for part in store.parts if self._writes(part.group)]
        with self._changed:
            self._storing[store.store_id] = len(own_parts) or 1
        if not own_parts:
            self._let_go(store.store_id)
        for part in own_parts:
            shard = self._shard(store.chain.model.family, self._rectangles[part.group])
            try:
                job = self._cache.store(
                    store.chain,
                    shard,
                    range(part.start, part.stop),
                    self._pages[part.group],
                    part.block_ids,
                    request=store.request_id,
                    after=after,
                )
            except CacheError as error:
                log.warning("%s: not stored: %s", store.request_id, error)
                self._part_stored(store.store_id, None)
                continue
            job.add_done_callback(lambda result, store_id=store.store_id: self._part_stored(store_id, result))  # type: ignore[misc]

    def wait(self, timeout_s: float) -> None:
        """In a step that has nothing to do: until a transfer of this rank has ended, at most `timeout_s`.

        Only briefly where this rank has none: another one may be about to report.
        """
        with self._changed:
            if not (self._arrived or self._stored):
                own = self._loading or self._storing
                self._changed.wait(timeout_s if own else min(timeout_s, _OTHERS_S))

    def arrivals(self) -> Arrivals:
        """The loads that have ended, each once."""
        with self._changed:
            ended, self._arrived = self._arrived, []
        failed = {s.load.request_id: s.failed_chunk for s in ended if s.failed_chunk is not None}
        blocks = {block for state in ended for block in state.failed_blocks}
        return Arrivals({state.load.request_id for state in ended}, failed, blocks)

    def stored(self) -> tuple[dict[int, int], set[int]]:
        """The stores whose blocks this rank has let go, each once, and those of which something was dropped."""
        with self._changed:
            ended, self._stored = self._stored, []
            dropped, self._dropped = self._dropped, set()
        return dict.fromkeys(ended, 1), dropped

    def counted(self) -> dict[str, float]:
        """What was counted since the last call."""
        with self._changed:
            return self._stats.take()

    def close(self) -> None:
        self._cache.close()

    def _writes(self, group: int) -> bool:
        own = self._rectangles.get(group)
        return own is not None and own.writer

    def _shard(self, family: Family, own: Rectangle) -> Shard:
        key = (family.family_id, own.group)
        found = self._shards.get(key)
        if found is None:
            if len(self._shards) >= _MAX_SHARDS:
                self._shards.clear()
            found = self._shards[key] = own.shard(family)
        return found

    def _part_arrived(self, state: _Load, part: Part | None, result: JobResult | None) -> None:
        with self._changed:
            if part is not None:
                failed = result.failed if result is not None else ((part.start, part.stop, "not started"),)
                self._note_failed(state, part, [(start, stop) for start, stop, _ in failed])
            if result is not None:
                self._stats.add(loaded_bytes=result.nbytes)
            state.outstanding -= 1
            if state.outstanding:
                return
            del self._loading[state.load.request_id]
            self._arrived.append(state)
            self._changed.notify_all()

    def _note_failed(self, state: _Load, part: Part, spans: Sequence[tuple[int, int]]) -> None:
        own = self._rectangles[part.group]
        each = own.layout.chunk_tokens // own.block_tokens
        for start, stop in spans:
            first = max((start - part.start) * each, part.skip_blocks)
            state.failed_blocks.update(part.block_ids[first : (stop - part.start) * each])
            state.failed_chunk = start if state.failed_chunk is None else min(state.failed_chunk, start)

    def _part_stored(self, store_id: int, result: JobResult | None) -> None:
        with self._changed:
            if result is None or result.failed:
                self._dropped.add(store_id)
            if result is not None:
                self._stats.add(
                    stored_chunks=result.ok_chunks,
                    skipped_chunks=result.skipped,
                    dropped_chunks=sum(stop - start for start, stop, _ in result.failed),
                    stored_bytes=result.nbytes,
                )
            self._let_go(store_id)

    def _let_go(self, store_id: int) -> None:
        with self._changed:
            self._storing[store_id] -= 1
            if not self._storing[store_id]:
                del self._storing[store_id]
                self._stored.append(store_id)
                self._changed.notify_all()


def report_of(half: WorkerHalf, failed: Mapping[str, int]) -> WorkerReport | None:
    """What the scheduler has to hear at the end of a step; None for nothing."""
    stored, dropped = half.stored()
    return WorkerReport(stored, dropped, dict(failed)) if stored or failed else None
