"""`lmc du`, `lmc verify`, `lmc repair`: what a store holds, whether it is whole, and without what is broken."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any, Final

import click

from lmcache_core import audit
from lmcache_core.audit import Finding, Progress, ShardUse, Survey
from lmcache_core.backend import Backend
from lmcache_core.errors import BackendError

from .display import ago, clean, size, table
from .stores import Store, store_options, stores_of

AGES: Final = {"1 h": 3600.0, "1 d": 86_400.0, "7 d": 7 * 86_400.0}
MAX_LINES: Final = 200
"""Findings printed one by one; all are counted."""
MAX_FINDINGS: Final = 10_000
"""Findings in a JSON object."""

_timeout = click.option("--timeout", "timeout_s", type=float, default=60.0, show_default=True, help="Seconds a batch.")
_json = click.option("--json", "as_json", is_flag=True, help="One JSON object.")


@click.command("du", help="Show what a store holds, by namespace and age.")
@store_options
@_json
def du(as_json: bool, **which: Any) -> None:
    """Lists the store and reads its manifests; no record."""
    found = [(store, _surveyed(store)) for store in stores_of(**which)]
    if as_json:
        click.echo(json.dumps({"stores": [_survey_as_json(store, survey) for store, survey in found]}, indent=1))
        return
    for number, (store, survey) in enumerate(found):
        if number:
            click.echo()
        click.echo("\n".join(_survey_lines(store, survey)))


@click.command("verify", help="Read every record of a store, and say which are broken.")
@store_options
@_timeout
@_json
def verify(timeout_s: float, as_json: bool, **which: Any) -> None:
    """Identity, length and checksum of each record; exit status 1 if one is broken or could not be judged."""
    sys.exit(_run(which, timeout_s, as_json, repair=False, dry_run=False))


@click.command("repair", help="Remove from a store what is broken, and only that.")
@store_options
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
@_timeout
@_json
def repair(timeout_s: float, as_json: bool, dry_run: bool, **which: Any) -> None:
    """Each broken record is read a second time before it goes.  Exit status 1 if something is left.

    Whoever wants a record that went computes it again, as for every miss.
    """
    sys.exit(_run(which, timeout_s, as_json, repair=True, dry_run=dry_run))


@dataclass(slots=True)
class Outcome:
    """One store's check, for people and as JSON."""

    store: Store
    repair: bool
    dry_run: bool
    progress: Progress = field(default_factory=Progress)
    kinds: Counter[str] = field(default_factory=Counter)
    broken: int = 0
    broken_nbytes: int = 0
    done: Counter[str] = field(default_factory=Counter)
    """Removed, gone, sound (by the second read), failed."""
    findings: list[dict[str, object]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def left(self) -> int:
        """Findings that are there as before."""
        return sum(self.kinds.values()) - self.done["removed"] - self.done["gone"] - self.done["sound"]

    def as_json(self) -> dict[str, object]:
        return {
            "store": self.store.name,
            "backend": self.store.tier.backend,
            "checked": self.progress.checked,
            "checked_nbytes": self.progress.checked_nbytes,
            "sound": self.progress.sound,
            "without_checksum": self.progress.without_checksum,
            "gone": self.progress.gone,
            "broken": self.broken,
            "broken_nbytes": self.broken_nbytes,
            "kinds": dict(self.kinds),
            "removed": self.done["removed"],
            "left": self.left,
            "findings": self.findings,
            "seconds": round(self.seconds, 3),
        }

    def summary(self) -> str:
        progress = self.progress
        parts = [f"{progress.sound:,} sound"]
        parts += [f"{count:,} {kind}" for kind, count in sorted(self.kinds.items())]
        parts += [f"{progress.without_checksum:,} of them without a checksum"] if progress.without_checksum else []
        parts += [f"{progress.gone:,} gone meanwhile"] if progress.gone else []
        parts += [f"{self.done['removed']:,} removed"] if self.repair and not self.dry_run else []
        parts += [f"{self.done['sound']:,} sound when read again"] if self.done["sound"] else []
        parts += [f"{self.broken:,} would be removed"] if self.dry_run else []
        speed = progress.checked_nbytes / max(self.seconds, 1e-9)
        return (
            f"{self.store.name}: {progress.checked:,} records and manifests, {size(progress.checked_nbytes)} "
            f"in {self.seconds:.1f} s ({size(int(speed))}/s): {', '.join(parts)}"
        )


class Line:
    """A progress line on a terminal, rewritten at most five times a second; nothing elsewhere."""

    def __init__(self, stream: IO[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream if stream.isatty() else None
        self._clock = clock
        self._next = 0.0
        self._shown = False

    def show(self, text: str) -> None:
        if self._stream is not None and self._clock() >= self._next:
            self._next = self._clock() + 0.2
            self._shown = True
            self._stream.write(f"\r\x1b[K{text}")
            self._stream.flush()

    def clear(self) -> None:
        if self._stream is not None and self._shown:
            self._shown = False
            self._next = 0.0
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def _run(which: dict[str, Any], timeout_s: float, as_json: bool, *, repair: bool, dry_run: bool) -> int:
    outcomes = []
    for store in stores_of(**which):
        outcome = Outcome(store, repair, dry_run)
        outcomes.append(outcome)
        with store.open() as backend:
            _check(backend, outcome, timeout_s, None if as_json else click.echo)
        if not as_json:
            click.echo(outcome.summary())
    if as_json:
        click.echo(json.dumps({"stores": [outcome.as_json() for outcome in outcomes]}, indent=1))
    elif not repair and any(outcome.broken for outcome in outcomes):
        click.echo("`lmc repair` with the same options removes what is broken", err=True)
    return int(any(outcome.left for outcome in outcomes))


def _check(backend: Backend[Any], outcome: Outcome, timeout_s: float, say: Callable[[str], None] | None) -> None:
    began = time.monotonic()
    line = Line(sys.stderr)
    line.show(f"{outcome.store.name}: listing")
    known = audit.survey(backend, now=time.time())
    total = known.records + known.manifests
    progress = outcome.progress

    def show() -> None:
        share = 100 * progress.checked // max(total, 1)
        read = f"{size(progress.checked_nbytes)} of {size(known.nbytes)}"
        bad = f", {sum(outcome.kinds.values()):,} not sound"
        line.show(f"{outcome.store.name}: {min(share, 100)} %, {progress.checked:,} of {total:,} records, {read}{bad}")

    for finding in audit.check(backend, known, timeout_s=timeout_s, progress=progress, on_progress=show):
        outcome.kinds[finding.kind] += 1
        outcome.broken += finding.broken
        outcome.broken_nbytes += finding.nbytes if finding.broken else 0
        done = _mend(backend, finding, known, timeout_s) if outcome.repair and not outcome.dry_run else ""
        outcome.done[done.partition(":")[0]] += 1
        if len(outcome.findings) < MAX_FINDINGS:
            outcome.findings.append(
                {
                    "key": finding.key.text,
                    "nbytes": finding.nbytes,
                    "kind": finding.kind,
                    "broken": finding.broken,
                    "detail": finding.detail,
                    "done": done,
                }
            )
        if say is not None and sum(outcome.kinds.values()) <= MAX_LINES:
            line.clear()
            say(f"{finding.kind:<14}{finding.key.text}  {clean(finding.detail)}{f'  -> {clean(done)}' if done else ''}")
            if sum(outcome.kinds.values()) == MAX_LINES:
                say("... further ones are counted; --json has more")
    line.clear()
    outcome.seconds = time.monotonic() - began


def _mend(backend: Backend[Any], finding: Finding, known: Survey, timeout_s: float) -> str:
    if not finding.broken:
        return ""
    try:
        return audit.remove(backend, finding, known, timeout_s=timeout_s)
    except BackendError as error:
        return f"failed: {error}"


def _surveyed(store: Store) -> Survey:
    with store.open() as backend:
        return audit.survey(backend, now=time.time(), age_limits_s=list(AGES.values()))


@dataclass(slots=True)
class _Namespace:
    """A family's shards; one without a manifest is alone."""

    family_id: str
    family: dict[str, Any]
    shards: list[ShardUse]

    @property
    def records(self) -> int:
        return sum(shard.records for shard in self.shards)

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)

    @property
    def oldest(self) -> float:
        return min((shard.oldest for shard in self.shards if shard.records), default=0.0)

    @property
    def newest(self) -> float:
        return max((shard.newest for shard in self.shards), default=0.0)


def _namespaces(survey: Survey) -> list[_Namespace]:
    """The largest first."""
    found: dict[str, _Namespace] = {}
    for shard in survey.shards.values():
        described = shard.manifest.described["family"] if shard.manifest is not None else {}
        name = described.get("family_id", f"shard {shard.shard_id.hex()}")
        found.setdefault(name, _Namespace(name, described, [])).shards.append(shard)
    return sorted(found.values(), key=lambda namespace: -namespace.nbytes)


def _survey_as_json(store: Store, survey: Survey) -> dict[str, object]:
    return {
        "store": store.name,
        "backend": store.tier.backend,
        "records": survey.records,
        "nbytes": survey.nbytes,
        "manifests": survey.manifests,
        "manifest_nbytes": survey.manifest_nbytes,
        "nbytes_by_age": dict(zip([*AGES, "older"], survey.ages, strict=True)),
        "namespaces": [
            {
                "family": namespace.family,
                "shards": [
                    {"shard_id": shard.shard_id.hex(), "records": shard.records, "nbytes": shard.nbytes}
                    for shard in namespace.shards
                ],
                "records": namespace.records,
                "nbytes": namespace.nbytes,
                "oldest": namespace.oldest,
                "newest": namespace.newest,
            }
            for namespace in _namespaces(survey)
        ],
    }


def _survey_lines(store: Store, survey: Survey) -> Iterator[str]:
    now = time.time()
    counted = f"{survey.records:,} records and {survey.manifests:,} manifests"
    yield f"{store.name} ({store.tier.backend}): {counted}, {size(survey.nbytes)}"
    if not survey.shards:
        return
    yield "by age: " + ", ".join(
        f"{size(nbytes)} {'older' if label == 'older' else f'up to {label}'}"
        for label, nbytes in zip([*AGES, "older"], survey.ages, strict=True)
        if nbytes
    )
    yield ""
    rows = [("MODEL", "WEIGHTS", "DTYPE", "CHUNK", "ALSO", "SHARDS", "RECORDS", "SIZE", "OLDEST", "NEWEST", "FAMILY")]
    for namespace in _namespaces(survey):
        family = namespace.family
        oldest, newest = (
            ago(max(0.0, now - at)) if namespace.records else "-" for at in (namespace.oldest, namespace.newest)
        )
        rows.append(
            (
                clean(str(family.get("model", "? (no manifest)")))[:48],
                clean(str(family.get("weights", "")))[:16],
                clean(str(family.get("kv_dtype", ""))),
                clean(str(family.get("chunk_tokens", ""))),
                _also(family),
                str(len(namespace.shards)),
                f"{namespace.records:,}",
                size(namespace.nbytes),
                oldest,
                newest,
                namespace.family_id,
            )
        )
    yield from table(rows)


def _also(family: dict[str, Any]) -> str:
    """What makes the namespace another one: adapter, tenant, tags."""
    parts = [f"adapter {family['adapter']}"] if family.get("adapter") else []
    parts += [f"tenant {family['salt_id'][:8]}"] if family.get("salt_id") else []
    parts += ["=".join(map(str, pair)) for pair in family.get("tags") or ()]
    return clean(", ".join(parts))[:48] or "-"
