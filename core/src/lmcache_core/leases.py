"""What requests were told is there, and hold until they release it."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from . import frame
from .chain import Chain, Group, GroupKind
from .errors import CapacityError
from .groups import restorable
from .index import Entry, Index, State
from .keys import ChunkKey
from .metrics import Metrics
from .tier import Tier

log = logging.getLogger(__name__)

MAX_LEASES: Final = 65_536
MAX_PINS: Final = 16_384
_FIND_ATTEMPTS: Final = 4
"""The last one looks in host memory only, which changes under our lock."""


@dataclass(frozen=True, slots=True)
class Found:
    """A lookup's answer; lengths in chunks."""

    resident: int
    restorable: tuple[int, ...]
    pending: bool
    lease_id: int


@dataclass(slots=True, eq=False)
class _Lease:
    lease_id: int
    chain: Chain
    touched: float
    found: Found | None = None
    entries: list[Entry] = field(default_factory=list)
    below: list[tuple[Tier, list[bytes]]] = field(default_factory=list)
    probes: int = 0
    """Answers of shared stores that are still out."""
    probed: bool = False
    stale: bool = False
    """All probes have answered since the last lookup."""
    counted: bool = False
    on_answered: Callable[[], None] | None = None


@dataclass(slots=True)
class _Shards:
    """Where the chunks of one group were found: chunk by chunk present at all, in host memory, and what to hold."""

    present: list[bool]
    resident: list[bool]
    entries: list[Entry] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    """Of `entries`."""
    below: list[tuple[int, Tier, bytes]] = field(default_factory=list)


class Leases:
    """Of one pool, under its lock, which it shares.  Bounded: beyond MAX_LEASES the oldest lease ends, never a pin."""

    def __init__(
        self,
        lock: threading.RLock,
        index: Index,
        tiers: Sequence[Tier],
        metrics: Metrics,
        *,
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._lock = lock
        self._answered = threading.Condition(lock)
        self._index = index
        self._tiers = tiers
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._clock = clock
        self._leases: OrderedDict[str, _Lease] = OrderedDict()
        self._pins: dict[str, _Lease] = {}
        """Those without end."""
        self._ids = itertools.count(1)

    def lookup(self, chain: Chain, request: str, on_answered: Callable[[], None] | None = None) -> Found:
        """What is there of `chain`, held under `request`; see `Cache.lookup`.

        While it is pending, `on_answered()` is called once when asking again will tell more.
        """
        with self._lock:
            lease = self._leases.get(request)
            if lease is not None and lease.chain is not chain and lease.chain != chain:
                self._end(request)
                lease = None
            if lease is None:
                lease = self._open(chain, request)
            elif lease.found is not None and not lease.stale:
                lease.touched = self._clock()
                return lease.found
            else:
                self._let_go(lease)
                lease.touched, lease.stale = self._clock(), False
            lease.on_answered = on_answered
            resident, lengths = self._find(lease)
            longest = lengths[-1] if lengths else 0
            probes = [] if lease.probed else self._probes(chain, longest)
            lease.probed = True
            lease.probes = len(probes)
            lease.found = Found(resident, lengths, bool(probes), lease.lease_id)
            if not probes:
                self._count(lease)
                return lease.found
        found = lease.found
        asked = [tier.probe(keys, nbytes, lambda: self._probe_answered(lease)) for tier, keys, nbytes in probes]
        if not any(asked):  # what is returned says it all
            lease.on_answered = None
        for _ in range(asked.count(False)):
            self._probe_answered(lease)
        if any(asked):
            return found
        with self._lock:  # nobody can say more
            lease.stale = False
            lease.found = found = Found(resident, lengths, False, lease.lease_id)
            self._count(lease)
            return found

    def lookup_answered(self, chain: Chain, request: str, timeout_s: float) -> Found:
        """`lookup`, waiting at most `timeout_s` for what is pending."""
        deadline = time.monotonic() + timeout_s
        while (found := self.lookup(chain, request)).pending:
            with self._lock:
                lease = self._leases.get(request)
                while lease is not None and not lease.stale and (left := deadline - time.monotonic()) > 0:
                    self._answered.wait(left)
                if lease is None or not lease.stale:
                    break
        return found

    def hold_resident(self, chain: Chain, request: str) -> int:
        """Hold what is in host memory, without end, asking and counting; return its length in chunks.

        CapacityError beyond MAX_PINS.
        """
        with self._lock:
            self._end(request)
            if len(self._pins) >= MAX_PINS:
                raise CapacityError(f"{MAX_PINS} prompts are pinned, which is the limit; unpin one")
            lease = self._pins[request] = _Lease(next(self._ids), chain, self._clock())
            resident, _ = self._find(lease)
            return resident

    def release(self, request: str) -> None:
        """Give back exactly what the request holds.  Twice is fine."""
        with self._lock:
            self._end(request)

    def count(self) -> int:
        """Requests that hold something, or were told that there is nothing, and pins."""
        return len(self._leases) + len(self._pins)

    def expire(self) -> bool:
        """End the leases of requests that stopped asking; whether there were any.  Under the lock."""
        limit = self._clock() - self._timeout_s
        old = [request for request, lease in self._leases.items() if lease.touched < limit]
        for request in old:
            self._end(request)
        if old:
            log.warning("%d leases that were not released within %.0f s have expired", len(old), self._timeout_s)
        return bool(old)

    def _open(self, chain: Chain, request: str) -> _Lease:
        lease = self._leases[request] = _Lease(next(self._ids), chain, self._clock())
        if len(self._leases) > MAX_LEASES:
            self._end(next(iter(self._leases)))
        return lease

    def _end(self, request: str) -> None:
        for lease in (self._leases.pop(request, None), self._pins.pop(request, None)):
            if lease is not None:
                self._let_go(lease)
                self._count(lease)

    def _let_go(self, lease: _Lease) -> None:
        self._index.unhold(lease.entries)
        lease.entries = []
        for tier, keys in lease.below:
            tier.unpin(keys)
        lease.below = []

    def _find(self, lease: _Lease) -> tuple[int, tuple[int, ...]]:
        """(resident length, restorable lengths); holds what it reports under `lease`."""
        groups, tokens = lease.chain.model.groups, lease.chain.model.family.chunk_tokens
        tiers = [tier for tier in self._tiers if tier.ready]
        for attempt in range(_FIND_ATTEMPTS):
            found: list[_Shards] = []
            limit = len(lease.chain)
            for group in groups:
                found.append(self._find_group(lease.chain, group, tiers if attempt < _FIND_ATTEMPTS - 1 else (), limit))
                limit = min(limit, len(found[-1].present))
            lengths = restorable(groups, [shards.present for shards in found], tokens)
            longest = lengths[-1] if lengths else 0
            if self._pin_below(lease, found, longest):
                break
        if any(shards.below for shards in found) or any(not all(shards.resident[:limit]) for shards in found):
            here = restorable(groups, [shards.resident for shards in found], tokens)
        else:
            here = lengths
        for shards in found:
            if longest == len(shards.present):
                lease.entries += shards.entries
            else:
                pairs = zip(shards.positions, shards.entries, strict=True)
                lease.entries += [entry for position, entry in pairs if position < longest]
        self._index.hold(lease.entries)
        return (here[-1] if here else 0), lengths

    def _pin_below(self, lease: _Lease, found: Sequence[_Shards], longest: int) -> bool:
        """Hold what was found in lower tiers; False, and nothing is held, if some of it has left meanwhile."""
        by_tier: dict[Tier, list[bytes]] = {}
        for shards in found:
            for position, tier, key in shards.below:
                if position < longest:
                    by_tier.setdefault(tier, []).append(key)
        for tier, keys in by_tier.items():
            if not tier.pin(keys):
                for pinned, theirs in lease.below:
                    pinned.unpin(theirs)
                lease.below = []
                return False
            lease.below.append((tier, keys))
        return True

    def _find_group(self, chain: Chain, group: Group, tiers: Sequence[Tier], limit: int) -> _Shards:
        """One group's chunks; of a full group the lists end where the first is missing."""
        get = self._index.entries.get
        full = group.kind is GroupKind.FULL
        ready, loading = State.READY, State.LOADING
        result = _Shards([True] * limit, [True] * limit)
        for shard in group.shards:
            prefix = shard.shard_id
            there = [get(prefix + digest) for digest in chain.digests[:limit]]
            entries = [entry for entry in there if entry is not None and entry.state is ready]
            if len(entries) == len(there):
                result.entries += entries
                result.positions += range(len(there))
                continue
            for position, entry in enumerate(there):
                if entry is not None and entry.state in (ready, loading):
                    result.resident[position] &= entry.state is ready
                    result.entries.append(entry)
                    result.positions.append(position)
                    continue
                result.resident[position] = False
                key = prefix + chain.digests[position]
                tier = next((tier for tier in tiers if key in tier.known), None)
                if tier is not None:
                    result.below.append((position, tier, key))
                elif full:
                    limit = position
                    break
                else:
                    result.present[position] = False
        del result.present[limit:], result.resident[limit:]
        return result

    def _probes(self, chain: Chain, start: int) -> list[tuple[Tier, list[ChunkKey], int]]:
        """What to ask of shared stores, which may have more than we know: the chunks from `start` on."""
        shared = [tier for tier in self._tiers if tier.backend.traits.shared and tier.ready]
        if start == len(chain) or not shared:
            return []
        span = range(start, len(chain))
        asked = [(shard, chain.keys(shard, span)) for shard in chain.model.shards]
        return [(tier, keys, frame.record_nbytes(s.layout.nbytes)) for tier in shared for s, keys in asked]

    def _probe_answered(self, lease: _Lease) -> None:
        with self._lock:
            lease.probes -= 1
            if lease.probes:
                return
            lease.stale = True
            on_answered, lease.on_answered = lease.on_answered, None
            self._answered.notify_all()
        if on_answered is not None:
            on_answered()

    def _count(self, lease: _Lease) -> None:
        if lease.counted or lease.found is None:
            return
        lease.counted = True
        lengths = lease.found.restorable
        chunks = lengths[-1] if lengths else 0
        result = "miss" if not chunks else "full" if chunks == len(lease.chain) else "partial"
        self._metrics.add("lookups", result=result)
        self._metrics.add("lookup_tokens", lease.chain.tokens)
        self._metrics.add("hit_tokens", chunks * lease.chain.model.family.chunk_tokens)
