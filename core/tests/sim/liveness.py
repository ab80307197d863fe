"""Liveness: stores that are well again are in use within one probe interval, and everything comes to an end.

That every job ends by its deadline is seen by the clients, for each job.
"""

from __future__ import annotations

from tiny import RECORD

from lmcache_core.breaker import BreakerState
from lmcache_core.index import State
from lmcache_core.keys import ChunkKey
from lmcache_core.tier import StoreItem, Tier

from .world import World

PATIENCE_S = 3_600.0


def check_recovery(world: World) -> None:
    """Heal every store; within one probe interval its tier is in use, by its own traffic."""
    scheduler = world.scheduler
    for tier, plan, backend in zip(world.pool.tiers, world.plan.tiers, world.backends, strict=True):
        healed, delayed = scheduler.now, scheduler.delayed_s
        backend.heal()
        while not _tried(world, tier):
            waited = scheduler.now - healed - (scheduler.delayed_s - delayed)
            in_time = waited <= plan.probe_interval_s + 2 * plan.timeout_s
            world.expect(in_time, "{} is {} {} s after it could recover", tier.name, tier.breaker.state, waited)
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
    """Store what the tier has: its store is not asked, so that this tells nothing of its health."""
    entries = world.pool._index.entries.values()
    entry = next((each for each in entries if each.key in tier.known and each.state is State.READY), None)
    if entry is None:
        return
    answers: list[object] = []
    record = world.pool.slab.view(entry.slot)
    tier.store([StoreItem(entry.key, record, entry.layout, lambda *told: answers.append(told), lambda item: None)])
    while not answers:
        world.scheduler.sleep(0.001)


def wait_for_rest(world: World) -> None:
    """Everything that runs comes to its end, in bounded time."""
    scheduler = world.scheduler
    world.device.healed = True
    until = scheduler.now + PATIENCE_S
    world.cache.drain(60.0)
    while world.device.pending or world.cache._running or any(tier._pool._stuck for tier in world.pool.tiers):
        if scheduler.now > until:
            world.expect(False, "no rest\n{}", scheduler.stacks())
        scheduler.sleep(1.0)
    scheduler.sleep(1.0)
