"""`lmc pin`, `lmc unpin`, `lmc prefetch`: what a daemon holds of one prompt, given as for `lmc key`."""

from __future__ import annotations

import sys
from typing import Any

import click

from lmcache_core.errors import CacheError

from .key import prompt_of, prompt_options
from .target import target_of, target_options


@click.command("pin", help="Keep a prompt's chunks in a daemon's memory.")
@prompt_options
@target_options(tcp=False)
def pin(socket: Any, config: Any, timeout: float, **prompt: Any) -> None:
    chain = prompt_of(**prompt)
    with target_of(socket, config, timeout).open() as daemon:
        count = daemon.pin(chain, timeout)
    click.echo(f"{count} of {len(chain)} chunks are in memory, and stay there until `lmc unpin` or the daemon's end")
    if count < len(chain):
        click.echo("the others are not in memory: `lmc prefetch` brings what is in the tiers below", err=True)


@click.command("unpin", help="End what `lmc pin` keeps.")
@prompt_options
@target_options(tcp=False)
def unpin(socket: Any, config: Any, timeout: float, **prompt: Any) -> None:
    chain = prompt_of(**prompt)
    with target_of(socket, config, timeout).open() as daemon:
        known = daemon.unpin(chain, timeout)
    if not known:
        click.echo("that prompt was not pinned", err=True)
        sys.exit(1)
    click.echo("unpinned")


@click.command("prefetch", help="Bring a prompt's chunks into a daemon's memory.")
@prompt_options
@click.option("--within", "within_s", type=float, default=60.0, show_default=True, help="Seconds for the loading.")
@target_options(tcp=False)
def prefetch(within_s: float, socket: Any, config: Any, timeout: float, **prompt: Any) -> None:
    chain = prompt_of(**prompt)
    target = target_of(socket, config, timeout)
    target.open().close()  # says why, if it is not there
    from lmcache_core.client.cache import connect

    with connect(target.socket, connect_timeout_s=timeout, call_timeout_s=timeout, load_timeout_s=within_s) as cache:
        result = cache.prefetch(chain).wait(within_s)
        if result is None:
            raise CacheError(f"not all was loaded within {within_s:g} s")
        resident = cache.lookup(chain, "prefetch").resident
        cache.release("prefetch")
    for start, stop, reason in result.failed:
        click.echo(f"chunks {start} to {stop - 1}: {reason}", err=True)
    click.echo(f"{resident} of {len(chain)} chunks are in memory")
    if result.failed:
        sys.exit(1)
