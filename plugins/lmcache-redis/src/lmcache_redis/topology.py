"""Which server a key belongs to: always the same one, the master that Sentinels name, or the owner of its slot."""

from __future__ import annotations

import contextlib
import threading
import time
from binascii import crc_hqx
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final, Protocol

from lmcache_core import BackendError, BackendUnavailable

from .address import Address
from .wire import Answer, Link, ServerError

SLOTS: Final = 16384
Dial = Callable[[Address, float], Link]


class Topology(Protocol):
    def route(self, keys: Sequence[bytes], deadline: float) -> list[Address]:
        """The server of each key; BackendError if none can be found in time."""

    def doubt(self, address: Address) -> None:
        """Something was wrong with that server: look again before the next operation."""

    def moved(self, slot: int, text: str, asked: Address) -> Address | None:
        """Where a redirection by `asked` points, remembered; None where keys are not redirected."""

    def target(self, text: str, asked: Address) -> Address | None:
        """The same for one operation, not remembered."""


class OneServer:
    def __init__(self, address: Address) -> None:
        self._address = address

    def route(self, keys: Sequence[bytes], deadline: float) -> list[Address]:
        return [self._address] * len(keys)

    def doubt(self, address: Address) -> None:
        return

    def moved(self, slot: int, text: str, asked: Address) -> Address | None:
        return None

    def target(self, text: str, asked: Address) -> Address | None:
        return None


class Sentinels(OneServer):
    """The master is asked for at first use, and again once it is in doubt."""

    def __init__(
        self, addresses: Sequence[Address], master: str, dial: Dial, retain: Callable[[Collection[Address]], None]
    ) -> None:
        self._sentinels = list(addresses)
        self._name = master
        self._dial = dial
        self._retain = retain
        self._lock = threading.Lock()
        self._master: Address | None = None

    def route(self, keys: Sequence[bytes], deadline: float) -> list[Address]:
        master = self._master
        if master is None:
            with _locked(self._lock, deadline, f"the master {self._name}"):
                master = self._master = self._master or self._discover(deadline)
            self._retain([master])
        return [master] * len(keys)

    def doubt(self, address: Address) -> None:
        if self._master == address:
            self._master = None

    def _discover(self, deadline: float) -> Address:
        problems: list[str] = []
        for sentinel in list(self._sentinels):
            try:
                answer = _ask(
                    self._dial, sentinel, deadline, b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", self._name.encode()
                )
            except BackendError as error:
                problems.append(str(error))
                continue
            match answer:
                case [bytes(host), bytes(port)] if port.isdigit():
                    # The one that answers is asked first next time.
                    self._sentinels.remove(sentinel)
                    self._sentinels.insert(0, sentinel)
                    return Address(host.decode("utf-8", "replace"), int(port))
                case ServerError(text):
                    problems.append(f"{sentinel}: {text}")
                case _:
                    problems.append(f"{sentinel}: knows no master {self._name!r}")
        raise BackendUnavailable(f"no Sentinel names the master {self._name!r}: {'; '.join(problems)}")


class Cluster:
    """The owners of all slots, asked for at first use, and again once they are in doubt."""

    def __init__(self, addresses: Sequence[Address], dial: Dial, retain: Callable[[Collection[Address]], None]) -> None:
        self._seeds = list(addresses)
        self._dial = dial
        self._retain = retain
        self._lock = threading.Lock()
        self._owners: list[Address | None] = [None] * SLOTS
        self._nodes: list[Address] = []
        self._suspects: set[Address] = set()
        self._stale = True

    def route(self, keys: Sequence[bytes], deadline: float) -> list[Address]:
        if self._stale:
            with _locked(self._lock, deadline, "the cluster's slots"):
                if self._stale:
                    self._refresh(deadline)
        owners = self._owners
        routed: list[Address] = []
        for key in keys:
            slot = crc_hqx(key, 0) % SLOTS  # a prefix has no braces, so there are no hash tags
            owner = owners[slot]
            if owner is None:
                self._stale = True
                raise BackendUnavailable(f"no node of the cluster owns slot {slot}")
            routed.append(owner)
        return routed

    def doubt(self, address: Address) -> None:
        self._suspects.add(address)
        self._stale = True

    def moved(self, slot: int, text: str, asked: Address) -> Address | None:
        address = self.target(text, asked)
        if address is not None and slot < SLOTS:
            self._owners[slot] = address
            self._stale = True
        return address

    def target(self, text: str, asked: Address) -> Address | None:
        host, _, port = text.rpartition(":")
        if not port.isdigit():
            return None
        return Address(host.strip("[]") or asked.host, int(port))

    def _refresh(self, deadline: float) -> None:
        candidates = list(dict.fromkeys([*self._nodes, *self._seeds]))
        candidates.sort(key=lambda address: address in self._suspects)
        problems: list[str] = []
        for address in candidates:
            try:
                answer = _ask(self._dial, address, deadline, b"CLUSTER", b"SLOTS")
                owners = _owners(answer, address)
            except BackendError as error:
                problems.append(str(error))
                continue
            self._owners = owners
            self._nodes = sorted({owner for owner in owners if owner is not None})
            self._suspects.clear()
            self._stale = False
            self._retain(self._nodes)
            return
        raise BackendUnavailable(f"no node of the cluster says who owns what: {'; '.join(problems)}")


def _owners(answer: Answer, asked: Address) -> list[Address | None]:
    """The master of each slot, from the answer to CLUSTER SLOTS."""
    if isinstance(answer, ServerError):
        raise BackendError(f"{asked}: {answer.text}")
    owners: list[Address | None] = [None] * SLOTS
    try:
        for first, last, (host, port, *_), *_ in answer:
            name = host.decode() if host else ""
            owner = Address(asked.host if name in ("", "?") else name, int(port))
            for slot in range(max(first, 0), min(last, SLOTS - 1) + 1):
                owners[slot] = owner
    except (TypeError, ValueError, AttributeError) as error:
        raise BackendError(f"{asked}: an answer to CLUSTER SLOTS that makes no sense") from error
    if not any(owners):
        raise BackendUnavailable(f"{asked}: its cluster has no slots yet")
    return owners


def _ask(dial: Dial, address: Address, deadline: float, *arguments: bytes) -> Answer:
    """One question on a connection of its own."""
    link = dial(address, deadline)
    try:
        link.deadline = deadline
        return link.ask(*arguments)
    except OSError as error:
        raise BackendUnavailable(f"{address}: {error}") from error
    finally:
        link.close()


@contextlib.contextmanager
def _locked(lock: threading.Lock, deadline: float, what: str) -> Iterator[None]:
    if not lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
        raise BackendUnavailable(f"{what}: another thread is still finding out")
    try:
        yield
    finally:
        lock.release()
