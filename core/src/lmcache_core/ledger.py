"""What a tier has, as far as it knows: sizes, pins, tenants, and who leaves when room is needed."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .index import Siblings
from .keys import SHARD_ID_NBYTES, ChunkKey
from .policy import EvictionPolicy, Item
from .shares import Shares, Tenants


@dataclass(slots=True)
class Life:
    """How a record fared in a tier; times by the monotonic clock."""

    began: float
    used_at: float
    uses: int = 0


@dataclass(frozen=True, slots=True)
class Written:
    """One record that was stored."""

    key: ChunkKey
    nbytes: int
    depth: int = 0
    alone: bool = False


class Ledger:
    """Thread-safe; holds its lock for bookkeeping only, and deletes nothing itself."""

    def __init__(
        self,
        capacity_nbytes: int | None,
        new_policy: Callable[[], EvictionPolicy],
        tenant_quota_nbytes: int | None = None,
    ) -> None:
        self.capacity_nbytes = capacity_nbytes
        self.tenant_quota_nbytes = tenant_quota_nbytes
        self.known: dict[bytes, int] = {}
        """Key to size.  Read without the lock, changed under it."""
        self.used_nbytes = 0
        """Bytes of what is known, what is being written, and manifests."""
        self._lock = threading.Lock()
        self._pins: Counter[bytes] = Counter()
        self._siblings = Siblings()
        self._alone: set[bytes] = set()
        self._shares = Shares(new_policy)
        self._tenants: dict[bytes, bytes] = {}
        self._families: dict[bytes, bytes] = {}
        self._manifests: dict[bytes, int] = {}
        self._coming: Counter[bytes] = Counter()
        """Bytes that are being written, by shard."""
        self._records: Counter[bytes] = Counter()
        """How many of each shard are known."""
        self._leaving: set[bytes] = set()
        self._lives: dict[bytes, Life] = {}
        """Of 1 record in 8."""

    def belongs(self, shard_id: bytes, tenant: bytes, family_id: bytes) -> None:
        """Records of this shard are the tenant's and of that family."""
        with self._lock:
            self._tenants[shard_id] = tenant
            self._families[shard_id] = family_id

    def has_shard(self, shard_id: bytes) -> bool:
        """Whether its tenant is known."""
        return shard_id in self._tenants

    def shards_of(self, family_id: bytes) -> list[bytes]:
        """The family's shards, as far as they are known."""
        with self._lock:
            return [shard_id for shard_id, family in self._families.items() if family == family_id]

    def has_manifest(self, shard_id: bytes) -> bool:
        """Whether the tier has what says whose the shard is."""
        return shard_id in self._manifests

    def learn_manifest(self, shard_id: bytes, nbytes: int, reserved_nbytes: int = 0) -> None:
        """The tier has the shard's manifest: it was found, or written, which ends what was reserved for it."""
        with self._lock:
            self._unreserve(reserved_nbytes, b"")
            self.used_nbytes += nbytes - self._manifests.get(shard_id, 0)
            self._manifests[shard_id] = nbytes

    def lose_manifest(self, shard_id: bytes) -> None:
        """The tier may have the shard's manifest no more."""
        with self._lock:
            self.used_nbytes -= self._manifests.pop(shard_id, 0)

    def disown(self, shard_id: bytes) -> bool:
        """Forget whose the shard is, if no record of it is known or coming; whether so."""
        with self._lock:
            if not self._is_empty(shard_id):
                return False
            self._families.pop(shard_id, None)
            self._tenants.pop(shard_id, None)
            self.used_nbytes -= self._manifests.pop(shard_id, 0)
            return True

    def empty(self, shard_ids: Iterable[bytes]) -> list[bytes]:
        """Those of which something is known, but no record."""
        with self._lock:
            return [each for each in shard_ids if each in self._tenants and self._is_empty(each)]

    def _is_empty(self, shard_id: bytes) -> bool:
        return shard_id not in self._records and shard_id not in self._coming

    def learn_new(self, records: Iterable[tuple[ChunkKey, int]]) -> None:
        """The tier has these too: they were found.  What is known already, or about to be deleted, is left as it is."""
        with self._lock:
            for key, nbytes in records:
                if key not in self.known and key not in self._leaving:
                    self._learn(key, nbytes, 0, False)

    def leave(self, keys: Iterable[ChunkKey]) -> list[ChunkKey]:
        """Which of `keys` were known and not pinned: no more, and not found until they are deleted, see `left`."""
        with self._lock:
            gone = [key for key in keys if key not in self._pins and self._forget(key)]
            self._leaving.update(gone)
            return gone

    def is_leaving(self, key: ChunkKey) -> bool:
        """Whether it is still to be deleted: nothing may be written in its place until then."""
        return key in self._leaving

    def left(self, keys: Iterable[ChunkKey]) -> None:
        """They have been deleted, or will not be."""
        with self._lock:
            self._leaving.difference_update(keys)

    def forget(self, key: ChunkKey, *, leaving: bool = False) -> bool:
        """The tier has it no more, or no more for long (`leaving`, until `left`), held or not; whether it was known."""
        with self._lock:
            known = self._forget(key)
            if known and leaving:
                self._leaving.add(key)
            return known

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """A request used these records, deepest first."""
        now = time.monotonic()
        with self._lock:
            for key in keys:
                self._shares.get(key)
                life = self._lives.get(key)
                if life is not None:
                    life.used_at = now
                    life.uses += 1

    def end_lives(self, keys: Iterable[bytes]) -> list[Life]:
        """How the records fared that have left; of those only that were followed."""
        with self._lock:
            return [life for key in keys if (life := self._lives.pop(key, None)) is not None]

    def pinned_nbytes(self) -> int:
        """Bytes of the records that requests hold."""
        with self._lock:
            return sum(self.known.get(key, 0) for key in self._pins)

    def tenants(self) -> Tenants:
        """How much each tenant uses."""
        with self._lock:
            return Tenants(tuple(self._shares.tenants().values()), self.tenant_quota_nbytes)

    def pin(self, keys: Sequence[bytes]) -> bool:
        """Keep all of `keys` until `unpin`; False, and nothing is kept, if one of them is not known any more."""
        with self._lock:
            if any(key not in self.known for key in keys):
                return False
            self._pins.update(keys)
            return True

    def unpin(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._pins[key] -= 1
                if self._pins[key] <= 0:
                    del self._pins[key]

    def reserve(self, nbytes: int, shard_id: bytes = b"", at_least: int = 0) -> tuple[list[ChunkKey], bool]:
        """Count `nbytes` as used for a write to come: (who must be deleted now, then `left`, whether there is room).

        `at_least` bytes go in any case: the store is fuller than we know.  Ends with `written`.
        """
        with self._lock:
            tenant = self._tenants.get(shard_id, b"")
            gone: list[ChunkKey] = []
            quota = self.tenant_quota_nbytes
            if quota is not None and tenant:
                coming = sum(n for shard, n in self._coming.items() if self._tenants.get(shard) == tenant)
                while (need := self._shares.used(tenant) + coming + nbytes - quota) > 0:
                    if not self._leave(self._shares.own_victims(need, tenant, self._pinned), gone):
                        return gone, False
            start = self.used_nbytes
            while True:
                freed = start - self.used_nbytes
                over = self.used_nbytes + nbytes - self.capacity_nbytes if self.capacity_nbytes is not None else 0
                need = max(over, at_least - freed)
                if need <= 0:
                    break
                if not self._leave(self._shares.victims(need, tenant, self._pinned), gone):
                    if over > 0:
                        return gone, False
                    break
            self.used_nbytes += nbytes
            if nbytes:
                self._coming[shard_id] += nbytes
            return gone, True

    def written(self, nbytes: int, shard_id: bytes = b"", stored: Iterable[Written] = ()) -> None:
        """The write that `nbytes` were reserved for has ended: the tier has what was `stored`, and no more."""
        with self._lock:
            self._unreserve(nbytes, shard_id)
            for record in stored:
                self._leaving.discard(record.key)
                self._learn(record.key, record.nbytes, record.depth, record.alone)

    def _unreserve(self, nbytes: int, shard_id: bytes) -> None:
        self.used_nbytes -= nbytes
        self._coming[shard_id] -= nbytes
        if not self._coming[shard_id]:
            del self._coming[shard_id]

    def _pinned(self, key: ChunkKey) -> bool:
        return key in self._pins

    def _leave(self, chosen: list[ChunkKey], gone: list[ChunkKey]) -> bool:
        together = [key for key in chosen if key not in self._alone]
        for key in dict.fromkeys([*chosen, *self._siblings.expand(together)]):
            if key not in self._pins and self._forget(key):
                gone.append(key)
                self._leaving.add(key)
        return bool(chosen)

    def _learn(self, key: ChunkKey, nbytes: int, depth: int, alone: bool) -> None:
        self.used_nbytes += nbytes - self.known.get(key, 0)
        if key not in self.known:
            self._records[key[:SHARD_ID_NBYTES]] += 1
        self.known[key] = nbytes
        self._siblings.add(key)
        if alone:
            self._alone.add(key)
        if not key[-1] & 7 and key not in self._lives:
            self._lives[key] = Life(now := time.monotonic(), now)
        self._shares.put(Item(key, depth, nbytes, self._tenants.get(key[:SHARD_ID_NBYTES], b"")))

    def _forget(self, key: ChunkKey) -> bool:
        nbytes = self.known.pop(key, None)
        if nbytes is None:
            return False
        self.used_nbytes -= nbytes
        shard_id = key[:SHARD_ID_NBYTES]
        self._records[shard_id] -= 1
        if not self._records[shard_id]:
            del self._records[shard_id]
        self._siblings.remove(key)
        self._alone.discard(key)
        self._shares.remove(key)
        return True
