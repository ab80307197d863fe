"""Where steps run: in the caller's thread, on threads that own a connection each, or on fsspec's event loop.

Each runner answers for all of a batch by its deadline, whatever its filesystem does.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

from lmcache_core import BackendUnavailable

from . import steps
from .faults import spoils_connection

Make = Callable[[], Any]
"""Makes a filesystem instance; may connect, and so may block."""
Work = Callable[[], steps.Steps[Any]]
Answer = tuple[int, Any]
"""The number of a piece of work in its batch, and its result or the exception that it raised."""

IDLE_S: Final = 30.0
"""A connection unused for longer is opened anew: servers close such ones without a word."""
CLOSE_S: Final = 5.0


class Runner(Protocol):
    def run(self, batch: Sequence[Work], timeout_s: float) -> Iterator[Answer]:
        """Answer each piece of work once, as it ends; those that are late with BackendUnavailable."""

    def close(self) -> None:
        """Let go of every connection and thread."""


class Here:
    """For filesystems that do not wait for anyone: this machine's files, this process's memory."""

    def __init__(self, make: Make) -> None:
        self._make = make
        self._fs: Any = None

    def run(self, batch: Sequence[Work], timeout_s: float) -> Iterator[Answer]:
        deadline = time.monotonic() + timeout_s
        for number, work in enumerate(batch):
            if time.monotonic() > deadline:
                yield number, late(timeout_s)
                continue
            try:
                if self._fs is None:
                    self._fs = self._make()
                yield number, steps.run(self._fs, work())
            except Exception as error:
                yield number, error

    def close(self) -> None:
        self._fs = None


class OnThreads:
    """For filesystems that block: each of up to `limit` threads has an instance, and with it a connection, alone.

    A caller that gives up leaves the thread to its work; the instance is then thrown away.
    """

    def __init__(self, make: Make, limit: int) -> None:
        self._make = make
        self._free = threading.BoundedSemaphore(limit)
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()
        self._closed = False

    def run(self, batch: Sequence[Work], timeout_s: float) -> Iterator[Answer]:
        deadline = time.monotonic() + timeout_s
        unanswered = set(range(len(batch)))
        if batch and self._free.acquire(timeout=max(0.0, timeout_s)):
            job = _Job(batch)
            self._connection().inbox.put(job)
            try:
                while unanswered:
                    number, outcome = job.answers.get(timeout=max(0.0, deadline - time.monotonic()))
                    unanswered.discard(number)
                    yield number, outcome
            except queue.Empty:
                job.late = True
            finally:
                job.given_up = True
        for number in sorted(unanswered):
            yield number, late(timeout_s)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            connections, self._idle = list(self._all), []
        for connection in connections:
            connection.inbox.put(None)
            connection.interrupt()
        deadline = time.monotonic() + CLOSE_S
        for connection in connections:
            connection.thread.join(max(0.0, deadline - time.monotonic()))

    def _connection(self) -> _Connection:
        with self._lock:
            if self._closed:
                self._free.release()
                raise BackendUnavailable("fsspec: closed meanwhile")
            if self._idle:
                return self._idle.pop()
            connection = _Connection(self._make, self._give_back)
            self._all.add(connection)
        connection.thread.start()
        return connection

    def _give_back(self, connection: _Connection) -> None:
        with self._lock:
            self._idle.append(connection)
        self._free.release()


class _Job:
    def __init__(self, batch: Sequence[Work]) -> None:
        self.batch = batch
        self.answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self.given_up = False
        """Nobody wants the rest."""
        self.late = False
        """It was given up in the middle of something."""


class _Connection:
    """One thread and the filesystem instance that it alone uses."""

    def __init__(self, make: Make, give_back: Callable[[_Connection], None]) -> None:
        self.inbox: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._serve, name="lmcache-fsspec", daemon=True)
        self._make = make
        self._give_back = give_back
        self._fs: Any = None
        self._used_at = 0.0

    def interrupt(self) -> None:
        """Wake a thread that waits for its server, where that can be done from outside."""
        sock = getattr(getattr(self._fs, "ftp", None), "sock", None)
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(2)

    def _serve(self) -> None:
        while (job := self.inbox.get()) is not None:
            if self._fs is not None and time.monotonic() - self._used_at > IDLE_S:
                self._drop()
            self._do(job)
            del job
        self._drop()

    def _do(self, job: _Job) -> None:
        for number, work in enumerate(job.batch):
            if job.given_up:
                break
            answer = (number, self._answer(work))
            if number < len(job.batch) - 1:
                job.answers.put(answer)
        if job.late:
            self._drop()
        self._used_at = time.monotonic()
        self._give_back(self)  # before the last answer, so that who gets it finds this connection free
        if not job.given_up:
            job.answers.put(answer)

    def _answer(self, work: Work) -> Any:
        try:
            if self._fs is None:
                self._fs = self._make()
            return steps.run(self._fs, work())
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # they would keep what could not be made, and its socket
            if spoils_connection(error):
                self._drop()
            return error

    def _drop(self) -> None:
        fs, self._fs = self._fs, None
        for owner in (fs, getattr(fs, "client", None)):
            for name in ("ftp", "client", "http"):
                close = getattr(getattr(owner, name, None), "close", None)
                if callable(close):
                    with contextlib.suppress(Exception):  # the connection may be broken: that is why
                        close()


class OnLoop:
    """For asynchronous filesystems: one instance on fsspec's loop, up to `limit` operations, cancelled if late."""

    def __init__(self, make: Make, limit: int) -> None:
        self._make = make
        self._limit = limit
        self._lock = threading.Lock()
        self._fs: Any = None
        self._opening: _Opening | None = None

    def run(self, batch: Sequence[Work], timeout_s: float) -> Iterator[Answer]:
        deadline = time.monotonic() + timeout_s
        unanswered = set(range(len(batch)))
        answers: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        running: dict[int, Any] = {}
        waiting = iter(range(len(batch)))
        try:
            fs: Any = self._opened(timeout_s) if batch else None
            while unanswered:
                while len(running) < self._limit and (number := next(waiting, None)) is not None:
                    coroutine = steps.run_async(fs, batch[number]())
                    running[number] = asyncio.run_coroutine_threadsafe(coroutine, fs.loop)
                    running[number].add_done_callback(lambda done, n=number: answers.put((n, done)))
                number, done = answers.get(timeout=max(0.0, deadline - time.monotonic()))
                del running[number]
                unanswered.discard(number)
                error = done.exception()
                if error is not None and not isinstance(error, Exception):
                    raise error
                yield number, error if error is not None else done.result()
        except queue.Empty:
            pass
        except _NotOpened as problem:
            for number in sorted(unanswered):
                yield number, problem.__cause__
            return
        finally:
            for each in running.values():
                each.cancel()
        for number in sorted(unanswered):
            yield number, late(timeout_s)

    def close(self) -> None:
        with self._lock:
            fs, self._fs, self._opening = self._fs, None, None
        if fs is None:
            return
        loop = fs.loop
        with contextlib.suppress(Exception):  # what cannot be closed is closed with the process
            asyncio.run_coroutine_threadsafe(_close(fs), loop).result(CLOSE_S)
        # Filesystems close what they own when they are collected.  On a thread, since s3fs before 2025.5 makes an event
        # loop for the main thread there, which nobody closes.
        last = [fs]
        del fs
        dropping = threading.Thread(target=_drop, args=(last,), name="lmcache-fsspec-close")
        dropping.start()
        dropping.join()
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), loop).result(CLOSE_S)

    def _opened(self, timeout_s: float) -> Any:
        """The instance, made on a thread of its own since its constructor may wait for a server."""
        with self._lock:
            if self._fs is not None:
                return self._fs
            if self._opening is None:
                self._opening = _Opening(self._make)
            opening = self._opening
        if not opening.done.wait(max(0.0, timeout_s)):
            raise queue.Empty
        with self._lock:
            if self._opening is opening:
                self._opening = None
                self._fs = opening.fs
        if opening.error is not None:
            raise _NotOpened from opening.error
        return opening.fs


class _NotOpened(Exception):
    """The filesystem could not be made; the cause says why."""


class _Opening:
    """A filesystem instance in the making."""

    def __init__(self, make: Make) -> None:
        self.done = threading.Event()
        self.fs: Any = None
        self.error: Exception | None = None
        self._make = make
        threading.Thread(target=self._run, name="lmcache-fsspec-open", daemon=True).start()

    def _run(self) -> None:
        try:
            self.fs = self._make()
        except Exception as error:
            self.error = error
        self.done.set()


def _drop(last: list[Any]) -> None:
    """Let go of the last reference to a filesystem."""
    last.clear()
    gc.collect()


async def _close(fs: Any) -> None:
    """Close what is known to hold connections: each filesystem has a name of its own for it."""
    for name in ("_s3creator", "_session", "service_client", "credential", "sync_credential"):
        owned = getattr(fs, name, None)
        end = getattr(owned, "close", None) or getattr(owned, "__aexit__", None)
        if end is None:
            continue
        with contextlib.suppress(Exception):
            ended = end() if hasattr(owned, "close") else end(None, None, None)
            if inspect.isawaitable(ended):
                await ended


def late(timeout_s: float) -> BackendUnavailable:
    """The answer for what was not reached in time."""
    return BackendUnavailable(f"fsspec: no answer in {timeout_s:g} s")
