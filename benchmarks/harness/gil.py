"""How long other threads go without the interpreter while a piece of work runs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Final

_NAP_S: Final = 50e-6


def longest_without(work: Callable[[], object]) -> float:
    """Seconds that a thread waited at most for the GIL, which it asks for every 50 us, while `work` ran.

    Time in which it had the GIL and no CPU is taken off where the kernel tells it: that is the machine's load.
    """
    beats: list[float] = []
    started, stop = threading.Event(), threading.Event()

    def beat() -> None:
        waits = _RunQueue()
        last, waited = time.perf_counter(), waits.seconds()
        started.set()
        while not stop.is_set():
            time.sleep(_NAP_S)
            now, delay = time.perf_counter(), waits.seconds()
            beats.append(now - last - (delay - waited) - _NAP_S)
            last, waited = now, delay
        waits.close()

    thread = threading.Thread(target=beat, name="gil")
    thread.start()
    started.wait()
    try:
        work()
    finally:
        stop.set()
        thread.join()
    return max(0.0, *beats)


class _RunQueue:
    """How long this thread has been ready and not running, since it began."""

    def __init__(self) -> None:
        try:
            self._file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        except OSError:
            self._file = -1

    def seconds(self) -> float:
        return int(os.pread(self._file, 100, 0).split()[1]) * 1e-9 if self._file >= 0 else 0.0

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
