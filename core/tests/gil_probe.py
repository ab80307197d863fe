"""Whether a call lets other threads run: told by the interpreter, not by a clock."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

_TRIES = 200


def releases_gil(operation: Callable[[], object]) -> bool:
    """Whether another thread ran during `operation`.

    The interpreter is told to take the GIL from nobody, so the other thread runs only if the operation gives it up.
    One that does is seen at the first try unless the kernel was slow to wake the thread; one that does not, never.
    """
    operation()  # what is done once only (imports, first touch) is no part of it
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        return any(_another_thread_ran(operation) for _ in range(_TRIES))
    finally:
        sys.setswitchinterval(interval)


def _another_thread_ran(operation: Callable[[], object]) -> bool:
    ran: list[bool] = []
    waits = threading.Event()
    go = threading.Lock()
    go.acquire()

    def other() -> None:
        waits.set()
        go.acquire()
        ran.append(True)

    thread = threading.Thread(target=other)
    thread.start()
    waits.wait()
    go.release()
    operation()
    seen = bool(ran)
    thread.join()
    return seen
