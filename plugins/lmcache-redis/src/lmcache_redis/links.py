"""Connections that are kept: a bounded number to each server, given to one caller at a time, thrown away in doubt."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from lmcache_core import BackendError, BackendUnavailable

from .address import Address
from .wire import Link


@dataclass(slots=True)
class _Shelf:
    """The connections to one server."""

    idle: list[Link] = field(default_factory=list)
    opened: int = 0
    """Idle, in use, and being opened."""


class LinkPool:
    """Thread-safe.  The lock is held for moments, never while a server is waited for."""

    def __init__(self, name: str, dial: Callable[[Address, float], Link], limit: int) -> None:
        self._name = name
        self._dial = dial
        self._limit = limit
        self._changed = threading.Condition()
        self._shelves: dict[Address, _Shelf] = {}
        self._in_use: set[Link] = set()
        self._closed = False
        self._pid = os.getpid()

    def take(self, address: Address, deadline: float) -> Link:
        """A connection that is up, for the caller alone until it is given back or thrown away."""
        while True:
            link = self._take_idle_or_permit(address, deadline)
            if link is None:
                break
            if link.is_idle:
                link.deadline = deadline
                return link
            self.throw_away(link)
        try:
            link = self._dial(address, deadline)
        except BaseException:
            self._forget_one(address)
            raise
        with self._changed:
            if not self._closed:
                self._in_use.add(link)
                link.deadline = deadline
                return link
        link.close()
        raise self._closed_error()

    def give_back(self, link: Link) -> None:
        with self._changed:
            self._in_use.discard(link)
            shelf = self._shelves.get(link.address)
            keep = not self._closed and shelf is not None and link.pid == self._pid
            if keep and shelf is not None:
                shelf.idle.append(link)
                self._changed.notify()
        if not keep:
            self._close(link)

    def throw_away(self, link: Link) -> None:
        with self._changed:
            self._in_use.discard(link)
        self._close(link)

    def drop_idle(self, address: Address) -> None:
        """Whoever is there now need not be who we connected to."""
        with self._changed:
            shelf = self._shelves.get(address)
            links = [] if shelf is None else shelf.idle[:]
            if shelf is not None:
                shelf.idle.clear()
        for link in links:
            self._close(link)

    def retain(self, addresses: Collection[Address]) -> None:
        """Close what is idle to other servers than these."""
        with self._changed:
            gone = [address for address in self._shelves if address not in addresses]
        for address in gone:
            self.drop_idle(address)

    def close(self) -> None:
        """Close what is idle; who uses a connection stops waiting and closes it.  Twice is fine."""
        with self._changed:
            self._closed = True
            links = [link for shelf in self._shelves.values() for link in shelf.idle]
            for shelf in self._shelves.values():
                shelf.idle.clear()
            in_use = list(self._in_use)
            self._changed.notify_all()
        for link in in_use:
            link.abort()
        for link in links:
            self._close(link)

    def _take_idle_or_permit(self, address: Address, deadline: float) -> Link | None:
        """An idle connection, or None for the permission to open one."""
        with self._changed:
            self._start_anew_after_fork()
            while True:
                if self._closed:
                    raise self._closed_error()
                shelf = self._shelves.setdefault(address, _Shelf())
                if shelf.idle:
                    link = shelf.idle.pop()
                    self._in_use.add(link)
                    return link
                if shelf.opened < self._limit:
                    shelf.opened += 1
                    return None
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    raise BackendUnavailable(f"{self._name} {address}: all {self._limit} connections are in use")

    def _start_anew_after_fork(self) -> None:
        """A child must not speak on its parent's connections; closing our copies of them does the parent no harm."""
        if self._pid == os.getpid():
            return
        self._pid = os.getpid()
        for shelf in self._shelves.values():
            for link in shelf.idle:
                link.close()
        self._shelves.clear()
        self._in_use.clear()

    def _close(self, link: Link) -> None:
        link.close()
        if link.pid == self._pid:
            self._forget_one(link.address)

    def _forget_one(self, address: Address) -> None:
        with self._changed:
            shelf = self._shelves.get(address)
            if shelf is not None:
                shelf.opened -= 1
                if not shelf.opened:
                    del self._shelves[address]
            self._changed.notify()

    def _closed_error(self) -> BackendError:
        return BackendError(f"{self._name}: the backend is closed")
