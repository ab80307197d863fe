"""From a seed to a verdict."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass
from functools import cache

from .checks import check_limits, check_recovery, check_rest, wait_for_rest
from .clients import Client
from .scheduler import SimulationError
from .threads import Thread
from .world import LONGEST, MODELS, Plan, World, build, plan_of, prompt, simulation


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
    """What is computed once per process is computed before: otherwise the first simulation would not be as the others."""
    for number, seed, chunks in itertools.product(range(len(MODELS)), range(4), range(1, LONGEST + 1)):
        prompt(number, seed, chunks)
    for seed in range(4):
        with contextlib.suppress(SimulationError):
            _run(plan_of(seed))


def _run(plan: Plan) -> Outcome:
    with simulation(plan) as scheduler:
        world = build(scheduler, plan)
        scheduler.at_points = lambda: check_limits(world)
        clients = [Client(world, number) for number in range(plan.clients)]
        threads = [Thread(scheduler, client.run, f"client {client.number}") for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        check_recovery(world)
        wait_for_rest(world)
        check_limits(world)
        check_rest(world)
        _close(world)
        scheduler.at_points = lambda: None
        return Outcome(plan.seed, scheduler.trace, scheduler.steps, scheduler.now, world.proven, world.jobs["ended"])


def _close(world: World) -> None:
    scheduler = world.scheduler
    began, delayed = scheduler.now, scheduler.delayed_s
    world.cache.close()
    took = scheduler.now - began - (scheduler.delayed_s - delayed)
    bound = sum(2 * tier.timeout_s + 1.0 for tier in world.plan.tiers) + 5.0
    world.expect(took <= bound, f"close took {took:.3f} s, at most {bound} are allowed")
    scheduler.sleep(1.0)
    left = [thread.name for thread in scheduler.threads[1:]]
    world.expect(not left, f"threads are left: {left}")
    world.expect(not world.pool.slab.extents and not world.device.extents, "memory is left")
    world.expect(all(backend.closed for backend in world.backends), "a backend was not closed")
    if scheduler.failure is not None:
        raise scheduler.failure or SimulationError
