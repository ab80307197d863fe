"""`lmc serve`: the daemon, in the foreground, until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import click

from lmcache_core.config import DEFAULT_FILE, CacheConfig, find_config, load_config
from lmcache_core.endpoints import DEFAULT_PAGE, socket_path
from lmcache_core.errors import ConfigError
from lmcache_core.logs import JsonFormatter
from lmcache_core.options import FieldError

log = logging.getLogger(__name__)


@click.command("serve", help="Run the daemon: one cache for every engine on this node.")
@click.option(
    "--config", "path", type=click.Path(path_type=Path), help=f"Default: $LMCACHE_CONFIG, else ./{DEFAULT_FILE}."
)
@click.option("--socket", help="Where to listen.  [default: that of the configuration]")
@click.option(
    "--page",
    is_flag=False,
    flag_value=DEFAULT_PAGE,
    metavar="[IP:PORT]",
    help=f"Serve the web dashboard on loopback; without an address on {DEFAULT_PAGE}.",
)
@click.option("--verbose", is_flag=True, help="Log connections that come and go, and more.")
@click.option("--json", "as_json", is_flag=True, help="Log one JSON object for each line.")
def command(path: Path | None, socket: str | None, page: str | None, verbose: bool, as_json: bool) -> None:
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if as_json:
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonFormatter())
    logging.getLogger("asyncio").setLevel(logging.INFO)
    config = load_config(path)
    if page is not None:
        config = _with_page(config, page)
    log.info("pid %d, configuration: %s", os.getpid(), find_config(path, os.environ) or "defaults")
    from lmcache_core.server.daemon import Daemon

    with closing(Daemon(config, socket_path=socket_path(socket) if socket is not None else None)) as daemon:
        asyncio.run(daemon.run())
    log.info("stopped")


def _with_page(config: CacheConfig, address: str) -> CacheConfig:
    try:
        return replace(config, server=replace(config.server, page=address))
    except FieldError as error:
        raise ConfigError(f"--page: {error}") from error
