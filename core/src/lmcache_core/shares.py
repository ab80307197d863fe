"""Who uses how much of a tier and who has to give: each tenant has an eviction policy of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .keys import ChunkKey
from .policy import EvictionPolicy, Item

Held = Callable[[ChunkKey], bool]


@dataclass(frozen=True, slots=True)
class Tenants:
    """How much each tenant uses, without names; and what each may."""

    used: tuple[int, ...]
    quota_nbytes: int | None


class Shares:
    """Called under its tier's lock.  A tenant is a salt_id; requests without a salt are the tenant b""."""

    def __init__(self, new_policy: Callable[[], EvictionPolicy]) -> None:
        self._new_policy = new_policy
        self._policies: dict[bytes, EvictionPolicy] = {}
        self._used: dict[bytes, int] = {}
        self._records: Counter[bytes] = Counter()
        self._items: dict[bytes, Item] = {}

    def used(self, tenant: bytes) -> int:
        """Bytes of the tenant's records."""
        return self._used.get(tenant, 0)

    def tenants(self) -> dict[bytes, int]:
        """Bytes of each tenant's records; without those that have no salt."""
        return {tenant: used for tenant, used in self._used.items() if tenant}

    def put(self, item: Item) -> None:
        """A record entered, or was stored again."""
        before = self._items.get(item.key)
        if before is not None and before.tenant != item.tenant:
            self.remove(item.key)
            before = None
        policy = self._policies.get(item.tenant)
        if policy is None:
            policy = self._policies[item.tenant] = self._new_policy()
        if before is None:
            self._records[item.tenant] += 1
        self._items[item.key] = item
        self._used[item.tenant] = self.used(item.tenant) + item.nbytes - (before.nbytes if before else 0)
        policy.on_put(item)

    def get(self, key: ChunkKey) -> None:
        """A request used the record; unknown keys are ignored."""
        item = self._items.get(key)
        if item is not None:
            self._policies[item.tenant].on_get(key)

    def remove(self, key: ChunkKey) -> None:
        """The record left; unknown keys are ignored."""
        item = self._items.pop(key, None)
        if item is None:
            return
        self._policies[item.tenant].on_remove(key)
        self._used[item.tenant] -= item.nbytes
        self._records[item.tenant] -= 1
        if not self._records[item.tenant]:
            del self._used[item.tenant], self._policies[item.tenant], self._records[item.tenant]

    def victims(self, nbytes: int, tenant: bytes, held: Held) -> list[ChunkKey]:
        """Who leaves so that `tenant` may store: some of `nbytes`, to be removed before asking again, or nobody.

        A tenant that uses its fair share or more gives of its own; below that, whoever uses the most gives.
        """
        for giver in self._givers(tenant):
            found = self.own_victims(nbytes, giver, held)
            if found:
                return found
        return []

    def own_victims(self, nbytes: int, tenant: bytes, held: Held) -> list[ChunkKey]:
        """The same among the tenant's own records only."""
        policy = self._policies.get(tenant)
        if policy is None:
            return []
        return policy.victims(nbytes, held) or policy.victims(1, held)

    def _givers(self, tenant: bytes) -> Iterator[bytes]:
        if len(self._used) == 1:
            yield from self._used
            return
        own = self.used(tenant)
        fair = sum(self._used.values()) / max(1, len(self._used))
        if own and own >= fair:
            yield tenant
        yield from sorted((t for t in self._used if t != tenant), key=self.used, reverse=True)
        if own and own < fair:
            yield tenant
