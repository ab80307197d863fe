"""Where the daemon is reached, and who may connect: its sockets as a configuration gives them."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from .errors import ConfigError
from .options import FieldError

AUTO: Final = "auto"
"""As a socket: the one that a daemon serves which was not told where."""
DEFAULT_PAGE: Final = "127.0.0.1:9466"
_MODE: Final = re.compile(r"0?[0-7]{3}")
_MIN_TOKEN: Final = 16


@dataclass(frozen=True, slots=True)
class TcpConfig:
    """Operators' commands over TCP.  Memory cannot be shared that way: engines need the Unix socket."""

    listen: str = ""
    """"IP:PORT"; empty for none."""
    certificate: Path | None = None
    key: Path | None = None
    token: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if not self.listen:
            return
        try:
            address = parse_address(self.listen)
        except ValueError as error:
            raise FieldError("listen", str(error)) from error
        if (self.certificate is None) != (self.key is None):
            raise FieldError("key", "a certificate and its key are given together")
        if len(self.token) < _MIN_TOKEN:
            raise FieldError("token", f"TCP needs a token of at least {_MIN_TOKEN} characters")
        if self.certificate is None and not address.is_loopback:
            raise FieldError("certificate", f"{self.listen} is not on loopback: TCP needs TLS there")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How the daemon is reached: a Unix socket, HTTP on loopback for health, metrics and a page, TCP for operators."""

    socket: str = ""
    """Path; empty for the configuration's `socket`, or lmcache/lmcache.sock in the run directory."""
    socket_mode: str = "0600"
    socket_group: str = ""
    allowed_uids: tuple[int, ...] = ()
    """Who may connect; empty for the daemon's own user and root."""
    max_clients: int = 1024
    nice: int = -10
    """Of the thread that answers, where the system allows it: it is short of time only when engines take all cores."""
    http: str = ""
    """"127.0.0.1:9464", say; empty for none."""
    page: str = ""
    """"127.0.0.1:9466", say: where people look at the daemon in a browser; empty for nowhere."""
    page_token: str = field(default="", repr=False)
    """With it, the page may also drain.  Empty: it only shows."""
    tcp: TcpConfig = TcpConfig()

    def __post_init__(self) -> None:
        if not _MODE.fullmatch(self.socket_mode):
            raise FieldError("socket_mode", f'{self.socket_mode[:80]!r} is not an octal mode; write e.g. "0660"')
        if not 1 <= self.max_clients <= 65_536:
            raise FieldError("max_clients", f"must be 1 to 65,536, got {self.max_clients}")
        if not -20 <= self.nice <= 19:
            raise FieldError("nice", f"must be -20 to 19, got {self.nice}")
        check_loopback("http", self.http)
        check_loopback("page", self.page)
        if self.page and self.page == self.http and parse_address(self.page).port:
            raise FieldError("page", f"{self.page} is the address of server.http; give the page one of its own")
        if self.page_token and len(self.page_token) < _MIN_TOKEN:
            raise FieldError("page_token", f"needs at least {_MIN_TOKEN} characters")

    @property
    def mode(self) -> int:
        return int(self.socket_mode, 8)


@dataclass(frozen=True, slots=True)
class Address:
    """An IP address and a port, 0 for a free one."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        return ip_address(self.host).is_loopback

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """ "127.0.0.1:9464" or "[::1]:9464"; ValueError says what to write."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([0-9.]+)):([0-9]{1,5})", text)
    try:
        if match is None or int(match[3]) > 65_535:
            raise ValueError("no match")
        host = match[1] or match[2]
        ip_address(host)
    except ValueError as error:
        raise ValueError(f"{text[:80]!r} is not an IP address and a port; write e.g. 127.0.0.1:9464") from error
    return Address(host, int(match[3]))


def check_loopback(field_name: str, text: str) -> None:
    """FieldError unless `text` is empty, or an address and port on loopback."""
    if not text:
        return
    try:
        address = parse_address(text)
    except ValueError as error:
        raise FieldError(field_name, str(error)) from error
    if not address.is_loopback:
        raise FieldError(field_name, f"{text} is not on loopback; put a proxy with authentication before it")


def socket_path(text: str) -> Path:
    """The path that a configuration's `socket` means."""
    if text == AUTO:
        return default_socket()
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"socket: {text!r}: {error}") from error


def default_socket() -> Path:
    """Where a daemon listens that was not told: in the user's or the system's run directory."""
    run = os.environ.get("XDG_RUNTIME_DIR")
    if run:
        return Path(run) / "lmcache" / "lmcache.sock"
    if os.getuid() == 0:
        return Path("/run/lmcache/lmcache.sock")
    folder = Path(f"/tmp/lmcache-{os.getuid()}")
    try:
        if (found := folder.lstat()).st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
            raise ConfigError(f"socket: {folder} is another user's; set XDG_RUNTIME_DIR, or name a path")
    except FileNotFoundError:
        pass
    return folder / "lmcache.sock"
