"""`lmc config`: check, show, begin or migrate a configuration file, and its schema."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import yaml

from lmcache_core import plugins
from lmcache_core.backend import NoOptions
from lmcache_core.config import (
    DEFAULT_FILE,
    MEMORY,
    CacheConfig,
    PluginsConfig,
    TierConfig,
    find_config,
    load_config,
    parse_config,
)
from lmcache_core.errors import CacheError, PluginError
from lmcache_core.nodes import MAX_TEXT_NBYTES
from lmcache_core.options import Origins
from lmcache_core.settings import Setting, settings

from . import incumbent, schema

STARTER = """\
# Configuration of an LMCache Core cache.  `lmc config check` checks it, `lmc config show` prints what is in effect.
chunk_tokens: 256          # the unit of reuse
device: auto               # exactly one available device, or an error that lists them
write: through             # to the tiers below: through | second_use | on_evict

tiers:                     # nearest first
  - name: host
    backend: memory        # the host memory itself: first, at most once
    capacity: 4GiB         # GiB = 2^30 bytes, GB = 10^9, a bare number is bytes
  - name: disk
    backend: disk
    capacity: 50GiB
    options:
      path: ~/.cache/lmcache
  # - name: pool
  #   backend: redis       # pip install lmcache-redis
  #   timeout: 2s
  #   options: {url: "rediss://cache:6379/0", password: "${REDIS_PASSWORD}"}

# socket: auto           # engines use the daemon (`lmc serve`), which opens the tiers once for all of them
# server:
#   http: "127.0.0.1:9464"   # /healthz, /readyz and /metrics of the daemon
#   page: "127.0.0.1:9466"   # the daemon in a browser

plugins:
  disable: []              # names or distributions that count as not installed
  hooks: [log]             # one log line for each request that loads something
"""

_option = click.option(
    "--config", "option", type=click.Path(path_type=Path), help=f"Default: $LMCACHE_CONFIG, else ./{DEFAULT_FILE}."
)
_argument = click.argument("file", required=False, type=click.Path(path_type=Path))


def _one(option: Path | None, file: Path | None) -> Path | None:
    """The file to read, which may be named with or without `--config`."""
    if option is not None and file is not None:
        raise click.UsageError(f"two files are named: {option} and {file}")
    return option if option is not None else file


@click.group("config", help="Check, show, begin or migrate a configuration file.")
def command() -> None:
    pass


@command.command()
@_option
@_argument
def check(option: Path | None, file: Path | None) -> None:
    """Read the configuration, load each plugin that it names, and check the options against it."""
    path = _one(option, file)
    config = load_config(path)
    found = list(problems(config))
    if found:
        raise CacheError("\n".join(found))
    tiers = ", ".join(f"{tier.name} ({tier.backend})" for tier in config.tiers)
    click.echo(f"{find_config(path, os.environ) or 'defaults'}: fine; tiers: {tiers}")


@command.command()
@_option
@_argument
@click.option("--json", "as_json", is_flag=True, help="A JSON array of path, value and source.")
def show(option: Path | None, file: Path | None, as_json: bool) -> None:
    """Print each effective value and where it came from; secrets are masked."""
    config = load_config(_one(option, file))
    table = [setting for part in parts(config) for setting in part]
    if as_json:
        click.echo(json.dumps([asdict(setting) for setting in table], indent=1))
        return
    width = max(len(f"{setting.path}: {setting.value}") for setting in table)
    for setting in table:
        click.echo(f"{f'{setting.path}: {setting.value}':<{min(width, 72)}}  # {setting.source}")


@command.command()
@click.option("--config", "path", type=click.Path(path_type=Path), default=Path(DEFAULT_FILE), show_default=True)
@click.option("--force", is_flag=True, help="Replace a file that is there.")
def init(path: Path, force: bool) -> None:
    """Write a configuration to begin with."""
    try:
        with path.open("w" if force else "x", encoding="utf-8") as stream:
            stream.write(STARTER)
    except FileExistsError as error:
        raise CacheError(f"{path}: is there already; --force replaces it") from error
    except OSError as error:
        raise CacheError(f"{path}: cannot be written: {error.strerror}") from error
    click.echo(f"wrote {path}; check it with: lmc config check --config {path}")


@command.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), help="A new file to write; else standard output.")
def migrate(path: Path, output: Path | None) -> None:
    """Make a configuration of the YAML file of an LMCache 0.5 (in-process), and say what has no counterpart."""
    theirs = _their_values(path)
    made = incumbent.migrate(theirs)
    text = _migrated_text(path, made)
    parse_config(text, "the migrated configuration", dict.fromkeys(made.environ, "x"))
    if output is None:
        click.echo(text, nl=False)
    else:
        try:
            with output.open("x", encoding="utf-8") as stream:
                stream.write(text)
        except FileExistsError as error:
            raise CacheError(f"{output}: is there already") from error
        except OSError as error:
            raise CacheError(f"{output}: cannot be written: {error.strerror}") from error
    for note in made.notes:
        click.echo(f"not carried over: {note.key}: {note.value}: {note.why}", err=True)
    for variable in made.environ:
        click.echo(f"set in the environment: {variable} (secrets do not stand in the file)", err=True)


@command.command("schema")
def print_schema() -> None:
    """Print a JSON Schema of the configuration file, with the options of each installed backend, for editors."""
    backends: dict[str, type] = {}
    for offer in plugins.discover(plugins.BACKENDS):
        try:
            with contextlib.redirect_stdout(sys.stderr):
                backends[offer.name] = plugins.load(plugins.BACKENDS, offer.name).Options
        except PluginError as error:
            click.echo(f"warning: the options of {offer.name} are left open: {error}", err=True)
    click.echo(json.dumps(schema.schema(backends), indent=1))


def _their_values(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_TEXT_NBYTES + 1)
        if len(raw) > MAX_TEXT_NBYTES:
            raise CacheError(f"{path}: larger than the limit of {MAX_TEXT_NBYTES} bytes")
        values = yaml.safe_load(raw)
    except OSError as error:
        raise CacheError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise CacheError(f"{path}: is not YAML: {' '.join(str(error).split())[:300]}") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise CacheError(f"{path}: the configuration must be a mapping (key: value)")
    return values


def _migrated_text(path: Path, made: incumbent.Migration) -> str:
    lines = [f"# Made from {path.name} by `lmc config migrate`; check it with `lmc config check`."]
    lines += ["# What the other cache has stored is not read: this one begins empty."]
    lines += [f"# Needs the environment variable {variable}." for variable in made.environ]
    lines += ["# Not carried over:"] if made.notes else []
    lines += [f"#   {note.key}: {note.value}: {note.why}" for note in made.notes]
    text = (
        "\n".join(" ".join(line.splitlines()) for line in lines)
        + "\n"
        + yaml.safe_dump(made.config, sort_keys=False, allow_unicode=True)
    )
    return text.encode("utf-8", "backslashreplace").decode()  # YAML has escapes for what is no text


def problems(config: CacheConfig) -> Iterator[str]:
    """What is wrong beyond the file itself: plugins that are missing or broken, options they do not take."""
    use = config.plugins
    for tier in config.tiers:
        for group, name in _named_by(tier):
            yield from _problem(config, f"tiers.{tier.name}.{plugins.kind_of(group)}", partial(_load, group, name, use))
        try:
            _typed_options(tier, use, {})
        except PluginError:
            pass  # said above
        except CacheError as error:
            yield str(error)
    if config.device != "auto":
        yield from _problem(config, "device", partial(_load, plugins.DEVICES, config.device, use))
    for key, hooks, inline in (("hooks", config.plugins.hooks, None), ("inline", (), config.plugins.inline)):
        yield from _problem(config, f"plugins.{key}", partial(_load_hooks, hooks, use.disable, inline))


def _problem(config: CacheConfig, path: str, load: Callable[[], object]) -> Iterator[str]:
    """What `load` says against the value at `path`, with where that value was written."""
    try:
        load()
    except PluginError as error:
        source = config.origins[path].source if path in config.origins else "default"
        yield f"{source}: {path}: {error}"


def _named_by(tier: TierConfig) -> Iterator[tuple[str, str]]:
    if tier.backend != MEMORY:
        yield plugins.BACKENDS, tier.backend
    yield plugins.POLICIES, tier.policy
    yield plugins.CODECS, tier.codec


def _load(group: str, name: str, use: PluginsConfig) -> type[Any]:
    with contextlib.redirect_stdout(sys.stderr):
        return plugins.load(group, name, use.disable, use.inline)


def _load_hooks(names: tuple[str, ...], disable: tuple[str, ...], inline: str | None) -> object:
    with contextlib.redirect_stdout(sys.stderr):
        return plugins.load_hooks(names, disable, inline)


def _typed_options(tier: TierConfig, use: PluginsConfig, origins: Origins) -> Any:
    kind = NoOptions if tier.backend == MEMORY else _load(plugins.BACKENDS, tier.backend, use).Options
    return tier.options.into(kind, origins)


def parts(config: CacheConfig) -> Iterator[Iterator[Setting]]:
    """The settings with the options of each tier as its plugin understands them, or as written where it cannot."""
    yield (s for s in settings(config, "", config.origins) if not s.path.startswith("tiers."))
    for tier in config.tiers:
        origins = dict(config.origins)
        path = f"tiers.{tier.name}"
        try:
            options = _typed_options(tier, config.plugins, origins)
        except CacheError as error:
            click.echo(f"warning: {path}.options are shown as written: {error}", err=True)
            yield settings(tier, path, origins)
        else:
            bare = replace(tier, options=type(tier.options)())
            yield settings(bare, path, origins)
            yield settings(options, f"{path}.options", origins)
