"""Requests to one bucket: connections kept warm and bounded, overload retried with jitter, all under a deadline."""

from __future__ import annotations

import logging
import os
import random
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, TypeVar

from lmcache_core import BackendError, BackendUnavailable, ConfigError

from .answers import Passing, problem
from .identity import Identity
from .options import S3Options
from .signing import request_head
from .target import Target
from .wire import Connection, Deadline, Head, Late, WireError

log = logging.getLogger(__name__)
T = TypeVar("T")

_IDLE_S: Final = 15.0
"""S3 hangs up after about 20 s without a request."""
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked.  `path` is quoted; `wanted` are the statuses that are an answer, all others are trouble."""

    method: str
    path: str
    wanted: tuple[int, ...]
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: memoryview | None = None


@dataclass(frozen=True, slots=True)
class Exchange:
    """An answer whose body is still on the wire; what reads it must read all of it, or the connection is lost."""

    head: Head
    connection: Connection
    deadline: Deadline
    tries: int
    """How often the request was sent, this one included."""

    def read_into(self, into: memoryview) -> None:
        self.connection.read_into(self.head, into, self.deadline)

    def text(self) -> bytes:
        return self.connection.read_text(self.head, self.deadline)


class Client:
    """Thread-safe.  After `close` every call is a BackendError."""

    def __init__(self, options: S3Options) -> None:
        self.target = Target.of(options)
        self._options = options
        self._identity = Identity(options)
        self._tls = _tls(options) if self.target.tls else None
        self._slots = threading.Semaphore(options.connections)
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._pid = os.getpid()
        self._closed = False
        self._random = random.Random()
        owner = options.expected_owner
        self._always = {} if owner is None else {"x-amz-expected-bucket-owner": owner}
        if not self.target.tls and not self.target.loopback:
            log.warning("s3: %s is not encrypted on its way: use https://", self.target)

    def call(self, request: Request, use: Callable[[Exchange], T], deadline: Deadline) -> T:
        """`use` of the answer.  Repeated while that can help and there is time; BackendError says why it did not."""
        pause_s = _FIRST_PAUSE_S
        renewed = False
        tries = 0
        while True:
            tries += 1
            try:
                return self._once(request, use, deadline, tries)
            except Passing as passing:
                trouble: BackendError = passing.error
                if passing.expired:
                    if renewed or not self._identity.renew():
                        raise trouble from passing
                    renewed = True
                    continue
            except Late as late:
                raise BackendUnavailable(
                    f"s3 {request.method}: no answer in {deadline.timeout_s:g} s; {self.target}"
                ) from late
            if tries >= self._options.attempts:
                raise trouble
            wait_s = self._random.uniform(0, pause_s)
            if time.monotonic() + wait_s >= deadline.at:
                raise trouble
            # Jitter between tries.  A closing backend does not wait for it: its caller would, for a second at most.
            time.sleep(wait_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _once(self, request: Request, use: Callable[[Exchange], T], deadline: Deadline, tries: int) -> T:
        while True:
            with self._connection(deadline) as (connection, warm):
                try:
                    return self._exchange(connection, request, use, deadline, tries)
                except WireError as error:
                    if warm and error.fresh:
                        continue  # it had been closed by the server while it was idle
                    text = f"s3 {request.method}: {error}; {self.target}"
                    raise Passing(BackendUnavailable(text)) from error

    def _exchange(
        self, connection: Connection, request: Request, use: Callable[[Exchange], T], deadline: Deadline, tries: int
    ) -> T:
        head = request_head(
            self.target,
            self._identity.credentials(deadline),
            request.method,
            request.path,
            query=request.query,
            headers={**request.headers, **self._always},
            body=request.body,
            sign_payload=self._options.sign_payload,
        )
        answer = connection.send(head, request.body, deadline) or connection.head(
            deadline, bodiless=request.method == "HEAD"
        )
        exchange = Exchange(answer, connection, deadline, tries)
        if answer.status not in request.wanted:
            text = b"" if answer.nbytes == 0 else exchange.text()
            raise problem(request.method, answer, text, self.target)
        return use(exchange)

    @contextmanager
    def _connection(self, deadline: Deadline) -> Iterator[tuple[Connection, bool]]:
        """One connection for one exchange, and whether it had been used before."""
        if not self._slots.acquire(timeout=deadline.left()):
            raise Late
        try:
            connection = self._warm()
            warm = connection is not None
            if connection is None:
                connection = self._open(deadline)
            try:
                yield connection, warm
            finally:
                self._give_back(connection)
        finally:
            self._slots.release()

    def _warm(self) -> Connection | None:
        """The connection used last that is still good."""
        with self._lock:
            if self._closed:
                raise BackendError(f"this backend is closed; {self.target}")
            if self._pid != os.getpid():  # forked: the sockets are the parent's
                self._pid = os.getpid()
                self._idle.clear()
            while self._idle:
                connection = self._idle.pop()
                if time.monotonic() - connection.used_at < _IDLE_S and connection.reusable:
                    return connection
                connection.close()
        return None

    def _open(self, deadline: Deadline) -> Connection:
        target, timeout_s = self.target, self._options.connect_timeout_s
        try:
            return Connection.open(target.host, target.port, self._tls, deadline.at_most(timeout_s))
        except ssl.SSLCertVerificationError as error:
            raise BackendError(
                f"s3: the server's certificate is not trusted: {error.verify_message}; {target}"
            ) from error
        except (TimeoutError, Late) as error:
            deadline.left()
            raise BackendUnavailable(f"s3: no connection in {timeout_s:g} s; {target}") from error
        except (OSError, UnicodeError) as error:  # UnicodeError: a host name that cannot be one
            cause = getattr(error, "strerror", None) or str(error)
            raise BackendUnavailable(f"s3: no connection: {cause}; {target}") from error

    def _give_back(self, connection: Connection) -> None:
        with self._lock:
            if not self._closed and connection.reusable:
                self._idle.append(connection)
                return
        connection.close()


def _tls(options: S3Options) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=options.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"s3: ca_file {options.ca_file}: {error.strerror or error}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
