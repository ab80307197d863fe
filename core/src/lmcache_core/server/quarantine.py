"""Slots that a lost client may still be writing: kept from reuse until that process cannot write any more."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable
from typing import Final

from ..index import Entry
from ..pool import Pool

log = logging.getLogger(__name__)

_SO_PEERPIDFD: Final = 77
GRACE_S: Final = 1.0
"""After the exit: writes of a device that the process had queued have ended by then."""


def open_peer_pidfd(sock: socket.socket, pid: int) -> int | None:
    """What gets readable when the peer exits, across pid namespaces on Linux 6.5 and later; None if it is unknown."""
    try:
        (fd,) = struct.unpack("i", sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4))
        return int(fd)
    except ProcessLookupError:
        return os.eventfd(1, os.EFD_CLOEXEC)  # it has exited already
    except OSError:
        pass
    if pid <= 0:
        return None
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return os.eventfd(1, os.EFD_CLOEXEC)
    except OSError:
        return None


class Quarantine:
    """Runs on the daemon's loop."""

    def __init__(self, pool: Pool, loop: asyncio.AbstractEventLoop, *, grace_s: float = GRACE_S) -> None:
        self._pool = pool
        self._loop = loop
        self._grace_s = grace_s
        self._entries: dict[str, list[Entry]] = {}
        self._pidfds: dict[int, str] = {}
        self._timers: set[asyncio.TimerHandle] = set()

    def __len__(self) -> int:
        """Slots in quarantine."""
        return sum(map(len, self._entries.values()))

    def add(self, client: str, entries: list[Entry], pidfd: int | None) -> None:
        """Keep the slots of `entries` until the process behind `pidfd`, which is ours now, has exited."""
        if not entries:
            if pidfd is not None:
                os.close(pidfd)
            return
        self._entries.setdefault(client, []).extend(entries)
        log.warning("%d slots are kept aside until a client that was lost while it wrote them has exited", len(entries))
        if pidfd is None:
            log.warning("its process cannot be watched: the slots stay aside until it connects again")
            return
        self._pidfds[pidfd] = client
        self._loop.add_reader(pidfd, self._exited, pidfd)

    def released_by(self, client: str) -> None:
        """The client is here again and says that its old copies have ended."""
        for pidfd in [pidfd for pidfd, of in self._pidfds.items() if of == client]:
            self._forget(pidfd)
        self._give(client)

    def close(self) -> None:
        for pidfd in list(self._pidfds):
            self._forget(pidfd)
        for timer in self._timers:
            timer.cancel()

    def _exited(self, pidfd: int) -> None:
        client = self._forget(pidfd)
        later: Callable[[], None] = lambda: self._give(client)  # noqa: E731
        self._timers = {timer for timer in self._timers if timer.when() > self._loop.time()}
        self._timers.add(self._loop.call_later(self._grace_s, later))

    def _forget(self, pidfd: int) -> str:
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        return self._pidfds.pop(pidfd)

    def _give(self, client: str) -> None:
        entries = self._entries.pop(client, [])
        self._pool.give_slots(entries)
        if entries:
            log.info("%d slots of a lost client are in use again", len(entries))
