"""A backend with capacity, policy, codec, breaker, deadlines and threads: everything a store of bytes is not."""

from __future__ import annotations

import itertools
import logging
import mmap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from . import frame, manifest
from .backend import (
    Backend,
    Entry,
    GetResult,
    SupportsDescription,
    SupportsListing,
    SupportsRegistration,
    SupportsUnregistration,
)
from .breaker import Breaker
from .chain import Model
from .costs import Costs
from .device import DeviceRecord
from .errors import BackendError, BackendFull, CacheError, ChunkCorrupt
from .events import Events
from .frame import Frame
from .history import NOT_STORED, History
from .keys import ChunkKey
from .layout import Layout, page_align
from .ledger import Ledger, Written
from .metrics import Metrics
from .policy import EvictionPolicy
from .sealing import Sealer
from .staged import Record, depth_of, device_io_of, get_many, in_device, in_host, put_many, unseal
from .transfer import Task, TransferPool

log = logging.getLogger(__name__)

_BATCH_NBYTES: Final = 8 << 20
_LEAST_PART_NBYTES: Final = 2 << 20
_PARTS_PER_THREAD: Final = 4
_STAGED_NBYTES: Final = 8 << 20
"""Most that one call moves of encoded records: each thread has staging memory for as much."""
_RELIST_INTERVAL_S: Final = 5.0
_LIST_WAIT_S: Final = 2.0
_ORPHAN_S: Final = 60.0
_MAX_DESCRIPTION: Final = 300

ItemT = TypeVar("ItemT", "LoadItem", "StoreItem")
Loaded = Callable[["LoadItem", Frame | None, str, bool], None]
Stored = Callable[["StoreItem", str, bool], None]


@dataclass(slots=True, eq=False)
class LoadItem:
    """One record wanted in `record` (a slot: header page and payload; or, for `device_io`, the same in a device).

    `done(item, frame, reason, in_use)` is called once: with the frame, or with None and why not.  If `in_use`, the
    backend may still write to `record`, until `free(item)`.
    """

    key: ChunkKey
    record: Record
    layout: Layout
    done: Loaded
    free: Callable[[LoadItem], None]
    context: Any = None


@dataclass(slots=True, eq=False)
class StoreItem:
    """One record to be written; `done(item, reason, in_use)` and `free` as for a LoadItem, "" being success."""

    key: ChunkKey
    record: Record
    layout: Layout
    done: Stored
    free: Callable[[StoreItem], None]
    alone: bool = False
    context: Any = None
    model: Model | None = None
    """Whose record it is."""


@dataclass(slots=True)
class _Timed:
    """Batches that were asked for together."""

    began: float
    left: int
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class TierStatus:
    name: str
    backend: str
    records: int
    used_nbytes: int
    capacity_nbytes: int | None
    breaker: str
    reason: str
    queued_loads: int
    queued_stores: int
    description: str = ""
    """How the backend says that it works; empty where it says nothing."""


class Tier:
    """Owns its backend and closes it.  Callbacks run on its threads, without its lock."""

    def __init__(
        self,
        name: str,
        backend: Backend[Any],
        *,
        backend_name: str,
        sealer: Sealer,
        new_policy: Callable[[], EvictionPolicy],
        capacity_nbytes: int | None,
        tenant_quota_nbytes: int | None = None,
        timeout_s: float,
        max_queued_nbytes: int,
        metrics: Metrics,
        events: Events,
        history: History | None = None,
        policy_name: str = "",
        probe_interval_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.backend = backend
        self.backend_name = backend_name
        self.capacity_nbytes = capacity_nbytes
        self.timeout_s = timeout_s
        self.breaker = Breaker(probe_interval_s=probe_interval_s, clock=clock, on_change=self._health_changed)
        self.ledger = Ledger(capacity_nbytes, new_policy, tenant_quota_nbytes)
        self.known = self.ledger.known
        self.costs = Costs()
        """Seconds until so many bytes that were asked for together were there."""
        self.pin, self.unpin, self.used = self.ledger.pin, self.ledger.unpin, self.ledger.touch
        self._sealer = sealer
        self._keeps_manifests = backend.traits.persistent or backend.traits.shared
        self._metrics = metrics
        self._events = events
        self._history = history or History()
        self._policy_name = policy_name
        self.device_io = device_io_of(backend) if sealer.codec_name == "identity" else None
        """How records get to and from a device's memory; they are given and wanted there only where it is not None."""
        self._lock = threading.Lock()
        self._closed = False
        self._lister: threading.Thread | None = None
        self._faulty = False
        self._said_corrupt = float("-inf")
        self._clock = clock
        self._relist_at = 0.0
        wanted = backend.traits.batch_nbytes
        batch_nbytes = _BATCH_NBYTES if wanted is None else wanted
        if sealer.codec_name != "identity":
            batch_nbytes = min(batch_nbytes, _STAGED_NBYTES)
        self._load_nbytes, self._store_nbytes = batch_nbytes, min(batch_nbytes, max_queued_nbytes // 4)
        """Records are grouped into calls of the backend up to so much; a full queue refuses a group as a whole."""
        self._pool = TransferPool(
            name, backend.traits.io_threads, deadline_s=2 * timeout_s, max_store_nbytes=max_queued_nbytes
        )

    def start(self, wait_s: float = _LIST_WAIT_S) -> None:
        """Learn what a listing store has, oldest first, and trim it to the capacity.

        Beyond `wait_s` that goes on in the background: a bucket of a million objects, or a server that is not there,
        keeps nobody from starting.  Records that are not learned yet are found by asking, where the store is shared.
        """
        self._lister = threading.Thread(target=self._learn_all, name=f"lmcache-{self.name}-list", daemon=True)
        self._lister.start()
        self._lister.join(wait_s)
        if self._lister.is_alive():
            log.info("tier %s: still listing what is there; in use meanwhile", self.name)

    def _learn_all(self) -> None:
        self._list()
        self._make_room(0)
        if self.known:
            log.info(
                "tier %s: warm with %d records, %d bytes of %s",
                self.name,
                len(self.known),
                self.ledger.used_nbytes,
                self.capacity_nbytes,
            )

    @property
    def ready(self) -> bool:
        """Whether it would be asked now."""
        return self.breaker.ready() and not self._pool.saturated

    def status(self) -> TierStatus:
        loads, stores = self._pool.queued()
        return TierStatus(
            self.name,
            self.backend_name,
            len(self.known),
            self.ledger.used_nbytes,
            self.capacity_nbytes,
            self.breaker.state.value,
            self.breaker.reason,
            loads,
            stores,
            self._description(),
        )

    def _description(self) -> str:
        if not isinstance(self.backend, SupportsDescription):
            return ""
        try:
            return self.backend.description().partition("\n")[0][:_MAX_DESCRIPTION]
        except Exception as error:  # a plugin may raise anything, and a status must be had of a broken one
            return f"not told: {error!r}"[:_MAX_DESCRIPTION]

    def load(self, items: Sequence[LoadItem]) -> None:
        """Read records in the background, in order; each item is answered once."""
        batches = _batches(items, self._part_nbytes(items))
        timed = _Timed(time.monotonic(), len(batches))
        for batch in batches:
            task = Task(
                partial(self._run_load, batch, timed),
                partial(self._late_load, batch),
                partial(_free, batch),
            )
            if not self._submit_load(task):
                self._metrics.add("tier_reads", len(batch), tier=self.name, result="tier unavailable")
                for item in batch:
                    item.done(item, None, "tier unavailable", False)

    def _part_nbytes(self, items: Sequence[LoadItem]) -> int:
        """What one call reads: little enough that all threads read and end at about the same time."""
        traits = self.backend.traits
        if traits.batch_nbytes is not None:
            return self._load_nbytes
        share = sum(item.record.nbytes for item in items) // (traits.io_threads * _PARTS_PER_THREAD)
        return min(self._load_nbytes, max(_LEAST_PART_NBYTES, share))

    def store(self, items: Sequence[StoreItem]) -> None:
        """Write records in the background; what the queue cannot take is dropped, counted and answered at once."""
        for batch in _batches(items, self._store_nbytes):
            task = Task(
                partial(self._run_store, batch),
                partial(self._late_store, batch),
                partial(_free, batch),
                nbytes=sum(item.record.nbytes for item in batch),
            )
            if not self.breaker.allow():
                self._drop(batch, "tier unavailable")
            elif not self._pool.submit_store(task):
                self.breaker.untried()
                self._drop(batch, "queue full")

    def probe(self, keys: Sequence[ChunkKey], record_nbytes: int, done: Callable[[], None]) -> bool:
        """Ask a shared store for a prefix of `keys` in the background, then `done()`; False if it is not asked."""

        def run() -> Callable[[], None]:
            began = time.monotonic()
            found = self._call("contains_prefix", lambda: self.backend.contains_prefix(keys, timeout_s=self.timeout_s))
            if isinstance(found, int):
                self.ledger.learn_new((key, record_nbytes) for key in keys[:found])

            seconds = time.monotonic() - began

            def complete() -> None:
                self._metrics.observe("tier_probe_seconds", seconds, tier=self.name)
                self._history.took(
                    self.name, "ask", seconds, len(keys), failed=0 if isinstance(found, int) else len(keys)
                )
                self._count_health("contains_prefix", keys, [found])
                done()

            return complete

        def late() -> None:
            self._count_late("ask", len(keys))
            done()

        return self._submit_load(Task(run, late, lambda: None))

    def _submit_load(self, task: Task) -> bool:
        if not self.breaker.allow():
            return False
        if self._pool.submit_load(task):
            return True
        self.breaker.untried()
        return False

    def remove(self, keys: Sequence[ChunkKey], reason: str) -> list[ChunkKey]:
        """Delete what nobody was told is there: not offered from now on, gone from the store in the background.

        Returns the keys of what goes.
        """
        gone = self.ledger.leave(keys)
        self._report_evicted(gone, reason)

        def run() -> Callable[[], None]:
            for key in gone:
                self._call("remove", partial(self.backend.remove, key))
            self.ledger.left(gone)
            self._drop_manifests((key.shard_id for key in gone), cleared=True)
            return lambda: None

        if not self._pool.submit_load(Task(run, lambda: None, lambda: self.ledger.left(gone))):
            self.ledger.left(gone)
        return gone

    def register(self, address: int, nbytes: int) -> None:
        """Tell a backend that wants to know what memory its buffers will lie in; it does without where it cannot."""
        if isinstance(self.backend, SupportsRegistration):
            refused = self._call("register", partial(self.backend.register, address, nbytes))
            if isinstance(refused, BackendError):
                log.warning("tier %s: its backend uses %d bytes unregistered: %s", self.name, nbytes, str(refused))

    def unregister(self, address: int, nbytes: int) -> None:
        """The inverse, before that memory goes."""
        if isinstance(self.backend, SupportsUnregistration):
            self._call("unregister", partial(self.backend.unregister, address, nbytes))

    def drain(self, timeout_s: float) -> bool:
        return self._pool.drain(timeout_s)

    def close(self) -> None:
        """Answer everything, end the threads, close the backend.  Twice is fine."""
        if self._closed:
            return
        self._closed = True
        if not self._pool.close(self.timeout_s):
            log.warning("tier %s: a thread is stuck in its backend and was left behind", self.name)
        if self._lister is not None:
            self._lister.join(self.timeout_s)
        self.backend.close()

    def _list(self) -> None:
        if not isinstance(self.backend, SupportsListing):
            return
        backend = self.backend
        entries = self._call("entries", lambda: self._until_closed(backend.entries()))
        self._count_health("entries", [], [entries])
        if isinstance(entries, list):
            entries.sort(key=lambda entry: entry.stored_at)
            manifests = [entry for entry in entries if manifest.is_manifest(entry.key)]
            for entry in manifests:
                self._read_manifest(entry)
            self.ledger.learn_new((e.key, e.nbytes) for e in entries if not manifest.is_manifest(e.key))
            old = time.time() - _ORPHAN_S  # a younger one may be of records that are under way
            self._drop_manifests(entry.key.shard_id for entry in manifests if entry.stored_at < old)

    def _until_closed(self, entries: Iterator[Entry]) -> list[Entry]:
        return list(itertools.takewhile(lambda entry: not self._closed, entries))

    # What follows runs on the pool's threads.

    def _relist(self) -> bool:
        """Look what others put into a shared store, so that it can be evicted; not more often than the interval."""
        now = self._clock()
        with self._lock:
            if not self.backend.traits.shared or now < self._relist_at:
                return False
            self._relist_at = now + _RELIST_INTERVAL_S
        self._list()
        return True

    def _run_load(self, batch: list[LoadItem], timed: _Timed) -> Callable[[], None]:
        started = time.monotonic()
        keys = [item.key for item in batch]
        views, get = self._reads(batch, keys)
        results: Sequence[GetResult] = self._each("get_many", get, keys)
        answers = [self._check(*parts) for parts in zip(batch, views, results, strict=True)]
        seconds = time.monotonic() - started

        def complete() -> None:
            self._count_health("get", keys, results)
            counts = Counter(reason.partition(":")[0] or "ok" for _, reason in answers)
            nbytes = sum(frame.record_nbytes(found.encoded_nbytes) for found, _ in answers if found is not None)
            for result, count in counts.items():
                self._metrics.add("tier_reads", count, tier=self.name, result=result)
            self._metrics.add("tier_read_bytes", nbytes, tier=self.name)
            self._metrics.observe("tier_read_seconds", seconds, tier=self.name)
            self._metrics.observe("tier_read_batch_bytes", nbytes, tier=self.name)
            self._history.took(self.name, "read", seconds, len(batch), nbytes, len(batch) - counts["ok"])
            if counts["ok"] == len(batch):
                self._time(timed, nbytes)
            for item, (found, reason) in zip(batch, answers, strict=True):
                item.done(item, found, reason, False)

        return complete

    def _time(self, timed: _Timed, nbytes: int) -> None:
        """One more batch is there; the last of those asked for together gives a sample of what loading takes."""
        with self._lock:
            timed.left -= 1
            timed.nbytes += nbytes
            if timed.left:
                return
        self.costs.sample(timed.nbytes, time.monotonic() - timed.began)

    def _reads(
        self, batch: list[LoadItem], keys: list[ChunkKey]
    ) -> tuple[Sequence[Record], Callable[[], list[GetResult]]]:
        """Where to read a batch to, which is all in host memory or all in a device's, and the call that does."""
        staged = in_device(item.record for item in batch)
        if staged:
            assert self.device_io is not None
            return staged, partial(get_many, self.device_io, keys, staged, self.timeout_s)
        views = self._sealer.targets(in_host(item.record for item in batch), [item.layout for item in batch])
        return views, partial(self.backend.get_many, keys, views, timeout_s=self.timeout_s)

    def _check(self, item: LoadItem, view: Record, result: GetResult) -> tuple[Frame | None, str]:
        """Verify one record and bring it, decoded, into its slot; what is wrong is removed."""
        if result is None:
            self._forget(item.key, "lost")
            return None, "miss"
        problem = str(result)
        corrupt = isinstance(result, ChunkCorrupt)
        if isinstance(result, int):
            try:
                if isinstance(item.record, DeviceRecord):
                    return unseal(item.record, result, item.key, item.layout), ""
                assert isinstance(view, memoryview)
                return self._sealer.unseal(view, result, item.key, item.layout, item.record), ""
            except ChunkCorrupt as error:
                corrupt, problem = True, str(error)
            except CacheError as error:  # a codec that is not installed: the record is fine
                log.warning("tier %s: %s", self.name, str(error))
                return None, f"fault: {error}"
        if not corrupt:
            return None, f"fault: {problem}"
        now = self._clock()
        if now - self._said_corrupt >= 1.0:
            self._said_corrupt = now
            log.warning("tier %s: removed a corrupt record: %s", self.name, problem)
        self._metrics.add("corruptions", tier=self.name)
        self._remove(item.key, "corrupt")
        return None, f"corrupt: {problem}"

    def _count_late(self, operation: str, records: int) -> None:
        self._history.took(self.name, operation, 2 * self.timeout_s, records, failed=records)
        self.breaker.failed(f"no answer in {2 * self.timeout_s} s")

    def _late_load(self, batch: list[LoadItem]) -> None:
        self._count_late("read", len(batch))
        for item in batch:
            self._metrics.add("tier_reads", tier=self.name, result="late")
            item.done(item, None, "late", True)

    def _run_store(self, batch: list[StoreItem]) -> Callable[[], None]:
        started = time.monotonic()
        results: list[str] = []
        answers: list[tuple[list[ChunkKey], list[object]]] = []
        if self._sealer.codec_name == "identity":
            results = self._put(batch, [self._sealed(item) for item in batch], answers)
        else:
            for item in batch:
                results += self._put([item], [self._sealed(item)], answers)
        seconds = time.monotonic() - started

        def complete() -> None:
            for keys, outcome in answers:
                self._count_health("put", keys, outcome)
            if not answers:
                self.breaker.untried()
            stored = [item for item, reason in zip(batch, results, strict=True) if not reason]
            nbytes = sum(item.record.nbytes for item in stored)
            self._metrics.observe("tier_write_seconds", seconds, tier=self.name)
            self._metrics.observe("tier_write_batch_bytes", nbytes, tier=self.name)
            self._metrics.add("tier_written_bytes", nbytes, tier=self.name)
            self._history.took(self.name, "write", seconds, len(batch), nbytes, len(batch) - len(stored))
            for result, count in Counter(reason.partition(":")[0] or "ok" for reason in results).items():
                self._metrics.add("tier_writes", count, tier=self.name, result=result)
            for item, reason in zip(batch, results, strict=True):
                if reason:
                    self._metrics.add("drops", tier=self.name, reason=reason.partition(":")[0])
                    self._history.lost([item.key], self.name, f"{NOT_STORED}{reason}")
                item.done(item, reason, False)
            if stored:
                keys = [item.key for item in stored]
                self._events.emit("lmcache_chunks_stored", tier=self.name, keys=keys, nbytes=nbytes, seconds=seconds)

        return complete

    def _sealed(self, item: StoreItem) -> Record:
        record = item.record
        return record if isinstance(record, DeviceRecord) else self._sealer.seal(record, item.layout)

    def _writes(self, keys: list[ChunkKey], records: Sequence[Record]) -> Callable[[], list[BackendError | None]]:
        staged = in_device(records)
        if staged:
            assert self.device_io is not None
            return partial(put_many, self.device_io, keys, staged, self.timeout_s)
        return partial(self.backend.put_many, keys, in_host(records), timeout_s=self.timeout_s)

    def _put(
        self,
        batch: list[StoreItem],
        records: list[Record],
        answers: list[tuple[list[ChunkKey], list[object]]],
    ) -> list[str]:
        """Write records that are not there yet; "" or why not for each.  What the store answered goes to `answers`."""
        reasons = [""] * len(batch)
        wanted: list[int] = []
        limit = self.backend.traits.max_nbytes
        for index, (item, record) in enumerate(zip(batch, records, strict=True)):
            too_large = (limit is not None and record.nbytes > limit) or (
                self.capacity_nbytes is not None and record.nbytes > self.capacity_nbytes
            )
            if too_large:
                reasons[index] = "full: the record is larger than the tier"
            elif self.ledger.is_leaving(item.key):  # what is written now would be deleted with what was there
                reasons[index] = "busy: the record is being removed"
            elif item.key not in self.known:
                wanted.append(index)
        if wanted:
            self._write_manifest(batch[wanted[0]])
        depths = {index: depth_of(records[index]) for index in wanted}  # a large write leaves no header in any cache
        for attempt in range(2):
            if not wanted:
                break
            nbytes = sum(records[index].nbytes for index in wanted)
            room = (nbytes, batch[0].key.shard_id, nbytes if attempt else 0)
            if not self._make_room(*room) and not (self._relist() and self._make_room(*room)):
                for index in wanted:
                    reasons[index] = "full: everything in the tier is in use"
                break
            keys = [batch[index].key for index in wanted]
            results = self._each("put_many", self._writes(keys, [records[index] for index in wanted]), keys)
            answers.append((keys, results))
            full: list[int] = []
            stored: list[Written] = []
            for index, result in zip(wanted, results, strict=True):
                item = batch[index]
                if result is None:
                    stored.append(Written(item.key, records[index].nbytes, depths[index], item.alone))
                    reasons[index] = ""
                elif isinstance(result, BackendFull):
                    reasons[index] = f"full: {result}"
                    full.append(index)
                else:
                    reasons[index] = f"fault: {result}"
            if stored and wanted:
                self._own(batch[wanted[0]])
            self.ledger.written(nbytes, batch[0].key.shard_id, stored)
            wanted = full  # the store is fuller than we knew: make room once and try again
        return reasons

    def _late_store(self, batch: list[StoreItem]) -> None:
        self._count_late("write", len(batch))
        for item in batch:
            self._metrics.add("tier_writes", tier=self.name, result="late")
            self._metrics.add("drops", tier=self.name, reason="late")
            item.done(item, "late", True)
        self._history.lost([item.key for item in batch], self.name, f"{NOT_STORED}late")

    def _make_room(self, nbytes: int, shard_id: bytes = b"", at_least: int = 0) -> bool:
        """Reserve `nbytes` of the capacity until `ledger.written`, deleting what must go; False if there is no room."""
        gone, fits = self.ledger.reserve(nbytes, shard_id, at_least)
        for key in gone:
            self._call("remove", partial(self.backend.remove, key))
        self.ledger.left(gone)
        self._report_evicted(gone, "capacity")
        dropped = self._drop_manifests(key.shard_id for key in gone if key.shard_id != shard_id)
        return fits or (dropped and self._make_room(nbytes, shard_id))

    def _write_manifest(self, item: StoreItem) -> None:
        """Say once per shard what its keys belong to, and learn whose they are."""
        shard_id = item.key.shard_id
        has_all = self.ledger.has_manifest if self._keeps_manifests else self.ledger.has_shard
        if item.model is None or has_all(shard_id):
            return
        described = manifest.of(item.model, shard_id)
        self.ledger.belongs(shard_id, described.tenant, described.family_id)
        if not self._keeps_manifests:
            return
        record = manifest.pack(described, time.time_ns())
        if not self._make_room(len(record)):
            return
        staged = _memory(len(record))
        staged[: len(record)] = record
        put = self._call("put", partial(self.backend.put, manifest.key_of(shard_id), staged[: len(record)]))
        if isinstance(put, BackendError):
            self.ledger.written(len(record))
        else:
            self.ledger.learn_manifest(shard_id, len(record), len(record))

    def _read_manifest(self, entry: Entry) -> None:
        if entry.nbytes > manifest.MAX_NBYTES or self.ledger.has_manifest(entry.key.shard_id):
            return
        staged = _memory(entry.nbytes)
        nbytes = self._call("get", partial(self.backend.get, entry.key, staged))
        try:
            found = manifest.parse(staged, nbytes, entry.key) if isinstance(nbytes, int) else None
        except ChunkCorrupt as error:
            log.warning("tier %s: removed a corrupt manifest: %s", self.name, str(error))
            self._call("remove", partial(self.backend.remove, entry.key))
            return
        if found is not None:
            self.ledger.belongs(found.shard_id, found.tenant, found.family_id)
            self.ledger.learn_manifest(found.shard_id, entry.nbytes)

    def _own(self, item: StoreItem) -> None:
        """Say again whose the shard is, if it was empty for a moment and was forgotten."""
        if item.model is not None and not self.ledger.has_shard(item.key.shard_id):
            described = manifest.of(item.model, item.key.shard_id)
            self.ledger.belongs(described.shard_id, described.tenant, described.family_id)

    def _drop_manifests(self, shard_ids: Iterable[bytes], *, cleared: bool = False) -> bool:
        """Forget the shards of which no record is left, so that their manifests do not fill the tier; whether any.

        In a shared store that cannot list, others may have some: the manifest stays, unless the shard was `cleared`.
        """
        dropped = False
        for shard_id in self.ledger.empty(dict.fromkeys(shard_ids)):
            dropped |= self._drop_manifest(shard_id, cleared)
        return dropped

    def _drop_manifest(self, shard_id: bytes, cleared: bool) -> bool:
        backend = self.backend
        lists = isinstance(backend, SupportsListing)
        if not self.ledger.has_manifest(shard_id) or not (lists or cleared or not backend.traits.shared):
            return self.ledger.disown(shard_id)
        if isinstance(backend, SupportsListing) and backend.traits.shared:  # others may have what we do not know
            entries = self._call("entries", lambda: self._until_closed(backend.entries(shard_id)))
            if not isinstance(entries, list) or not all(manifest.is_manifest(entry.key) for entry in entries):
                return False
        if not self.ledger.disown(shard_id):
            return False
        self._call("remove", partial(backend.remove, manifest.key_of(shard_id)))
        self.ledger.lose_manifest(shard_id)  # that of a store meanwhile: it is written again with the next
        return True

    def _forget(self, key: ChunkKey, reason: str) -> None:
        if self.ledger.forget(key):
            self._report_evicted([key], reason)

    def _remove(self, key: ChunkKey, reason: str) -> None:
        if self.ledger.forget(key, leaving=True):
            self._report_evicted([key], reason)
        self._call("remove", lambda: self.backend.remove(key))
        self.ledger.left([key])

    def _report_evicted(self, keys: list[ChunkKey], reason: str) -> None:
        if keys:
            self._metrics.add("evictions", len(keys), tier=self.name, reason=reason)
            policy = self._policy_name if reason == "capacity" else ""
            self._history.lost(keys, self.name, reason, policy)
            self._observe_lives(keys, reason)
            self._events.emit("lmcache_chunks_evicted", tier=self.name, keys=keys, reason=reason)

    def _observe_lives(self, keys: list[ChunkKey], reason: str) -> None:
        lives = self.ledger.end_lives(keys)
        if lives and reason == "capacity":
            now, observe = time.monotonic(), self._metrics.observe_all
            observe("evicted_age_seconds", [now - life.began for life in lives], tier=self.name)
            observe("evicted_idle_seconds", [now - life.used_at for life in lives], tier=self.name)
            observe("evicted_uses", [life.uses for life in lives], tier=self.name)

    def _drop(self, batch: list[StoreItem], reason: str) -> None:
        self._metrics.add("drops", len(batch), tier=self.name, reason=reason)
        self._history.lost([item.key for item in batch], self.name, f"{NOT_STORED}{reason}")
        for item in batch:
            item.done(item, reason, False)

    def _call(self, verb: str, call: Callable[[], Any]) -> Any:
        """`call()`, or the BackendError that it ended with.  A plugin may raise anything: that opens the breaker."""
        try:
            answer = call()
        except BackendError as error:
            return error.plain()
        except Exception as error:
            self.breaker.failed(f"{verb} raised {error!r}", fatal=True)
            log.exception("tier %s: backend %s raised in %s; this is its bug", self.name, self.backend_name, verb)
            return _Foreign(f"{verb} raised {error!r}")
        if isinstance(answer, list):
            return [one.plain() if isinstance(one, BackendError) else one for one in answer]
        return answer

    def _each(self, verb: str, call: Callable[[], Any], keys: Sequence[ChunkKey]) -> list[Any]:
        """`call()`, which answers for each of `keys`; an error that it ended with is the answer for all of them."""
        answer = self._call(verb, call)
        if isinstance(answer, list) and len(answer) == len(keys):
            return answer
        if not isinstance(answer, BackendError):
            self.breaker.failed(f"{verb} returned no list of {len(keys)}", fatal=True)
            log.error(
                "tier %s: backend %s returned no list of %d from %s", self.name, self.backend_name, len(keys), verb
            )
            answer = _Foreign(f"{verb} returned no list of {len(keys)}")
        return [answer] * len(keys)

    def _count_health(self, verb: str, keys: Sequence[ChunkKey], results: Sequence[object]) -> None:
        """Tell the breaker, and log the first fault after a success: the rest are counted."""
        faults = [
            (index, result)
            for index, result in enumerate(results)
            if isinstance(result, BackendError) and not isinstance(result, (ChunkCorrupt, BackendFull))
        ]
        if not faults:
            self._faulty = False
            self.breaker.succeeded()
            return
        index, fault = faults[0]
        if isinstance(fault, _Foreign):
            return  # logged, and the breaker is open
        if not self._faulty:
            self._faulty = True
            subject = keys[index] if keys else "the store"
            log.warning("tier %s: %s of %r failed: %s", self.name, verb, subject, str(fault))
        self.breaker.failed(str(fault))

    def _health_changed(self, healthy: bool, reason: str) -> None:
        if healthy:
            log.info("tier %s: in use again", self.name)
        else:
            log.warning("tier %s: left alone, tried again at intervals: %s", self.name, reason)
        self._events.emit("lmcache_tier_health", tier=self.name, healthy=healthy, error=reason)


class _Foreign(BackendError):
    """Stands for an exception that a backend should not have raised; its breaker is open already."""


def _memory(nbytes: int) -> memoryview:
    """Page-aligned memory for a manifest: not this thread's staging, which may hold a record that is being put."""
    return memoryview(mmap.mmap(-1, page_align(max(nbytes, 1))))  # a crash leaves files of no length


def _batches(items: Sequence[ItemT], nbytes: int) -> list[list[ItemT]]:
    batches: list[list[ItemT]] = []
    room = 0
    shard = b""
    for item in items:
        if item.record.nbytes > room or item.key.shard_id != shard:
            batches.append([])
            room, shard = nbytes, item.key.shard_id
        batches[-1].append(item)
        room -= item.record.nbytes
    return batches


def _free(batch: Sequence[ItemT]) -> None:
    for item in batch:
        item.free(item)
