"""Which daemon a command speaks to, as options of `lmc`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from lmcache_core.client.control import Control
from lmcache_core.config import DEFAULT_FILE, load_config
from lmcache_core.endpoints import parse_address, socket_path
from lmcache_core.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Target:
    """A daemon by its Unix socket, or by `tcp` with a token."""

    socket: Path
    tcp: str
    token: str
    ca: Path | None
    timeout_s: float

    def open(self) -> Control:
        """Connect; BackendUnavailable or WireError says why not."""
        if not self.tcp:
            return Control.unix(self.socket, timeout_s=self.timeout_s)
        try:
            address = parse_address(self.tcp)
        except ValueError as error:
            raise ConfigError(f"--tcp: {error}") from error
        if not self.token:
            raise ConfigError("--tcp needs the daemon's token in the environment variable LMCACHE_TOKEN")
        return Control.tcp(address, token=self.token, ca=self.ca, timeout_s=self.timeout_s)


def target_options(*, tcp: bool) -> Callable[[F], F]:
    """The options that name a daemon; they reach the command as keywords for `target_of`."""
    options = [
        click.option("--socket", help="The daemon's socket.  [default: that of the configuration]"),
        click.option(
            "--config", type=click.Path(path_type=Path), help=f"Default: $LMCACHE_CONFIG, else {DEFAULT_FILE}."
        ),
        click.option("--timeout", type=float, default=5.0, show_default=True, help="Seconds to wait for an answer."),
    ]
    if tcp:
        options += [
            click.option("--tcp", default="", metavar="IP:PORT", help="Over TCP instead; the token is $LMCACHE_TOKEN."),
            click.option("--ca", type=click.Path(path_type=Path), help="Certificate to trust for --tcp."),
        ]

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def target_of(socket: str | None, config: Path | None, timeout: float, tcp: str = "", ca: Path | None = None) -> Target:
    """The daemon that those options name."""
    return Target(daemon_socket(socket, config), tcp, os.environ.get("LMCACHE_TOKEN", ""), ca, timeout)


def daemon_socket(socket: str | None, path: Path | None) -> Path:
    """The socket that was named, else that of the configuration, else the default one."""
    return socket_path(socket) if socket is not None else load_config(path).daemon_socket
