"""The settings of both backends, checked when they are read."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from .address import DEFAULT_PORT, SENTINEL_PORT, Location, parse_url

DEFAULT_MAX_VALUE_NBYTES: Final = 512 << 20
"""What servers take unless their `proto-max-bulk-len` says otherwise."""
_PREFIX: Final = re.compile(r"[\x21-\x7a|~]{0,64}")
_DAY_S: Final = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisOptions:
    """Settings of the backend `redis`, and with one other default of `valkey`."""

    url: str
    """`redis://HOST:PORT/DB`, `rediss://` for TLS, `unix:///PATH?db=DB`.  Several HOST:PORT, separated by commas, are
    the Sentinels (with `master`) or first nodes (with `cluster`).  No default."""
    username: str = ""
    """User of the access control list.  Default: none, which is the user `default`."""
    password: str = field(default="", repr=False)
    """Password of that user.  A secret.  Default: none."""
    cluster: bool = False
    """Whether the servers are a cluster.  Default false."""
    master: str = ""
    """Name under which the Sentinels that `url` lists know the master.  Default: none, no Sentinel."""
    sentinel_username: str = ""
    """User at the Sentinels.  Default: none."""
    sentinel_password: str = field(default="", repr=False)
    """Password at the Sentinels.  A secret.  Default: none."""
    prefix: str = "lmcache:"
    """What every key begins with: up to 64 printable ASCII characters but space, `{` and `}`.  Default "lmcache:"."""
    ttl_s: float | None = None
    """The server forgets a record this long after it was stored.  At least 1ms.  Default null: never."""
    connections: int = field(default=4, metadata={"measure": "threads"})
    """Connections to each server, and threads of the tier.  1 to 64.  Default 4."""
    connect_timeout_s: float = 2.0
    """Bound for TCP, TLS and AUTH of one connection together, within the operation's own deadline.  Default 2s."""
    protocol: Literal[2, 3] = 2
    """Version of the protocol, RESP2 or RESP3.  Default 2."""
    max_value_nbytes: int = DEFAULT_MAX_VALUE_NBYTES
    """Largest record, the server's `proto-max-bulk-len`.  Default 512MiB."""
    read_slice_nbytes: int = 512 << 10
    """Records of twice this size and more are read in pieces of it.  0: whole, for servers that answer without copying
    the value first, and for proxies without WATCH and EXEC.  Default 512KiB."""
    ca_file: Path | None = None
    """PEM file of certificate authorities to trust besides the system's.  Default null."""
    cert_file: Path | None = None
    """PEM file of our certificate, for servers that ask for one.  Default null."""
    key_file: Path | None = None
    """PEM file of its private key.  Default null: in `cert_file`."""
    key_password: str = field(default="", repr=False)
    """Password of `key_file`.  A secret.  Default: none."""
    tls_verify: Literal["full", "ca", "none"] = "full"
    """What the server's certificate must have: `full` the right authority and host name, `ca` the authority, `none`
    nothing.  Default full."""

    def __post_init__(self) -> None:
        location = self.location
        if self.cluster and self.master:
            raise ValueError("cluster and master: a cluster has no Sentinels; give one of them")
        if len(location.addresses) > 1 and not (self.cluster or self.master):
            raise ValueError("url: names several servers; say what they are with cluster: true or master: NAME")
        if location.addresses[0].path and (self.cluster or self.master):
            raise ValueError("url: a Unix socket is one server, neither a cluster nor Sentinels")
        if self.cluster and location.db:
            raise ValueError("url: a cluster has database 0 only")
        if (self.sentinel_username or self.sentinel_password) and not self.master:
            raise ValueError("sentinel_username and sentinel_password need master")
        if not _PREFIX.fullmatch(self.prefix):
            raise ValueError("prefix: up to 64 printable ASCII characters but space, { and }")
        if self.ttl_s is not None and not 0.001 <= self.ttl_s <= 3650 * _DAY_S:
            raise ValueError(f"ttl: from 1ms to 10 years, got {self.ttl_s} s")
        if not 1 <= self.connections <= 64:
            raise ValueError(f"connections: 1 to 64, got {self.connections}")
        if not 0 < self.connect_timeout_s <= 600:
            raise ValueError(f"connect_timeout: more than 0 and up to 600 s, got {self.connect_timeout_s} s")
        if self.max_value_nbytes < 4096:
            raise ValueError(f"max_value: at least 4096 bytes, got {self.max_value_nbytes}")
        if self.read_slice_nbytes and not 4096 <= self.read_slice_nbytes <= 1 << 30:
            raise ValueError(f"read_slice: 0, or from 4KiB to 1GiB, got {self.read_slice_nbytes} bytes")
        tls = (self.ca_file, self.cert_file, self.key_file, self.key_password or None)
        if not location.tls and (any(tls) or self.tls_verify != "full"):
            raise ValueError(
                "url: ca_file, cert_file, key_file, key_password and tls_verify need rediss:// or valkeys://"
            )
        if (self.key_file or self.key_password) and not self.cert_file:
            raise ValueError("key_file and key_password need cert_file")
        for name in ("ca_file", "cert_file", "key_file"):
            path: Path | None = getattr(self, name)
            if path is not None and not path.is_file():
                raise ValueError(f"{name}: {path} is not a file")

    @property
    def location(self) -> Location:
        return parse_url(self.url, SENTINEL_PORT if self.master else DEFAULT_PORT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValkeyOptions(RedisOptions):
    """Settings of the backend `valkey`."""

    read_slice_nbytes: int = 0
    """Records of twice this size and more are read in pieces of it.  Worth it before Valkey 9.  Default 0: whole."""
