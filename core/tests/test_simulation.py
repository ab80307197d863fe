"""Core simulated, seed by seed: nothing lies, limits hold, everything ends; and of the bugs planted none stays hidden.

With LMCACHE_SOAK set, thousands of seeds; with LMCACHE_SIM_SEED that one only.  A failure names its seed:
`python -m sim SEED` in this folder replays it.
"""

from __future__ import annotations

import gc
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sim.mutants import MUTANTS, Mutant
from sim.runs import run
from sim.scheduler import Scheduler, SimulationError
from sim.threads import Condition, Lock, SimpleQueue, Thread, simulated
from sim.world import plan_of

import lmcache_core.transfer

CI_SEEDS = 160
SOAK_SEEDS = 5000
TOGETHER = 20
"""Seeds of one test."""
ONE = os.environ.get("LMCACHE_SIM_SEED")
SEEDS = range(int(ONE), int(ONE) + 1) if ONE else range(SOAK_SEEDS if os.environ.get("LMCACHE_SOAK") else CI_SEEDS)


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """A cache that was not closed is a cycle that has memory."""
    yield
    gc.collect()


@pytest.mark.parametrize("first", SEEDS[::TOGETHER])
def test_no_seed_brings_a_lie_a_broken_limit_a_wrong_count_or_a_job_without_end(first: int) -> None:
    for seed in SEEDS[first - SEEDS.start :][:TOGETHER]:
        run(seed)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.plant.__name__)
def test_a_planted_bug_is_noticed(
    mutant: Mutant, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    record_property("mutant", f"simulation {mutant.plant.__name__}")
    mutant.plant(monkeypatch)
    assert _first_noticed([mutant.seed, *range(CI_SEEDS)]) is not None


def _first_noticed(seeds: list[int]) -> int | None:
    for seed in seeds:
        try:
            run(seed)
        except Exception:
            return seed
    return None


def test_a_seed_goes_the_same_way_every_time_and_in_every_process() -> None:
    by_lines = next(seed for seed in range(CI_SEEDS) if plan_of(seed).lines)
    by_points = next(seed for seed in range(CI_SEEDS) if not plan_of(seed).lines)
    chosen = (by_points, by_lines)
    here = [run(seed) for seed in chosen]
    assert [run(seed) for seed in reversed(chosen)] == here[::-1]
    program = f"from sim.runs import run; print(*(run(seed).trace for seed in {chosen}))"
    for hash_seed in ("1", "2"):
        told = subprocess.run(
            [sys.executable, "-c", program],
            cwd=Path(__file__).parent,
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert told.stdout.split() == [str(outcome.trace) for outcome in here]


def test_seeds_go_different_ways() -> None:
    assert len({run(seed).trace for seed in range(5)}) == 5


def test_a_failure_says_how_to_see_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[0].plant(monkeypatch)
    seed = _first_noticed([MUTANTS[0].seed, *range(CI_SEEDS)])
    assert seed is not None
    with pytest.raises(SimulationError) as caught:
        run(seed)
    assert f"python -m sim {seed}" in caught.value.__notes__[0]


# What simulates must itself be right.


def test_core_sees_simulated_threads_and_time_and_afterwards_real_ones() -> None:
    mine = vars(lmcache_core.transfer)
    real = (threading, queue, time)
    with simulated(Scheduler(0)) as scheduler:
        assert isinstance(mine["threading"].Lock(), Lock)
        assert mine["time"].monotonic() == scheduler.now
        core = [module for name, module in sys.modules.items() if name.startswith("lmcache_core.")]
        assert not [
            module.__name__ for module in core for used in vars(module).values() if any(used is r for r in real)
        ]
    assert (mine["threading"], mine["time"]) == (threading, time)


def test_time_passes_only_when_nobody_can_run() -> None:
    with simulated(Scheduler(0)) as scheduler:
        began, woken = scheduler.now, []

        def sleep(seconds: float) -> None:
            scheduler.sleep(seconds)
            woken.append(scheduler.now - began)

        sleepers = [Thread(scheduler, sleep, f"sleeper {n}", (seconds,)) for n, seconds in enumerate((3.0, 7200.0))]
        for thread in sleepers:
            thread.start()
        assert scheduler.now == began
        for thread in sleepers:
            thread.join()
        assert woken == [3.0, 7200.0]


def test_a_deadlock_is_told_with_who_waits_where() -> None:
    with simulated(Scheduler(0)) as scheduler:
        one, two = Lock(scheduler), Lock(scheduler)

        def take(first: Lock, second: Lock) -> None:
            with first:
                scheduler.sleep(1.0)
                with second:
                    pass

        takers = [Thread(scheduler, take, "taker", names) for names in ((one, two), (two, one))]
        for thread in takers:
            thread.start()
        with pytest.raises(SimulationError, match=r"deadlock[\s\S]*test_simulation.py:\d+ take"):
            takers[0].join()


def test_an_endless_loop_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.scheduler.MAX_STEPS", 1000)
    with simulated(Scheduler(0)) as scheduler:
        lock = Lock(scheduler)

        def spin() -> None:
            while True:
                with lock:
                    pass

        with pytest.raises(SimulationError, match="livelock"):
            spin()


def test_what_a_thread_raises_ends_the_simulation() -> None:
    def fails() -> None:
        raise ZeroDivisionError

    with simulated(Scheduler(0)) as scheduler:
        thread = Thread(scheduler, fails, "failing")
        thread.start()
        with pytest.raises(ZeroDivisionError):
            thread.join()


@pytest.mark.parametrize("seed", range(10))
def test_the_stand_ins_behave_as_the_real_ones(seed: int) -> None:
    """One in a lock at a time; a queue in its order; a wait that ends in time or in being notified."""
    with simulated(Scheduler(seed, switch=0.5)) as scheduler:
        lock, line, inside, most = Lock(scheduler), SimpleQueue(scheduler, 2), 0, 0
        wake = Condition(scheduler, lock)
        got: list[tuple[int, int]] = []

        def work(number: int) -> None:
            nonlocal inside, most
            for n in range(5):
                with lock:
                    inside += 1
                    most = max(most, inside)
                    scheduler.point()
                    inside -= 1
                line.put((number, n))
            with lock:
                assert not wake.wait(1.0)
                assert wake.wait_for(lambda: len(got) == 15, 100.0)

        workers = [Thread(scheduler, work, f"worker {n}", (n,)) for n in range(3)]
        for thread in workers:
            thread.start()
        for _ in range(15):
            got.append(line.get())
        scheduler.sleep(10.0)
        with lock:
            wake.notify_all()
        for thread in workers:
            thread.join()
            assert not thread.is_alive()
        assert most == 1
        assert all([n for number, n in got if number == who] == list(range(5)) for who in range(3))
        with pytest.raises(queue.Empty):
            line.get(timeout=1.0)
