"""What requests were told is there, and hold until they release it."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from . import frame
from .cache import Hit
from .chain import Chain, Group, GroupKind
from .errors import CapacityError
from .groups import restorable
from .history import BEING_STORED, LATE, NEVER_STORED, REFUSED_BY_COST, TIER_DOWN, History, Lookup
from .index import Entry, Index, State
from .keys import ChunkKey
from .metrics import Metrics
from .tier import Tier

log = logging.getLogger(__name__)

MAX_LEASES: Final = 65_536
MAX_PINS: Final = 16_384
_FIND_ATTEMPTS: Final = 4
"""The last one looks in host memory only, which changes under our lock."""
_MAX_UNTOLD: Final = 1024
_PROBE_EVERY: Final = 32
"""One hit in so many that look dear is let through all the same: what is never loaded is never measured again."""


@dataclass(frozen=True, slots=True)
class Found:
    """A lookup's answer; lengths in chunks."""

    resident: int
    restorable: tuple[int, ...]
    pending: bool
    lease_id: int
    refused: int = 0
    """Chunks that were found too, and would have cost more to load than to compute."""
    tiers: tuple[tuple[str, int], ...] = ()
    """Chunks by the tier that they are in, nearest first."""

    def hit(self, chain: Chain, request: str, boot_id: str) -> Hit:
        """The same for whoever asked."""
        return Hit(
            chain,
            request,
            self.resident,
            self.restorable,
            self.pending,
            boot_id,
            self.lease_id,
            self.refused,
            self.tiers,
        )


@dataclass(slots=True, eq=False)
class _Lease:
    lease_id: int
    request: str
    chain: Chain
    touched: float
    found: Found | None = None
    entries: list[Entry] = field(default_factory=list)
    below: list[tuple[Tier, list[bytes]]] = field(default_factory=list)
    refused: int = 0
    load_s: float = 0.0
    """Estimated, for what lies below host memory; 0 where it was not measured."""
    token_s: float = 0.0
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
        history: History,
        *,
        host: str,
        admission: bool,
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._lock = lock
        self._answered = threading.Condition(lock)
        self._index = index
        self._tiers = tiers
        self._metrics = metrics
        self._history = history
        self._host = host
        self._admission = admission
        self._dear = 0
        """Hits that looked dear so far, those let through as probes too."""
        self.on_lookup: Callable[[Lookup], None] | None = None
        """Told of each lookup that has been answered, without the lock."""
        self._untold: deque[Lookup] = deque(maxlen=_MAX_UNTOLD)
        self._timeout_s = timeout_s
        self._clock = clock
        self._leases: OrderedDict[str, _Lease] = OrderedDict()
        self._pins: dict[str, _Lease] = {}
        """Those without end."""
        self._ids = itertools.count(1)

    def lookup(
        self, chain: Chain, request: str, on_answered: Callable[[], None] | None = None, token_s: float = 0.0
    ) -> Found:
        """What is there of `chain`, held under `request`; see `Cache.lookup`.

        While it is pending, `on_answered()` is called once when asking again will tell more.  `token_s` is what one
        token restored is worth: the seconds that computing it takes, less what copying it takes.  What costs more is
        refused; 0 means that it was not measured, and nothing is.
        """
        found = self._lookup(chain, request, on_answered, token_s)
        self._tell()
        return found

    def _lookup(self, chain: Chain, request: str, on_answered: Callable[[], None] | None, token_s: float) -> Found:
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
            lease.on_answered, lease.token_s = on_answered, token_s
            resident, lengths = self._find(lease)
            longest = lengths[-1] if lengths else 0
            probes = [] if lease.probed else self._probes(chain, longest)
            lease.probed = True
            lease.probes = len(probes)
            resident, lengths = self._admit(lease, resident, lengths)
            lease.found = self._found(lease, resident, lengths, bool(probes))
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
            lease.found = found = replace(found, pending=False)
            self._count(lease)
            return found

    def lookup_answered(self, chain: Chain, request: str, timeout_s: float, token_s: float = 0.0) -> Found:
        """`lookup`, waiting at most `timeout_s` for what is pending."""
        deadline = time.monotonic() + timeout_s
        while (found := self.lookup(chain, request, None, token_s)).pending:
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
            lease = self._pins[request] = _Lease(next(self._ids), request, chain, self._clock())
            resident, _ = self._find(lease)
            return resident

    def release(self, request: str) -> None:
        """Give back exactly what the request holds.  Twice is fine."""
        with self._lock:
            self._end(request)
        self._tell()

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
        lease = self._leases[request] = _Lease(next(self._ids), request, chain, self._clock())
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

    def _found(self, lease: _Lease, resident: int, lengths: tuple[int, ...], pending: bool) -> Found:
        shards = len(lease.chain.model.shards)
        below = [(tier.name, -(-len(keys) // shards)) for tier, keys in lease.below]
        rest = (lengths[-1] if lengths else 0) - sum(chunks for _, chunks in below)
        here = [(self._host, rest)] if rest > 0 else []
        return Found(resident, lengths, pending, lease.lease_id, lease.refused, (*here, *below))

    def _admit(self, lease: _Lease, resident: int, lengths: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """(resident length, restorable lengths) without what would take longer to load than to compute."""
        lease.refused, lease.load_s = 0, self._load_s(lease)
        longest = lengths[-1] if lengths else 0
        if not self._admission or not longest or not lease.token_s:
            return resident, lengths
        worth_s = (longest - resident) * lease.chain.model.family.chunk_tokens * lease.token_s
        if lease.token_s > 0 and lease.load_s <= worth_s:
            return resident, lengths
        self._dear += 1
        if self._dear % _PROBE_EVERY == 0:
            self._metrics.add("cost_probes")
            return resident, lengths
        self._let_go(lease)
        if lease.token_s > 0:
            resident, lengths = self._find(lease, below=False)
        else:  # copying alone takes longer
            resident, lengths = 0, ()
        lease.refused = longest - (lengths[-1] if lengths else 0)
        return resident, lengths

    def _load_s(self, lease: _Lease) -> float:
        """Estimated seconds until what the lease holds below host memory is there; 0 where nothing was measured."""
        slowest = 0.0
        for tier, keys in lease.below:
            known = tier.known
            estimate = tier.costs.estimate(sum(known.get(key, 0) for key in keys))
            if estimate is None:
                return 0.0
            slowest = max(slowest, estimate)
        return slowest

    def _find(self, lease: _Lease, *, below: bool = True) -> tuple[int, tuple[int, ...]]:
        """(resident length, restorable lengths); holds what it reports under `lease`."""
        groups, tokens = lease.chain.model.groups, lease.chain.model.family.chunk_tokens
        tiers = [tier for tier in self._tiers if tier.ready] if below else []
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
        found, chain = lease.found, lease.chain
        family = chain.model.family
        chunks = found.restorable[-1] if found.restorable else 0
        result = "miss" if not chunks else "full" if chunks == len(chain) else "partial"
        if found.refused:
            result = "refused"
        self._metrics.add("lookups", result=result)
        self._metrics.add("lookup_tokens", chain.tokens)
        self._metrics.add("hit_tokens", chunks * family.chunk_tokens)
        self._metrics.add("refused_tokens", found.refused * family.chunk_tokens)
        saved_s = lease.token_s * chunks * family.chunk_tokens - lease.load_s
        if lease.token_s > 0 and chunks:
            self._metrics.add("ttft_saved_estimated_seconds", max(0.0, saved_s))
        missing = chain.digests[chunks] if chunks < len(chain) else b""
        self._say(
            Lookup(
                at=time.time(),
                request=lease.request,
                family=family,
                tokens=chain.tokens,
                chunks=len(chain),
                hit_chunks=chunks,
                hit_tokens=chunks * family.chunk_tokens,
                resident_chunks=found.resident,
                refused_chunks=found.refused,
                result=result,
                reason=self._why(lease, missing) if missing else "",
                missing=missing,
                tiers=found.tiers,
                load_s=lease.load_s,
                recompute_s=lease.token_s * (chunks - found.resident + found.refused) * family.chunk_tokens,
            )
        )

    def _say(self, lookup: Lookup) -> None:
        self._history.answered(lookup)
        if self.on_lookup is not None:
            self._untold.append(lookup)

    def _tell(self) -> None:
        """Without the lock: whoever is told may write to a slow terminal."""
        while self._untold and self.on_lookup is not None:
            try:
                lookup = self._untold.popleft()
            except IndexError:  # another thread tells it
                return
            self.on_lookup(lookup)

    def _why(self, lease: _Lease, digest: bytes) -> str:
        """Why the chunk `digest` was not reported."""
        assert lease.found is not None
        if lease.found.refused:
            return REFUSED_BY_COST
        if lease.found.pending:
            return LATE
        keys = [shard.shard_id + digest for shard in lease.chain.model.shards]
        if any((entry := self._index.entries.get(key)) and entry.state is State.RESERVED for key in keys):
            return BEING_STORED
        losses = self._history.why(digest)
        if any(key in tier.known for tier in self._tiers if not tier.ready for key in keys):
            return TIER_DOWN
        return losses[0].reason if losses else NEVER_STORED
