"""`lmc plugins`: what is installed, from metadata; imported only with --load."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from lmcache_core import plugins
from lmcache_core.config import load_config
from lmcache_core.errors import ConfigError, PluginError
from lmcache_core.plugins import PluginInfo

from .display import table


@dataclass(frozen=True, slots=True)
class Row:
    group: str
    name: str
    distribution: str
    version: str
    api: str
    state: str
    """"not loaded", "loaded", "failed", "disabled", "shadowed" (a built-in has the name) or "conflict"."""
    target: str
    location: str
    detail: str = ""


@click.command("plugins", help="List the installed plugins without importing them.")
@click.option("--json", "as_json", is_flag=True, help="A JSON array, one object for each plugin.")
@click.option("--load", is_flag=True, help="Import each one and say what came of it; exit status 1 if one fails.")
@click.option("--config", "path", type=click.Path(path_type=Path), help="Configuration whose plugins.disable to obey.")
def command(as_json: bool, load: bool, path: Path | None) -> None:
    found = rows(_disabled(path), load)
    if as_json:
        click.echo(json.dumps([asdict(row) for row in found], indent=1))
    else:
        _print_table(found)
    if any(row.state == "failed" for row in found):
        sys.exit(1)


def rows(disable: Iterable[str] = (), load: bool = False) -> list[Row]:
    """One row for each offer of each group."""
    disable = tuple(disable)
    offers = plugins.discover()
    return [_row(offer, offers, disable, load) for offer in offers]


def _row(offer: PluginInfo, offers: list[PluginInfo], disable: tuple[str, ...], load: bool) -> Row:
    state, api, detail = _state(offer, offers, disable), "?", ""
    if load and state != "disabled":
        outcome, api, detail = _try(offer)
        state = outcome if outcome == "failed" or state == "not loaded" else state
    group = offer.group.rpartition(".")[2]
    return Row(group, offer.name, offer.dist, offer.version, api, state, offer.target, offer.location, detail)


def _state(offer: PluginInfo, offers: list[PluginInfo], disable: tuple[str, ...]) -> str:
    if plugins.is_disabled(offer, disable):
        return "disabled"
    if not any(o.group == offer.group and o.name == offer.name and o != offer for o in offers):
        return "not loaded"
    try:
        chosen = plugins.resolve(offer.group, offer.name, disable)
    except PluginError:
        return "conflict"
    return "not loaded" if chosen == offer else "shadowed"


def _try(offer: PluginInfo) -> tuple[str, str, str]:
    """State, API version and error.  What a plugin prints while it is imported must not get into our output."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            loaded = plugins.LOADERS[offer.group](offer)
    except PluginError as error:
        return "failed", "?", str(error)
    if offer.group == plugins.COMMANDS:
        return "loaded", "-", ""
    major, minor = loaded.api_version  # checked while loading
    return "loaded", f"{major}.{minor}", ""


def _disabled(path: Path | None) -> tuple[str, ...]:
    """A broken configuration must not hide the plugins from whoever is mending it, unless it was named."""
    try:
        return load_config(path).plugins.disable
    except ConfigError as error:
        if path is not None:
            raise
        click.echo(f"warning: nothing is shown as disabled: {error}", err=True)
        return ()


def _print_table(rows: list[Row]) -> None:
    if not rows:
        click.echo("no plugins are installed")
        return
    lines = [("GROUP", "NAME", "DISTRIBUTION", "VERSION", "API", "STATE")]
    lines += [(row.group, row.name, row.distribution, row.version, row.api, row.state) for row in rows]
    for line in table(lines):
        click.echo(line)
    for row in rows:
        if row.detail:
            click.echo(f"\n{row.detail}")
