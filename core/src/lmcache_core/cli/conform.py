"""`lmc conform`: check an installed plugin against the laws of its kind without writing a test."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import click

from lmcache_core import plugins, testing
from lmcache_core.backend import Backend, Context
from lmcache_core.config import MEMORY
from lmcache_core.errors import ConfigError, PluginError, PluginNotFound
from lmcache_core.nodes import Scalar, Table
from lmcache_core.options import RawOptions
from lmcache_core.spelling import did_you_mean
from lmcache_core.testing import LawResult, Laws

LABELS = {"passed": "ok", "failed": "FAIL", "skipped": "skip", "known": "known"}


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of plugin: its group, its laws, and the member of them that is the plugin or makes one."""

    group: str
    laws: type[Laws]
    member: str


KINDS: Final = {
    "backend": Kind(plugins.BACKENDS, testing.BackendLaws, "open_backend"),
    "codec": Kind(plugins.CODECS, testing.CodecLaws, "open_codec"),
    "device": Kind(plugins.DEVICES, testing.DeviceLaws, "device_class"),
    "policy": Kind(plugins.POLICIES, testing.PolicyLaws, "new_policy"),
}


@click.command("conform", help="Run the conformance laws on a plugin.")
@click.argument("plugin", metavar="[KIND:]PLUGIN")
@click.option("-o", "pairs", multiple=True, metavar="KEY=VALUE", help="An option of a backend; repeatable.")
@click.option("--only", multiple=True, metavar="LAW", help="Check this law alone; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines.")
def command(plugin: str, pairs: tuple[str, ...], only: tuple[str, ...], as_json: bool) -> None:
    """Prints each law and a summary; exit status 1 if one fails, 2 if the plugin could not be loaded or opened.

    KIND is backend, codec, device or policy; it may be left out where one kind alone has a plugin of that name.
    """
    kind, name = kind_and_name(plugin)
    laws = _laws_named(KINDS[kind].laws, only)
    options = raw_options(pairs)
    if pairs and kind != "backend":
        raise ConfigError(f"-o: a {kind} takes no options")
    with contextlib.redirect_stdout(sys.stderr):
        subject: Any = plugins.load(KINDS[kind].group, name)
    if kind == "backend":
        subject = _opener(name, subject, options)
    started = time.monotonic()
    results = _laws_of(KINDS[kind], subject).results(laws, None if as_json else _print)
    _summarise(kind, name, results, time.monotonic() - started, as_json)
    if not all(result.ok for result in results):
        sys.exit(1)


def kind_and_name(plugin: str) -> tuple[str, str]:
    """("codec", "zstd") for "codec:zstd", and for "zstd" where only codecs have that name."""
    kind, colon, name = plugin.rpartition(":")
    if colon:
        if kind not in KINDS:
            raise ConfigError(f"{plugin}: {kind!r} is none of {', '.join(KINDS)}{did_you_mean(kind, KINDS)}")
    elif name == MEMORY:
        kind = "backend"
    else:
        bare = name.partition("@")[0]
        kinds = [kind for kind, of in KINDS.items() if any(o.name == bare for o in plugins.discover(of.group))]
        if len(kinds) > 1:
            raise ConfigError(f"{name} is more than one plugin; write {' or '.join(f'{k}:{name}' for k in kinds)}")
        if not kinds:
            names = sorted({offer.name for of in KINDS.values() for offer in plugins.discover(of.group)})
            raise PluginNotFound(
                f"no backend, codec, device or policy {name!r} is installed{did_you_mean(bare, names)}; "
                f"found: {', '.join(names)}"
            )
        kind = kinds[0]
    if kind == "backend" and name == MEMORY:
        raise ConfigError(f"{MEMORY} is the host memory itself, which is no backend; write e.g. lmc conform disk")
    return kind, name


def raw_options(pairs: tuple[str, ...]) -> RawOptions:
    """Options as given by `-o key=value`, read as in a configuration file; lists are separated by commas."""
    items: dict[str, Scalar] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"-o {pair}: write -o key=value")
        if key in items:
            raise ConfigError(f"-o {key}: given twice")
        items[key] = Scalar(value, f"-o {key}")
    return RawOptions(Table(items, "-o", {key: f"-o {key}" for key in items}), "options")


def _laws_named(laws: type[Laws], only: Sequence[str]) -> list[str]:
    names = [each.name.removeprefix("test_") for each in laws.laws()]
    wanted = [name.removeprefix("test_") for name in only]
    for name in wanted:
        if name not in names:
            raise ConfigError(f"--only: no law is called {name!r}{did_you_mean(name, names)}")
    return [f"test_{name}" for name in wanted]


def _laws_of(kind: Kind, subject: Any) -> Laws:
    members = {kind.member: subject if kind.member == "device_class" else staticmethod(subject)}
    laws: Laws = type("LawsOfOnePlugin", (kind.laws,), members)()
    return laws


def _opener(name: str, backend: Any, raw: RawOptions) -> Callable[[Context], Backend[Any]]:
    """What opens the backend; wrong options are one clear error, not a failure of each law."""
    options = raw.into(backend.Options)

    def open_backend(context: Context) -> Backend[Any]:
        opened: Backend[Any] = backend(options, context)
        return opened

    try:
        open_backend(Context()).close()
    except (ConfigError, PluginError):
        raise
    except Exception as error:
        raise PluginError(f"the backend {name!r} could not be opened: {type(error).__name__}: {error}") from error
    return open_backend


def _print(result: LawResult) -> None:
    sentence = result.name.removeprefix("test_").replace("_", " ")
    detail = f": {result.detail}" if result.detail else ""
    click.echo(f"{LABELS[result.outcome]:<6}{sentence}{detail}")


def _summarise(kind: str, name: str, results: list[LawResult], seconds: float, as_json: bool) -> None:
    counts = Counter(result.outcome for result in results)
    if as_json:
        laws = [{"law": r.name.removeprefix("test_"), "outcome": r.outcome, "detail": r.detail} for r in results]
        found = {"kind": kind, "name": name, "counts": counts, "seconds": round(seconds, 3), "laws": laws}
        click.echo(json.dumps(found, indent=1))
        return
    parts = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped", "known"))
    click.echo(f"{kind} {name}: {len(results)} laws in {seconds:.1f} s: {parts}")
