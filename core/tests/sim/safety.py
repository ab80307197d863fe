"""Safety: no limit is exceeded and no pin broken at any moment; at rest nothing is held and the counters add up."""

from __future__ import annotations

from tiny import RECORD

from lmcache_core import GroupKind
from lmcache_core.index import State
from lmcache_core.tier import Tier
from lmcache_core.transfer import MAX_QUEUED

from .world import TierPlan, World


def check_limits(world: World) -> None:
    """What holds at any moment; what somebody is changing now is left alone."""
    if world.pool._lock._owner is None:  # type: ignore[attr-defined]
        _check_slots(world)
        _check_pins(world)
    for tier, plan in zip(world.pool.tiers, world.plan.tiers, strict=True):
        if tier.ledger._lock._owner is None:  # type: ignore[attr-defined]
            _check_ledger(world, tier, plan)
        if tier._pool._lock._owner is None:  # type: ignore[attr-defined]
            _check_queues(world, tier, plan)


def _check_slots(world: World) -> None:
    pool, slab, expect = world.pool, world.pool.slab, world.expect
    expect(slab.used_nbytes <= slab.capacity_nbytes, "the slab is larger than its capacity")
    used = sum(extent.nbytes for extent in slab.extents.values())
    expect(slab.used_nbytes == used, "the slab's total is not that of its extents")
    taken: set[tuple[int, int]] = set()
    for extent in slab.extents.values():
        for offset in extent.free:
            expect((extent.extent_id, offset) not in taken, "a slot is free twice")
            taken.add((extent.extent_id, offset))
    evictable = held = 0
    for entry in pool._index.entries.values():
        place = (entry.slot.extent_id, entry.slot.offset)
        expect(place not in taken, "a slot has two owners")
        taken.add(place)
        expect(entry.holds >= 0, "a record is given back more often than it was held")
        evictable += entry.state is State.READY and not entry.holds
        held += entry.holds > 0
    expect(pool._index.held() == held, "the count of what is held is wrong")
    expect(pool._index.evictable(RECORD) == evictable, "the count of what can be evicted is wrong")
    quota = world.plan.quota_nbytes
    for model in world.models():
        tenant = model.family.salt_id
        expect(quota is None or not tenant or pool._index.used(tenant) <= quota, "a tenant has more than its quota")


def _check_pins(world: World) -> None:
    for chain, count in world.pinned.items():
        for group in chain.model.groups:
            first = 0 if group.kind is GroupKind.FULL else max(0, count - 1)
            for key in (key for shard in group.shards for key in chain.keys(shard, range(first, count))):
                found = world.pool._index.entries.get(key)
                kept = found is not None and found.state is State.READY and found.holds > 0
                world.expect(kept, "a pinned chunk has left host memory")


def _check_ledger(world: World, tier: Tier, plan: TierPlan) -> None:
    used, known = tier.ledger.used_nbytes, sum(tier.known.values())
    world.expect(used >= known, "{} counts {} bytes and knows of {}", tier.name, used, known)
    if plan.traits.shared or world.number >= world.plan.caches:  # others have filled it, or an earlier cache
        return
    within = plan.capacity_nbytes is None or used <= plan.capacity_nbytes
    world.expect(within, "{} uses {} bytes of {}", tier.name, used, plan.capacity_nbytes)
    for tenant, share in tier.ledger._shares._used.items():
        within = plan.quota_nbytes is None or not tenant or share <= plan.quota_nbytes
        world.expect(within, "a tenant has {} bytes in {}, of {}", share, tier.name, plan.quota_nbytes)


def _check_queues(world: World, tier: Tier, plan: TierPlan) -> None:
    pool = tier._pool
    world.expect(max(pool.queued()) <= MAX_QUEUED, "a queue is longer than its bound")
    queued, most = pool._store_nbytes, plan.max_queued_nbytes
    alone = sum(task.queued_nbytes > 0 for task in (*pool._stores, *pool._running)) <= 1
    world.expect(0 <= queued <= most or alone, "{} bytes of stores wait for {}, of {}", queued, tier.name, most)
    world.expect(pool._unanswered >= 0, "there are more answers than tasks")
    most = 2 * max(2, plan.traits.io_threads)
    serving = len(pool._workers)  # one that has left these is about to end, and may be seen once more
    world.expect(serving <= most, "{} threads serve {}, at most {} may", serving, tier.name, most)


def check_rest(world: World) -> None:
    """What holds when nobody asks for anything and everything has been answered."""
    pool, expect = world.pool, world.expect
    expect(world.jobs["begun"] == world.jobs["ended"], "jobs have no end: {}", world.jobs)
    expect(not world.cache._running and not world.cache._late, "the cache still has transfers")
    entries = list(pool._index.entries.values())
    expect(all(entry.state is State.READY for entry in entries), "a record is neither ready nor gone")
    held = [entry.holds for entry in entries if entry.holds]
    expect(not held, "records are held by nobody: {}", held)
    expect(not any(entry.waiters for entry in entries), "somebody waits for a record that is there")
    slots = sum(extent.slots for extent in pool.slab.extents.values())
    free = sum(len(extent.free) for extent in pool.slab.extents.values())
    expect(free + len(entries) == slots, "of {} slots {} are free and {} in use", slots, free, len(entries))
    for tier in pool.tiers:
        _check_tier_at_rest(world, tier)
    _check_chunks(world)
    _check_evictions(world, len(entries))
    expect(not world.scheduler.unhandled, "core reports bugs of its own: {}", world.scheduler.unhandled)


def _check_tier_at_rest(world: World, tier: Tier) -> None:
    expect, ledger, pool = world.expect, tier.ledger, tier._pool
    expect(not ledger._pins, "{} has pins of nobody: {}", tier.name, len(ledger._pins))
    expect(not ledger._leaving, "{} has records that never leave", tier.name)
    expect(not ledger._coming, "{} has writes that never end", tier.name)
    there = sum(tier.known.values()) + sum(ledger._manifests.values())
    expect(ledger.used_nbytes == there, "{} counts {} bytes and has {}", tier.name, ledger.used_nbytes, there)
    expect(not pool._unanswered and not pool._running, "{} has tasks without an answer", tier.name)
    expect(not pool._store_nbytes, "{} counts {} bytes of stores that wait", tier.name, pool._store_nbytes)


def _check_chunks(world: World) -> None:
    """Counters of chunks are what the jobs said of them."""
    count, jobs, expect = world.metrics.count, world.jobs, world.expect
    for name in ("stores", "loads"):
        for result in ("ok", "skipped", "failed", "late"):
            counted, told = count(name, result=result), jobs[f"{name} {result}"]
            expect(counted == told, "{} {} {} are counted, jobs say {}", counted, name, result, told)
        nbytes = f"{name[:-1]}_bytes"
        expect(count(nbytes) == jobs[nbytes], "{} counts {}, jobs say {}", nbytes, count(nbytes), jobs[nbytes])
    refused = sum(count("drops", tier="host", reason=reason) for reason in ("no room", "tenant quota"))
    least, most = jobs["no room"], jobs["no room, at most"]  # a chunk may lack several records
    expect(least <= refused <= most, "{} drops are counted, jobs say {} to {}", refused, least, most)
    results = sum(count("lookups", result=result) for result in ("full", "partial", "miss", "refused"))
    expect(results == count("lookups"), "lookups are not full, partial or miss")


def _check_evictions(world: World, records: int) -> None:
    """Every record that came is there or was evicted, and every eviction had one event."""
    count, expect = world.metrics.count, world.expect
    came = count("stores", result="ok") + sum(count("tier_reads", tier=t.name, result="ok") for t in world.pool.tiers)
    left = count("evictions", tier="host")
    expect(came - left == records, "{} records came to host memory, {} left, {} are there", came, left, records)
    expect(not count("hook_drops"), "the events of a simulation fit their queue")
    for (tier, reason), keys in world.heard.items():
        counted = count("evictions", tier=tier, reason=reason)
        expect(counted == keys, "{} evictions ({}, {}) had events of {}", counted, tier, reason, keys)
    expect(count("evictions") == world.heard.total(), "an eviction had no event")
