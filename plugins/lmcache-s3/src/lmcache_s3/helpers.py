"""A few threads that share the work of one call with the thread that makes it; none is started before it is needed."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from lmcache_core import BackendError


class Helpers:
    """At most `count` calls run at once for each caller, itself included."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._pid = 0
        self._closed = False

    def each(self, work: Callable[[int], bool], number: int) -> None:
        """`work(0)`, `work(1)`, ... in that order, several at once, until one returns False or all are done.

        Returns when none runs any more, since they use the caller's buffers.  What one raises is raised, and ends it.
        """
        indexes = itertools.count()
        stop = threading.Event()

        def pull() -> None:
            try:
                while not stop.is_set() and (index := next(indexes)) < number:
                    if not work(index):
                        stop.set()
            except BaseException:
                stop.set()
                raise

        wanted = min(self._count, number) - 1
        helping = [self._executor().submit(pull) for _ in range(wanted)] if wanted > 0 else []
        try:
            pull()
        finally:
            running = [future for future in helping if not future.cancel()]
            problems = [problem for future in running if (problem := future.exception()) is not None]
        if problems:
            raise problems[0]

    def close(self) -> None:
        """Wait for what runs and end the threads."""
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None and self._pid == os.getpid():
            pool.shutdown(wait=True, cancel_futures=True)

    def _executor(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._closed:
                raise BackendError("this backend is closed")
            if self._pool is None or self._pid != os.getpid():  # threads do not survive a fork
                self._pool = ThreadPoolExecutor(max(1, self._count - 1), thread_name_prefix="lmcache-s3")
                self._pid = os.getpid()
            return self._pool
