"""Completion of what an accelerator is computing, for copies that have to wait for it."""

from __future__ import annotations

import time
from typing import Any

import torch


class EventFence:
    """An event recorded on the stream that writes the KV."""

    __slots__ = ("_event",)

    def __init__(self, event: Any) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self, timeout_s: float | None = None) -> bool:
        if timeout_s is None:
            self._event.synchronize()
            return True
        deadline = time.monotonic() + timeout_s
        while not self._event.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.0005)
        return True

    def make_stream_wait(self, stream: Any) -> None:
        self._event.wait(stream)


def fence_now(device: torch.device) -> EventFence | None:
    """A fence after what the current stream of `device` has been given; None where nothing is left running."""
    if device.type == "cpu":
        return None
    module = getattr(torch, device.type)
    event = module.Event()
    event.record(module.current_stream(device))
    return EventFence(event)
