"""`lmc ping`, `lmc drain`, `lmc clear`: what is asked of a running daemon."""

from __future__ import annotations

import re
import sys
from typing import Any

import click

from lmcache_core.errors import ConfigError

from .target import target_of, target_options


@click.command("ping", help="Ask whether a daemon answers.")
@target_options(tcp=True)
def ping(**where: Any) -> None:
    with target_of(**where).open() as daemon:
        welcome = daemon.welcome
        milliseconds = 1e3 * daemon.greeting_s
        click.echo(f"{daemon.where} answers in {milliseconds:.1f} ms: pid {welcome.pid}, boot id {welcome.boot_id}")


@click.command("drain", help="Have a daemon write what is not written, and take no new stores.")
@click.option("--within", "within_s", type=float, default=60.0, show_default=True, help="Seconds for the writing.")
@target_options(tcp=True)
def drain(within_s: float, **where: Any) -> None:
    with target_of(**where).open() as daemon:
        done = daemon.drain(within_s)
    if not done:
        click.echo(f"not everything was written within {within_s:g} s; no new stores are taken", err=True)
        sys.exit(1)
    click.echo("everything is written; no new stores are taken until the daemon is started again")


@click.command("clear", help="Remove one namespace, or everything, from a daemon.")
@click.option("--namespace", required=True, metavar="HEX|all", help="A family or shard, as `lmc key` prints them.")
@target_options(tcp=True)
def clear(namespace: str, **where: Any) -> None:
    chosen = _namespace(namespace)
    with target_of(**where).open() as daemon:
        count = daemon.clear(chosen, 60.0)
    click.echo(f"{count} records removed; what is in use stays")
    if not count and chosen:
        click.echo(
            "a family is known to a daemon once an engine has used it there; name its shards otherwise", err=True
        )


def _namespace(text: str) -> bytes:
    if text == "all":
        return b""
    if not re.fullmatch(r"[0-9a-fA-F]{32}", text):
        raise ConfigError(f"--namespace: {text[:80]!r} is neither `all` nor the 32 hex digits of a family or shard")
    return bytes.fromhex(text)
