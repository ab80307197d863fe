"""Calls that the kernel may never answer, on threads of their own: who asks waits until a deadline and no longer."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from lmcache_core import BackendError, BackendUnavailable

T = TypeVar("T")
CLOSE_WAIT_S: Final = 1.0


class _Call(Generic[T]):
    """One piece of work; its end and the asker's leaving are told apart under one lock."""

    def __init__(self, work: Callable[[], T], on_late: Callable[[T], object] | None) -> None:
        self._work = work
        self._on_late = on_late
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._left = False
        self._answer: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._answer.append(self._work())
        except BaseException as error:
            self._error = error
        with self._lock:
            self._ended.set()
            left = self._left
        if left and self._answer and self._on_late is not None:
            self._on_late(self._answer.pop())

    def result(self, timeout_s: float) -> T:
        self._ended.wait(timeout_s)
        with self._lock:
            if not self._ended.is_set():
                self._left = True
                raise BackendUnavailable(f"the file system did not answer in {timeout_s:.3g} s")
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # or the error's own frames would keep it, and what they hold
        return self._answer.pop()


class Guard:
    """At most `threads` calls at a time, those that were given up included: a dead mount takes no more of them."""

    def __init__(self, name: str, threads: int) -> None:
        self._name = name
        self._free = threading.Semaphore(threads)
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[_Call[Any] | None] = queue.SimpleQueue()
        self._workers: set[threading.Thread] = set()
        self._idle = 0
        self._closed = False

    def call(self, work: Callable[[], T], timeout_s: float, on_late: Callable[[T], object] | None = None) -> T:
        """What `work()` returns or raises; BackendUnavailable at the deadline.

        Then it is still running.  It may use nothing that is the asker's, and what it returns is for `on_late`.
        """
        began = time.monotonic()
        if not self._free.acquire(timeout=max(0.0, timeout_s)):
            raise BackendUnavailable(f"the file system has not answered for {timeout_s:.3g} s and more")
        asked = _Call(work, on_late)
        with self._lock:
            if self._closed:
                self._free.release()
                raise BackendError("this backend is closed")
            if self._idle:
                self._idle -= 1
            else:
                self._hire()
            self._calls.put(asked)
        return asked.result(max(0.0, timeout_s - (time.monotonic() - began)))

    def _hire(self) -> None:
        worker = threading.Thread(target=self._work, name=f"lmcache-{self._name}-guard", daemon=True)
        try:
            worker.start()
        except RuntimeError as error:  # as many threads as the process may have
            self._free.release()
            raise BackendUnavailable(f"no thread can be started: {error}") from error
        self._workers.add(worker)

    def close(self) -> None:
        """End the threads that are not held by the kernel; those that are end when it lets them."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            workers = list(self._workers)
        for _ in workers:
            self._calls.put(None)
        deadline = time.monotonic() + CLOSE_WAIT_S
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while (asked := self._calls.get()) is not None:
            asked.run()
            del asked  # an idle thread keeps nothing alive
            with self._lock:
                self._idle += 1
            self._free.release()
