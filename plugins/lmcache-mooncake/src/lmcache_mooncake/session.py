"""One client of the store: connected when needed, careful with a master that is gone, closed when nobody uses it."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from lmcache_core import BackendError, BackendUnavailable

from . import library
from .address import Address
from .bounce import Bounces
from .helpers import Helpers
from .options import MooncakeOptions
from .regions import Regions
from .turns import Turns

logger = logging.getLogger(__name__)
T = TypeVar("T")

_LOCAL_BUFFER_NBYTES: Final = 0
"""What the library would copy through; we give it memory that is registered."""


class Session:
    """The client, the memory that it knows, and the threads that may wait for it.

    The library cannot be interrupted: what it might wait for longer than the caller does goes to a helper.  Calls that
    move payload stay on the caller's thread, whose memory they use; `library.bound_waiting` bounds those.
    """

    def __init__(self, options: MooncakeOptions, timeout_s: float) -> None:
        self.options = options
        self.master = Address.parse(options.master)
        self.regions = Regions()
        self.turns = Turns()
        self.bounces = Bounces(self.unregister)
        self.config: Any = None
        self._module = library.load()
        library.replication(self._module, options, "")  # says now what this version does not have
        self.timeout_s = timeout_s
        self._rpc_bound_s = library.bound_waiting(timeout_s)
        self._helpers = Helpers(2 * options.threads)
        self._changed = threading.Condition()
        self._store: Any = None
        self._attempt: _Attempt | None = None
        self._users = 0
        self._closed = False
        self._doubtful = False
        self._pending: dict[int, int] = {}
        self._registering = threading.Lock()

    def start(self) -> None:
        """Connect in the background, for a process whose memory is part of the store."""
        with self._changed:
            if self._store is None:
                self._begin()

    @contextlib.contextmanager
    def use(self, deadline: float, verb: str) -> Iterator[Any]:
        """The connected client; it is not closed meanwhile."""
        store = self._entered(deadline, verb)
        try:
            if self._doubtful:
                self.knock(deadline, verb)
            if self._pending:
                self._register_pending(store)
            yield store
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()

    def ask(self, call: Callable[[], T], deadline: float, verb: str) -> T:
        """What `call` returns, which holds none of the caller's memory; BackendUnavailable at the deadline."""
        if not self.is_short(deadline):
            return call()
        try:
            return self._helpers.ask(call, deadline, verb)
        except BackendUnavailable:
            self._doubtful = True
            raise

    def is_short(self, deadline: float) -> bool:
        """Whether the library might wait for the master beyond `deadline`."""
        return deadline - time.monotonic() < self._rpc_bound_s

    def doubt(self) -> None:
        """The master did not answer: look whether it is there before the next call, which would wait for seconds."""
        self._doubtful = True

    def trust(self) -> None:
        self._doubtful = False

    def register(self, address: int, nbytes: int) -> None:
        """Done with the next call: pinning a gigabyte takes a while, and so may connecting."""
        with self._changed:
            self._pending[address] = nbytes

    def register_now(self, store: Any, address: int, nbytes: int) -> None:
        """The same by a user of the client, who needs it."""
        with self._registering:
            self._tell(store, address, nbytes)

    def unregister(self, address: int) -> None:
        with self._changed:
            self._pending.pop(address, None)
            store = self._store
        with self._registering:
            if self.regions.drop(address) and not self._closed:
                store.unregister_buffer(address)

    def close(self) -> None:
        """Close the client when nobody uses it any more; twice is fine."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            if _is_forked():
                return
            attempt = self._attempt
        deadline = time.monotonic() + self.timeout_s
        is_free = self._helpers.close(deadline - time.monotonic())
        if attempt is not None:
            is_free &= attempt.ended.wait(max(0.0, deadline - time.monotonic()))
        with self._changed:
            is_free &= self._changed.wait_for(lambda: not self._users, max(0.0, deadline - time.monotonic()))
            store, self._store = self._store, None
        if store is None:
            return
        if is_free:
            store.close()
        else:
            _left_behind.append(store)
            logger.warning("mooncake: a call is stuck in the library; the client is left as it is")

    def _entered(self, deadline: float, verb: str) -> Any:
        with self._changed:
            while True:
                if _is_forked():
                    raise BackendUnavailable(f"mooncake {verb}: its client does not survive a fork; use spawn")
                if self._closed:
                    raise BackendUnavailable(f"mooncake {verb}: it is closed")
                if self._store is not None:
                    self._users += 1
                    return self._store
                attempt = self._begin()
                if not self._wait_for(attempt, deadline):
                    raise BackendUnavailable(f"mooncake {verb}: no connection to {self.master} in time")
                if attempt.problem:
                    # An exception of each caller's own: a shared one would keep the frames of whoever raised it last.
                    raise BackendUnavailable(attempt.problem)

    def _wait_for(self, attempt: _Attempt, deadline: float) -> bool:
        """Whether it ended in time, or nobody needs it any more; under the lock."""
        left_s = max(0.0, deadline - time.monotonic())
        return self._changed.wait_for(lambda: attempt.ended.is_set() or self._closed, left_s)

    def _begin(self) -> _Attempt:
        """The attempt to connect that is under way, or a new one; under the lock."""
        if self._attempt is None or self._attempt.ended.is_set():
            self._attempt = attempt = _Attempt()
            threading.Thread(
                target=self._connect, args=(attempt,), name="lmcache-mooncake-connect", daemon=True
            ).start()
        return self._attempt

    def _connect(self, attempt: _Attempt) -> None:
        store: Any = None
        try:
            store = self._set_up()
        except BackendError as error:
            attempt.problem = str(error)
        except Exception as error:
            attempt.problem = f"mooncake: connecting to {self.master} raised {error!r}"
        with self._changed:
            if store is not None and not self._closed:
                self._store, store = store, None
            attempt.ended.set()
            self._changed.notify_all()
        if store is not None:
            store.close()

    def _set_up(self) -> Any:
        options = self.options
        try:
            # The library would try for a minute and a half.
            self.master.knock(options.connect_timeout_s)
            hostname = options.hostname or self.master.seen_from()
        except OSError as error:
            raise BackendUnavailable(f"mooncake: no connection to the master {self.master}: {error}") from error
        _home.append(os.getpid())
        store = self._module.MooncakeDistributedStore()
        answer = store.setup(
            hostname,
            options.metadata,
            options.segment_nbytes,
            _LOCAL_BUFFER_NBYTES,
            options.protocol,
            options.devices,
            str(self.master),
        )
        if answer:
            raise BackendUnavailable(
                f"mooncake: the client would not start ({answer}: {options.protocol}, master {self.master}, metadata "
                f"{options.metadata}); MC_LOG_LEVEL=INFO in the environment makes it say why"
            )
        self.config = library.replication(self._module, options, store.get_hostname())
        logger.info(
            "mooncake: connected to %s as %s over %s, %d bytes of this process are part of the store",
            *(self.master, store.get_hostname(), options.protocol, options.segment_nbytes),
        )
        return store

    def knock(self, deadline: float, verb: str) -> None:
        """BackendUnavailable unless the master accepts a connection."""
        try:
            self.master.knock(min(self.options.connect_timeout_s, deadline - time.monotonic()))
        except OSError as error:
            self._doubtful = True
            raise BackendUnavailable(f"mooncake {verb}: no connection to the master {self.master}: {error}") from error

    def _register_pending(self, store: Any) -> None:
        with self._registering:
            with self._changed:
                pending, self._pending = self._pending, {}
            for address, nbytes in pending.items():
                self._tell(store, address, nbytes)

    def _tell(self, store: Any, address: int, nbytes: int) -> None:
        for start in self.regions.overlapping(address, nbytes):  # what was there is gone
            self.regions.drop(start)
            store.unregister_buffer(start)
        answer = store.register_buffer(address, nbytes)
        if answer:
            logger.warning(
                "mooncake: %d bytes could not be registered (%d); their records are copied. With rdma, see `ulimit -l`",
                *(nbytes, answer),
            )
        else:
            self.regions.add(address, nbytes)


class _Attempt:
    """To connect."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.problem = ""


def _is_forked() -> bool:
    """Whether the library's threads run in a parent of this process, and not here."""
    return bool(_home) and _home[0] != os.getpid()


_home: Final[list[int]] = []
"""First of all: the process that the library runs in."""
_left_behind: Final[list[Any]] = []
"""Clients that a stuck thread is in: their destructor would pull the ground from under it."""
