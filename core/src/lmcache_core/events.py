"""The event thread: hooks are called here, one by one, after the fact, never on the data path."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Container
from typing import Any, Final

from .unhandled import report

log = logging.getLogger(__name__)

MAX_QUEUED: Final = 1024
PAUSE_S: Final = 0.1
"""Between deliveries: woken for each event, the thread would take the GIL from whoever is loading."""


class Events:
    """A bounded queue and one thread.  `call(hook, kwargs)` runs every implementation of a hook, isolated.

    Without hooks (`call` is None) nothing is queued and there is no thread.  A full queue drops the event: a slow hook
    costs itself its events, never a request its time.
    """

    def __init__(
        self,
        call: Callable[[str, dict[str, Any]], None] | None,
        on_drop: Callable[[], None] = lambda: None,
        heard: Container[str] | None = None,
    ) -> None:
        """`heard` are the hooks that somebody implements; None for any."""
        self._call = call
        self._heard = heard
        self._on_drop = on_drop
        self._queue: queue.Queue[tuple[str, dict[str, Any]] | None] = queue.Queue(MAX_QUEUED)
        self._abandoned = False
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if call is not None:
            self._thread = threading.Thread(target=self._run, name="lmcache-events", daemon=True)
            self._thread.start()

    @property
    def wanted(self) -> bool:
        """Whether anybody listens; ask before building a costly event."""
        return self._thread is not None

    def hears(self, hook: str) -> bool:
        """Whether anybody listens to that hook."""
        return self._thread is not None and (self._heard is None or hook in self._heard)

    def emit(self, hook: str, **kwargs: Any) -> None:
        """Queue one event; returns at once."""
        if not self.hears(hook):
            return
        try:
            self._queue.put_nowait((hook, kwargs))
        except queue.Full:
            self._on_drop()

    def close(self, timeout_s: float = 5.0) -> None:
        """Deliver what is queued, at most for `timeout_s`, and end the thread.  Twice is fine."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        if thread is threading.current_thread():  # a hook closes us: it cannot wait for itself
            self._abandon()
            return
        deadline = time.monotonic() + timeout_s
        self._closing.set()
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            pass
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            log.warning("hooks are still busy after %.1f s; their last events are lost", timeout_s)
            self._abandon()

    def _abandon(self) -> None:
        """Have the thread end after the hook that it is in."""
        self._abandoned = True
        self._closing.set()
        try:
            self._queue.put_nowait(None)  # it may wait for an event
        except queue.Full:
            pass

    def _run(self) -> None:
        assert self._call is not None
        while (event := self._queue.get()) is not None and not self._abandoned:
            try:
                self._call(*event)
            except (
                BaseException
            ):  # a bug of ours, since `call` isolates hooks; the next event is delivered all the same
                report()
            if self._queue.empty():
                self._closing.wait(PAUSE_S)
