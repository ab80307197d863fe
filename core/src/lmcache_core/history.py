"""What became of chunks and lookups lately, in bounded rings: for whoever asks why a request missed."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from dataclasses import fields as dataclass_fields
from typing import Any, Final

from .keys import SHARD_ID_NBYTES, ChunkKey, Family

MAX_LOSSES: Final = 8192
"""Chunks, for each tier, whose last loss is remembered; 250 bytes each."""
MAX_LOOKUPS: Final = 4096
MAX_SLOW: Final = 64
SLOW_S: Final = 0.1
"""From here on an operation of a tier is remembered as a slow one."""

NEVER_STORED: Final = "never stored"
BEING_STORED: Final = "being stored"
TIER_DOWN: Final = "tier down"
REFUSED_BY_COST: Final = "refused by cost"
LATE: Final = "late"
"""Reasons of a miss beside those of the losses: `Lookup.reason`."""
NOT_STORED: Final = "not stored: "
"""How the reason of a loss begins when the tier never got the record."""

_MEANINGS: Final = {
    NEVER_STORED: "no tier has had it, as far as is remembered: nobody computed this prefix before in this "
    "namespace, or that was before the daemon's start; `lmc explain A B` compares two prompts",
    BEING_STORED: "another request was just storing it; the same prompt hits once that is done",
    TIER_DOWN: "a tier has it, and was not used since it had failed; `lmc status` and `lmc doctor` say why",
    REFUSED_BY_COST: "it was there, and loading it would have taken longer than computing it again",
    LATE: "a tier had not answered when the request went on without",
    "capacity": "it was evicted to make room: a larger capacity, or a tier below, would have kept it",
    "removed": "it was removed on purpose: `lmc clear`, or the engine",
    "corrupt": "it failed its check and was removed: never a wrong token; `lmc verify` reads the whole store",
    "lost": "the store had it no more: it expired there, or somebody removed it there",
    "tenant quota": "it was evicted to keep its tenant within its quota",
    "expired": "it was older than its tier keeps records",
}


@dataclass(frozen=True, slots=True)
class Loss:
    """Why records are not in a tier.  Shared by all that one decision concerned."""

    at: float
    """Seconds since the epoch."""
    tier: str
    reason: str
    """Left: "capacity", "removed", "corrupt", "lost".  Not stored: "not stored: queue full" and the like.  There, but
    a load of it failed: "late", "fault: ...", "tier unavailable"."""
    policy: str = ""
    """The eviction policy that chose it, where the reason is "capacity"."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """How a request was answered; lengths in chunks."""

    at: float
    request: str
    family: Family
    tokens: int
    chunks: int
    hit_chunks: int
    hit_tokens: int
    resident_chunks: int
    refused_chunks: int
    """Found, and not reported since loading them would have taken longer than computing them."""
    result: str
    """As the metric `lookups` has it: full, partial, miss, refused."""
    reason: str
    """Why there was no more; empty for a full hit.  The loss of the first chunk that is missing, or one of ours."""
    missing: bytes
    """Digest of the first chunk that was not reported; empty for a full hit."""
    tiers: tuple[tuple[str, int], ...] = ()
    """Chunks of the hit by the tier that they were in, nearest first."""
    load_s: float = 0.0
    recompute_s: float = 0.0
    """What the decision by cost was about: estimated seconds for what was not in host memory, 0 where nothing was
    measured."""


@dataclass(frozen=True, slots=True)
class SlowOperation:
    """A batch of a tier that took `SLOW_S` or more."""

    at: float
    tier: str
    operation: str
    """"read", "write", or "ask" for what a shared store has."""
    seconds: float
    records: int
    nbytes: int
    failed: int
    """Records of it that were not read or written."""


class History:
    """Thread-safe.  Bounded by the limits, the oldest going first."""

    def __init__(
        self,
        *,
        max_losses: int = MAX_LOSSES,
        max_lookups: int = MAX_LOOKUPS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._max_losses = max_losses
        self._max_lookups = max_lookups
        self._clock = clock
        self._lock = threading.Lock()
        self._losses: dict[str, OrderedDict[bytes, Loss]] = {}
        self._lookups: OrderedDict[str, Lookup] = OrderedDict()
        self._slow: deque[SlowOperation] = deque(maxlen=MAX_SLOW)

    def lost(self, keys: Iterable[ChunkKey], tier: str, reason: str, policy: str = "") -> None:
        """Remember why the chunks of `keys` are not in `tier`."""
        loss = Loss(self._clock(), tier, reason, policy)
        with self._lock:
            losses = self._losses.setdefault(tier, OrderedDict())
            for key in keys:
                digest = key[SHARD_ID_NBYTES:]
                losses.pop(digest, None)
                losses[digest] = loss
            while len(losses) > self._max_losses:
                losses.popitem(last=False)

    def answered(self, lookup: Lookup) -> None:
        """Remember a lookup; the latest of a request stays."""
        with self._lock:
            self._lookups.pop(lookup.request, None)
            self._lookups[lookup.request] = lookup
            if len(self._lookups) > self._max_lookups:
                self._lookups.popitem(last=False)

    def why(self, digest: bytes) -> tuple[Loss, ...]:
        """The last loss of a chunk in each tier, newest first; empty if it never left one, or too long ago."""
        with self._lock:
            found = [loss for losses in self._losses.values() if (loss := losses.get(digest)) is not None]
        return tuple(sorted(found, key=lambda loss: loss.at, reverse=True))

    def lookup(self, request: str) -> Lookup | None:
        """How `request` was answered last.  A daemon puts the connection's number before an engine's name for it."""
        with self._lock:
            found = self._lookups.get(request)
            if found is None:
                named = (one for name, one in reversed(self._lookups.items()) if name.partition("/")[2] == request)
                found = next(named, None)
        return found

    def lookups(self, limit: int = MAX_LOOKUPS) -> list[Lookup]:
        """The latest lookups, newest first."""
        with self._lock:
            return [one for one, _ in zip(reversed(self._lookups.values()), range(limit), strict=False)]

    def took(self, tier: str, operation: str, seconds: float, records: int, nbytes: int = 0, failed: int = 0) -> None:
        """A tier was busy with a batch for so long; remembered if that was slow."""
        if seconds >= SLOW_S:
            with self._lock:
                self._slow.append(SlowOperation(self._clock(), tier, operation, seconds, records, nbytes, failed))

    def slow(self) -> list[SlowOperation]:
        """The latest slow operations, newest first."""
        with self._lock:
            return list(self._slow)[::-1]

    def report(self, request: str = "", digests: Sequence[bytes] = (), limit: int = 16) -> dict[str, Any]:
        """For people, as JSON has it: the lookup of `request`, the latest ones, and the losses of `digests`.

        Also those of the chunk that the request missed first.
        """
        found = self.lookup(request) if request else None
        wanted = [*digests, *([found.missing] if found is not None and found.missing else [])]
        return {
            "lookup": plain(found) if found is not None else None,
            "latest": [plain(one) for one in self.lookups(limit)],
            "losses": {digest.hex(): [asdict(loss) for loss in self.why(digest)] for digest in wanted},
        }


def plain(lookup: Lookup) -> dict[str, Any]:
    """A lookup as JSON has it: the family by its id."""
    fields = {each.name: getattr(lookup, each.name) for each in dataclass_fields(lookup) if each.name != "family"}
    return {**fields, "family_id": lookup.family.family_id.hex(), "missing": lookup.missing.hex()}


def meaning(reason: str) -> str:
    """What a reason means for whoever asks, and what to do."""
    if reason.startswith(NOT_STORED):
        why = reason.removeprefix(NOT_STORED)
        return f"it was computed and then not stored ({why}): the cache never makes a request wait"
    if reason.startswith("fault"):
        return "a tier failed to load it; `lmc status` and `lmc doctor` say more"
    return _MEANINGS.get(reason, "a tier that had it could not be used")
