"""Handles with equal settings in one process share one client: its ports, its segment and its memory are there once."""

from __future__ import annotations

import threading
from typing import Final

from .options import MooncakeOptions
from .session import Session

_lock = threading.Lock()
_sessions: Final[dict[tuple[MooncakeOptions, float], list[Session]]] = {}
"""Each as often as it is in use."""


def acquire(options: MooncakeOptions, timeout_s: float) -> Session:
    """The session of these settings, for as long as until `release`."""
    with _lock:
        users = _sessions.setdefault((options, timeout_s), [])
        try:
            users.append(users[0] if users else Session(options, timeout_s))
        finally:
            if not users:
                del _sessions[options, timeout_s]
        return users[0]


def release(session: Session) -> None:
    """Called once for each `acquire`; the last one closes it."""
    with _lock:
        settings = (session.options, session.timeout_s)
        users = _sessions[settings]
        users.pop()
        if users:
            return
        del _sessions[settings]
    session.close()
