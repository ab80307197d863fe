"""`lmc bench device`: the ways on which a device copies, side by side, and which of them it uses from now on."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from datetime import date
from typing import Final

import click

from lmcache_core import choice, plugins
from lmcache_core.config import PluginsConfig
from lmcache_core.device import Device, SupportsPaths
from lmcache_core.errors import ConfigError
from lmcache_core.opening import open_device

from .device_speed import DIRECT, Speeds, Subject, measure, subject_of
from .display import table

_CLEARLY: Final = 1.05
"""How many times as fast as the first path another has to be."""

_HELP: Final = """Measure the ways on which a device copies, and use the fastest from now on.

NAME is a device plugin's; by default the accelerator that is here, or the CPU.  Copied are chunks of 256 tokens of a
model with 8 billion parameters, in blocks of 16 tokens, in order and scattered, beside one large copy.
"""


@click.command("device", help=_HELP)
@click.argument("name", required=False, default="auto")
@click.option("--on", type=click.Choice(["cpu"]), help="Pages in the CPU's memory; the accelerator need not be there.")
@click.option("--chunks", type=click.IntRange(1, 64), default=8, show_default=True, help="32 MiB each.")
@click.option("--rounds", type=click.IntRange(1, 100), default=7, show_default=True)
@click.option("--no-keep", is_flag=True, help="Only measure: what is used stays as it is.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
def command(name: str, on: str | None, chunks: int, rounds: int, no_keep: bool, as_json: bool) -> None:
    """Nothing of it is on the path of a request: the choice is read when a cache is opened."""
    with contextlib.redirect_stdout(sys.stderr):
        if on is None:
            name, device = open_device(name, PluginsConfig())
        elif name == "auto":
            raise ConfigError("--on cpu: name the device, e.g. lmc bench device cuda --on cpu")
        else:
            device = plugins.load(plugins.DEVICES, name)()
        try:
            subject = subject_of(device, on_cpu=on is not None)
            speeds = measure(subject, chunks, rounds)
        finally:
            device.close()
    chosen = _chosen(subject, speeds)
    kept = _keep(name, chosen) if chosen is not None and not no_keep else None
    if as_json:
        found = {"device": name, "pages": subject.where, **asdict(speeds), "choice": chosen and asdict(chosen)}
        click.echo(json.dumps({**found, "identity": _identity(device), "kept": kept}, indent=1))
    else:
        for line in _lines(name, subject, speeds, chosen, kept):
            click.echo(line)


def _identity(device: Device) -> dict[str, str]:
    return dict(device.identity()) if isinstance(device, SupportsPaths) else {}


def _chosen(subject: Subject, speeds: Speeds) -> choice.Choice | None:
    if not subject.several or not speeds.figures:
        return None
    gather, scatter = (speeds.fastest(what, subject.paths[0], _CLEARLY) for what in ("gather", "scatter"))
    today = date.today().isoformat()
    return choice.Choice(gather=gather, scatter=scatter, measured_on=today, identity=_identity(subject.device))


def _keep(name: str, chosen: choice.Choice) -> str | None:
    try:
        return str(choice.keep(name, chosen))
    except OSError as error:
        click.echo(f"not kept: {error}", err=True)
        return None


def _lines(
    name: str, subject: Subject, speeds: Speeds, chosen: choice.Choice | None, kept: str | None
) -> Iterator[str]:
    yield (
        f"{name}, pages in {subject.where}; one large copy: {speeds.large_gather_gib_s:.2f} GiB/s out of there, "
        f"{speeds.large_scatter_gib_s:.2f} into there"
    )
    rows = [("path", "blocks", "gather GiB/s", "of large", "scatter GiB/s", "of large")]
    for f in speeds.figures:
        numbers = (f.gather_gib_s, f.gather_ratio, f.scatter_gib_s, f.scatter_ratio)
        rows.append((f.path, f.blocks, *(f"{number:.2f}" for number in numbers)))  # type: ignore[arg-type]
    for line in table(rows):
        yield f"  {line}"
    for path, why in speeds.unusable.items():
        yield f"  {path}: cannot be used here: {why}"
    if chosen is None:
        yield f"one path, {DIRECT}: there is nothing to choose"
    else:
        yield f"from now on: gather by {chosen.gather}, scatter by {chosen.scatter}" if kept else f"would be: {chosen}"
        if kept:
            yield f"kept in {kept}"
