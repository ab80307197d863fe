"""`lmc bench`: measure what a store, a device or a server gives, on this machine and through this product."""

from __future__ import annotations

from typing import Final

import click

from . import LazyGroup

COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "backend": (".bench_backend", "Measure a store through a tier, and say how to set it up."),
    "device": (".bench_device", "Measure the ways on which a device copies, and use the fastest from now on."),
}


@click.group("bench", cls=LazyGroup, own=COMMANDS, under="bench.", help="Measure a store, a device or a server.")
def group() -> None:
    pass
