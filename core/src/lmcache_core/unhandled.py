"""Exceptions that would end one of our threads: reported as if they had, while the thread goes on for the others."""

from __future__ import annotations

import sys
import threading


def report() -> None:
    """Give the exception being handled to `threading.excepthook`, which prints its traceback."""
    threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
