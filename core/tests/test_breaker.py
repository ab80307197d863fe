"""The circuit breaker, under a clock of our own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from lmcache_core.breaker import Breaker, BreakerState
from lmcache_core.testing import in_threads


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


Change = tuple[bool, str]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def changes() -> list[Change]:
    return []


@pytest.fixture
def breaker(clock: Clock, changes: list[Change]) -> Breaker:
    def changed(healthy: bool, reason: str) -> None:
        changes.append((healthy, reason))

    return Breaker(failures=3, probe_interval_s=10.0, clock=clock, on_change=changed)


def fail(breaker: Breaker, times: int = 3) -> None:
    for count in range(times):
        breaker.failed(f"fault {count + 1}")


def test_a_new_circuit_is_closed_and_says_nothing(breaker: Breaker, changes: list[Change]) -> None:
    assert (breaker.state, breaker.reason) == (BreakerState.CLOSED, "")
    assert breaker.allow()
    assert breaker.ready()
    breaker.succeeded()
    assert not changes


def test_it_opens_at_the_stated_number_of_faults_in_a_row_with_the_last_reason(
    breaker: Breaker, changes: list[Change]
) -> None:
    fail(breaker, 2)
    assert breaker.allow()
    assert not changes
    breaker.failed("the third")
    assert breaker.state is BreakerState.OPEN
    assert not breaker.allow()
    assert not breaker.ready()
    assert (breaker.reason, changes) == ("the third", [(False, "the third")])


def test_a_success_in_between_starts_the_count_again(breaker: Breaker, changes: list[Change]) -> None:
    for _ in range(5):
        fail(breaker, 2)
        breaker.succeeded()
    assert breaker.state is BreakerState.CLOSED
    assert not changes


def test_a_fatal_fault_opens_it_at_once(breaker: Breaker, changes: list[Change]) -> None:
    breaker.failed("a bug", fatal=True)
    assert not breaker.allow()
    assert changes == [(False, "a bug")]


def test_one_trial_passes_after_the_interval_and_only_one(breaker: Breaker, clock: Clock) -> None:
    fail(breaker)
    clock.now += 9.999
    assert not breaker.ready()
    assert not breaker.allow()
    clock.now += 0.001
    assert breaker.ready()
    assert breaker.ready()  # asking claims nothing
    assert breaker.allow()
    assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.ready()
    assert not breaker.allow()


def test_a_good_trial_closes_it(breaker: Breaker, clock: Clock, changes: list[Change]) -> None:
    fail(breaker)
    clock.now += 10
    assert breaker.allow()
    breaker.succeeded()
    assert (breaker.state, breaker.reason) == (BreakerState.CLOSED, "")
    assert changes == [(False, "fault 3"), (True, "")]
    fail(breaker, 2)
    assert breaker.allow()  # and the count begins anew


def test_a_bad_trial_waits_a_whole_interval_more_and_is_no_change(
    breaker: Breaker, clock: Clock, changes: list[Change]
) -> None:
    fail(breaker)
    clock.now += 10
    assert breaker.allow()
    clock.now += 3
    breaker.failed("still down")
    assert breaker.state is BreakerState.OPEN
    assert breaker.reason == "still down"
    clock.now += 9.999
    assert not breaker.allow()
    clock.now += 0.001
    assert breaker.allow()
    assert len(changes) == 1


def test_a_bad_trial_after_a_fatal_fault_opens_it_again(breaker: Breaker, clock: Clock) -> None:
    breaker.failed("a bug", fatal=True)
    clock.now += 10
    assert breaker.allow()
    clock.now += 3
    breaker.failed("still broken")
    assert (breaker.state, breaker.reason) == (BreakerState.OPEN, "still broken")
    clock.now += 9.999
    assert not breaker.allow()


def test_a_trial_that_nobody_reports_on_does_not_keep_it_shut(breaker: Breaker, clock: Clock) -> None:
    fail(breaker)
    clock.now += 10
    assert breaker.allow()
    clock.now += 10
    assert breaker.ready()
    assert breaker.allow()
    assert not breaker.allow()


def test_a_trial_that_tried_nothing_leaves_it_to_the_next(
    breaker: Breaker, clock: Clock, changes: list[Change]
) -> None:
    breaker.untried()
    assert breaker.state is BreakerState.CLOSED
    fail(breaker)
    breaker.untried()
    assert not breaker.allow(), "a circuit that is open stays so"
    clock.now += 10
    assert breaker.allow()
    breaker.untried()
    assert breaker.ready()
    assert breaker.allow()
    assert not breaker.allow()
    assert len(changes) == 1


def test_each_change_is_told_exactly_once_however_many_threads_report_it() -> None:
    changes: list[Change] = []
    breaker = Breaker(failures=3, on_change=lambda healthy, reason: changes.append((healthy, reason)))
    in_threads(*[lambda: fail(breaker, 50)] * 8)
    assert len(changes) == 1
    in_threads(*[breaker.succeeded] * 8)
    assert [healthy for healthy, _ in changes] == [False, True]


def test_one_thread_of_many_gets_the_trial(clock: Clock) -> None:
    for _ in range(50):
        breaker = Breaker(failures=1, probe_interval_s=10, clock=clock)
        breaker.failed("down")
        clock.now += 10
        allowed: list[bool] = []
        in_threads(*[lambda b=breaker, a=allowed: a.append(b.allow())] * 4)  # type: ignore[misc]
        assert sorted(allowed) == [False, False, False, True]


def test_changes_of_several_threads_are_told_in_the_order_in_which_they_happened() -> None:
    told: list[bool] = []
    telling, go_on = threading.Event(), threading.Event()

    def slow_listener(healthy: bool, reason: str) -> None:
        if not healthy:
            telling.set()
            assert go_on.wait(60)
        told.append(healthy)

    breaker = Breaker(failures=1, on_change=slow_listener)
    first = threading.Thread(target=breaker.failed, args=("down",))
    first.start()
    assert telling.wait(60)
    second = threading.Thread(target=breaker.succeeded)
    second.start()
    deadline = time.monotonic() + 60
    while breaker.state is not BreakerState.CLOSED:
        assert time.monotonic() < deadline
    go_on.set()
    first.join(60)
    second.join(60)
    assert told == [False, True]


def test_a_listener_may_use_the_breaker() -> None:
    asked: list[bool] = []
    breaker: Breaker

    def listener(healthy: bool, reason: str) -> None:
        asked.append(breaker.allow())
        if not healthy:
            breaker.succeeded()

    breaker = Breaker(failures=1, on_change=listener)
    breaker.failed("down")
    assert asked == [False, True]


@pytest.mark.parametrize("report", [lambda b: b.succeeded(), lambda b: b.failed("late")])
def test_reports_in_an_open_circuit_are_no_second_opening(
    report: Callable[[Breaker], None], breaker: Breaker, changes: list[Change]
) -> None:
    fail(breaker)
    report(breaker)
    assert [healthy for healthy, _ in changes].count(False) == 1
