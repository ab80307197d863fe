"""From a seed to a verdict."""

from __future__ import annotations

import contextlib
import itertools
import random
from dataclasses import dataclass
from functools import cache, partial

from lmcache_core import late
from lmcache_core.buffers import Slab

from .clients import Client
from .liveness import check_recovery, wait_for_rest
from .safety import check_limits, check_rest
from .scheduler import Scheduler, SimulationError
from .stores import Records
from .threads import Thread
from .world import LONGEST, MODELS, Plan, TierPlan, World, build, plan_of, prompt, simulation


@dataclass(frozen=True, slots=True)
class Outcome:
    """A simulation that found nothing wrong; equal traces mean equal runs."""

    seed: int
    trace: int
    steps: int
    seconds: float
    """Of simulated time."""
    proven: int
    """Chunks whose bytes were compared."""
    jobs: int


def run(seed: int, plan: Plan | None = None) -> Outcome:
    """Simulate one seed; SimulationError, or whatever else went wrong, with the way to see it again."""
    plan = plan or plan_of(seed)
    _warm()
    try:
        return _run(plan)
    except BaseException as error:
        error.add_note(f"to see it again, in core/tests: python -m sim {seed}\n{plan}")
        raise


@cache
def _warm() -> None:
    """What is computed once per process is computed before: otherwise the first run would not be as the others."""
    for number, seed, chunks in itertools.product(range(len(MODELS)), range(6), range(1, LONGEST + 1)):
        prompt(number, seed, chunks)
    for seed in range(4):
        with contextlib.suppress(SimulationError):
            _run(plan_of(seed))


def _run(plan: Plan) -> Outcome:
    with simulation(plan) as scheduler, contextlib.ExitStack() as at_end:
        rng = random.Random(f"threads {plan.seed}")
        stored: set[bytes] = set()
        shared = [Records() for _ in plan.tiers]
        stores = [
            [_kept(tier, kept) for tier, kept in zip(plan.tiers, shared, strict=True)] for _ in range(plan.caches)
        ]
        proven = jobs = 0
        for again in (False, True) if plan.again else (False,):
            worlds = []
            for number, records in enumerate(stores):
                left = [
                    kept if not again or tier.traits.persistent or tier.traits.shared else Records()
                    for tier, kept in zip(plan.tiers, records, strict=True)
                ]
                worlds.append(build(scheduler, plan, number + again * plan.caches, left, stored))
                at_end.callback(_free, worlds[-1].pool.slab)
            scheduler.refuses = lambda name: name.endswith("-io") and rng.random() < plan.threads_refused
            scheduler.at_points = partial(_look_at, worlds)
            _use(scheduler, worlds)
            proven += sum(world.proven for world in worlds)
            jobs += sum(world.jobs["ended"] for world in worlds)
            scheduler.refuses = lambda name: False
        return Outcome(plan.seed, scheduler.trace, scheduler.steps, scheduler.now, proven, jobs)


def _look_at(worlds: list[World]) -> None:
    for world in worlds:
        check_limits(world)


def _kept(tier: TierPlan, shared: Records) -> Records:
    """What one cache's tier keeps its records in."""
    return shared if tier.traits.shared else Records()


def _use(scheduler: Scheduler, worlds: list[World]) -> None:
    """From the first call of the clients to the end of the last thread."""
    plan = worlds[0].plan
    clients = [Client(world, number) for world in worlds for number in range(plan.clients)]
    threads = [Thread(scheduler, client.run, f"client {number}") for number, client in enumerate(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not plan.abrupt:
        for world in worlds:
            check_recovery(world)
        for world in worlds:
            wait_for_rest(world)
            check_limits(world)
            check_rest(world)
    for world in worlds:
        _close(world)
    _expect_nothing_left(scheduler, worlds)


def _free(slab: Slab) -> None:
    """What a simulation that failed did not come to."""
    slab.on_drop = lambda extent: None
    slab.close()


def _close(world: World) -> None:
    scheduler = world.scheduler
    began, delayed = scheduler.now, scheduler.delayed_s
    world.closed_at = began
    world.cache.close()
    took = scheduler.now - began - (scheduler.delayed_s - delayed)
    bound = sum(2 * tier.timeout_s + 1.0 for tier in world.plan.tiers) + 5.0
    if "device_late" in world.plan.device:  # copies are waited for, by the cache and by the device itself
        bound += 200.0
    world.expect(took <= bound, "close took {} s, at most {} are allowed", took, bound)
    world.expect(world.jobs["begun"] == world.jobs["ended"], "jobs have no end: {}", world.jobs)
    world.expect(not world.pool.slab.extents, "memory is left")
    world.expect(not world.device.extents or late._unending, "memory is pinned")
    world.expect(all(backend.closed for backend in world.backends), "a backend was not closed")


def _expect_nothing_left(scheduler: Scheduler, worlds: list[World]) -> None:
    for world in worlds:
        for backend in world.backends:
            backend.heal()
    scheduler.sleep(1_000.0)
    if len(scheduler.threads) > 1:
        scheduler.fail(SimulationError(f"threads are left\n{scheduler.stacks()}"))
    worlds[0].expect(not scheduler.unhandled, "core reports bugs of its own: {}", scheduler.unhandled)
