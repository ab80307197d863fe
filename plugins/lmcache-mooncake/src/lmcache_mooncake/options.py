"""The settings of the backend, checked when they are read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from .address import Address

P2P_HANDSHAKE: Final = "P2PHANDSHAKE"
"""In place of a metadata server: clients ask each other."""
_METADATA: Final = re.compile(r"(https?|etcd|redis)://[^\s@]+")
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{0,253}")
_DEVICES: Final = re.compile(r"[A-Za-z0-9._:-]*(,[A-Za-z0-9._:-]+)*")
_PROTOCOL: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")
_PREFIX: Final = re.compile(r"[\x21-\x7e]{0,64}")
_DAY_S: Final = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeOptions:
    """Settings of the backend `mooncake`."""

    master: str
    """`HOST:PORT` of the master's RPC.  No default."""
    metadata: str = P2P_HANDSHAKE
    """`P2PHANDSHAKE` (clients ask each other), or the URL of a metadata server: http://, etcd:// or redis://.
    Default P2PHANDSHAKE."""
    hostname: str = ""
    """Name or address under which the other nodes reach this one.  Default: the address that reaches the master."""
    protocol: str = "tcp"
    """How payloads go: `tcp`, `rdma`, or another that the installed variant has.  Default tcp."""
    devices: str = ""
    """RDMA devices, separated by commas.  Default: those that the library finds."""
    segment_nbytes: int = 0
    """Memory of this process that becomes part of the store.  Default 0: a pure client."""
    prefer_local: bool = False
    """Whether records go to this process's segment while it has room.  Default false."""
    replicas: int = 1
    """Copies of each record, in different segments.  1 to 16.  Default 1."""
    soft_pin: bool = False
    """Whether the store evicts these records after all others.  Default false."""
    soft_pin_ttl_s: float | None = None
    """How long a soft pin lasts after the last use.  Default null: what the master says (30m unless set there)."""
    prefix: str = "lmcache:"
    """What every key begins with: up to 64 printable ASCII characters but space.  Default "lmcache:"."""
    threads: int = 4
    """Calls at once, and threads of the tier.  1 to 64.  Default 4."""
    connect_timeout_s: float = 2.0
    """Bound for the master to accept a connection, within the operation's own deadline.  Default 2s."""

    def __post_init__(self) -> None:
        try:
            Address.parse(self.master)
        except ValueError as error:
            raise ValueError(f"master: {error}") from error
        if self.metadata != P2P_HANDSHAKE and not _METADATA.fullmatch(self.metadata):
            raise ValueError(
                f"metadata: {P2P_HANDSHAKE}, or a URL with http://, https://, etcd:// or redis:// and without a user, "
                f"got {self.metadata[:80]!r}"
            )
        if not _NAME.fullmatch(self.hostname):
            raise ValueError(f"hostname: a host name or an IPv4 address, without a port, got {self.hostname[:80]!r}")
        if not _PROTOCOL.fullmatch(self.protocol):
            raise ValueError(f"protocol: tcp, rdma or the name of another, in lower case, got {self.protocol[:80]!r}")
        if not _DEVICES.fullmatch(self.devices):
            raise ValueError(f"devices: names separated by commas, e.g. mlx5_0,mlx5_1, got {self.devices[:80]!r}")
        if self.devices and self.protocol == "tcp":
            raise ValueError("devices: are for protocol: rdma; tcp has none")
        if self.segment_nbytes and self.segment_nbytes < 16 << 20:
            raise ValueError(f"segment: 0 or at least 16MiB, got {self.segment_nbytes} bytes")
        if self.segment_nbytes < 0:
            raise ValueError(f"segment: not below 0, got {self.segment_nbytes}")
        if self.prefer_local and not self.segment_nbytes:
            raise ValueError("prefer_local: there is no local segment; set segment too")
        if not 1 <= self.replicas <= 16:
            raise ValueError(f"replicas: 1 to 16, got {self.replicas}")
        if self.soft_pin_ttl_s is not None and not self.soft_pin:
            raise ValueError("soft_pin_ttl: needs soft_pin: true")
        if self.soft_pin_ttl_s is not None and not 0.001 <= self.soft_pin_ttl_s <= 3650 * _DAY_S:
            raise ValueError(f"soft_pin_ttl: from 1ms to 10 years, got {self.soft_pin_ttl_s} s")
        if not _PREFIX.fullmatch(self.prefix):
            raise ValueError("prefix: up to 64 printable ASCII characters but space")
        if not 1 <= self.threads <= 64:
            raise ValueError(f"threads: 1 to 64, got {self.threads}")
        if not 0 < self.connect_timeout_s <= 600:
            raise ValueError(f"connect_timeout: more than 0 and up to 600 s, got {self.connect_timeout_s} s")
