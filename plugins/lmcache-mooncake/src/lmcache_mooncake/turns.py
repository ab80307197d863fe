"""Whose turn it is to write a name: the master tells the end of one write from that of another by the client alone."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from lmcache_core import BackendUnavailable


class Turns:
    """Of one name, nothing else is written by this client while it is replaced.

    What replaces a name takes it over from a put that has not ended.  The end of that put would then count as the end
    of the other, and what is not written yet could be read.  Puts of one name beside each other do no harm.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._put: dict[int, Sequence[str]] = {}
        self._replaced: set[str] = set()

    @contextlib.contextmanager
    def putting(self, names: Sequence[str], deadline: float) -> Iterator[None]:
        with self._changed:
            self._wait(lambda: not self._replaced or self._replaced.isdisjoint(names), deadline, "put")
            self._put[id(names)] = names
        try:
            yield
        finally:
            with self._changed:
                del self._put[id(names)]
                self._changed.notify_all()

    @contextlib.contextmanager
    def replacing(self, name: str, deadline: float) -> Iterator[None]:
        with self._changed:
            self._wait(
                lambda: name not in self._replaced and not any(name in names for names in self._put.values()),
                deadline,
                "remove",
            )
            self._replaced.add(name)
        try:
            yield
        finally:
            with self._changed:
                self._replaced.remove(name)
                self._changed.notify_all()

    def _wait(self, is_free: Callable[[], bool], deadline: float, verb: str) -> None:
        if not self._changed.wait_for(is_free, max(0.0, deadline - time.monotonic())):
            raise BackendUnavailable(f"mooncake {verb}: the record is being written or removed until the deadline")
