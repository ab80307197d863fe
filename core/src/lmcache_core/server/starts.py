"""Daemons that start in one folder, one by one: at once, each would take the other's socket for a stale one."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

_WAIT_S: Final = 5.0
_PAUSE_S: Final = 0.02


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Whoever else starts there waits, or goes on without after a while: a folder may be one that cannot be locked."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # said by whoever needs the folder next
        yield
        return
    try:
        if not _lock(fd):
            log.warning("%s cannot be locked: daemons that start there at once may take each other's socket", folder)
        yield
    finally:
        os.close(fd)


def _lock(fd: int) -> bool:
    deadline = time.monotonic() + _WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_PAUSE_S)
        except OSError:
            return False
