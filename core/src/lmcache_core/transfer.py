"""A bounded pool of I/O threads: loads before stores, and for each task one answer by its deadline."""

from __future__ import annotations

import enum
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

MAX_QUEUED: Final = 4096


class _State(enum.Enum):
    QUEUED = enum.auto()
    RUNNING = enum.auto()
    ENDED = enum.auto()


class Task:
    """One blocking operation.

    `run()` does the work on a pool thread and returns the function that completes it.  If that takes too long,
    `on_late()` is called instead, from another thread; `on_return()` then says, much later perhaps, that `run` has let
    go of its buffers.  A task that never ran gets both calls in a row.
    """

    __slots__ = ("_lock", "answered", "deadline", "nbytes", "on_late", "on_return", "run", "state")

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
        self.deadline = 0.0
        self.state = _State.QUEUED
        self.answered: threading.Event | None = None
        self._lock = threading.Lock()

    def forget(self) -> None:
        """Let go of what the task held: it may be watched for a while after its end."""
        self.run, self.on_late, self.on_return = _nothing, _no_call, _no_call

    def move(self, *origins: _State, to: _State) -> bool:
        """Change the state if it is one of `origins`; whether it was."""
        with self._lock:
            if self.state not in origins:
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
    thread whose task is late is left to it and replaced, at most `threads` times at once.
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
        self._idle = threading.Condition(self._lock)
        self._loads: deque[Task] = deque()
        self._stores: deque[Task] = deque()
        self._store_nbytes = 0
        self._watched_loads: deque[Task] = deque()
        self._watched_stores: deque[Task] = deque()
        self._running = 0
        self._stuck = 0
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
            task.deadline = time.monotonic() + self._deadline_s
            self._loads.append(task)
            self._watch_for(self._watched_loads, task)
            self._wake_loader.notify()
            self._wake_any.notify()
            return True

    def submit_store(self, task: Task) -> bool:
        """Queue a store; False when the queue would exceed its bound in bytes or count, or as for loads."""
        with self._lock:
            over = self._store_nbytes > 0 and self._store_nbytes + task.nbytes > self._max_store_nbytes
            if self._closing or self.saturated or over or len(self._stores) >= MAX_QUEUED:
                return False
            self._stores.append(task)
            self._store_nbytes += task.nbytes
            self._wake_any.notify()
            return True

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is queued or running; False at the timeout."""
        with self._lock:
            return self._idle.wait_for(lambda: not (self._loads or self._stores or self._running), timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Refuse new work, answer what is queued as late, wait for the threads; False if one is stuck."""
        with self._lock:
            self._closing = True
            abandoned = [*self._loads, *self._stores]
            self._loads.clear()
            self._stores.clear()
            self._store_nbytes = 0
            for condition in (self._wake_loader, self._wake_any, self._wake_watch):
                condition.notify_all()
            workers = list(self._workers)
        for task in abandoned:
            self._give_up_queued(task)
        deadline = time.monotonic() + timeout_s
        for thread in [*workers, self._watcher]:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in workers)

    def _spawn(self, *, loads_only: bool) -> None:
        thread = threading.Thread(target=self._work, args=(loads_only,), name=f"lmcache-{self._name}-io", daemon=True)
        self._workers.add(thread)
        thread.start()

    def _work(self, loads_only: bool) -> None:
        wake = self._wake_loader if loads_only else self._wake_any
        while True:
            with self._lock:
                while True:
                    if self._loads:
                        task = self._loads.popleft()
                        break
                    if self._stores and not loads_only:
                        task = self._stores.popleft()
                        task.deadline = time.monotonic() + self._deadline_s
                        self._watch_for(self._watched_stores, task)
                        break
                    if self._closing:
                        self._workers.discard(threading.current_thread())
                        return
                    wake.wait()
                if not task.move(_State.QUEUED, to=_State.RUNNING):
                    continue  # it was late before a thread was free
                self._running += 1
            complete = task.run()
            if task.move(_State.RUNNING, to=_State.ENDED):
                complete()
                task.forget()
                with self._lock:
                    self._ended(task)
            else:
                assert task.answered is not None
                task.answered.wait()  # `on_return` comes after `on_late`
                task.on_return()
                task.forget()
                with self._lock:
                    self._stuck -= 1
                    self._workers.discard(threading.current_thread())
                return  # a replacement has taken this thread's place

    def _ended(self, task: Task) -> None:
        self._running -= 1
        self._store_nbytes = max(0, self._store_nbytes - task.nbytes)
        if not (self._loads or self._stores or self._running):
            self._idle.notify_all()
            if self._closing:
                self._wake_watch.notify()

    def _watch_for(self, watched: deque[Task], task: Task) -> None:
        while watched and watched[0].state is _State.ENDED:
            watched.popleft()
        watched.append(task)
        if len(watched) == 1:
            self._wake_watch.notify()

    def _watch(self) -> None:
        while True:
            with self._lock:
                if self._closing and not self._running:
                    return
                now = time.monotonic()
                late: list[Task] = []
                for watched in (self._watched_loads, self._watched_stores):
                    while watched and (watched[0].state is _State.ENDED or watched[0].deadline <= now):
                        late.append(watched.popleft())
                if not late:
                    heads = [w[0].deadline for w in (self._watched_loads, self._watched_stores) if w]
                    self._wake_watch.wait(min(heads) - now if heads else None)
                    continue
            for task in late:
                if task.state is _State.RUNNING:
                    self._give_up_running(task)
                else:
                    self._give_up_queued(task)

    def _give_up_queued(self, task: Task) -> None:
        if task.move(_State.QUEUED, to=_State.ENDED):
            task.on_late()
            task.on_return()
            task.forget()

    def _give_up_running(self, task: Task) -> None:
        with self._lock:
            task.answered = threading.Event()
            if not task.move(_State.RUNNING, to=_State.ENDED):
                return
            self._stuck += 1
            if not self._closing:
                self._spawn(loads_only=False)
            self._ended(task)
        task.on_late()
        task.answered.set()
