"""What is in host memory: key -> state, slot, holds and waiters.  Called under its pool's lock."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Set

from .buffers import Slot
from .chain import Model
from .keys import SHARD_ID_NBYTES, ChunkKey
from .layout import Layout

Sink = Callable[[int, "Entry | None", str], None]
"""Told (position, entry, tier that it came from) when a record that was waited for is ready, (position, None, reason)
when it is lost."""


class State(enum.Enum):
    RESERVED = "reserved"
    """A store is being copied in; not visible."""
    LOADING = "loading"
    """Coming from a lower tier."""
    READY = "ready"
    GONE = "gone"
    """Out of the index; whoever still holds it sees this."""


class Entry:
    """One record in a slot.  Evictable when READY and nobody holds it (leases, jobs, I/O)."""

    __slots__ = (
        "alone",
        "below_mask",
        "depth",
        "entered",
        "generation",
        "holds",
        "key",
        "last_used",
        "layout",
        "model",
        "slot",
        "state",
        "stored_at_ns",
        "uses",
        "waiters",
    )

    def __init__(
        self,
        key: ChunkKey,
        slot: Slot,
        layout: Layout,
        depth: int,
        state: State,
        generation: int,
        model: Model | None = None,
    ) -> None:
        self.key = key
        self.slot = slot
        self.layout = layout
        self.depth = depth
        self.state = state
        self.generation = generation
        self.model = model
        """Whose record it is."""
        self.holds = 1
        """Not evictable while above 0; the first is of whoever fills the slot."""
        self.below_mask = 0
        """Bit i: lower tier i was given the record, or is being given it."""
        self.alone = False
        """Of a window or state group: may leave without its siblings."""
        self.stored_at_ns = 0
        self.entered = self.last_used = 0.0
        """By the pool's clock."""
        self.uses = 0
        self.waiters: list[tuple[Sink, int]] = []

    @property
    def tenant(self) -> bytes:
        return self.model.family.salt_id if self.model is not None else b""


class Siblings:
    """Which keys share a digest: the rectangles of one chunk leave a tier together."""

    def __init__(self) -> None:
        self._keys: dict[bytes, tuple[ChunkKey, ...]] = {}

    def add(self, key: ChunkKey) -> None:
        digest = key[SHARD_ID_NBYTES:]
        have = self._keys.get(digest, ())
        if key not in have:
            self._keys[digest] = (*have, key)

    def remove(self, key: ChunkKey) -> None:
        digest = key[SHARD_ID_NBYTES:]
        left = tuple(k for k in self._keys.get(digest, ()) if k != key)
        if left:
            self._keys[digest] = left
        else:
            self._keys.pop(digest, None)

    def expand(self, victims: Iterable[ChunkKey]) -> list[ChunkKey]:
        """`victims` and all their siblings, each once, in order."""
        return list(dict.fromkeys(s for key in victims for s in self._keys.get(key[SHARD_ID_NBYTES:], (key,))))


class Index:
    """All entries, counted by size class so that "nothing can be evicted" is known without a search."""

    def __init__(self) -> None:
        self.entries: dict[bytes, Entry] = {}
        self.siblings = Siblings()
        self._evictable: dict[int, int] = {}
        self._used: Counter[bytes] = Counter()
        self._by_extent: dict[int, dict[Entry, None]] = {}

    def add(self, entry: Entry) -> None:
        self.entries[entry.key] = entry
        self._used[entry.tenant] += entry.slot.nbytes
        self.siblings.add(entry.key)
        self._by_extent.setdefault(entry.slot.extent_id, {})[entry] = None

    def remove(self, entry: Entry) -> None:
        """Forget the entry; its slot is the caller's to give back."""
        if entry.state is State.READY and not entry.holds:
            self._evictable[entry.slot.nbytes] -= 1
        entry.state = State.GONE
        del self.entries[entry.key]
        self._used[entry.tenant] -= entry.slot.nbytes
        if not self._used[entry.tenant]:
            del self._used[entry.tenant]
        self.siblings.remove(entry.key)
        residents = self._by_extent[entry.slot.extent_id]
        residents.pop(entry, None)
        if not residents:
            del self._by_extent[entry.slot.extent_id]  # extents come and go, their numbers never return

    def hold(self, entries: Iterable[Entry]) -> None:
        fresh: list[Entry] = []
        for entry in entries:
            if not entry.holds:
                fresh.append(entry)
            entry.holds += 1
        for nbytes, count in _ready_by_size(fresh).items():
            self._evictable[nbytes] -= count

    def unhold(self, entries: Iterable[Entry]) -> None:
        free: list[Entry] = []
        for entry in entries:
            entry.holds -= 1
            if not entry.holds:
                free.append(entry)
        for nbytes, count in _ready_by_size(free).items():
            self._evictable[nbytes] = self._evictable.get(nbytes, 0) + count

    def used(self, tenant: bytes) -> int:
        """Bytes of slots that hold the tenant's records, or are being filled with them."""
        return self._used[tenant]

    def held(self) -> int:
        """Entries that somebody holds; who is not ready yet is held by whoever fills it."""
        return len(self.entries) - sum(self._evictable.values())

    def held_nbytes(self) -> int:
        """Bytes of slots that could not be given up now."""
        free = sum(slot_nbytes * count for slot_nbytes, count in self._evictable.items())
        return sum(self._used.values()) - free

    def evictable(self, slot_nbytes: int) -> int:
        """Entries of a size class that could leave now."""
        return self._evictable.get(slot_nbytes, 0)

    def in_extent(self, extent_id: int) -> Set[Entry]:
        return self._by_extent.get(extent_id, {}).keys()


def _ready_by_size(entries: list[Entry]) -> Counter[int]:
    ready = State.READY
    return Counter([entry.slot.nbytes for entry in entries if entry.state is ready])
