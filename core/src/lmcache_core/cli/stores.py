"""Which stores a command looks into: those of a configuration, or one that is named by its backend and options."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click

from lmcache_core.backend import Backend
from lmcache_core.backends.disk import DiskOptions
from lmcache_core.config import DEFAULT_FILE, MEMORY, PluginsConfig, TierConfig, load_config
from lmcache_core.errors import CacheError, ConfigError, PluginError
from lmcache_core.opening import open_backend
from lmcache_core.spelling import did_you_mean

from .conform import raw_options

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Store:
    """A store that can be opened."""

    name: str
    """Of its tier, or of its backend."""
    tier: TierConfig
    use: PluginsConfig

    @contextlib.contextmanager
    def open(self) -> Iterator[Backend[Any]]:
        """The backend, without a capacity of ours; CacheError says why not."""
        with contextlib.redirect_stdout(sys.stderr):
            backend = _opened(self.tier, self.use)
        with contextlib.closing(backend):
            yield backend


def store_options(command: F) -> F:
    """The options that name stores; they reach the command as keywords for `stores_of`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


_OPTIONS = (
    click.argument("backend", required=False),
    click.option("-o", "pairs", multiple=True, metavar="KEY=VALUE", help="An option of BACKEND (disk); repeatable."),
    click.option(
        "--config",
        type=click.Path(path_type=Path),
        help=f"Default: $LMCACHE_CONFIG, else {DEFAULT_FILE}.",
    ),
    click.option("--tier", help="Only this tier of the configuration."),
)


def stores_of(backend: str | None, pairs: tuple[str, ...], config: Path | None, tier: str | None) -> list[Store]:
    """The stores that those options name."""
    if backend is not None or pairs:
        if config is not None or tier is not None:
            raise click.UsageError("name a backend with its -o options, or a configuration; not both")
        name = backend or "disk"
        if name == MEMORY:
            raise ConfigError(f"{MEMORY} is the host memory of a running cache; what is in it is checked there")
        options = raw_options(pairs)
        return [Store(name, TierConfig("store", name, options=options), PluginsConfig())]
    found = load_config(config)
    tiers = [each for each in found.tiers if each.backend != MEMORY]
    if tier is not None:
        named = [each for each in tiers if each.name == tier]
        if not named:
            names = [each.name for each in tiers]
            there = ", ".join(names) or "none"
            raise ConfigError(f"--tier: no store is called {tier!r}{did_you_mean(tier, names)}; there are: {there}")
        tiers = named
    if not tiers:
        raise ConfigError(
            "the configuration has no tier below the host memory; name a store, e.g. -o path=/var/cache/lmcache"
        )
    return [Store(each.name, each, found.plugins) for each in tiers]


def _opened(tier: TierConfig, use: PluginsConfig) -> Backend[Any]:
    if tier.backend in ("disk", "disk@lmcache-core"):
        path = tier.options.into(DiskOptions).path
        if not (Path(path).expanduser() / "v1").is_dir():
            raise ConfigError(f"{path}: there is no store")  # opening it would make one
    try:
        return open_backend(replace(tier, capacity_nbytes=None), use)
    except CacheError:
        raise
    except Exception as error:
        raise PluginError(
            f"the backend {tier.backend!r} could not be opened: {type(error).__name__}: {error}"
        ) from error
