"""Completion of what was queued on streams of torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

_FIRST_NAP_S: Final = 20e-6
_LONGEST_NAP_S: Final = 1e-3


class EventFence:
    """Done when all of its events are; each answers `query`, `synchronize` and `wait(stream)` as torch's do."""

    __slots__ = ("_events",)

    def __init__(self, events: Sequence[Any]) -> None:
        self._events = tuple(events)

    def done(self) -> bool:
        return all(event.query() for event in self._events)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Torch's events wait for ever or not at all, so a wait with an end asks them again and again."""
        if timeout_s is None:
            for event in self._events:
                event.synchronize()
            return True
        deadline = time.monotonic() + timeout_s
        nap_s = _FIRST_NAP_S
        while not self.done():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(nap_s, left_s))
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)
        return True

    def make_stream_wait(self, stream: Any) -> None:
        for event in self._events:
            event.wait(stream)
