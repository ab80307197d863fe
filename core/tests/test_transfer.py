"""The I/O pool: loads first, one answer for each task by its deadline, nothing left behind, whatever gets stuck."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from lmcache_core import transfer
from lmcache_core.transfer import Task, TransferPool

WAIT_S = 60.0
"""For what must happen: a test that waits this long has failed."""
SOON_S = 0.05
"""A deadline of tasks that are meant to miss it."""
FAR_S = 3600.0
"""A deadline that nothing in these tests reaches."""

Submit = Callable[[TransferPool, Task], bool]
EITHER = pytest.mark.parametrize("submit", [TransferPool.submit_load, TransferPool.submit_store])


class Probe:
    """A task that says what happens to it; it blocks in `run` if it was made with a gate."""

    def __init__(self, name: str = "", *, blocks: bool = False, nbytes: int = 0, log: list[str] | None = None) -> None:
        self.name = name
        self.log = log if log is not None else []
        self.started = threading.Event()
        self.gate = threading.Event()
        self.completed = threading.Event()
        self.late = threading.Event()
        self.returned = threading.Event()
        self.order: list[str] = []
        if not blocks:
            self.gate.set()
        self.task = Task(self._run, self._on_late, self._on_return, nbytes=nbytes)

    def _run(self) -> Callable[[], None]:
        self.order.append("run")
        self.log.append(self.name)
        self.started.set()
        assert self.gate.wait(WAIT_S)
        return self._complete

    def _complete(self) -> None:
        self.order.append("complete")
        self.completed.set()

    def _on_late(self) -> None:
        self.order.append("late")
        self.late.set()

    def _on_return(self) -> None:
        self.order.append("return")
        self.returned.set()


Open = Callable[..., TransferPool]


@pytest.fixture
def open_pool() -> Iterator[Open]:
    opened: list[TransferPool] = []

    def open_one(threads: int = 2, *, deadline_s: float = FAR_S, max_store_nbytes: int = 1 << 30) -> TransferPool:
        opened.append(TransferPool("test", threads, deadline_s=deadline_s, max_store_nbytes=max_store_nbytes))
        return opened[-1]

    yield open_one
    for pool in opened:
        pool.close(WAIT_S)


def pool_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("lmcache-test")}


def until(condition: Callable[[], object]) -> None:
    """Look until the condition holds; it must, soon."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0)


def all_started(probes: list[Probe]) -> bool:
    return all(probe.started.wait(WAIT_S) for probe in probes)


def open_gates(probes: list[Probe]) -> None:
    for probe in probes:
        probe.gate.set()


@pytest.fixture
def no_new_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it, and from then on the process has as many threads as it may."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    return lambda: monkeypatch.setattr(threading.Thread, "start", refuse)


@pytest.fixture
def uncaught(monkeypatch: pytest.MonkeyPatch) -> list[BaseException | None]:
    """What was reported as an unhandled exception of a thread."""
    told: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: told.append(args.exc_value))
    return told


# What ends in time.


@EITHER
def test_a_task_runs_and_completes_once(open_pool: Open, submit: Submit) -> None:
    pool, probe = open_pool(), Probe()
    assert submit(pool, probe.task)
    assert probe.completed.wait(WAIT_S)
    assert pool.drain(WAIT_S)
    assert probe.order == ["run", "complete"]


def test_a_queued_load_overtakes_queued_stores(open_pool: Open) -> None:
    pool = open_pool()
    log: list[str] = []
    store, load = Probe(blocks=True), Probe(blocks=True)
    pool.submit_store(store.task)
    assert store.started.wait(WAIT_S)
    pool.submit_load(load.task)
    assert load.started.wait(WAIT_S)
    queued = [Probe(name, log=log) for name in ("store 1", "store 2", "load 1", "load 2")]
    for probe in queued:
        (pool.submit_load if probe.name.startswith("load") else pool.submit_store)(probe.task)
    assert pool.queued() == (2, 2)
    store.gate.set()
    assert all(probe.completed.wait(WAIT_S) for probe in queued)
    assert log == ["load 1", "load 2", "store 1", "store 2"]
    load.gate.set()


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_stores_that_block_every_other_thread_do_not_stop_loads(open_pool: Open, threads: int) -> None:
    pool = open_pool(threads)
    stores = [Probe(blocks=True) for _ in range(8)]
    for store in stores:
        assert pool.submit_store(store.task)
    others = max(2, threads) - 1
    until(lambda: sum(store.started.is_set() for store in stores) == others)
    for _ in range(20):
        load = Probe()
        assert pool.submit_load(load.task)
        assert load.completed.wait(WAIT_S)
    assert sum(store.started.is_set() for store in stores) == others  # and it took none of them
    open_gates(stores)


@pytest.mark.parametrize("threads", [2, 4])
def test_after_any_burst_every_thread_can_be_woken_again(open_pool: Open, threads: int) -> None:
    pool = open_pool(threads)
    for count in range(3 * threads):
        burst = [Probe() for _ in range(count)]
        for index, probe in enumerate(burst):
            assert (pool.submit_store if index % 3 == 1 else pool.submit_load)(probe.task)
        assert pool.drain(WAIT_S)
        loads = [Probe(blocks=True) for _ in range(threads)]
        assert all(pool.submit_load(load.task) for load in loads)
        assert all_started(loads), "a thread sleeps on"
        open_gates(loads)
        assert pool.drain(WAIT_S)


def test_an_ended_task_keeps_nothing_alive_though_its_thread_idles_and_the_watch_remembers_it(open_pool: Open) -> None:
    class Buffer:
        pass

    pool = open_pool()
    held: list[weakref.ref[Buffer]] = []
    for submit in (pool.submit_load, pool.submit_store) * 3:
        buffer = Buffer()
        held.append(weakref.ref(buffer))

        def run(buffer: Buffer = buffer) -> Callable[[], None]:
            return lambda: [buffer].clear()

        submit(Task(run, lambda buffer=buffer: None, lambda buffer=buffer: None))  # type: ignore[misc]
        del buffer, run
        assert pool.drain(WAIT_S)
    deadline = time.monotonic() + 5
    while any(reference() is not None for reference in held) and time.monotonic() < deadline:
        gc.collect()
    assert [reference() for reference in held] == [None] * 6


# What is late.


@EITHER
def test_a_task_that_runs_too_long_is_answered_by_its_deadline_and_returned_when_it_ends(
    open_pool: Open, submit: Submit
) -> None:
    pool, probe = open_pool(deadline_s=SOON_S), Probe(blocks=True)
    assert submit(pool, probe.task)
    assert probe.late.wait(WAIT_S)
    assert not probe.returned.is_set()
    probe.gate.set()
    assert probe.returned.wait(WAIT_S)
    assert pool.drain(WAIT_S)
    assert probe.order == ["run", "late", "return"]


def test_a_load_that_no_thread_took_is_answered_by_its_deadline_and_never_runs(
    open_pool: Open, no_new_threads: Callable[[], None]
) -> None:
    pool = open_pool(deadline_s=0.2)
    no_new_threads()
    blockers = [Probe(blocks=True) for _ in range(2)]
    waiting = [Probe() for _ in range(3)]
    for probe in (*blockers, *waiting):
        assert pool.submit_load(probe.task)
    assert all(probe.returned.wait(WAIT_S) for probe in waiting)
    assert pool.queued() == (0, 0)
    open_gates(blockers)
    assert pool.drain(WAIT_S)
    until(lambda: not pool.saturated)
    last = Probe()
    assert pool.submit_load(last.task)
    assert last.completed.wait(WAIT_S)
    assert [probe.order for probe in waiting] == [["late", "return"]] * 3


def test_a_stores_deadline_counts_from_its_start(open_pool: Open) -> None:
    pool = open_pool(deadline_s=0.2)
    first, second = Probe(blocks=True), Probe(blocks=True)
    pool.submit_store(first.task)
    assert first.started.wait(WAIT_S)
    pool.submit_store(second.task)
    assert first.late.wait(WAIT_S)  # the second has waited for as long as the first took to be late
    assert second.late.wait(WAIT_S)
    assert second.order == ["run", "late"]
    open_gates([first, second])


def test_buffers_are_returned_only_after_the_late_answer_was_given(open_pool: Open) -> None:
    pool = open_pool(deadline_s=SOON_S)
    answering, go_on = threading.Event(), threading.Event()
    order: list[str] = []
    gate, returned = threading.Event(), threading.Event()

    def run() -> Callable[[], None]:
        assert gate.wait(WAIT_S)
        return lambda: order.append("complete")

    def on_late() -> None:
        answering.set()
        assert go_on.wait(WAIT_S)
        order.append("late")

    def on_return() -> None:
        order.append("return")
        returned.set()

    pool.submit_load(Task(run, on_late, on_return))
    assert answering.wait(WAIT_S)
    gate.set()
    other = Probe()
    pool.submit_load(other.task)
    assert other.completed.wait(WAIT_S)
    assert order == []
    assert not pool.drain(0)  # it has no answer yet
    go_on.set()
    assert returned.wait(WAIT_S)
    assert order == ["late", "return"]


def test_a_task_taken_by_a_thread_in_the_moment_it_is_found_late_is_still_answered(
    open_pool: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = open_pool()
    blockers = [Probe(blocks=True), Probe(blocks=True)]
    for blocker in blockers:
        pool.submit_load(blocker.task)
    assert all_started(blockers)
    probe = Probe(blocks=True)
    pool.submit_load(probe.task)
    give_up_queued = pool._give_up_queued

    def in_the_worst_moment(task: Task) -> bool:
        blockers[0].gate.set()
        assert probe.started.wait(WAIT_S)
        return give_up_queued(task)

    monkeypatch.setattr(pool, "_give_up_queued", in_the_worst_moment)
    pool._give_up(probe.task)
    assert probe.order == ["run", "late"]
    open_gates([*blockers, probe])
    assert probe.returned.wait(WAIT_S)


# Stuck threads.


def test_a_stuck_thread_is_replaced_and_leaves_when_it_returns(open_pool: Open) -> None:
    pool = open_pool(2, deadline_s=SOON_S)
    stuck = Probe(blocks=True)
    pool.submit_load(stuck.task)
    assert stuck.late.wait(WAIT_S)
    assert len(pool_threads()) == 4  # two, the stuck one and the watch
    stuck.gate.set()
    until(lambda: len(pool_threads()) == 3)


def test_a_stuck_thread_for_loads_is_replaced_by_one_for_loads(open_pool: Open) -> None:
    pool = open_pool(2, deadline_s=SOON_S)
    stuck = [Probe(blocks=True), Probe(blocks=True)]
    pool.submit_store(stuck[0].task)
    assert stuck[0].started.wait(WAIT_S)
    pool.submit_load(stuck[1].task)
    assert all(probe.late.wait(WAIT_S) for probe in stuck)
    pool._deadline_s = FAR_S
    open_gates(stuck)
    until(lambda: len(pool_threads()) == 3)
    stores = [Probe(blocks=True) for _ in range(3)]
    for store in stores:
        assert pool.submit_store(store.task)
    until(lambda: any(store.started.is_set() for store in stores))
    for _ in range(50):  # a thread that serves both would sooner or later begin a store in between
        load = Probe()
        assert pool.submit_load(load.task)
        assert load.completed.wait(5)
        pool.drain(0.001)
    assert sum(store.started.is_set() for store in stores) == 1
    open_gates(stores)


@pytest.mark.parametrize("threads", [2, 4])
def test_at_most_as_many_threads_are_replaced_as_there_are_and_then_work_is_refused(
    open_pool: Open, threads: int
) -> None:
    pool = open_pool(threads, deadline_s=0.3)
    stores = [Probe(blocks=True) for _ in range(6 * threads)]
    assert all(pool.submit_store(probe.task) for probe in stores)
    assert all(probe.late.wait(WAIT_S) for probe in stores)  # also those that no thread is left for
    assert pool.saturated
    assert pool.drain(WAIT_S)
    assert not pool.submit_load(Probe().task)
    assert not pool.submit_store(Probe().task)
    started = [probe for probe in stores if probe.started.is_set()]
    assert threads <= len(started) <= 2 * threads
    assert len(pool_threads()) <= 2 * threads + 1
    assert all(probe.order == ["late", "return"] for probe in stores if probe not in started)
    assert not any(probe.returned.is_set() for probe in started)
    open_gates(started)
    assert all(probe.returned.wait(WAIT_S) for probe in started)
    until(lambda: len(pool_threads()) == threads + 1)
    again = [Probe() for _ in range(10)]
    for index, probe in enumerate(again):
        assert (pool.submit_load if index % 2 else pool.submit_store)(probe.task)
    assert all(probe.completed.wait(WAIT_S) for probe in again)


def test_when_every_thread_and_every_replacement_was_stuck_the_pool_serves_again(open_pool: Open) -> None:
    pool = open_pool(2, deadline_s=0.2)
    first, second = ([Probe(blocks=True) for _ in range(2)] for _ in range(2))
    for probe in first:
        assert pool.submit_load(probe.task)
    assert all_started(first)
    pool._deadline_s = 1.5  # the next are taken by the replacements of the first, and are late in their turn
    for probe in second:
        assert pool.submit_load(probe.task)
    assert all(probe.late.wait(WAIT_S) for probe in (*first, *second))
    assert all(probe.order == ["run", "late"] for probe in (*first, *second))
    assert len(pool_threads()) == 5  # four are stuck, one watches: nobody serves
    pool._deadline_s = FAR_S
    open_gates([*second, *first])
    until(lambda: len(pool_threads()) == 3)
    assert not pool.saturated
    store, load = Probe(blocks=True), Probe()
    assert pool.submit_store(store.task)
    assert store.started.wait(5)
    assert pool.submit_load(load.task)
    assert load.completed.wait(5)
    store.gate.set()


def test_a_thread_without_a_replacement_takes_its_place_again(
    open_pool: Open, no_new_threads: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = open_pool(2, deadline_s=SOON_S)
    no_new_threads()
    stuck = Probe(blocks=True)
    pool.submit_load(stuck.task)
    assert stuck.late.wait(WAIT_S)
    assert len(pool_threads()) == 3
    pool._deadline_s = FAR_S
    stuck.gate.set()
    assert stuck.returned.wait(WAIT_S)
    monkeypatch.undo()
    store, load = Probe(blocks=True), Probe()
    assert pool.submit_store(store.task)
    assert store.started.wait(5)
    assert pool.submit_load(load.task)
    assert load.completed.wait(5)
    assert len(pool_threads()) == 3
    store.gate.set()


# Bounds.


def test_the_store_queue_is_bounded_in_bytes_and_gives_them_back(open_pool: Open) -> None:
    pool = open_pool(max_store_nbytes=100)
    running = Probe(blocks=True, nbytes=40)
    assert pool.submit_store(running.task)
    assert running.started.wait(WAIT_S)  # what is being written counts
    assert not pool.submit_store(Probe(nbytes=61).task)
    waiting = Probe(nbytes=60)
    assert pool.submit_store(waiting.task)
    assert not pool.submit_store(Probe(nbytes=1).task)
    running.gate.set()
    assert pool.drain(WAIT_S)
    again = Probe(nbytes=100)
    assert pool.submit_store(again.task)
    assert again.completed.wait(WAIT_S)


def test_one_store_larger_than_the_bound_passes_alone(open_pool: Open) -> None:
    pool = open_pool(max_store_nbytes=100)
    large = Probe(blocks=True, nbytes=1000)
    assert pool.submit_store(large.task)
    assert not pool.submit_store(Probe(nbytes=1).task)
    large.gate.set()
    assert large.completed.wait(WAIT_S)


def test_late_stores_give_their_bytes_back(open_pool: Open) -> None:
    pool = open_pool(2, deadline_s=SOON_S, max_store_nbytes=100)
    late = Probe(blocks=True, nbytes=100)
    assert pool.submit_store(late.task)
    assert late.late.wait(WAIT_S)
    assert pool.drain(WAIT_S)
    another = Probe(nbytes=100)
    assert pool.submit_store(another.task)
    assert another.completed.wait(WAIT_S)
    late.gate.set()


def test_the_size_of_loads_is_no_part_of_the_bound_on_stores(open_pool: Open) -> None:
    pool = open_pool(max_store_nbytes=100)
    store = Probe(blocks=True, nbytes=80)
    assert pool.submit_store(store.task)
    assert store.started.wait(WAIT_S)
    for _ in range(2):  # when the second is done the first has been accounted for
        load = Probe(nbytes=1000)
        assert pool.submit_load(load.task)
        assert load.completed.wait(WAIT_S)
    assert not pool.submit_store(Probe(nbytes=21).task)
    store.gate.set()


def test_both_queues_are_bounded_in_count(open_pool: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "MAX_QUEUED", 5)
    pool = open_pool()
    blockers = [Probe(blocks=True), Probe(blocks=True)]
    for blocker in blockers:
        pool.submit_load(blocker.task)
    assert all_started(blockers)
    assert [pool.submit_load(Probe().task) for _ in range(7)] == [True] * 5 + [False] * 2
    assert [pool.submit_store(Probe().task) for _ in range(7)] == [True] * 5 + [False] * 2
    open_gates(blockers)


# Draining.


def test_draining_waits_for_every_answer_and_gives_up_at_its_timeout(open_pool: Open) -> None:
    pool, probe = open_pool(), Probe(blocks=True)
    assert pool.drain(0)
    pool.submit_store(probe.task)
    assert not pool.drain(0)
    assert not pool.drain(0.01)
    probe.gate.set()
    assert pool.drain(WAIT_S)
    assert probe.completed.is_set()


def test_draining_ends_when_the_last_answer_is_a_late_one(open_pool: Open, no_new_threads: Callable[[], None]) -> None:
    pool = open_pool(2, deadline_s=0.1)
    no_new_threads()
    probes = [Probe(blocks=True) for _ in range(6)]
    for probe in probes:
        pool.submit_load(probe.task)
    started = time.monotonic()
    assert pool.drain(WAIT_S)
    assert time.monotonic() - started < WAIT_S / 2
    assert all(probe.late.is_set() for probe in probes)
    open_gates(probes)


# The end.


def test_closing_answers_what_is_queued_and_leaves_no_thread(open_pool: Open) -> None:
    pool = open_pool()
    running = [Probe(blocks=True), Probe(blocks=True)]
    pool.submit_store(running[0].task)
    assert running[0].started.wait(WAIT_S)
    pool.submit_load(running[1].task)
    assert running[1].started.wait(WAIT_S)
    queued = [Probe(nbytes=10) for _ in range(6)]
    for index, probe in enumerate(queued):
        assert (pool.submit_load if index % 2 else pool.submit_store)(probe.task)
    closing = threading.Thread(target=pool.close, args=(WAIT_S,))
    closing.start()
    assert all(probe.returned.wait(WAIT_S) for probe in queued)
    assert all(probe.order == ["late", "return"] for probe in queued)
    assert not pool.submit_load(Probe().task)
    assert not pool.submit_store(Probe().task)
    open_gates(running)
    closing.join(WAIT_S)
    assert all(probe.order == ["run", "complete"] for probe in running)
    assert not pool_threads()


def test_closing_is_done_when_the_last_task_is_and_not_at_its_deadline(open_pool: Open) -> None:
    pool = open_pool(deadline_s=FAR_S)
    running = Probe(blocks=True)
    pool.submit_load(running.task)
    assert running.started.wait(WAIT_S)
    closed: list[bool] = []
    closing = threading.Thread(target=lambda: closed.append(pool.close(20)))
    started = time.monotonic()
    closing.start()
    until(lambda: not pool.submit_load(Probe().task))
    running.gate.set()
    closing.join(WAIT_S)
    assert closed == [True]
    assert time.monotonic() - started < 10


def test_closing_answers_what_still_runs_at_its_timeout_and_says_that_a_thread_is_stuck(open_pool: Open) -> None:
    pool = open_pool(deadline_s=FAR_S)
    stuck = [Probe(blocks=True), Probe(blocks=True)]
    for probe in stuck:
        pool.submit_load(probe.task)
    assert all_started(stuck)
    assert not pool.close(0.01)
    assert all(probe.order == ["run", "late"] for probe in stuck)
    assert len(pool_threads()) == 2  # the stuck ones; nobody replaces them, the watch is gone
    open_gates(stuck)
    assert all(probe.returned.wait(WAIT_S) for probe in stuck)
    until(lambda: not pool_threads())
    assert pool.close(WAIT_S)


def test_closing_wakes_who_drains(open_pool: Open) -> None:
    pool = open_pool()
    running = Probe(blocks=True)
    pool.submit_store(running.task)
    assert running.started.wait(WAIT_S)
    pool.submit_store(Probe().task)
    drained: list[bool] = []
    draining = threading.Thread(target=lambda: drained.append(pool.drain(WAIT_S)))
    draining.start()
    assert not pool.close(0.01)
    draining.join(WAIT_S / 2)
    assert drained == [True]
    running.gate.set()


def test_closing_twice_and_from_two_threads_is_fine(open_pool: Open) -> None:
    pool = open_pool()
    closed: list[bool] = []
    threads = [threading.Thread(target=lambda: closed.append(pool.close(WAIT_S))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert closed == [True, True]
    assert pool.close(0)
    assert not pool_threads()


# Bugs of ours.


@EITHER
@pytest.mark.parametrize("error", [RuntimeError("a bug"), SystemExit(3), MemoryError()], ids=repr)
def test_a_run_that_raises_is_reported_and_its_task_answered_at_once(
    open_pool: Open, uncaught: list[BaseException | None], error: BaseException, submit: Submit
) -> None:
    pool = open_pool(deadline_s=FAR_S)
    before = pool_threads()
    for count in range(1, 10):
        order: list[str] = []
        returned = threading.Event()

        def run() -> Callable[[], None]:
            raise error

        def on_return(order: list[str] = order, returned: threading.Event = returned) -> None:
            order.append("return")
            returned.set()

        assert submit(pool, Task(run, lambda order=order: order.append("late"), on_return))  # type: ignore[misc]
        assert returned.wait(5)
        assert pool.drain(WAIT_S)
        assert order == ["late", "return"]
        assert uncaught == [error] * count
    assert not pool.saturated
    assert pool_threads() == before


def test_callbacks_that_raise_are_reported_and_take_nobody_with_them(
    open_pool: Open, uncaught: list[BaseException | None]
) -> None:
    pool = open_pool(2, deadline_s=0.2)

    def fail(what: str) -> Callable[[], None]:
        def callback() -> None:
            raise RuntimeError(what)

        return callback

    gates = [threading.Event() for _ in range(2)]

    def block(index: int) -> Callable[[], None]:
        gates[index].wait(WAIT_S)
        return fail("never")

    assert pool.submit_load(Task(lambda: fail("complete"), fail("never"), fail("never")))
    assert pool.drain(5)
    for index in range(2):
        pool.submit_load(Task(lambda index=index: block(index), fail("late"), fail("return")))  # type: ignore[misc]
    assert pool.drain(5)
    for gate in gates:
        gate.set()
    until(lambda: len(pool_threads()) == 3)
    probe = Probe(blocks=True)
    assert pool.submit_load(probe.task)
    assert probe.late.wait(WAIT_S)  # the watch is alive
    probe.gate.set()
    assert probe.returned.wait(WAIT_S)
    assert sorted(map(str, uncaught)) == ["complete", "late", "late", "return", "return"]


# All of it at once.


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_each_task_has_exactly_one_answer(open_pool: Open, seed: int) -> None:
    choose = random.Random(seed)
    pool = open_pool(3, deadline_s=0.02, max_store_nbytes=2000)
    accepted: list[Probe] = []
    refused: list[Probe] = []
    for _ in range(400):
        probe = Probe(blocks=choose.random() < 0.04, nbytes=choose.randrange(200))
        submit = choose.choice((pool.submit_load, pool.submit_store))
        (accepted if submit(probe.task) else refused).append(probe)
        if choose.random() < 0.05:
            pool.drain(0.03)
        if pool.saturated:
            open_gates(accepted)
            until(lambda: not pool.saturated)
    assert pool.drain(WAIT_S)
    open_gates(accepted)
    assert pool.close(WAIT_S)
    assert not pool_threads()
    outcomes = Counter(tuple(probe.order) for probe in accepted)
    assert set(outcomes) <= {("run", "complete"), ("run", "late", "return"), ("late", "return")}
    assert outcomes["run", "complete"] > 50
    assert outcomes["run", "late", "return"] > 3
    assert all(not probe.order for probe in refused)
