"""A bounded pool of I/O threads: loads before stores, and for each task one answer by its deadline."""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from .unhandled import report

log = logging.getLogger(__name__)

MAX_QUEUED: Final = 4096


class _State(enum.Enum):
    QUEUED = enum.auto()
    RUNNING = enum.auto()
    ENDED = enum.auto()


class Task:
    """One blocking operation.

    `run()` does the work on a pool thread and returns the function that completes it.  If that takes too long,
    `on_late()` is called instead, from another thread; `on_return()` then says, much later perhaps, that `run` has let
    go of its buffers.  A task that never ran, or whose `run` raised, gets both calls in a row.
    """

    __slots__ = (
        "_lock",
        "answered",
        "deadline",
        "loads_only",
        "nbytes",
        "on_late",
        "on_return",
        "queued_nbytes",
        "run",
        "state",
    )

    def __init__(
        self,
        run: Callable[[], Callable[[], None]],
        on_late: Callable[[], None],
        on_return: Callable[[], None],
        *,
        nbytes: int = 0,
    ) -> None:
        self.run = run
        self.on_late = on_late
        self.on_return = on_return
        self.nbytes = nbytes
        self.queued_nbytes = 0
        """What it takes of the bound on stores."""
        self.loads_only = False
        """Whether the thread that runs it serves loads only."""
        self.deadline = 0.0
        self.state = _State.QUEUED
        self.answered = threading.Event()
        """Set after `on_late`."""
        self._lock = threading.Lock()

    def forget(self) -> None:
        """Let go of what the task held: it may be watched for a while after its end."""
        self.run, self.on_late, self.on_return = _nothing, _no_call, _no_call

    def move(self, origin: _State, to: _State) -> bool:
        """Change the state if it is `origin`; whether it was."""
        with self._lock:
            if self.state is not origin:
                return False
            self.state = to
            return True


def _no_call() -> None:
    return None


def _nothing() -> Callable[[], None]:
    return _no_call


class TransferPool:
    """`threads` daemon threads, one of which serves loads only, and a watch that answers for what is late.

    A load's deadline counts from its submission, a store's from its start, since a queue of stores may be long.  A
    thread whose task is late is left to it and replaced, at most `threads` of them at once; then the pool is saturated,
    and the stores that wait are given up.  A callback that raises is a bug of ours: it is reported as an unhandled
    exception of the thread, which goes on.
    """

    def __init__(self, name: str, threads: int, *, deadline_s: float, max_store_nbytes: int) -> None:
        self._name = name
        self._threads = max(2, threads)
        self._deadline_s = deadline_s
        self._max_store_nbytes = max_store_nbytes
        self._lock = threading.Lock()
        self._wake_loader = threading.Condition(self._lock)
        self._wake_any = threading.Condition(self._lock)
        self._wake_watch = threading.Condition(self._lock)
        self._idle_loaders = self._idle_others = 0
        """Threads that wait and were not woken."""
        self._idle = threading.Condition(self._lock)
        self._loads: deque[Task] = deque()
        self._stores: deque[Task] = deque()
        self._store_nbytes = 0
        self._watched_loads: deque[Task] = deque()
        self._watched_stores: deque[Task] = deque()
        self._running: dict[Task, None] = {}
        """In the order in which they began."""
        self._unanswered = 0
        self._stuck = 0
        self._vacant: list[bool] = []
        """Places (`loads_only`) of stuck threads without replacement."""
        self._closing = False
        self._workers: set[threading.Thread] = set()
        self._watcher = threading.Thread(target=self._watch, name=f"lmcache-{name}-watch", daemon=True)
        self._watcher.start()
        with self._lock:
            for index in range(self._threads):
                self._spawn(loads_only=index == 0)

    @property
    def saturated(self) -> bool:
        """Whether as many threads are stuck as may be replaced: every further task would only wait."""
        return self._stuck >= self._threads

    def queued(self) -> tuple[int, int]:
        """(loads, stores) that wait for a thread."""
        return len(self._loads), len(self._stores)

    def submit_load(self, task: Task) -> bool:
        """Queue a load; False when that is refused (queue full, all threads stuck, closing)."""
        with self._lock:
            if self._closing or self.saturated or len(self._loads) >= MAX_QUEUED:
                return False
            self._unanswered += 1
            task.deadline = time.monotonic() + self._deadline_s
            self._loads.append(task)
            _watch_for(self._watched_loads, task)
            if self._idle_loaders:
                self._idle_loaders -= 1
                self._wake_loader.notify()
            else:
                self._wake_other()
            return True

    def submit_store(self, task: Task) -> bool:
        """Queue a store; False when the queue would exceed its bound in bytes or count, or as for loads."""
        with self._lock:
            over = self._store_nbytes > 0 and self._store_nbytes + task.nbytes > self._max_store_nbytes
            if self._closing or self.saturated or over or len(self._stores) >= MAX_QUEUED:
                return False
            self._unanswered += 1
            task.queued_nbytes = task.nbytes
            self._store_nbytes += task.nbytes
            self._stores.append(task)
            self._wake_other()
            return True

    def _wake_other(self) -> None:
        if self._idle_others:
            self._idle_others -= 1
            self._wake_any.notify()

    def drain(self, timeout_s: float) -> bool:
        """Wait until every task has its answer; False at the timeout."""
        with self._lock:
            return self._idle.wait_for(lambda: not self._unanswered, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Refuse new work and give up what is queued; at the timeout also what still runs.  False if a thread is stuck.

        Twice is fine.
        """
        with self._lock:
            self._closing = True
            abandoned = [*self._loads, *self._stores]
            self._loads.clear()
            self._stores.clear()
            for condition in (self._wake_loader, self._wake_any, self._wake_watch):
                condition.notify_all()
            workers = list(self._workers)
        for task in abandoned:
            self._give_up(task)
        deadline = time.monotonic() + timeout_s
        for thread in workers:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            late = list(self._running)
        for task in late:
            self._give_up(task)
        self._watcher.join(max(1.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in workers)

    def _spawn(self, *, loads_only: bool) -> None:
        thread = threading.Thread(target=self._work, args=(loads_only,), name=f"lmcache-{self._name}-io", daemon=True)
        self._workers.add(thread)
        try:
            thread.start()
        except RuntimeError:  # as many threads as the process may have
            self._workers.discard(thread)
            raise

    def _work(self, loads_only: bool) -> None:
        while True:
            task = self._next(loads_only)
            if task is None:
                return
            if self._serve(task):
                continue
            with self._lock:  # the task was late, this thread may have been replaced
                self._stuck -= 1
                if self._closing or not self._vacant:
                    self._workers.discard(threading.current_thread())
                    return
                loads_only = self._vacant.pop()

    def _next(self, loads_only: bool) -> Task | None:
        """The next task for this thread, which is now running; `None` when the pool closes."""
        wake = self._wake_loader if loads_only else self._wake_any
        with self._lock:
            while True:
                task: Task | None = None
                if self._loads:
                    task = self._loads.popleft()
                elif self._stores and not loads_only:
                    task = self._stores.popleft()
                    task.deadline = time.monotonic() + self._deadline_s
                    _watch_for(self._watched_stores, task)
                if task is None:
                    if self._closing:
                        self._workers.discard(threading.current_thread())
                        return None
                    if loads_only:
                        self._idle_loaders += 1
                    else:
                        self._idle_others += 1
                    wake.wait()
                elif task.move(_State.QUEUED, _State.RUNNING):  # else it was late before a thread was free
                    task.loads_only = loads_only
                    self._running[task] = None
                    return task

    def _serve(self, task: Task) -> bool:
        """Run a task; False if it was late.  A frame of its own: an idle thread keeps no task's buffers alive."""
        complete: Callable[[], None] | None = None
        try:
            complete = task.run()
        except BaseException:
            report()
        in_time = task.move(_State.RUNNING, _State.ENDED)
        if not in_time:
            task.answered.wait()  # `on_return` comes after `on_late`
            _tell(task.on_return)
        elif complete is not None:
            _tell(complete)
        else:
            _tell(task.on_late)
            _tell(task.on_return)
        task.forget()
        if in_time:
            self._has_answer(task)
        return in_time

    def _has_answer(self, task: Task) -> None:
        with self._lock:
            self._running.pop(task, None)
            self._store_nbytes -= task.queued_nbytes
            self._unanswered -= 1
            if not self._unanswered:
                self._idle.notify_all()
                if self._closing:
                    self._wake_watch.notify()

    def _watch(self) -> None:
        while True:
            with self._lock:
                if self._closing and not self._unanswered:
                    return
                now = time.monotonic()
                late: list[Task] = []
                for watched in (self._watched_loads, self._watched_stores):
                    while watched and (watched[0].state is _State.ENDED or watched[0].deadline <= now):
                        late.append(watched.popleft())
                if not late:
                    heads = [w[0].deadline for w in (self._watched_loads, self._watched_stores) if w]
                    # What begins meanwhile is not late before the end of a whole deadline from now.
                    self._wake_watch.wait(min(heads) - now if heads else self._deadline_s)
                    continue
            for task in late:
                self._give_up(task)

    def _give_up(self, task: Task) -> None:
        """Answer for a task that is late, unless it has ended.  In this order: it may begin to run meanwhile."""
        if not self._give_up_queued(task):
            self._give_up_running(task)

    def _give_up_queued(self, task: Task) -> bool:
        with self._lock:
            if not task.move(_State.QUEUED, _State.ENDED):
                return False
            if self._loads and self._loads[0] is task:  # loads are late in the order of their queue
                self._loads.popleft()
        _tell(task.on_late)
        _tell(task.on_return)
        task.forget()
        self._has_answer(task)
        return True

    def _give_up_running(self, task: Task) -> None:
        abandoned: list[Task] = []
        with self._lock:
            if not task.move(_State.RUNNING, _State.ENDED):
                return
            self._stuck += 1
            if not self._closing:
                self._replace(task.loads_only)
            if self.saturated:  # nobody may be left to serve them, and their deadlines have not begun
                abandoned = list(self._stores)
                self._stores.clear()
        _tell(task.on_late)
        task.answered.set()
        self._has_answer(task)
        for other in abandoned:
            self._give_up_queued(other)

    def _replace(self, loads_only: bool) -> None:
        if self._stuck <= self._threads:
            try:
                self._spawn(loads_only=loads_only)
                return
            except RuntimeError as error:
                log.error("%s: a thread is stuck and has no replacement: %s", self._name, error)
        self._vacant.append(loads_only)  # for whichever stuck thread returns first


def _watch_for(watched: deque[Task], task: Task) -> None:
    while watched and watched[0].state is _State.ENDED:
        watched.popleft()
    watched.append(task)


def _tell(callback: Callable[[], None]) -> None:
    try:
        callback()
    except BaseException:
        report()
