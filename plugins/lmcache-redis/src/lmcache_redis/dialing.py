"""Opening connections: the client library does TCP, TLS and AUTH, under our deadline, then the socket is ours."""

from __future__ import annotations

import inspect
import math
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, Final, Literal

from lmcache_core import BackendError, BackendUnavailable

from .address import Address
from .options import RedisOptions
from .wire import Link

ClientName = Literal["redis", "valkey"]
_BASE_ERROR: Final = {"redis": "RedisError", "valkey": "ValkeyError"}
_MIN_TIMEOUT_S: Final = 0.001


class _UnderDeadline:
    """Goes before a client's connection class: whatever it waits for, it waits until `deadline` at most."""

    deadline: float = math.inf
    _sock: Any

    @property
    def _left_s(self) -> float:
        return max(self.deadline - time.monotonic(), _MIN_TIMEOUT_S)

    @property
    def socket_timeout(self) -> float:
        return self._left_s

    @socket_timeout.setter
    def socket_timeout(self, ignored: object) -> None: ...

    @property
    def socket_connect_timeout(self) -> float:
        return self._left_s

    @socket_connect_timeout.setter
    def socket_connect_timeout(self, ignored: object) -> None: ...

    def read_response(self, *args: Any, **kwargs: Any) -> Any:
        self._sock.settimeout(self._left_s)
        return super().read_response(*args, **kwargs)  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class Dialer:
    """How connections to one kind of server (data nodes, Sentinels) are opened."""

    client: ClientName
    connect_timeout_s: float
    username: str = ""
    password: str = field(default="", repr=False)
    db: int = 0
    protocol: int = 2
    tls: dict[str, Any] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, client: ClientName, options: RedisOptions, *, sentinel: bool = False) -> Dialer:
        location = options.location
        return cls(
            client,
            options.connect_timeout_s,
            options.sentinel_username if sentinel else options.username,
            options.sentinel_password if sentinel else options.password,
            0 if sentinel else location.db,
            options.protocol,
            _tls_arguments(options) if location.tls else None,
        )

    def dial(self, address: Address, deadline: float) -> Link:
        """A connection on which the server has let us in; BackendError within the deadline otherwise."""
        until = min(deadline, time.monotonic() + self.connect_timeout_s)
        if until <= time.monotonic():
            raise BackendUnavailable(f"{self.client} {address}: no time left to connect")
        arguments: dict[str, Any] = {
            "db": self.db,
            "username": self.username or None,
            "password": self.password or None,
            "protocol": self.protocol,
            **_no_extras(self.client),
        }
        if address.path:
            kind = "UnixDomainSocketConnection"
            arguments["path"] = address.path
        else:
            kind = "Connection" if self.tls is None else "SSLConnection"
            arguments |= {"host": address.host, "port": address.port, "socket_keepalive": True, **(self.tls or {})}
        failures = getattr(import_module(f"{self.client}.exceptions"), _BASE_ERROR[self.client])
        connection: Any = None
        try:
            connection = _bounded_class(self.client, kind)(**arguments)
            connection.deadline = until
            connection.connect()
            sock = connection._sock
            connection._sock = None  # ours from here on
        except (failures, OSError) as error:
            _give_up(connection)
            raise self._fault(address, error) from _without_frames(error)
        except BaseException:
            _give_up(connection)
            raise
        return Link(sock, address)

    def _fault(self, address: Address, error: Exception) -> BackendError:
        name = type(error).__name__
        text = " ".join(str(error).split()) or name
        where = f"{self.client} {address}"
        if name in ("AuthenticationError", "AuthorizationError", "NoPermissionError"):
            return BackendError(f"{where}: let in neither {self.username or 'the default user'}: {text}")
        causes = list(_chain(error))
        if any(isinstance(cause, ssl.SSLError) and not isinstance(cause, TimeoutError) for cause in causes):
            return BackendError(f"{where}: TLS: {text}")
        if name == "ResponseError":
            return BackendError(f"{where}: {text}")
        return BackendUnavailable(f"{where}: {text}")


def _give_up(connection: Any) -> None:
    if connection is not None:
        connection.disconnect()


def _without_frames(error: Exception) -> Exception:
    """The client's frames hold their own exceptions: a cycle that would keep the callers' buffers as well."""
    for cause in _chain(error):
        cause.__traceback__ = None
    return error


def _chain(error: BaseException) -> Iterator[BaseException]:
    """`error` and everything behind it."""
    found: list[BaseException] = [error]
    for seen in found:
        yield seen
        found += [more for more in (seen.__cause__, seen.__context__) if more is not None and more not in found]


@cache
def _bounded_class(client: str, kind: str) -> type:
    base = getattr(import_module(f"{client}.connection"), kind)
    # What redis-py says of a late connection names a host, which its Unix sockets lack.
    extras = {"host": "", "port": 0} if kind == "UnixDomainSocketConnection" else {}
    return type(kind, (_UnderDeadline, base), extras)


@cache
def _no_extras(client: str) -> dict[str, Any]:
    """Arguments that turn off what the client would do besides: retries, and telling the server its name."""
    connection = import_module(f"{client}.connection")
    known = inspect.signature(connection.AbstractConnection.__init__).parameters
    retry = import_module(f"{client}.retry").Retry(import_module(f"{client}.backoff").NoBackoff(), 0)
    silent = ("driver_info",) if "driver_info" in known else ("lib_name", "lib_version")
    return {"retry": retry, **{name: None for name in silent if name in known}}


def _tls_arguments(options: RedisOptions) -> dict[str, Any]:
    return {
        "ssl_cert_reqs": "none" if options.tls_verify == "none" else "required",
        "ssl_check_hostname": options.tls_verify == "full",
        "ssl_ca_certs": str(options.ca_file) if options.ca_file else None,
        "ssl_certfile": str(options.cert_file) if options.cert_file else None,
        "ssl_keyfile": str(options.key_file) if options.key_file else None,
        "ssl_password": options.key_password or None,
    }
