"""`lmc conform`: check an installed backend against the laws of the kit without writing a test."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import Counter
from typing import Any

import click

from lmcache_core import plugins
from lmcache_core.backend import Backend, Context
from lmcache_core.config import MEMORY
from lmcache_core.errors import ConfigError, PluginError
from lmcache_core.nodes import Scalar, Table
from lmcache_core.options import RawOptions
from lmcache_core.spelling import did_you_mean
from lmcache_core.testing import BackendLaws, LawResult, run_backend_laws

LABELS = {"passed": "ok", "failed": "FAIL", "skipped": "skip", "known": "known"}


@click.command("conform", help="Run the conformance laws on a backend.")
@click.argument("backend")
@click.option("-o", "pairs", multiple=True, metavar="KEY=VALUE", help="An option of the backend; repeatable.")
@click.option("--only", multiple=True, metavar="LAW", help="Check this law alone; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines.")
def command(backend: str, pairs: tuple[str, ...], only: tuple[str, ...], as_json: bool) -> None:
    """Prints each law and a summary; exit status 1 if one fails, 2 if the backend could not be opened."""
    if backend == MEMORY:
        raise ConfigError(f"{MEMORY} is the host memory itself, which is no backend; write e.g. lmc conform disk")
    names = [each.name.removeprefix("test_") for each in BackendLaws.laws()]
    wanted = [name.removeprefix("test_") for name in only]
    for name in wanted:
        if name not in names:
            raise ConfigError(f"--only: no law is called {name!r}{did_you_mean(name, names)}")
    with contextlib.redirect_stdout(sys.stderr):
        kind: Any = plugins.load(plugins.BACKENDS, backend)
    options = raw_options(pairs).into(kind.Options)

    def open_backend(context: Context) -> Backend[Any]:
        opened: Backend[Any] = kind(options, context)
        return opened

    _try_to_open(backend, open_backend)
    started = time.monotonic()
    results = run_backend_laws(
        open_backend,
        only=[f"test_{name}" for name in wanted],
        on_result=None if as_json else _print,
    )
    _summarise(backend, results, time.monotonic() - started, as_json)
    if not all(result.ok for result in results):
        sys.exit(1)


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


def _try_to_open(backend: str, open_backend: Any) -> None:
    """Wrong options are one clear error, not a failure of each law."""
    try:
        open_backend(Context()).close()
    except (ConfigError, PluginError):
        raise
    except Exception as error:
        raise PluginError(f"the backend {backend!r} could not be opened: {type(error).__name__}: {error}") from error


def _print(result: LawResult) -> None:
    sentence = result.name.removeprefix("test_").replace("_", " ")
    detail = f": {result.detail}" if result.detail else ""
    click.echo(f"{LABELS[result.outcome]:<6}{sentence}{detail}")


def _summarise(backend: str, results: list[LawResult], seconds: float, as_json: bool) -> None:
    counts = Counter(result.outcome for result in results)
    if as_json:
        laws = [{"law": r.name.removeprefix("test_"), "outcome": r.outcome, "detail": r.detail} for r in results]
        click.echo(
            json.dumps({"backend": backend, "counts": counts, "seconds": round(seconds, 3), "laws": laws}, indent=1)
        )
        return
    parts = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped", "known"))
    click.echo(f"{backend}: {len(results)} laws in {seconds:.1f} s: {parts}")
