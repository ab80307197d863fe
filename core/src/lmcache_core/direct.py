"""A pool whose engine's records go between the device's memory and one store, past host memory."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

from . import frame
from .buffers import Extent, Slot
from .chain import Chain, GroupKind, Shard
from .device import Device, DeviceRecord, Pages, SupportsStaging
from .errors import CacheError
from .frame import Frame
from .index import Entry, Sink, State
from .keys import ChunkKey
from .layout import PAGE_NBYTES
from .pool import Pool, Reservation
from .tier import LoadItem, StoreItem, Tier

log = logging.getLogger(__name__)
_NOWHERE: Final = Slot(-1, 0, 0)


class StagedEntry(Entry):
    """A record in the device's memory, of one job: in no index and in no slot."""

    __slots__ = ("record",)

    def __init__(self, key: ChunkKey, chain: Chain, shard: Shard, depth: int, record: DeviceRecord) -> None:
        super().__init__(key, _NOWHERE, shard.layout, depth, State.RESERVED, 0, chain.model)
        self.alone = any(shard in group.shards for group in chain.model.groups if group.kind is not GroupKind.FULL)
        self.record = record


class Staging:
    """Device memory for records, at most `capacity_nbytes` of it, kept by size for the next ones."""

    def __init__(self, device: SupportsStaging, capacity_nbytes: int) -> None:
        self._device = device
        self._capacity_nbytes = capacity_nbytes
        self._lock = threading.Lock()
        self._pages: Pages = ()
        self._free: dict[int, list[DeviceRecord]] = {}
        self._made_nbytes = 0
        self._said = False

    def meet(self, pages: Pages) -> None:
        """Where the engine's pages are; the first ones decide."""
        if not self._pages:
            self._pages = pages

    def take(self, nbytes: int) -> DeviceRecord | None:
        """Memory for a record; `None` where all of it is in use."""
        with self._lock:
            free = self._free.get(nbytes)
            if free:
                return free.pop()
            if not self._pages:
                return None
            while self._made_nbytes + nbytes > self._capacity_nbytes:
                other = next((size for size, records in self._free.items() if records), None)
                if other is None:
                    return None
                self._free[other].pop()
                self._made_nbytes -= other
            try:
                made = self._device.staging(nbytes, self._pages)
            except CacheError as error:
                if not self._said:
                    self._said = True
                    log.warning("no device memory for records, they go through host memory: %s", str(error))
                return None
            self._made_nbytes += nbytes
            return made

    def give(self, record: DeviceRecord) -> None:
        """Nobody reads or writes it any more."""
        with self._lock:
            self._free.setdefault(record.nbytes, []).append(record)

    def in_use_nbytes(self) -> int:
        with self._lock:
            return self._made_nbytes - sum(size * len(records) for size, records in self._free.items())

    def clear(self) -> None:
        """Let go of what nobody uses."""
        with self._lock:
            for size, records in self._free.items():
                self._made_nbytes -= size * len(records)
            self._free.clear()
            self._pages = ()


class DirectPool(Pool):
    """What finds no place in the device's memory goes through the slab, as in any pool."""

    def __init__(self, *args: Any, staging: Staging, **more: Any) -> None:
        super().__init__(*args, **more)
        (self._tier,) = self.tiers
        self._staging = staging

    def meet(self, pages: Pages) -> None:
        self._staging.meet(pages)

    def reserve(self, chain: Chain, shard: Shard, span: range) -> Reservation:
        new: list[tuple[int, Entry]] = []
        other: list[int] = []
        present: list[ChunkKey] = []
        for position, key in enumerate(chain.keys(shard, span)):
            if key in self._tier.known:
                present.append(key)
                continue
            entry = None if self._is_here(key) else self._staged(key, chain, shard, span.start + position)
            if entry is None:
                other.append(position)
            else:
                new.append((position, entry))
        self._metrics.add("direct_records", len(new), operation="store")
        self._tier.used(present[::-1])
        skipped, refused = len(present), []
        for run in _runs(other):
            through = super().reserve(chain, shard, range(span.start + run.start, span.start + run.stop))
            new += [(run.start + position, entry) for position, entry in through.new]
            refused += [run.start + position for position in through.refused]
            skipped += through.skipped
        return Reservation(sorted(new, key=lambda found: found[0]), skipped, refused)

    def commit(self, entries: Sequence[Entry]) -> str:
        staged, others = _split(entries)
        now = time.time_ns()
        items = []
        for entry in staged:
            page = memoryview(bytearray(PAGE_NBYTES))
            nbytes = entry.layout.nbytes
            frame.pack(Frame(entry.key, entry.depth, entry.layout.fingerprint, nbytes, nbytes, now), page)
            entry.record.write_header(page)
            done, free = self._staged_stored, self._staged_free
            items.append(StoreItem(entry.key, entry.record, entry.layout, done, free, entry.alone, entry, entry.model))
        if items:
            self._tier.store(items)
        return super().commit(others)

    def abort(self, entries: Sequence[Entry], reason: str, *, give_slots: bool = True) -> None:
        staged, others = _split(entries)
        if give_slots:
            self.unhold(staged)
        super().abort(others, reason, give_slots=give_slots)

    def give_slots(self, entries: Sequence[Entry]) -> None:
        staged, others = _split(entries)
        self.unhold(staged)
        super().give_slots(others)

    def acquire(self, chain: Chain, shard: Shard, span: range, sink: Sink, *, for_engine: bool = True) -> None:
        loads: list[LoadItem] = []
        other: list[int] = []
        for position, key in enumerate(chain.keys(shard, span)):
            depth = span.start + position
            wanted = for_engine and key in self._tier.known and self._tier.ready and not self._is_here(key)
            entry = self._staged(key, chain, shard, depth) if wanted else None
            if entry is None:
                other.append(position)
                continue
            again = partial(super().acquire, chain, shard, range(depth, depth + 1), _shifted(sink, position))
            context = (entry, sink, position, again)
            loads.append(LoadItem(key, entry.record, entry.layout, self._staged_loaded, self._staged_free, context))
        for run in _runs(other):
            part = range(span.start + run.start, span.start + run.stop)
            super().acquire(chain, shard, part, _shifted(sink, run.start), for_engine=for_engine)
        if loads:
            self._metrics.add("direct_records", len(loads), operation="load")
            self._tier.used([item.key for item in reversed(loads)])
            self._tier.load(loads)

    def unhold(self, entries: Iterable[Entry]) -> None:
        staged, others = _split(entries)
        for entry in staged:
            self._staging.give(entry.record)
        super().unhold(others)

    def extent(self, entry: Entry) -> Extent | None:
        return None if isinstance(entry, StagedEntry) else super().extent(entry)

    def payload(self, entry: Entry) -> Any:
        if isinstance(entry, StagedEntry):
            return entry.record.payload(entry.layout.nbytes)
        return super().payload(entry)

    def intact(self, entry: Entry) -> bool:
        return isinstance(entry, StagedEntry) or super().intact(entry)

    def close(self) -> None:
        super().close()
        self._staging.clear()

    def _is_here(self, key: bytes) -> bool:
        with self._lock:
            return key in self._index.entries

    def _staged(self, key: ChunkKey, chain: Chain, shard: Shard, depth: int) -> StagedEntry | None:
        record = self._staging.take(frame.record_nbytes(shard.layout.nbytes))
        return StagedEntry(key, chain, shard, depth, record) if record is not None else None

    def _staged_loaded(self, item: LoadItem, found: Frame | None, reason: str, in_use: bool) -> None:
        entry, sink, position, again = item.context
        if found is not None:
            entry.depth, entry.stored_at_ns, entry.state = found.depth, found.stored_at_ns, State.READY
            sink(position, entry, self._tier.name)
            return
        if not in_use:
            self._staging.give(entry.record)
        if reason.startswith("fault"):
            again()  # by host memory, which also takes what has to be decoded there
        else:
            sink(position, None, reason)

    def _staged_stored(self, item: StoreItem, reason: str, in_use: bool) -> None:
        if not in_use:
            self._staging.give(item.context.record)

    def _staged_free(self, item: LoadItem | StoreItem) -> None:
        entry = item.context if isinstance(item, StoreItem) else item.context[0]
        self._staging.give(entry.record)


def direct_staging(tiers: Sequence[Tier], device: Device, *, has_host: bool, capacity_nbytes: int) -> Staging | str:
    """Device memory for records, or why they go through host memory; "" where no store offers anything else."""
    if not any(tier.device_io is not None for tier in tiers):
        return ""
    if has_host:
        return "a tier in host memory keeps what is stored"
    if len(tiers) != 1:
        return "there is more than one store, and each is written from host memory"
    if not isinstance(device, SupportsStaging):
        return "the device has no memory for records on their way"
    return Staging(device, capacity_nbytes)


def _split(entries: Iterable[Entry]) -> tuple[list[StagedEntry], list[Entry]]:
    staged: list[StagedEntry] = []
    others: list[Entry] = []
    for entry in entries:
        if isinstance(entry, StagedEntry):
            staged.append(entry)
        else:
            others.append(entry)
    return staged, others


def _runs(positions: Sequence[int]) -> list[range]:
    """Neighbours as ranges."""
    runs = []
    for _, group in itertools.groupby(enumerate(positions), key=lambda pair: pair[1] - pair[0]):
        found = [position for _, position in group]
        runs.append(range(found[0], found[-1] + 1))
    return runs


def _shifted(sink: Sink, by: int) -> Sink:
    return lambda position, entry, reason: sink(by + position, entry, reason)
