"""Threads that ask the store what may take long, so that whoever asks can leave at its deadline."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from lmcache_core import BackendUnavailable

T = TypeVar("T")


class Helpers:
    """At most `count` threads, started when they are needed.  For calls that hold no memory of the caller's."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._questions: queue.SimpleQueue[_Question[Any] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._unanswered = 0
        self._closed = False

    def ask(self, call: Callable[[], T], deadline: float, what: str) -> T:
        """What `call` returns or raises; BackendUnavailable at the deadline, and then nobody hears of it."""
        question: _Question[T] = _Question(call)
        with self._lock:
            if self._closed:
                raise BackendUnavailable(f"mooncake {what}: it is closed")
            self._unanswered += 1
            if self._unanswered > len(self._threads) < self._count:
                self._spawn()
            self._questions.put(question)
        if not question.answered.wait(max(0.0, deadline - time.monotonic())):
            question.is_wanted = False
            raise BackendUnavailable(f"mooncake {what}: no answer in time")
        if question.error is not None:
            raise question.error
        return question.answer[0]

    def close(self, timeout_s: float) -> bool:
        """End the threads; False if one still waits for the store.  Twice is fine."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._questions.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _spawn(self) -> None:
        thread = threading.Thread(target=self._work, name="lmcache-mooncake-ask", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self) -> None:
        while (question := self._questions.get()) is not None:
            if question.is_wanted:
                question.run()
            with self._lock:
                self._unanswered -= 1
            del question  # or it would stay until the next one comes


class _Question(Generic[T]):
    """One call and what came of it."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self.answered = threading.Event()
        self.answer: list[T] = []
        self.error: Exception | None = None
        self.is_wanted = True

    def run(self) -> None:
        try:
            self.answer.append(self._call())
        except Exception as error:  # raised in the thread that asked
            self.error = error
        finally:
            self.answered.set()
