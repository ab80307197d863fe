"""What a pool and its tiers hold at the moment, as gauges: read when somebody collects the metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Final

from . import __version__, plugins
from .breaker import BreakerState
from .errors import PluginError
from .metrics import Labels, Metrics
from .pool import Pool
from .shares import Tenants

_NEAR_QUOTA: Final = 0.95

GAUGES: Final = {
    "used_bytes": "Bytes in use: of host memory the extents, of a tier the records, what is being written, manifests.",
    "capacity_bytes": "The most that a tier may hold; not there without a limit.",
    "records": "Records of a tier, as far as it knows.",
    "records_in_use": "Records in host memory that a request, a job or a write holds.",
    "pinned_bytes": "Bytes that cannot be evicted now: held in host memory, leased in a tier.",
    "leases": "Requests that hold something, or were told that there is nothing.",
    "queued": "Batches that wait for a tier's threads, by operation.",
    "breaker": "1 for the state that a tier's circuit breaker is in: closed, open, half_open.",
    "tenants": "Tenants (salts) with records in a tier; requests without a salt are none.",
    "tenant_quota_bytes": "What each tenant may use of a tier; not there without a quota.",
    "tenant_largest_bytes": "What the tenant with the most records uses of a tier.",
    "clients": "Connections of engines to the daemon.",
    "plugin": "1 for core and each plugin in use, with its distribution and version.",
    "tenants_near_quota": "Tenants that use 95 % of their quota or more.",
}
"""Help texts by name."""


def add_pool_gauges(metrics: Metrics, pool: Pool) -> None:
    """Have `metrics` read what `pool` and its tiers hold."""
    for name, read in _readers(pool):
        metrics.gauge(name, GAUGES[name], read)


def add_plugin_gauge(metrics: Metrics, used: Sequence[tuple[str, str]], disable: Sequence[str] = ()) -> None:
    """Have `metrics` tell the versions of core and of the plugins `used`, as (group, name)."""
    metrics.gauge("plugin", GAUGES["plugin"], cache(lambda: _versions(used, disable)))


def _versions(used: Sequence[tuple[str, str]], disable: Sequence[str]) -> dict[Labels, float]:
    found: dict[Labels, float] = {_version("core", plugins.CORE, plugins.CORE, __version__): 1.0}
    for group, name in used:
        try:
            offer = plugins.resolve(group, name, disable)
        except PluginError:  # inline: it has no version
            continue
        found[_version(offer.kind, offer.name, offer.dist, offer.version)] = 1.0
    return found


def _version(kind: str, name: str, distribution: str, version: str) -> Labels:
    return (("kind", kind), ("name", name), ("distribution", distribution), ("version", version))


def _readers(pool: Pool) -> Iterator[tuple[str, Callable[[], dict[Labels, float]]]]:
    tiers = pool.tiers

    def each(host: float | None, below: Iterable[float | None]) -> dict[Labels, float]:
        found = zip([pool.name, *(tier.name for tier in tiers)], [host, *below], strict=True)
        return {(("tier", name),): value for name, value in found if value is not None}

    def quota(read: Callable[[Tenants], float | None]) -> Callable[[], dict[Labels, float]]:
        return lambda: each(read(pool.tenants()), [read(tier.ledger.tenants()) for tier in tiers])

    yield "used_bytes", lambda: each(pool.slab.used_nbytes, [tier.ledger.used_nbytes for tier in tiers])
    yield "capacity_bytes", lambda: each(pool.slab.capacity_nbytes, [tier.capacity_nbytes for tier in tiers])
    yield "records", lambda: each(pool.records(), [len(tier.known) for tier in tiers])
    yield "records_in_use", lambda: {(): float(pool.usage()[1])}
    yield "pinned_bytes", lambda: each(pool.held_nbytes(), [tier.ledger.pinned_nbytes() for tier in tiers])
    yield "leases", lambda: {(): float(pool.leases.count())}
    yield "queued", lambda: _queued(pool)
    yield "breaker", lambda: _breakers(pool)
    yield "tenants", quota(lambda of: len(of.used))
    yield "tenant_quota_bytes", quota(lambda of: of.quota_nbytes)
    yield "tenant_largest_bytes", quota(lambda of: max(of.used, default=0))
    yield "tenants_near_quota", quota(near_quota)


def near_quota(of: Tenants) -> float | None:
    """How many tenants use almost all that they may; None without a quota."""
    limit = of.quota_nbytes
    return None if limit is None else sum(used >= _NEAR_QUOTA * limit for used in of.used)


def _queued(pool: Pool) -> dict[Labels, float]:
    found: dict[Labels, float] = {}
    for tier in pool.tiers:
        status = tier.status()
        found[("tier", tier.name), ("operation", "load")] = status.queued_loads
        found[("tier", tier.name), ("operation", "store")] = status.queued_stores
    return found


def _breakers(pool: Pool) -> dict[Labels, float]:
    return {
        (("tier", tier.name), ("state", state.value)): float(tier.breaker.state is state)
        for tier in pool.tiers
        for state in BreakerState
    }
