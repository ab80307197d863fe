"""Where servers are: addresses, and the URL that names them."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Final

SCHEMES: Final = {"redis": False, "rediss": True, "valkey": False, "valkeys": True}
"""Scheme of a URL to whether it means TLS."""
DEFAULT_PORT: Final = 6379
SENTINEL_PORT: Final = 26379
_DATABASE: Final = re.compile(r"0|[1-9][0-9]{0,5}")


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """A TCP address, or the path of a Unix socket."""

    host: str
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str, default_port: int) -> Address:
        """`host`, `host:port`, `[v6]:port`; ValueError says what is wrong."""
        match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^\[\]:/?#@\s]+))(?::([0-9]{1,5}))?", text)
        if match is None:
            raise ValueError(f"{text[:80]!r} is not HOST:PORT")
        port = int(match[3]) if match[3] else default_port
        if not 1 <= port <= 65535:
            raise ValueError(f"{text[:80]!r} has no port from 1 to 65535")
        return cls(match[1] or match[2], port)

    @property
    def is_local(self) -> bool:
        """Whether nothing said there leaves this host."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.partition("%")[0]).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        if self.path:
            return self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Location:
    """What a URL says: servers, TLS or not, and the database."""

    addresses: tuple[Address, ...]
    tls: bool = False
    db: int = 0


def parse_url(url: str, default_port: int = DEFAULT_PORT) -> Location:
    """`redis://HOST:PORT[,HOST:PORT...][/DB]`, `rediss://...` for TLS, `unix:///PATH[?db=DB]`; also `valkey(s)://`.

    ValueError says what is wrong, without showing what may be a password.
    """
    scheme, found, rest = url.partition("://")
    if "@" in rest:
        raise ValueError(
            'url: holds a user or a password; give them as the options username and password: "${VARIABLE}"'
        )
    if not found or scheme not in (*SCHEMES, "unix"):
        raise ValueError(f"url: {url[:80]!r} does not begin with redis://, rediss://, valkey://, valkeys:// or unix://")
    if scheme == "unix":
        path, _, query = rest.partition("?")
        if not path.startswith("/"):
            raise ValueError(f"url: {url[:80]!r} has no absolute path; write unix:///PATH")
        return Location((Address("", 0, path),), db=_database(query.removeprefix("db=") if query else ""))
    hosts, _, db = rest.partition("/")
    try:
        addresses = tuple(Address.parse(host.strip(), default_port) for host in hosts.split(","))
    except ValueError as error:
        raise ValueError(f"url: {error}") from error
    return Location(addresses, SCHEMES[scheme], _database(db.rstrip("/")))


def _database(text: str) -> int:
    if not text:
        return 0
    if not _DATABASE.fullmatch(text):
        raise ValueError(f"url: {text[:80]!r} is not the number of a database")
    return int(text)
