"""`lmc bench backend`: what a store gives on this machine, through a tier, and how to set it up."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import click

from lmcache_core import plugins
from lmcache_core.config import MEMORY, PluginsConfig, TierConfig
from lmcache_core.errors import CacheError, ConfigError
from lmcache_core.nodes import Scalar, Table
from lmcache_core.options import MEASURE, RawOptions, is_secret, option_fields
from lmcache_core.units import parse_nbytes, parse_seconds

from .conform import raw_options
from .display import clean, size
from .store_speed import Latency, Speed, bench

SIZES: Final = "256KiB,2MiB,16MiB"
THREADS: Final = (2, 4, 8, 16)
ENOUGH: Final = 0.9
"""Of the best throughput: with this much, the smaller record and the fewer threads are recommended."""
MUCH: Final = 2.0
"""Times as fast as the value that the backend names first: then another one is recommended."""
HEAD: Final = ("", "PUT", "GET", "1 PUT p50/p95/p99 ms", "1 GET p50/p95/p99 ms", "ASK ms", "KEYS/S")
WIDTHS: Final = (38, 12, 12, 23, 23, 9, 11)
_MAX_DATA_NBYTES: Final = 64 << 30
_MAX_SIZES: Final = 16


@dataclass(frozen=True, slots=True)
class Run:
    """One set of options, one size, and what came of it."""

    options: dict[str, str]
    """Beside those that were given."""
    payload_nbytes: int
    speed: Speed | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Advice:
    """What to set, each with its reason."""

    options: dict[str, str]
    record_nbytes: int
    timeout_s: float
    reasons: list[str]


@click.command("backend", help="Measure a store through a tier, and say how to set it up.")
@click.argument("backend")
@click.option("-o", "pairs", multiple=True, metavar="KEY=VALUE", help="An option of the backend; repeatable.")
@click.option("--sizes", default=SIZES, show_default=True, metavar="SIZE,...", help="Sizes of records.")
@click.option("--data", default="256MiB", show_default=True, metavar="SIZE", help="The most that is there at a time.")
@click.option("--timeout", default="10s", show_default=True, metavar="DURATION", help="The tier's, for one record.")
@click.option("--quick", is_flag=True, help="Only the options as they are given.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def command(
    backend: str, pairs: tuple[str, ...], sizes: str, data: str, timeout: str, quick: bool, as_json: bool
) -> None:
    """Writes records under keys that nobody has, reads them, and removes them again.

    Each size as the options are; then, at the size that is recommended, more and fewer threads, and the other values of
    options that the backend names for it.  Exit status 2 if the store fails.
    """
    if backend == MEMORY:
        raise ConfigError(f"{MEMORY} is the host memory itself: copies run at the memory's own speed")
    payloads = _sizes(sizes)
    data_nbytes = _value(data, "--data", parse_nbytes)
    if not 1 << 20 <= data_nbytes <= _MAX_DATA_NBYTES:
        raise ConfigError("--data: from 1MiB to 64GiB")
    if 2 * max(payloads) > data_nbytes:
        raise ConfigError(f"--data {data}: less than two records of {size(max(payloads))}")
    given = raw_options(pairs)
    tier = TierConfig("bench", backend, options=given, timeout_s=_value(timeout, "--timeout", parse_seconds))
    with contextlib.redirect_stdout(sys.stderr):
        kind = plugins.load(plugins.BACKENDS, backend)
    runs: list[Run] = []
    for run in _runs(tier, kind.Options, payloads, data_nbytes, quick=quick):
        runs.append(run)
        if not as_json:
            for line in _lines(run, first=len(runs) == 1):
                click.echo(line)
    advice = advise(runs)
    if as_json:
        click.echo(json.dumps({"backend": backend, "runs": [asdict(r) for r in runs], "advice": asdict(advice)}))
        return
    click.echo("")
    for reason in advice.reasons:
        click.echo(f"- {clean(reason)}")
    click.echo("")
    click.echo(_yaml(backend, kind.Options, given, advice))


def _runs(tier: TierConfig, options: type, payloads: Sequence[int], data_nbytes: int, *, quick: bool) -> Iterator[Run]:
    """The sizes first, whose failure is the end; what is tried beside them may fail."""
    found: list[Run] = []
    for payload in payloads:
        found.append(Run({}, payload, _speed(tier, payload, data_nbytes)))
        yield found[-1]
    if quick:
        return
    payload = _smallest(found).payload_nbytes
    for name, value in _variants(options, tier.options):
        varied = replace(tier, options=_with(tier.options, name, value))
        try:
            yield Run({name: value}, payload, _speed(varied, payload, data_nbytes))
        except CacheError as error:
            yield Run({name: value}, payload, None, str(error))


def _speed(tier: TierConfig, payload_nbytes: int, data_nbytes: int) -> Speed:
    with bench(tier, PluginsConfig(), payload_nbytes, data_nbytes) as measured:
        return measured.measure()


def _variants(options: type, given: RawOptions) -> Iterator[tuple[str, str]]:
    """What else to try: values of options that say so, unless they were given."""
    for name, described in option_fields(options).items():
        wanted: Any = described.metadata.get(MEASURE, ())
        if name in given.table.items or described.name in given.table.items:
            continue
        values = THREADS if wanted == "threads" else wanted
        yield from ((name, str(value)) for value in values)


def _with(given: RawOptions, name: str, value: str) -> RawOptions:
    items = {**given.table.items, name: Scalar(value, f"-o {name}")}
    return RawOptions(Table(items, "-o", {key: f"-o {key}" for key in items}), "options")


def advise(runs: Sequence[Run]) -> Advice:
    """From what was measured; reads count, since a request waits for them, and writes where reads do not decide."""
    sized = [run for run in runs if not run.options]
    best = _smallest(sized)
    speed = _of(best)
    share = _share(speed.get, max(_of(run).get for run in sized))
    records = f"records of {size(speed.record_nbytes)} or more, read at {size(int(speed.get))}/s, {share} of the best"
    reasons = [f"{records}: chunk_tokens of {speed.record_nbytes} / (KV bytes of a token in one shard), or more"]
    chosen: dict[str, str] = {}
    names = dict.fromkeys(name for run in runs for name in run.options)
    for name in names:
        tried = {run.options[name]: run for run in runs if name in run.options}
        worked = {value: run for value, run in tried.items() if run.speed is not None}
        failed = {value: run.problem for value, run in tried.items() if run.speed is None}
        reasons += [f"{name} {value} does not work here: {problem}" for value, problem in failed.items()]
        if not worked:
            continue
        value, why = _chosen(name, worked)
        chosen[name] = value
        reasons.append(why)
    slowest_s = max(max(_of(run).get_latency.p99_s, _of(run).put_latency.p99_s) for run in sized)
    timeout_s = float(max(2, round(20 * slowest_s)))
    reasons.append(f"timeout {timeout_s:g}s: at least 20 times what the slowest record took that went alone")
    return Advice(chosen, speed.record_nbytes, timeout_s, reasons)


def _chosen(name: str, worked: dict[str, Run]) -> tuple[str, str]:
    """The value to set and why; values are in the order of preference, or numbers of threads."""
    threads = all(value.isdigit() for value in worked)
    if threads:
        total = {value: _of(run).get + _of(run).put for value, run in worked.items()}
        best = max(total.values())
        value = min((v for v, rate in total.items() if rate >= ENOUGH * best), key=int)
        return value, f"{name} {value}: {_share(total[value], best)} of the best of {', '.join(worked)}"
    put = {value: _of(run).put for value, run in worked.items()}
    written = ", ".join(f"{value} writes at {size(int(rate))}/s" for value, rate in put.items())
    first, fastest = next(iter(worked)), max(put, key=lambda value: put[value])
    value = fastest if put[fastest] > MUCH * put[first] else first
    return value, f"{name} {value}: {written}; reads of what was just written say little where a page cache answers"


def _smallest(runs: Sequence[Run]) -> Run:
    """The smallest size with which reads are about as fast as they get."""
    best = max(_of(run).get for run in runs)
    return min((run for run in runs if _of(run).get >= ENOUGH * best), key=lambda run: run.payload_nbytes)


def _of(run: Run) -> Speed:
    assert run.speed is not None
    return run.speed


def _lines(run: Run, *, first: bool) -> Iterator[str]:
    if run.speed is None:
        yield clean(f"{_name(run)}: {run.problem}")
        return
    speed = run.speed
    if first and speed.description:
        yield clean(speed.description)
    row = (
        f"{_name(run)}, {speed.io_threads} threads",
        f"{size(int(speed.put))}/s",
        f"{size(int(speed.get))}/s",
        _milliseconds(speed.put_latency),
        _milliseconds(speed.get_latency),
        f"{1e3 * speed.exists_latency.p50_s:.2f}",
        f"{speed.exists:,.0f}",
    )
    if first:
        yield _columns(HEAD)
    yield _columns(row)


def _columns(cells: Sequence[str]) -> str:
    return "".join(cell.rjust(width) for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()


def _name(run: Run) -> str:
    options = "".join(f" {name}={value}" for name, value in run.options.items())
    return f"{size(run.payload_nbytes)}{options}"


def _milliseconds(latency: Latency) -> str:
    return "/".join(f"{1e3 * each:.1f}" for each in (latency.p50_s, latency.p95_s, latency.p99_s))


def _share(value: float, best: float) -> str:
    return f"{100 * value / best:.0f} %"


def _yaml(backend: str, kind: type, given: RawOptions, advice: Advice) -> str:
    """A tier for a configuration, without secrets: those stand in variables."""
    known = option_fields(kind)
    parts = []
    for name, node in given.table.items.items():
        secret = name in known and is_secret(known[name])
        value = f"${{{name.upper()}}}" if secret else str(node.value if isinstance(node, Scalar) else node)
        parts.append(f"{name}: {json.dumps(value)}")
    parts += [f"{name}: {value}" for name, value in advice.options.items()]
    options = f", options: {{{', '.join(parts)}}}" if parts else ""
    return f"  - {{name: {backend.partition('@')[0]}, backend: {backend}, timeout: {advice.timeout_s:g}s{options}}}"


def _sizes(text: str) -> list[int]:
    found = sorted({_value(each.strip(), "--sizes", parse_nbytes) for each in text.split(",")})
    if not 1 <= len(found) <= _MAX_SIZES or found[0] < 1:
        raise ConfigError(f"--sizes: 1 to {_MAX_SIZES} sizes of at least a byte")
    return found


def _value(text: str, option: str, parse: Any) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: {error}") from error
