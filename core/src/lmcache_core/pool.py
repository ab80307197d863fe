"""The host tier and what lies below it, by keys and slots: reserve, commit, load, lease, evict.  No tokens, no pages."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from . import frame
from .buffers import Slab, Slot
from .chain import Chain, GroupKind, Shard
from .events import Events
from .frame import Frame
from .groups import restorable
from .index import Entry, Index, Sink, State
from .keys import ChunkKey
from .layout import PAGE_NBYTES, Layout, page_align
from .metrics import Metrics
from .policy import EvictionPolicy, Item
from .tier import LoadItem, StoreItem, Tier

log = logging.getLogger(__name__)

Write = Literal["through", "second_use", "on_evict"]
MAX_LEASES: Final = 65_536
_HEADROOM: Final = 8
"""`on_evict` keeps one slot in this many free or already saved below."""


@dataclass(slots=True)
class Lease:
    """What one request holds until it is released."""

    lease_id: int
    touched: float
    entries: list[Entry] = field(default_factory=list)
    below: list[tuple[Tier, list[bytes]]] = field(default_factory=list)
    probes: int = 0
    """Answers of slower tiers that are still out."""
    probed: bool = False
    stale: bool = False
    """All probes have answered since the last lookup."""
    found: Found | None = None
    counted: bool = False
    chain: Chain | None = None
    on_answered: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """A lookup's answer, in chunks."""

    resident: int
    restorable: tuple[int, ...]
    pending: bool
    lease_id: int


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
        name: str = "host",
        write: Write = "through",
        lease_timeout_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.slab = slab
        self.tiers = tuple(tiers)
        self._new_policy = new_policy
        self._metrics = metrics
        self._events = events
        self._write = write
        self._lease_timeout_s = lease_timeout_s
        self._clock = clock
        self._lock = threading.RLock()
        self._answered = threading.Condition(self._lock)
        self._index = Index()
        self._policies: dict[int, EvictionPolicy] = {}
        self._leases: OrderedDict[str, Lease] = OrderedDict()
        self._ids = itertools.count(1)
        self._generations = itertools.count(1)
        self._uses = 0
        self._said_full = -1.0

    # Lookup and leases.

    def lookup(self, chain: Chain, request: str, on_answered: Callable[[], None] | None = None) -> Found:
        """What is there of `chain`, held under `request`; see `Cache.lookup`.

        While it is pending, `on_answered()` is called once when asking again will tell more.
        """
        with self._lock:
            lease = self._leases.get(request)
            if lease is not None and lease.found is not None and not lease.stale and lease.chain == chain:
                lease.touched = self._clock()
                return lease.found
            if lease is None or lease.chain != chain:
                self._end(request)
                lease = self._leases[request] = Lease(next(self._ids), 0.0, chain=chain)
                if len(self._leases) > MAX_LEASES:
                    self._end(next(iter(self._leases)))
            else:
                self._let_go(lease)
            lease.touched = self._clock()
            lease.stale = False
            lease.on_answered = on_answered
            resident, lengths, unknown = self._find(chain, lease)
            probes = [] if lease.probed else self._probes(chain, unknown)
            lease.probed = True
            lease.probes = len(probes)
            pending = bool(probes)
            lease.found = Found(resident, lengths, pending, lease.lease_id)
            if not pending:
                self._count_lookup(lease)
                return lease.found
        asked = [tier.probe(keys, nbytes, lambda: self._probe_answered(lease)) for tier, keys, nbytes in probes]
        for _ in range(asked.count(False)):
            self._probe_answered(lease)
        if not any(asked):  # nobody can say more
            with self._lock:
                lease.stale = False
                lease.found = Found(resident, lengths, False, lease.lease_id)
                self._count_lookup(lease)
        return lease.found

    def lookup_answered(self, chain: Chain, request: str, timeout_s: float) -> Found:
        """`lookup`, waiting at most `timeout_s` for what is pending."""
        deadline = time.monotonic() + timeout_s
        found = self.lookup(chain, request)
        while found.pending:
            with self._lock:
                lease = self._leases.get(request)
                if lease is None or not self._answered.wait_for(lambda: lease.stale, deadline - time.monotonic()):
                    break
            found = self.lookup(chain, request)
        return found

    def release(self, request: str) -> None:
        """Give back what the request's lease holds.  Twice is fine."""
        with self._lock:
            self._end(request)

    def hold_resident(self, chain: Chain, request: str) -> int:
        """Lease without asking below or counting a lookup; return the resident length."""
        with self._lock:
            self._end(request)
            lease = self._leases[request] = Lease(next(self._ids), float("inf"), probed=True, counted=True)
            return self._find(chain, lease)[0]

    def _find(self, chain: Chain, lease: Lease) -> tuple[int, tuple[int, ...], int | None]:
        """(resident, restorable lengths, first chunk nobody has or None); holds what it reports under `lease`."""
        groups = chain.model.groups
        get = self._index.entries.get
        ready_tiers = [tier for tier in self.tiers if tier.ready]
        here: list[list[bool]] = []
        anywhere: list[list[bool]] = []
        held: list[list[tuple[int, Entry]]] = []
        below: list[list[tuple[int, Tier, bytes]]] = []
        limit = len(chain)
        for group in groups:
            full = group.kind is GroupKind.FULL
            group_here = [True] * limit
            group_any = [True] * limit
            for shard in group.shards:
                prefix = shard.shard_id
                found: list[tuple[int, Entry]] = []
                lower: list[tuple[int, Tier, bytes]] = []
                for position, digest in enumerate(chain.digests[:limit]):
                    key = prefix + digest
                    entry = get(key)
                    if entry is not None and entry.state is State.READY:
                        found.append((position, entry))
                        continue
                    group_here[position] = False
                    if entry is not None and entry.state is State.LOADING:
                        found.append((position, entry))
                        continue
                    for tier in ready_tiers:
                        if key in tier.known:
                            lower.append((position, tier, key))
                            break
                    else:
                        group_any[position] = False
                        if full:
                            limit = position
                            break
                held.append(found)
                below.append(lower)
            here.append(group_here)
            anywhere.append(group_any)
        tokens = chain.model.family.chunk_tokens
        lengths = restorable(groups, [there[:limit] for there in anywhere], tokens)
        resident = restorable(groups, [there[:limit] for there in here], tokens)
        longest = lengths[-1] if lengths else 0
        for found in held:
            for position, entry in found:
                if position >= longest:
                    break
                self._index.hold(entry)
                lease.entries.append(entry)
        by_tier: dict[int, tuple[Tier, list[bytes]]] = {}
        for lower in below:
            for position, tier, key in lower:
                if position < longest:
                    by_tier.setdefault(id(tier), (tier, []))[1].append(key)
        for tier, keys in by_tier.values():
            tier.pin(keys)
            lease.below.append((tier, keys))
        return (resident[-1] if resident else 0), lengths, (longest if longest < len(chain) else None)

    def _probes(self, chain: Chain, start: int | None) -> list[tuple[Tier, list[ChunkKey], int]]:
        """What to ask of shared stores, which may have more than we know."""
        shared = [tier for tier in self.tiers if tier.backend.traits.shared and tier.ready]
        if start is None or not shared:
            return []
        span = range(start, len(chain))
        asked = [(shard, chain.keys(shard, span)) for shard in chain.model.shards]
        return [(tier, keys, frame.record_nbytes(s.layout.nbytes)) for tier in shared for s, keys in asked]

    def _probe_answered(self, lease: Lease) -> None:
        with self._lock:
            lease.probes -= 1
            if lease.probes:
                return
            lease.stale = True
            on_answered, lease.on_answered = lease.on_answered, None
            self._answered.notify_all()
        if on_answered is not None:
            on_answered()

    def _count_lookup(self, lease: Lease) -> None:
        chain, found = lease.chain, lease.found
        if lease.counted or chain is None or found is None:
            return
        lease.counted = True
        chunks = found.restorable[-1] if found.restorable else 0
        result = "miss" if not chunks else "full" if chunks == len(chain) else "partial"
        self._metrics.add("lookups", result=result)
        self._metrics.add("lookup_tokens", chain.tokens)
        self._metrics.add("hit_tokens", chunks * chain.model.family.chunk_tokens)

    def _end(self, request: str) -> None:
        lease = self._leases.pop(request, None)
        if lease is not None:
            self._let_go(lease)
            self._count_lookup(lease)

    def _let_go(self, lease: Lease) -> None:
        unhold = self._index.unhold
        for entry in lease.entries:
            unhold(entry)
        lease.entries = []
        for tier, keys in lease.below:
            tier.unpin(keys)
        lease.below = []

    def _expire_leases(self) -> bool:
        """End the leases of requests that stopped asking; whether there were any."""
        limit = self._clock() - self._lease_timeout_s
        old = [request for request, lease in self._leases.items() if lease.touched < limit]
        for request in old:
            self._end(request)
        if old:
            log.warning("%d leases not released within %.0f s have expired", len(old), self._lease_timeout_s)
        return bool(old)

    # Stores.

    def reserve(self, chain: Chain, shard: Shard, span: range) -> Reservation:
        """Slots for the chunks of `span` that are not there yet; ends with `commit` or `abort` of the entries."""
        layout = shard.layout
        keys = chain.keys(shard, range(span.stop))
        alone = any(shard in g.shards for g in chain.model.groups if g.kind is not GroupKind.FULL)
        with self._lock:
            entries = self._index.entries
            ancestors = [e for key in keys[: span.start] if (e := entries.get(key)) and e.state is State.READY]
            positions = [i for i, key in enumerate(keys[span.start :]) if key not in entries]
            present = [e for key in keys[span.start :] if (e := entries.get(key)) and e.state is State.READY]
            for entry in (*ancestors, *present):
                self._index.hold(entry)  # a prompt never evicts its own prefix
            slots = self._take_slots(len(positions), frame.record_nbytes(layout.nbytes))
            for entry in (*ancestors, *present):
                self._index.unhold(entry)
            self._touch(list(reversed((*ancestors, *present))))
            again = self._plan_writes(present) if self._write == "second_use" else []
            new: list[tuple[int, Entry]] = []
            for position, slot in zip(positions, slots, strict=False):
                entry = self._enter(keys[span.start + position], slot, layout, span.start + position, State.RESERVED)
                entry.alone = alone
                new.append((position, entry))
        self._submit_writes(again)
        return Reservation(new, len(span) - len(positions), positions[len(slots) :])

    def commit(self, entries: Sequence[Entry]) -> None:
        """Publish what was copied in, and write it to the tiers below as the `write` knob says."""
        if not entries:
            return
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
            sink(position, entry, "")

    def abort(self, entries: Sequence[Entry], reason: str) -> None:
        """Give up reserved slots that were not filled."""
        for entry in entries:
            self._fail(entry, reason, give_slot=True)

    def _publish(self, entries: Sequence[Entry]) -> list[tuple[Sink, int, Entry]]:
        told: list[tuple[Sink, int, Entry]] = []
        for entry in reversed(entries):
            entry.state = State.READY
            nbytes = entry.slot.nbytes
            self._policy(nbytes).on_put(Item(entry.key, entry.depth, nbytes))
            self._index.unhold(entry)
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

    def acquire(self, keys: Sequence[ChunkKey], layout: Layout, depth: int, sink: Sink) -> None:
        """Hold each record for a job and tell `sink(position, entry | None, reason)` once for each key.

        What is in host memory is told before this returns, what comes from below when it is there.
        """
        told: list[tuple[int, Entry | None, str]] = []
        loads: list[tuple[int, Tier, Entry]] = []
        with self._lock:
            wanted: list[tuple[int, int]] = []
            used: list[Entry] = []
            for position, key in enumerate(keys):
                entry = self._index.entries.get(key)
                if entry is not None:
                    self._index.hold(entry)
                    if entry.state is State.READY:
                        told.append((position, entry, ""))
                        used.append(entry)
                    else:
                        entry.waiters.append((sink, position))
                    continue
                where = next((i for i, t in enumerate(self.tiers) if key in t.known and t.ready), None)
                if where is None:
                    told.append((position, None, "miss"))
                else:
                    wanted.append((position, where))
            slots = self._take_slots(len(wanted), frame.record_nbytes(layout.nbytes))
            for (position, where), slot in itertools.zip_longest(wanted, slots):
                if slot is None:
                    told.append((position, None, "no room"))
                    continue
                entry = self._enter(keys[position], slot, layout, depth + position, State.LOADING)
                self._index.hold(entry)
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
            for entry in entries:
                self._index.unhold(entry)

    def record(self, entry: Entry) -> memoryview:
        """The payload of an entry that the caller holds or fills."""
        start = entry.slot.offset + PAGE_NBYTES
        return self.slab.extents[entry.slot.extent_id].view[start : start + entry.layout.nbytes]

    def intact(self, entry: Entry) -> bool:
        """Whether the slot still holds this record in this generation."""
        page = self.slab.view(entry.slot)[:PAGE_NBYTES]
        return frame.holds(page, entry.key, entry.layout.fingerprint, entry.layout.nbytes, entry.generation)

    def _load_item(self, entry: Entry, where: int) -> LoadItem:
        record = self.slab.view(entry.slot)
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
                self._fail(entry, reason, give_slot=not in_use)
            return
        frame.set_generation(item.record[:PAGE_NBYTES], entry.generation)
        with self._lock:
            entry.depth = found.depth
            entry.stored_at_ns = found.stored_at_ns
            entry.below_mask |= 1 << where
            told = self._publish([entry])
            writes = self._plan_writes([entry], range(where)) if self._write == "through" else []
        self._submit_writes(writes)
        for sink, position, ready in told:
            sink(position, ready, "")

    def _load_returned(self, item: LoadItem) -> None:
        entry, _ = item.context
        with self._lock:
            if entry.slot.extent_id in self.slab.extents:
                self.slab.give(entry.slot)

    # Slots and eviction; all of this under the lock.

    def _policy(self, slot_nbytes: int) -> EvictionPolicy:
        policy = self._policies.get(slot_nbytes)
        if policy is None:
            policy = self._policies[slot_nbytes] = self._new_policy()
        return policy

    def _enter(self, key: ChunkKey, slot: Slot, layout: Layout, depth: int, state: State) -> Entry:
        entry = Entry(key, slot, layout, depth, state, next(self._generations))
        frame.set_generation(self.slab.view(slot)[:PAGE_NBYTES], entry.generation)
        self._index.add(entry)
        return entry

    def _touch(self, entries: Sequence[Entry]) -> None:
        """Tell the policies of use, deepest chunk first."""
        self._uses += 1
        for entry in entries:
            self._policy(entry.slot.nbytes).on_get(entry.key)
            self.slab.extents[entry.slot.extent_id].last_used = self._uses

    def _take_slots(self, count: int, nbytes: int) -> list[Slot]:
        """Up to `count` slots, evicting what may go; fewer only when all the rest is held."""
        slots: list[Slot] = []
        self._fill(slots, count, nbytes)
        if len(slots) < count and self.slab.fits(nbytes):
            self._evict_own(count - len(slots), page_align(nbytes))
            self._fill(slots, count, nbytes)
            for extent in self.slab.others(page_align(nbytes)) if len(slots) < count else ():
                residents = self._index.in_extent(extent.extent_id)
                if len(residents) + len(extent.free) < extent.slots or any(e.holds for e in residents):
                    continue
                self._evict(list(residents))
                self._fill(slots, count, nbytes)
                if len(slots) == count:
                    break
            if len(slots) < count and self._expire_leases():
                self._evict_own(count - len(slots), page_align(nbytes))
                self._fill(slots, count, nbytes)
        if len(slots) < count:
            self._metrics.add("drops", count - len(slots), tier=self.name, reason="no room")
            if self._clock() - self._said_full >= 1.0:
                self._said_full = self._clock()
                log.warning("tier %s: full, and everything in it is in use", self.name)
        return slots

    def _fill(self, slots: list[Slot], count: int, nbytes: int) -> None:
        while len(slots) < count and (slot := self.slab.take(nbytes)) is not None:
            slots.append(slot)

    def _evict_own(self, count: int, slot_nbytes: int) -> None:
        """Free `count` slots of a size class, or as many as can be."""
        entries = self._index.entries
        count = min(count, self._index.evictable(slot_nbytes))
        if not count:
            return
        policy = self._policy(slot_nbytes)

        def held(key: ChunkKey) -> bool:
            return entries[key].holds > 0

        def held_or_unsaved(key: ChunkKey) -> bool:
            return entries[key].holds > 0 or not self._saved(key)

        chosen: list[ChunkKey] = []
        if self._write == "on_evict" and self.tiers:
            chosen = policy.victims(count * slot_nbytes, held_or_unsaved)
        chosen = chosen or policy.victims(count * slot_nbytes, held)
        together = [key for key in chosen if not entries[key].alone]
        keys = dict.fromkeys([*chosen, *self._index.siblings.expand(together)])
        self._evict([entries[key] for key in keys if not entries[key].holds])

    def _evict(self, victims: Sequence[Entry], reason: str = "capacity") -> None:
        for entry in victims:
            self._policy(entry.slot.nbytes).on_remove(entry.key)
            self._index.remove(entry)
            self.slab.give(entry.slot)
        if victims:
            self._metrics.add("evictions", len(victims), tier=self.name, reason=reason)
            if self._events.wanted:
                keys = [entry.key for entry in victims]
                self._events.emit("lmcache_chunks_evicted", tier=self.name, keys=keys, reason=reason)
            if self.tiers and self._write == "on_evict":
                lost = sum(not self._saved(entry.key) for entry in victims)
                self._metrics.add("drops", lost, tier=self.name, reason="evicted before it was saved")

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
                    self._index.hold(entry)
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
        victims = self._policy(slot_nbytes).victims(
            clean_slots * slot_nbytes, lambda key: entries[key].holds > 0 or self._saved(key)
        )
        return self._plan_writes([entries[key] for key in victims])

    def _submit_writes(self, planned: Sequence[tuple[int, Entry]]) -> None:
        for index, group in itertools.groupby(planned, key=lambda plan: plan[0]):
            items = []
            for _, entry in group:
                record = self.slab.view(entry.slot)[: frame.record_nbytes(entry.layout.nbytes)]
                context = (entry, index)
                items.append(
                    StoreItem(entry.key, record, entry.layout, self._stored, self._returned, entry.alone, context)
                )
            self.tiers[index].store(items)

    def _stored(self, item: StoreItem, reason: str, in_use: bool) -> None:
        entry, index = item.context
        with self._lock:
            if reason:
                entry.below_mask &= ~(1 << index)
            if not in_use:
                self._index.unhold(entry)

    def _returned(self, item: StoreItem) -> None:
        self.unhold([item.context[0]])

    # Whole chains, and the end.

    def evict(self, chain: Chain) -> int:
        """Remove what nobody holds of `chain` from every tier."""
        keys = [key for shard in chain.model.shards for key in chain.keys(shard)]
        with self._lock:
            found = [e for key in keys if (e := self._index.entries.get(key)) and e.state is State.READY and not e.holds]
            self._evict(found, "removed")
        for tier in self.tiers:
            known = [key for key in keys if key in tier.known]
            if known:
                tier.remove(known, "removed")
        return len(found)

    def drain(self, timeout_s: float) -> bool:
        """Save what is not below yet, then wait for the tiers; False at the timeout."""
        deadline = time.monotonic() + timeout_s
        looked = False
        while True:
            with self._lock:
                ready = [e for e in self._index.entries.values() if e.state is State.READY]
                planned = self._plan_writes(ready)
            if looked and not planned:
                return True
            self._submit_writes(planned)
            for tier in self.tiers:
                if not tier.drain(max(0.0, deadline - time.monotonic())):
                    return False
            with self._lock:
                if planned and not any(entry.below_mask >> index & 1 for index, entry in planned):
                    return False
            looked = True

    def usage(self) -> tuple[int, int, int]:
        """(records, records that are held, bytes of extents)."""
        with self._lock:
            held = sum(entry.holds > 0 for entry in self._index.entries.values())
            return len(self._index.entries), held, self.slab.used_nbytes

    def close(self) -> None:
        """Close the tiers, then the slab.  Twice is fine."""
        for tier in self.tiers:
            tier.close()
        with self._lock:
            self.slab.close()
