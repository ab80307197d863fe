"""Where the master is, and where this host is as seen from there."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Address:
    """A TCP address."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """`host:port` or `[v6]:port`; ValueError says what is wrong."""
        match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^\[\]:/?#@\s,]+)):([0-9]{1,5})", text)
        if match is None:
            raise ValueError(f"{text[:80]!r} is not HOST:PORT")
        if not 1 <= int(match[3]) <= 65535:
            raise ValueError(f"{text[:80]!r} has no port from 1 to 65535")
        return cls(match[1] or match[2], int(match[3]))

    @property
    def is_local(self) -> bool:
        """Whether nothing said there leaves this host."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.partition("%")[0]).is_loopback
        except ValueError:
            return False

    def knock(self, timeout_s: float) -> None:
        """OSError unless it accepts a connection in time."""
        with socket.create_connection((self.host, self.port), timeout=max(timeout_s, 0.001)):
            pass

    def seen_from(self) -> str:
        """The address of this host on the way there; OSError if there is none.  Sends nothing."""
        family, _, _, _, where = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)
            name: str = probe.getsockname()[0]
        return name

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
