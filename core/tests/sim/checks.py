"""What must hold in a simulation: limits at any moment; at its end pins, slots and counters; and that it recovers."""

from __future__ import annotations

from collections import Counter

from tiny import RECORD

from lmcache_core import GroupKind
from lmcache_core.breaker import BreakerState
from lmcache_core.index import State
from lmcache_core.keys import ChunkKey
from lmcache_core.tier import StoreItem, Tier
from lmcache_core.transfer import MAX_QUEUED

from .world import World

# Safety, at any moment.


def check_limits(world: World) -> None:
    """No limit is exceeded and no pin broken now; what somebody is changing at this moment is left alone."""
    if world.pool._lock._owner is None:  # type: ignore[attr-defined]
        _check_host(world)
    for tier, plan in zip(world.pool.tiers, world.plan.tiers, strict=True):
        if tier.ledger._lock._owner is None:  # type: ignore[attr-defined]
            used, capacity = tier.ledger.used_nbytes, plan.capacity_nbytes
            world.expect(used >= sum(tier.known.values()), lambda: f"{tier.name} uses less than what it knows of")
            over = capacity is not None and used > capacity and not plan.traits.shared  # others may fill a shared one
            world.expect(not over, lambda: f"{tier.name} uses {used} of {capacity} bytes")
            if plan.quota_nbytes is not None and not plan.traits.shared:
                for tenant, share in tier.ledger._shares._used.items():
                    world.expect(not tenant or share <= plan.quota_nbytes, "a tenant has more than its quota below")
        pool = tier._pool
        if pool._lock._owner is None:  # type: ignore[attr-defined]
            loads, stores = pool.queued()
            world.expect(max(loads, stores) <= MAX_QUEUED, "a queue is longer than its bound")
            queued = pool._store_nbytes
            single = max((task.nbytes for task in pool._stores), default=0)
            over = queued > max(plan.max_queued_nbytes, single, 8 << 20)
            world.expect(queued >= 0 and not over, lambda: f"{queued} bytes of stores wait")
            world.expect(pool._unanswered >= 0, "more answers than tasks")
            names = Counter(thread.name for thread in world.scheduler.threads)
            alive = names[f"lmcache-{tier.name}-io"]
            most = 2 * max(2, plan.traits.io_threads) * world.plan.caches
            world.expect(alive <= most, lambda: f"{alive} threads of one tier, at most {most} are allowed")


def _check_host(world: World) -> None:
    pool, slab = world.pool, world.pool.slab
    world.expect(slab.used_nbytes <= slab.capacity_nbytes, "the slab is larger than its capacity")
    used = sum(extent.nbytes for extent in slab.extents.values())
    world.expect(slab.used_nbytes == used, "the slab's total is not that of its extents")
    taken: set[tuple[int, int]] = set()
    for extent in slab.extents.values():
        for offset in extent.free:
            world.expect((extent.extent_id, offset) not in taken, "a slot is free twice")
            taken.add((extent.extent_id, offset))
    evictable = 0
    for entry in pool._index.entries.values():
        place = (entry.slot.extent_id, entry.slot.offset)
        world.expect(place not in taken, "a slot has two owners")
        taken.add(place)
        world.expect(entry.holds >= 0, "a record is given back more often than it was held")
        evictable += entry.state is State.READY and not entry.holds
    world.expect(pool._index.evictable(RECORD) == evictable, "the count of what can be evicted is wrong")
    if world.plan.quota_nbytes is not None:
        for model in world.models():
            tenant = model.family.salt_id
            world.expect(not tenant or pool._index.used(tenant) <= world.plan.quota_nbytes, "a quota is exceeded")
    for chain, count in world.pinned.items():
        for group in chain.model.groups:
            first = 0 if group.kind is GroupKind.FULL else max(0, count - 1)
            for key in (key for shard in group.shards for key in chain.keys(shard, range(first, count))):
                found = pool._index.entries.get(key)
                kept = found is not None and found.state is State.READY and found.holds > 0
                world.expect(kept, "a pinned chunk has left host memory")


# Safety, at rest: nobody asks for anything and everything has been answered.


def check_rest(world: World) -> None:
    """Nothing is held, queued or missing, and the counters add up."""
    pool, metrics = world.pool, world.metrics
    world.expect(world.jobs["begun"] == world.jobs["ended"], lambda: f"jobs without end: {world.jobs}")
    world.expect(not world.cache._running and not world.cache._late, "the cache still has transfers")
    entries = list(pool._index.entries.values())
    world.expect(all(entry.state is State.READY for entry in entries), "a record is neither ready nor gone")
    held = [entry for entry in entries if entry.holds]
    world.expect(not held, lambda: f"{len(held)} records are held by nobody: {[e.holds for e in held]}")
    world.expect(not any(entry.waiters for entry in entries), "somebody waits for a record that is there")
    slots = sum(extent.slots for extent in pool.slab.extents.values())
    free = sum(len(extent.free) for extent in pool.slab.extents.values())
    world.expect(free + len(entries) == slots, lambda: f"{slots - free - len(entries)} slots of {slots} are lost")
    for tier in pool.tiers:
        world.expect(not tier.ledger._pins, lambda: f"{tier.name}: pins of nobody: {len(tier.ledger._pins)}")
        world.expect(not tier.ledger._leaving, lambda: f"{tier.name}: records that never leave")
        world.expect(tier._pool._unanswered == 0, lambda: f"{tier.name}: tasks without an answer")
        world.expect(tier._pool._store_nbytes == 0, lambda: f"{tier.name}: bytes of stores that do not wait")
        world.expect(not tier._pool._running, lambda: f"{tier.name}: tasks run that have been answered")
        counted = sum(tier.known.values()) + sum(tier.ledger._manifests.values())
        used = tier.ledger.used_nbytes
        world.expect(used == counted, lambda: f"{tier.name}: {used} bytes are in use, of what is there {counted}")
        world.expect(not tier.ledger._coming, lambda: f"{tier.name}: writes that never end")
    _check_counters(world, len(entries))
    world.expect(not world.scheduler.unhandled, lambda: f"core reports bugs of its own: {world.scheduler.unhandled}")


def _check_counters(world: World, records: int) -> None:
    count = world.metrics.count
    for name in ("stores", "loads"):
        for result in ("ok", "skipped", "failed", "late"):
            told, counted = world.jobs[f"{name} {result}"], count(name, result=result)
            world.expect(told == counted, lambda n=name, r=result, t=told, c=counted: f"{n} {r}: {c}, jobs say {t}")  # type: ignore[misc]
    world.expect(count("store_bytes") == world.jobs["store_bytes"], "store_bytes is not what the jobs say")
    world.expect(count("load_bytes") == world.jobs["load_bytes"], "load_bytes is not what the jobs say")
    results = [count("lookups", result=result) for result in ("full", "partial", "miss")]
    world.expect(sum(results) == count("lookups"), "lookups are not full, partial or miss")
    entered = count("stores", result="ok") + sum(
        count("tier_reads", tier=t.name, result="ok") for t in world.pool.tiers
    )
    left = count("evictions", tier="host")
    world.expect(
        entered - left == records, lambda: f"{entered} records entered host memory, {left} left, {records} are there"
    )
    refused = count("drops", tier="host", reason="no room") + count("drops", tier="host", reason="tenant quota")
    told = world.jobs["no room"]
    world.expect(refused == told, lambda: f"{refused} records were refused a slot, jobs say {told}")
    world.expect(not count("hook_drops"), "the events of a simulation fit its queue")
    for (tier, reason), keys in world.heard.items():
        counted = count("evictions", tier=tier, reason=reason)
        world.expect(keys == counted, f"{tier} {reason}: {counted} evictions, events of {keys}")  # type: ignore[str-bytes-safe]
    world.expect(count("evictions") == sum(world.heard.values()), "an eviction had no event")


# Liveness.


def check_recovery(world: World) -> None:
    """The stores are well again: within one probe interval each tier is in use, by its own traffic."""
    scheduler = world.scheduler
    for tier, plan, backend in zip(world.pool.tiers, world.plan.tiers, world.backends, strict=True):
        healed, delayed = scheduler.now, scheduler.delayed_s
        backend.heal()
        while not _tried(world, tier):
            excused = scheduler.delayed_s - delayed
            waited = scheduler.now - healed - excused
            late = waited > plan.probe_interval_s + 2 * plan.timeout_s
            world.expect(not late, lambda: f"{tier.name} is {tier.breaker.state} {waited:.3f} s after it could recover")
            scheduler.sleep(plan.probe_interval_s / 20)


def _tried(world: World, tier: Tier) -> bool:
    """One question asked of the tier, if it takes any, as a lookup would; whether its circuit is closed then."""
    answered: list[bool] = []
    _ask_for_nothing(world, tier)
    if tier.ready and tier.probe([ChunkKey(bytes(48))], RECORD, lambda: answered.append(True)):
        while not answered:
            world.scheduler.sleep(0.001)
    return bool(answered) and tier.breaker.state is BreakerState.CLOSED


def _ask_for_nothing(world: World, tier: Tier) -> None:
    """Store what the tier has: it is not asked, so that tells nothing of its health."""
    entry = next((e for e in world.pool._index.entries.values() if e.key in tier.known and e.state is State.READY), None)
    if entry is not None:
        answers: list[object] = []
        record = world.pool.slab.view(entry.slot)
        tier.store([StoreItem(entry.key, record, entry.layout, lambda *answer: answers.append(answer), lambda item: None)])
        while not answers:
            world.scheduler.sleep(0.001)


def wait_for_rest(world: World) -> None:
    """Everything that runs comes to its end, in bounded time."""
    scheduler = world.scheduler
    world.device.healed = True
    until = scheduler.now + 3_600.0
    world.cache.drain(60.0)
    while world.device.pending or world.cache._running or any(tier._pool._stuck for tier in world.pool.tiers):
        world.expect(scheduler.now < until, lambda: f"no rest\n{scheduler.stacks()}")
        scheduler.sleep(1.0)
    scheduler.sleep(1.0)
