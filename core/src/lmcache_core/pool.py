"""The host tier and what lies below it, by keys and slots: reserve, commit, load, evict.  No tokens, no pages."""

from __future__ import annotations

import itertools
import logging
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from . import frame
from .buffers import Extent, Slab, Slot
from .chain import Chain, GroupKind, Model, Shard
from .device import Pages
from .events import Events
from .frame import Frame
from .history import NOT_STORED, History
from .index import Entry, Index, Sink, State
from .keys import ChunkKey
from .layout import PAGE_NBYTES, Layout, page_align
from .leases import Found, Leases
from .metrics import Metrics
from .policy import EvictionPolicy, Item
from .shares import Shares, Tenants
from .tier import LoadItem, StoreItem, Tier

log = logging.getLogger(__name__)

Write = Literal["through", "second_use", "on_evict"]
_STAGING_SHARE: Final = 20
"""One slot in this many is left to loads: stores alone never take the last ones that could be had."""
_HEADROOM: Final = 8
"""`on_evict` keeps one slot in this many free or already saved below."""


@dataclass(slots=True)
class Reservation:
    """Slots to be filled for a store: positions in the span that was asked for, with their entries."""

    new: list[tuple[int, Entry]]
    skipped: int
    refused: list[int]


class Pool:
    """Thread-safe; every call returns at once and does no I/O.  Sinks and completions run without its lock."""

    def __init__(
        self,
        slab: Slab,
        tiers: Sequence[Tier],
        *,
        new_policy: Callable[[], EvictionPolicy],
        metrics: Metrics,
        events: Events,
        history: History | None = None,
        policy_name: str = "",
        name: str = "host",
        write: Write = "through",
        admission: bool = True,
        tenant_quota_nbytes: int | None = None,
        lease_timeout_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.boot_id = uuid.uuid4().hex
        self.name = name
        self.slab = slab
        self.tiers = tuple(tiers)
        self._new_policy = new_policy
        self._metrics = metrics
        self._events = events
        self.history = history or History()
        self._policy_name = policy_name
        self._write = write
        self._tenant_quota_nbytes = tenant_quota_nbytes
        self._clock = clock
        self._lock = threading.RLock()
        self._index = Index()
        self.leases = Leases(
            self._lock,
            self._index,
            self.tiers,
            metrics,
            self.history,
            host=name,
            admission=admission,
            timeout_s=lease_timeout_s,
            clock=clock,
        )
        self._shares: dict[int, Shares] = {}
        self._generations = itertools.count(1)
        self._uses = 0
        self._said_full = -1.0
        slab.on_map, slab.on_unmap = self._extent_mapped, self._extent_unmapped

    # Leases.

    def lookup(
        self, chain: Chain, request: str, on_answered: Callable[[], None] | None = None, token_s: float = 0.0
    ) -> Found:
        return self.leases.lookup(chain, request, on_answered, token_s)

    def lookup_answered(self, chain: Chain, request: str, timeout_s: float, token_s: float = 0.0) -> Found:
        return self.leases.lookup_answered(chain, request, timeout_s, token_s)

    def release(self, request: str) -> None:
        self.leases.release(request)

    def hold_resident(self, chain: Chain, request: str) -> int:
        return self.leases.hold_resident(chain, request)

    def meet(self, pages: Pages) -> None:
        """Told of an engine's pages before anything of theirs is moved."""
        return None

    # Stores.

    def reserve(self, chain: Chain, shard: Shard, span: range) -> Reservation:
        """Slots for the chunks of `span` that are not there yet; ends with `commit` or `abort` of the entries."""
        layout, model = shard.layout, chain.model
        keys = chain.keys(shard, range(span.stop))
        alone = any(shard in g.shards for g in model.groups if g.kind is not GroupKind.FULL)
        with self._lock:
            entries = self._index.entries
            ancestors = [e for key in keys[: span.start] if (e := entries.get(key)) and e.state is State.READY]
            positions = [i for i, key in enumerate(keys[span.start :]) if key not in entries]
            present = [e for key in keys[span.start :] if (e := entries.get(key)) and e.state is State.READY]
            kept = [*ancestors, *present]
            self._index.hold(kept)  # a prompt never evicts its own prefix
            nbytes = frame.record_nbytes(layout.nbytes)
            allowed = self._left_for_stores(len(positions), page_align(nbytes))
            slots = self._take_slots(allowed, nbytes, model.family.salt_id)
            self._metrics.add("drops", len(positions) - allowed, tier=self.name, reason="no room")
            self._index.unhold(kept)
            self._touch(kept[::-1])
            again = self._plan_writes(present) if self._write == "second_use" else []
            new: list[tuple[int, Entry]] = []
            for position, slot in zip(positions, slots, strict=False):
                entry = self._enter(
                    keys[span.start + position], slot, layout, span.start + position, State.RESERVED, model
                )
                entry.alone = alone
                new.append((position, entry))
        self._submit_writes(again)
        refused = positions[len(slots) :]
        if refused:
            self.history.lost([keys[span.start + i] for i in refused], self.name, f"{NOT_STORED}no room")
        return Reservation(new, len(span) - len(positions), refused)

    def commit(self, entries: Sequence[Entry]) -> str:
        """Publish what was copied in, and write it to the tiers below as the `write` knob says; "" for success."""
        if not entries:
            return ""
        now = time.time_ns()
        for entry in entries:
            entry.stored_at_ns = now
            page = self.slab.view(entry.slot)[:PAGE_NBYTES]
            nbytes = entry.layout.nbytes
            frame.pack(Frame(entry.key, entry.depth, entry.layout.fingerprint, nbytes, nbytes, now), page)
        with self._lock:
            told = self._publish(entries)
            writes = self._plan_writes(entries) if self._write == "through" else []
            if self._write == "on_evict":
                writes = self._plan_demotions(entries[0].slot.nbytes)
        self._submit_writes(writes)
        for sink, position, entry in told:
            sink(position, entry, self.name)
        return ""

    def abort(self, entries: Sequence[Entry], reason: str, *, give_slots: bool = True) -> None:
        """Give up reserved slots that were not filled; without `give_slots` somebody may still write to them."""
        for entry in entries:
            self._fail(entry, reason, give_slot=give_slots)

    def give_up(self, entries: Sequence[Entry], reason: str) -> Callable[[], None]:
        """`abort` while somebody may still write to the slots: they are free when what is returned is called."""
        self.abort(entries, reason, give_slots=False)
        return partial(self.give_slots, entries)

    def give_slots(self, entries: Sequence[Entry]) -> None:
        """What `abort` kept back: nobody writes to these slots any more."""
        with self._lock:
            for entry in entries:
                if entry.slot.extent_id in self.slab.extents:
                    self.slab.give(entry.slot)

    def _publish(self, entries: Sequence[Entry]) -> list[tuple[Sink, int, Entry]]:
        told: list[tuple[Sink, int, Entry]] = []
        for entry in reversed(entries):
            entry.state = State.READY
            nbytes = entry.slot.nbytes
            self._share(nbytes).put(Item(entry.key, entry.depth, nbytes, entry.tenant))
            self._index.unhold([entry])
            waiters, entry.waiters = entry.waiters, []
            told += [(sink, position, entry) for sink, position in waiters]
        return told

    def _fail(self, entry: Entry, reason: str, *, give_slot: bool) -> None:
        with self._lock:
            waiters, entry.waiters = entry.waiters, []
            self._index.remove(entry)
            if give_slot:
                self.slab.give(entry.slot)
        for sink, position in waiters:
            sink(position, None, reason)

    # Loads.

    def acquire(self, chain: Chain, shard: Shard, span: range, sink: Sink, *, for_engine: bool = True) -> None:
        """Hold each record of `span` for a job and tell `sink(position, entry | None, tier or reason)` once for each.

        What is in host memory is told before this returns, what comes from below when it is there.  `for_engine` is
        for a daemon's accounts.
        """
        keys, layout, depth = chain.keys(shard, span), shard.layout, span.start
        told: list[tuple[int, Entry | None, str]] = []
        loads: list[tuple[int, Tier, Entry]] = []
        with self._lock:
            wanted: list[tuple[int, int]] = []
            used: list[Entry] = []
            found: list[Entry] = []
            for position, key in enumerate(keys):
                entry = self._index.entries.get(key)
                if entry is not None:
                    found.append(entry)
                    if entry.state is State.READY:
                        told.append((position, entry, self.name))
                        used.append(entry)
                    else:
                        entry.waiters.append((sink, position))
                    continue
                where = next((i for i, t in enumerate(self.tiers) if key in t.known and t.ready), None)
                if where is None:
                    told.append((position, None, "miss"))
                else:
                    wanted.append((position, where))
            self._index.hold(found)
            slots = self._take_slots(len(wanted), frame.record_nbytes(layout.nbytes), chain.model.family.salt_id)
            for (position, where), slot in itertools.zip_longest(wanted, slots):
                if slot is None:
                    told.append((position, None, "no room"))
                    continue
                entry = self._enter(keys[position], slot, layout, depth + position, State.LOADING, chain.model)
                self._index.hold([entry])
                entry.waiters.append((sink, position))
                loads.append((where, self.tiers[where], entry))
            self._touch(used[::-1])
            writes = self._plan_writes(used) if self._write == "second_use" else []
        self._submit_writes(writes)
        for told_position, told_entry, reason in told:
            sink(told_position, told_entry, reason)
        for where, group in itertools.groupby(loads, key=lambda load: load[0]):
            entries = [entry for _, _, entry in group]
            self.tiers[where].used([entry.key for entry in reversed(entries)])
            self.tiers[where].load([self._load_item(entry, where) for entry in entries])

    def unhold(self, entries: Iterable[Entry]) -> None:
        """End what `acquire` held."""
        with self._lock:
            self._index.unhold(entries)

    def extent(self, entry: Entry) -> Extent | None:
        return self.slab.extents[entry.slot.extent_id]

    def payload(self, entry: Entry) -> memoryview:
        """The raw bytes of an entry that the caller holds or fills."""
        start = entry.slot.offset + PAGE_NBYTES
        return self.slab.extents[entry.slot.extent_id].view[start : start + entry.layout.nbytes]

    def intact(self, entry: Entry) -> bool:
        """Whether the slot still holds this record in this generation."""
        page = self.slab.view(entry.slot)[:PAGE_NBYTES]
        return frame.holds(page, entry.key, entry.layout.fingerprint, entry.layout.nbytes, entry.generation)

    def _load_item(self, entry: Entry, where: int) -> LoadItem:
        record = self.slab.view(entry.slot)
        frame.void(record)
        return LoadItem(entry.key, record, entry.layout, self._loaded, self._load_returned, (entry, where))

    def _loaded(self, item: LoadItem, found: Frame | None, reason: str, in_use: bool) -> None:
        entry, where = item.context
        if found is None:
            key = entry.key
            rest = range(where + 1, len(self.tiers))
            other = next((i for i in rest if key in self.tiers[i].known and self.tiers[i].ready), None)
            if other is not None and not in_use:
                self.tiers[other].load([self._load_item(entry, other)])
            else:
                if reason != "miss" and not reason.startswith("corrupt"):  # those have left: the tier said so
                    self.history.lost([key], self.tiers[where].name, reason)
                self._fail(entry, reason, give_slot=not in_use)
            return
        frame.set_generation(self.slab.view(entry.slot)[:PAGE_NBYTES], entry.generation)
        with self._lock:
            entry.depth = found.depth
            entry.stored_at_ns = found.stored_at_ns
            entry.below_mask |= 1 << where
            told = self._publish([entry])
            writes = self._plan_writes([entry], range(where)) if self._write == "through" else []
        self._submit_writes(writes)
        for sink, position, ready in told:
            sink(position, ready, self.tiers[where].name)

    def _load_returned(self, item: LoadItem) -> None:
        self.give_slots([item.context[0]])

    # Slots and eviction; all of this under the lock.

    def _share(self, slot_nbytes: int) -> Shares:
        shares = self._shares.get(slot_nbytes)
        if shares is None:
            shares = self._shares[slot_nbytes] = Shares(self._new_policy)
        return shares

    def _enter(self, key: ChunkKey, slot: Slot, layout: Layout, depth: int, state: State, model: Model) -> Entry:
        entry = Entry(key, slot, layout, depth, state, next(self._generations), model)
        entry.entered = entry.last_used = self._clock()
        frame.set_generation(self.slab.view(slot)[:PAGE_NBYTES], entry.generation)
        self._index.add(entry)
        return entry

    def _touch(self, entries: Sequence[Entry]) -> None:
        """Tell the policies of use, deepest chunk first."""
        self._uses += 1
        now = self._clock()
        for entry in entries:
            entry.uses += 1
            entry.last_used = now
            self._share(entry.slot.nbytes).get(entry.key)
            self.slab.extents[entry.slot.extent_id].last_used = self._uses

    def _take_slots(self, count: int, nbytes: int, tenant: bytes) -> list[Slot]:
        """Up to `count` slots, evicting what may go; fewer only when all the rest is held, or the tenant's quota is."""
        slots: list[Slot] = []
        slot_nbytes = page_align(nbytes)
        wanted = self._within_quota(count, slot_nbytes, tenant)
        if wanted < count:
            self._metrics.add("drops", count - wanted, tier=self.name, reason="tenant quota")
        self._fill(slots, wanted, nbytes)
        if len(slots) < wanted and self.slab.fits(nbytes):
            self._evict_own(wanted - len(slots), slot_nbytes, tenant)
            self._fill(slots, wanted, nbytes)
            for extent in self.slab.others(slot_nbytes) if len(slots) < wanted else ():
                residents = self._index.in_extent(extent.extent_id)
                if len(residents) + len(extent.free) < extent.slots or any(e.holds for e in residents):
                    continue
                self._evict(list(residents))
                self._fill(slots, wanted, nbytes)
                if len(slots) == wanted:
                    break
            if len(slots) < wanted and self.leases.expire():
                self._evict_own(wanted - len(slots), slot_nbytes, tenant)
                self._fill(slots, wanted, nbytes)
        if len(slots) < wanted:
            self._metrics.add("drops", wanted - len(slots), tier=self.name, reason="no room")
            if self._clock() - self._said_full >= 1.0:
                self._said_full = self._clock()
                log.warning("tier %s: full, and everything in it is in use", self.name)
        return slots

    def _left_for_stores(self, count: int, slot_nbytes: int) -> int:
        """At most `count`, so that a share of the slots stays free or evictable for loads, where there can be any."""
        if not self.tiers:
            return count
        total = self.slab.capacity_nbytes // slot_nbytes
        used = sum(e.slots - len(e.free) for e in self.slab.extents.values() if e.slot_nbytes == slot_nbytes)
        left = total - total // _STAGING_SHARE - used
        if left + self._index.evictable(slot_nbytes) < count:
            self.leases.expire()
        return max(0, min(count, left + self._index.evictable(slot_nbytes)))

    def _within_quota(self, count: int, slot_nbytes: int, tenant: bytes) -> int:
        """How many slots the tenant may take, its own oldest records making place."""
        quota = self._tenant_quota_nbytes
        if quota is None or not tenant:
            return count
        count = min(count, quota // slot_nbytes)
        for shares in self._shares.values():
            while (over := self._index.used(tenant) + count * slot_nbytes - quota) > 0:
                victims = shares.own_victims(over, tenant, self._is_held)
                if not victims:
                    break
                self._evict_together(victims)
        return max(0, min(count, (quota - self._index.used(tenant)) // slot_nbytes))

    def _fill(self, slots: list[Slot], count: int, nbytes: int) -> None:
        while len(slots) < count and (slot := self.slab.take(nbytes)) is not None:
            slots.append(slot)

    def _is_held(self, key: ChunkKey) -> bool:
        return self._index.entries[key].holds > 0

    def _is_held_or_unsaved(self, key: ChunkKey) -> bool:
        return self._is_held(key) or not self._saved(key)

    def _evict_own(self, count: int, slot_nbytes: int, tenant: bytes) -> None:
        """Free `count` slots of a size class for `tenant`, or as many as can be."""
        shares = self._share(slot_nbytes)
        saved_first = self._write == "on_evict" and bool(self.tiers)
        while count > 0 and self._index.evictable(slot_nbytes):
            nbytes = min(count, self._index.evictable(slot_nbytes)) * slot_nbytes
            chosen = shares.victims(nbytes, tenant, self._is_held_or_unsaved) if saved_first else []
            chosen = chosen or shares.victims(nbytes, tenant, self._is_held)
            if not chosen:
                break
            count -= self._evict_together(chosen)

    def _evict_together(self, chosen: Sequence[ChunkKey]) -> int:
        """Evict records with the other rectangles of their chunks; return how many of `chosen` went."""
        entries = self._index.entries
        together = [key for key in chosen if not entries[key].alone]
        keys = dict.fromkeys([*chosen, *self._index.siblings.expand(together)])
        self._evict([entries[key] for key in keys if not entries[key].holds])
        return len(chosen)

    def _evict(self, victims: Sequence[Entry], reason: str = "capacity") -> None:
        for entry in victims:
            self._share(entry.slot.nbytes).remove(entry.key)
            self._index.remove(entry)
            self.slab.give(entry.slot)
        if victims:
            self._metrics.add("evictions", len(victims), tier=self.name, reason=reason)
            keys = [entry.key for entry in victims]
            self.history.lost(keys, self.name, reason, self._policy_name if reason == "capacity" else "")
            if reason == "capacity":
                self._observe_lives(victims)
            if self._events.wanted:
                self._events.emit("lmcache_chunks_evicted", tier=self.name, keys=keys, reason=reason)
            if self.tiers and self._write == "on_evict":
                lost = sum(not self._saved(entry.key) for entry in victims)
                self._metrics.add("drops", lost, tier=self.name, reason="evicted before it was saved")

    def _observe_lives(self, victims: Sequence[Entry]) -> None:
        now, observe = self._clock(), self._metrics.observe_all
        observe("evicted_age_seconds", [now - entry.entered for entry in victims], tier=self.name)
        observe("evicted_idle_seconds", [now - entry.last_used for entry in victims], tier=self.name)
        observe("evicted_uses", [entry.uses for entry in victims], tier=self.name)

    def _saved(self, key: bytes) -> bool:
        return any(key in tier.known for tier in self.tiers)

    # Writing below.

    def _plan_writes(self, entries: Sequence[Entry], where: range | None = None) -> list[tuple[int, Entry]]:
        """Hold each entry once for each lower tier that lacks it."""
        planned: list[tuple[int, Entry]] = []
        for index in range(len(self.tiers)) if where is None else where:
            bit = 1 << index
            for entry in entries:
                if not entry.below_mask & bit and entry.state is State.READY:
                    entry.below_mask |= bit
                    self._index.hold([entry])
                    planned.append((index, entry))
        return planned

    def _plan_demotions(self, slot_nbytes: int) -> list[tuple[int, Entry]]:
        """Save ahead what would be evicted next, so that evicting need not wait."""
        entries = self._index.entries
        clean_slots = self._index.evictable(slot_nbytes) // _HEADROOM
        room = self.slab.capacity_nbytes - sum(e.slots * e.slot_nbytes for e in self.slab.extents.values())
        free = sum(len(e.free) for e in self.slab.extents.values() if e.slot_nbytes == slot_nbytes)
        if not clean_slots or free + room // slot_nbytes >= clean_slots:
            return []
        victims = self._share(slot_nbytes).victims(
            clean_slots * slot_nbytes, b"", lambda key: entries[key].holds > 0 or self._saved(key)
        )
        return self._plan_writes([entries[key] for key in victims])

    def _submit_writes(self, planned: Sequence[tuple[int, Entry]]) -> None:
        for index, group in itertools.groupby(planned, key=lambda plan: plan[0]):
            items = []
            for _, entry in group:
                record = self.slab.view(entry.slot)[: frame.record_nbytes(entry.layout.nbytes)]
                context = (entry, index)
                items.append(
                    StoreItem(
                        entry.key, record, entry.layout, self._stored, self._returned, entry.alone, context, entry.model
                    )
                )
            self.tiers[index].store(items)

    def _stored(self, item: StoreItem, reason: str, in_use: bool) -> None:
        entry, index = item.context
        with self._lock:
            if reason:
                entry.below_mask &= ~(1 << index)
            if not in_use:
                self._index.unhold([entry])

    def _returned(self, item: StoreItem) -> None:
        self.unhold([item.context[0]])

    # Whole chains, and the end.

    def evict(self, chain: Chain) -> int:
        """Remove what nobody holds of `chain` from every tier."""
        keys = [key for shard in chain.model.shards for key in chain.keys(shard)]
        with self._lock:
            found = [
                e for key in keys if (e := self._index.entries.get(key)) and e.state is State.READY and not e.holds
            ]
            self._evict(found, "removed")
        for tier in self.tiers:
            known = [key for key in keys if key in tier.known]
            if known:
                tier.remove(known, "removed")
        return len(found)

    def clear(self, shard_id: bytes) -> int:
        """Remove what nobody holds of one shard, of all with b"", from every tier; return how many records go."""
        with self._lock:
            entries = self._index.entries.values()
            here = [e for e in entries if e.key.startswith(shard_id) and e.state is State.READY and not e.holds]
            self._evict(here, "removed")
        gone = {bytes(entry.key) for entry in here}
        for tier in self.tiers:
            known = [ChunkKey(key) for key in list(tier.known) if key.startswith(shard_id)]
            if known:
                gone.update(tier.remove(known, "removed"))
        self._events.emit("lmcache_cleared", shard_id=shard_id)
        return len(gone)

    def drain(self, timeout_s: float) -> bool:
        """Save what is not below yet, then wait for the tiers; False at the timeout."""
        deadline = time.monotonic() + timeout_s
        planned: list[tuple[int, Entry]] = []
        while True:
            for tier in self.tiers:  # first what is queued: more may find no room behind it
                if not tier.drain(max(0.0, deadline - time.monotonic())):
                    return False
            with self._lock:
                if planned and not any(entry.below_mask >> index & 1 for index, entry in planned):
                    return False
                planned = self._plan_writes([e for e in self._index.entries.values() if e.state is State.READY])
            if not planned:
                return True
            self._submit_writes(planned)

    def usage(self) -> tuple[int, int, int]:
        """(records, records that are held, bytes of extents)."""
        with self._lock:
            return len(self._index.entries), self._index.held(), self.slab.used_nbytes

    def records(self) -> int:
        """Records in host memory, those on their way there too."""
        return len(self._index.entries)

    def held_nbytes(self) -> int:
        """Bytes of host memory that could not be given up now."""
        with self._lock:
            return self._index.held_nbytes()

    def tenants(self) -> Tenants:
        """How much host memory each tenant uses."""
        with self._lock:
            used: Counter[bytes] = Counter()
            for shares in self._shares.values():
                used.update(shares.tenants())
            return Tenants(tuple(used.values()), self._tenant_quota_nbytes)

    def in_forked_child(self) -> None:
        """See `forks`: the slab's descriptors would keep its memory when the parent is gone."""
        for extent in self.slab.extents.values():
            extent.close_fd()

    def _extent_mapped(self, extent: Extent) -> None:
        for tier in self.tiers:
            tier.register(extent.address, extent.nbytes)

    def _extent_unmapped(self, extent: Extent) -> None:
        for tier in self.tiers:
            tier.unregister(extent.address, extent.nbytes)

    def close(self) -> None:
        """Close the tiers, then the slab.  Twice is fine."""
        for tier in self.tiers:
            tier.close()
        with self._lock:
            self.slab.close()
