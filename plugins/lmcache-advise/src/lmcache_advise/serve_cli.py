"""`lmc bench serve`: what a cache does for an OpenAI-compatible endpoint, on workloads that look like services."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from lmcache_core import CacheError, ConfigError, __version__

from . import serve_page
from .cli import write_text
from .driving import MAX_USERS, Run, alternate
from .prompts import WORKLOADS, Session, Size, replayed
from .serve_page import WITH, WITHOUT, Report
from .serving import Endpoint, checked_url, model_of
from .units import TIME
from .verdict import comparison_of, figures_of, verdict_alone, verdict_of

_FILE = click.Path(path_type=Path)


@click.command("serve", help="Measure an OpenAI-compatible endpoint, with a cache and without, and say if it helps.")
@click.argument("url")
@click.option("--baseline", help="The same model without the cache: what it is compared with.")
@click.option("--workload", "-w", "workloads", multiple=True, type=click.Choice((*WORKLOADS, "all")),
              help="Repeatable.  [default: all]")  # fmt: skip
@click.option(
    "--trace", type=_FILE, help="Replay the requests of this trace instead: made-up text, equal where it was."
)
@click.option("--speed", type=click.FloatRange(0.001, 1e6), default=1.0, show_default=True, help="Of the trace.")
@click.option("--model", help="[default: the first that the endpoint lists]")
@click.option("--users", type=click.IntRange(1, MAX_USERS), default=4, show_default=True, help="At a time.")
@click.option(
    "--sessions", type=click.IntRange(1, 10_000), default=8, show_default=True, help="Agents; their turns alternate."
)
@click.option("--turns", type=click.IntRange(1, 100), default=6, show_default=True, help="Of each agent.")
@click.option("--scale", type=click.FloatRange(1e-4, 10), default=1.0, show_default=True,
              help="Of all lengths; at 1 an agent goes from 20k to 115k tokens.")  # fmt: skip
@click.option("--max-tokens", type=click.IntRange(1, 10_000), default=32, show_default=True, help="Of an answer.")
@click.option("--seed", type=int, default=0, show_default=True,
              help="Another one asks what no endpoint has seen.")  # fmt: skip
@click.option("--rounds", type=click.IntRange(1, 100), default=1, show_default=True,
              help="Ask the endpoints in turn, a part at a time.")  # fmt: skip
@click.option("--note", "notes", multiple=True, help="Into the report, e.g. what is served how.  Repeatable.")
@click.option("--timeout", type=TIME, default=300.0, help="Of one request.  [default: 300s]")
@click.option("--limit", type=TIME, default=1800.0, help="Of one workload on one endpoint.  [default: 30min]")
@click.option("--api-key-env", default="OPENAI_API_KEY", show_default=True, help="The variable with the key, if any.")
@click.option("--out", type=_FILE, help="Write the report as JSON.")
@click.option("--html", type=_FILE, help="Write it as a page of its own.")
@click.option("--json", "as_json", is_flag=True, help="The report as JSON instead of a table.")
def serve(url: str, baseline: str | None, as_json: bool, **options: Any) -> None:
    """URL is the endpoint with the cache, e.g. http://127.0.0.1:8000/v1."""
    try:
        report = measure(url, baseline, options)
        found = json.dumps(report.as_json(), indent=1) + "\n"
        if options["out"]:
            write_text(options["out"], found)
        if options["html"]:
            write_text(options["html"], serve_page.html_of(report))
    except CacheError as error:
        raise click.ClickException(str(error)) from error
    click.echo(found if as_json else serve_page.text_of(report), nl=False)


def measure(url: str, baseline: str | None, options: Mapping[str, Any]) -> Report:
    """Ask everything of each endpoint, the one without the cache first."""
    urls = {WITHOUT: checked_url(baseline)} if baseline else {}
    urls[WITH] = checked_url(url)
    if len(set(urls.values())) < len(urls):
        raise ConfigError("the baseline is the same endpoint: it would be compared with itself")
    key = os.environ.get(options["api_key_env"], "")
    model = options["model"] or model_of(urls[WITH], key)
    size = Size(
        users=options["users"], sessions=options["sessions"], turns=options["turns"], scale=options["scale"],
        seed=options["seed"],
    )  # fmt: skip
    began = datetime.now(UTC).isoformat(timespec="seconds")
    endpoints = {
        side: Endpoint(where, model, key, options["timeout"], options["max_tokens"]) for side, where in urls.items()
    }
    runs: dict[str, dict[str, Run]] = {}
    for name, sessions in _sessions(options, size).items():
        click.echo(
            f"{name}: {sum(len(each.turns) for each in sessions)} requests to {', '.join(urls.values())}", err=True
        )
        runs[name] = alternate(
            endpoints, sessions, size.users, rounds=options["rounds"], limit_s=options["limit"]
        )  # fmt: skip
    figures = {name: {side: figures_of(run) for side, run in sides.items()} for name, sides in runs.items()}
    compared = {n: comparison_of(s[WITH], s[WITHOUT], size.seed) for n, s in runs.items() if WITHOUT in s}
    if baseline:
        verdict = verdict_of({name: (each[WITH], each[WITHOUT]) for name, each in figures.items()}, compared)
    else:
        verdict = verdict_alone({name: each[WITH] for name, each in figures.items()})
    shown = {name: options[name] for name in ("users", "sessions", "turns", "scale", "max_tokens", "rounds", "seed")}
    return Report(urls, model, shown, runs, figures, compared, verdict, measured_on(began, options["notes"]))


def measured_on(began: str, notes: Sequence[str]) -> dict[str, Any]:
    """When, where and with what: a file of figures says so by itself."""
    return {
        "began": began,
        "lmcache-advise": version("lmcache-advise"),
        "lmcache-core": __version__,
        "python": platform.python_version(),
        "machine": f"{os.cpu_count()} CPUs, {platform.machine()}",
        "notes": list(notes),
    }


def _sessions(options: Mapping[str, Any], size: Size) -> dict[str, list[Session]]:
    if options["trace"] is not None:
        if options["workloads"]:
            raise ConfigError("give --trace or --workload; not both")
        return {"trace": replayed(options["trace"], size, options["speed"])}
    names = options["workloads"] or ("all",)
    wanted = list(WORKLOADS) if "all" in names else list(dict.fromkeys(names))
    return {name: WORKLOADS[name](size) for name in wanted}
