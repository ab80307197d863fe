"""`lmc doctor`: everything that a person would look at first, and what to do about what is wrong."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import click

from lmcache_core.config import DEFAULT_FILE, CacheConfig, load_config
from lmcache_core.diagnosis import Diagnosis
from lmcache_core.errors import CacheError

from . import checks, security, tier_checks
from .display import clean

_LEVELS: Final = ("error", "warning", "note", "ok")


@dataclass(frozen=True, slots=True)
class Section:
    name: str
    lines: list[Diagnosis]


@click.command("doctor", help="Look at the whole setup, and say what to mend.")
@click.option(
    "--config", "path", type=click.Path(path_type=Path), help=f"Default: $LMCACHE_CONFIG, else {DEFAULT_FILE}."
)
@click.option("--no-write", is_flag=True, help="Write nothing to the stores, not even what is removed at once.")
@click.option("--strict", is_flag=True, help="Exit status 1 also for warnings.")
@click.option("--quiet", is_flag=True, help="Only what is not in order.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def command(path: Path | None, no_write: bool, strict: bool, quiet: bool, as_json: bool) -> None:
    """Exit status 1 if something is an error.  Takes seconds; a store that hangs, four times its timeout."""
    counts: Counter[str] = Counter()
    sections = []
    for section in examined(path, write=not no_write):
        counts.update(line.level for line in section.lines)
        sections.append(section)
        if not as_json:
            _print(section, quiet)
    bad = counts["error"] + (counts["warning"] if strict else 0)
    if as_json:
        found = {
            "counts": {level: counts[level] for level in _LEVELS},
            "sections": {section.name: [asdict(line) for line in section.lines] for section in sections},
        }
        click.echo(json.dumps(found, indent=1))
    else:
        parts = [f"{counts[level]} {level}{'s' if counts[level] != 1 else ''}" for level in _LEVELS[:3]]
        click.echo(", ".join(parts))
    sys.exit(int(bad > 0))


def examined(path: Path | None, *, write: bool) -> Iterable[Section]:
    """Each section as it is done; a configuration that cannot be read is a finding, and the rest goes on without."""
    yield Section("environment", list(checks.environment()))
    try:
        config: CacheConfig | None = load_config(path)
    except CacheError as error:
        config = None
        yield Section("configuration", list(checks.broken(error)))
    disable = config.plugins.disable if config is not None else ()
    yield Section("plugins", list(checks.installed(disable)))
    if config is None:
        yield Section("security", list(security.security(None, path)))
        return
    yield Section("configuration", list(checks.configuration(config, path)))
    yield Section("devices", list(checks.devices(config)))
    daemon, runs = tier_checks.daemon(config)
    yield Section("daemon", daemon)
    yield Section("limits", list(checks.limits(config, daemon_runs=runs)))
    yield Section("stores", list(tier_checks.tiers(config, write=write)))
    yield Section("security", list(security.security(config, path)))


def _print(section: Section, quiet: bool) -> None:
    lines = [line for line in section.lines if not quiet or line.level != "ok"]
    if not lines:
        return
    click.echo(section.name)
    for line in lines:
        click.echo(f"  {line.level:<8} {clean(line.text)}")
        if line.remedy:
            click.echo(f"           -> {clean(line.remedy)}")
