"""A circuit breaker: after repeated faults a tier is left alone, then tried again with one operation at a time."""

from __future__ import annotations

import enum
import threading
import time
from collections import deque
from collections.abc import Callable


class BreakerState(enum.Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Thread-safe.  `on_change(healthy, reason)` is called without the lock, once per change and in their order."""

    def __init__(
        self,
        *,
        failures: int = 3,
        probe_interval_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[bool, str], None] = lambda healthy, reason: None,
    ) -> None:
        self._failures_allowed = failures
        self._probe_interval_s = probe_interval_s
        self._clock = clock
        self._on_change = on_change
        self._lock = threading.Lock()
        self._changes: deque[tuple[bool, str]] = deque()
        self._telling = threading.RLock()
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._retry_at = 0.0
        self.reason = ""
        """Why it opened; empty while closed."""

    @property
    def state(self) -> BreakerState:
        return self._state

    def ready(self) -> bool:
        """Whether an operation may be tried, without claiming the trial of a half-open circuit."""
        return self._state is BreakerState.CLOSED or self._clock() >= self._retry_at

    def allow(self) -> bool:
        """Whether to try an operation now; in an open circuit one trial passes per probe interval."""
        with self._lock:
            if self._state is BreakerState.CLOSED:
                return True
            now = self._clock()
            if now < self._retry_at:
                return False
            self._state = BreakerState.HALF_OPEN
            self._retry_at = now + self._probe_interval_s
            return True

    def untried(self) -> None:
        """What `allow` let through ended without trying anything: the next may be the trial."""
        with self._lock:
            if self._state is BreakerState.HALF_OPEN:
                self._state = BreakerState.OPEN
                self._retry_at = self._clock()

    def succeeded(self) -> None:
        if self._state is BreakerState.CLOSED and not self._failures:
            return
        with self._lock:
            changed = self._state is not BreakerState.CLOSED
            self._state = BreakerState.CLOSED
            self._failures = 0
            self.reason = ""
            if changed:
                self._changes.append((True, ""))
        self._tell()

    def failed(self, reason: str, *, fatal: bool = False) -> None:
        """Count a fault; a `fatal` one opens the circuit at once."""
        with self._lock:
            self._failures += 1
            opens = fatal or self._failures >= self._failures_allowed or self._state is BreakerState.HALF_OPEN
            if not opens:
                return
            changed = self._state is BreakerState.CLOSED
            self._state = BreakerState.OPEN
            self._retry_at = self._clock() + self._probe_interval_s
            self.reason = reason
            if changed:
                self._changes.append((False, reason))
        self._tell()

    def _tell(self) -> None:
        """Two threads that change the state at once must not report it in the wrong order."""
        if not self._changes:
            return
        with self._telling:
            while self._changes:
                self._on_change(*self._changes.popleft())
