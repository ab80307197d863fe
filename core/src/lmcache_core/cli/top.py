"""`lmc top`: a daemon at work: requests, hits, tiers and the latest misses; live, once, or as JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import click

from lmcache_core.errors import BackendUnavailable, CacheError

from .display import ago, clean, size, table
from .figures import Figures, Snapshot, TierFigures, figures
from .target import Target, target_of, target_options

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_RESULTS: Final = ("full", "partial", "miss", "refused")
_VIEW_HEADS: Final = ("TIER", "FILL", "USED", "READ", "MS", "WRITTEN", "MS", "QUEUE")
_BAR: Final = 6
Rows = list[tuple[str, ...]]


@click.command("top", help="Watch a daemon: requests, hits, tiers, the latest misses.")
@click.option("--interval", "interval_s", type=click.FloatRange(0.1, 3600), default=2.0, show_default=True)
@click.option("--once", is_flag=True, help="Print it once, with figures since the daemon's start.")
@click.option("--over", "over_s", type=click.FloatRange(0.0, 3600), help="With --once: figures of so many seconds.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object; implies --once.")
@target_options(tcp=True)
def command(interval_s: float, once: bool, over_s: float | None, as_json: bool, **where: Any) -> None:
    """Ctrl-C ends it."""
    target = target_of(**where)
    if not once and not as_json:
        _live(target, interval_s)
        return
    with target.open() as daemon:
        before = None
        if over_s:
            before = Snapshot.of(daemon, target.timeout_s)
            time.sleep(over_s)
        now = Snapshot.of(daemon, target.timeout_s)
    found = figures(now, before)
    if as_json:
        shown = asdict(found) | {"hit_share": found.hit_share}
        click.echo(json.dumps({"status": now.status, "figures": shown, "latest": now.latest}, indent=1))
    else:
        click.echo("\n".join(lines(now, found)))


def lines(now: Snapshot, found: Figures) -> Iterator[str]:
    """The view as plain text."""
    yield heading(now.status)
    yield from requests(found)
    yield ""
    yield from table(tier_rows(found))
    if now.latest:
        yield ""
        yield from table(latest_rows(now, time.time()))


def heading(status: dict[str, Any]) -> str:
    state = status["problem"] or "ready"
    return (
        f"{clean(state)}: pid {status['pid']}, up {ago(status['uptime_s'])}, {status['clients']} clients, "
        f"{status['leases']} leases, {status['records_in_use']:,} records in use"
    )


def requests(found: Figures) -> Iterator[str]:
    """What requests were told, and what it brought."""
    count = sum(found.lookups.values())
    known = [result for result in _RESULTS if found.lookups.get(result)]
    more = [result for result in found.lookups if result not in _RESULTS]
    parts = ", ".join(f"{found.lookups[result]:,.0f} {result}" for result in (*known, *more))
    stretch = "since the start" if found.whole else f"in {found.seconds:.1f} s"
    rate = f"{count / found.seconds:,.1f}/s"
    yield f"{count:,.0f} lookups {stretch} ({rate}){f': {clean(parts)}' if parts else ''}"
    share = "-" if found.hit_share is None else f"{100 * found.hit_share:.1f} %"
    hits = f"prefix hits: {share} of {found.tokens:,.0f} tokens"
    saved = f", about {found.saved_s:,.1f} s of prefill saved (estimated)" if found.saved_s else ""
    moved = f"; to engines {_rate(found.load_nbytes, found)}, from engines {_rate(found.store_nbytes, found)}"
    yield f"{hits}{saved}{moved}"


def tier_rows(found: Figures) -> Rows:
    rows: Rows = [
        (
            "TIER",
            "BACKEND",
            "STATE",
            "RECORDS",
            "USED",
            "OF",
            "FILL",
            "READ",
            "MS",
            "WRITTEN",
            "MS",
            "QUEUED",
            "LEFT",
            "DROPPED",
        )
    ]
    return rows + [_tier_row(tier, found) for tier in found.tiers]


def latest_rows(now: Snapshot, wall: float) -> Rows:
    rows: Rows = [("REQUEST", "AGO", "RESULT", "CHUNKS", "TOKENS", "WHY NOT MORE")]
    for one in now.latest:
        rows.append(
            (
                clean(str(one["request"]))[:40],
                ago(max(0.0, wall - one["at"])),
                clean(str(one["result"])),
                f"{one['hit_chunks']:,} of {one['chunks']:,}",
                f"{one['tokens']:,}",
                clean(str(one["reason"]))[:40],
            )
        )
    return rows


def _tier_row(tier: TierFigures, found: Figures) -> tuple[str, ...]:
    below = tier.backend != "memory"
    fill = f"{100 * tier.used_nbytes / tier.capacity_nbytes:.0f} %" if tier.capacity_nbytes else "-"
    gone = _counts(tier.evictions)
    if tier.corruptions and "corrupt" not in tier.evictions:
        gone = f"{gone} {tier.corruptions:,.0f} corrupt".strip("- ")
    return (
        tier.name,
        tier.backend,
        clean(tier.state)[:40],
        f"{tier.records:,}",
        size(tier.used_nbytes),
        size(tier.capacity_nbytes) if tier.capacity_nbytes else "-",
        fill,
        _rate(tier.read_nbytes, found) if below else "",
        _ms(tier.read_s) if below else "",
        _rate(tier.written_nbytes, found) if below else "",
        _ms(tier.write_s) if below else "",
        tier.queued,
        gone,
        _counts(tier.drops),
    )


def _counts(by_reason: dict[str, float]) -> str:
    return clean(", ".join(f"{count:,.0f} {reason}" for reason, count in sorted(by_reason.items()))) or "-"


def _rate(nbytes: float, found: Figures) -> str:
    """Of a stretch as a rate, of everything as a sum."""
    return size(int(nbytes)) if found.whole else f"{size(int(nbytes / found.seconds))}/s"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f}"


def _live(target: Target, interval_s: float) -> None:
    try:
        from rich.console import Console
    except ImportError as error:
        raise CacheError("the live view needs the package rich: pip install rich; --once does without") from error
    target.open().close()  # says why, if it is not there
    try:
        watch(target, interval_s, Console(), time.sleep)
    except KeyboardInterrupt:
        sys.exit(0)


def watch(target: Target, interval_s: float, console: Console, pause: Callable[[float], object]) -> None:
    """Draw until `pause` raises; a daemon that goes away is waited for."""
    from rich.live import Live

    before: Snapshot | None = None
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            try:
                with target.open() as daemon:
                    while True:
                        now = Snapshot.of(daemon, target.timeout_s, latest=max(1, console.height - 16))
                        live.update(view(now, figures(now, before)), refresh=True)
                        before = now
                        pause(interval_s)
            except BackendUnavailable as error:
                live.update(clean(f"{error}; trying again"), refresh=True)
                pause(interval_s)


def view(now: Snapshot, found: Figures) -> RenderableType:
    """The view for a terminal of 80 columns or more; the names of requests and the reasons give way first."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    def drawn(rows: Rows, *giving: str) -> Table:
        made = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold dim")
        for head, *cells in zip(*rows, strict=True):
            width = None if head in giving else max(map(len, (head, *cells)))
            made.add_column(head, no_wrap=True, overflow="ellipsis", min_width=width)
        for row in rows[1:]:
            made.add_row(*(Text(cell, style=_style(cell)) for cell in row))
        return made

    state = Text(heading(now.status), style="bold red" if now.status["problem"] else "bold green")
    body: list[RenderableType] = [state, *(Text(line) for line in requests(found)), Text("")]
    body.append(drawn([_VIEW_HEADS, *(_view_row(tier, found) for tier in found.tiers)], "TIER"))
    body += [Text(line, style="yellow") for tier in found.tiers for line in _remarks(tier)]
    if now.latest:
        body += [Text(""), drawn(latest_rows(now, time.time()), "REQUEST", "WHY NOT MORE")]
    return Group(*body)


def _view_row(tier: TierFigures, found: Figures) -> tuple[str, ...]:
    below = tier.backend != "memory"
    return (
        tier.name,
        _bar(tier),
        size(tier.used_nbytes),
        _rate(tier.read_nbytes, found) if below else "",
        _ms(tier.read_s) if below else "",
        _rate(tier.written_nbytes, found) if below else "",
        _ms(tier.write_s) if below else "",
        tier.queued,
    )


def _remarks(tier: TierFigures) -> Iterator[str]:
    """What is not in a column: trouble, and records that went or were never written."""
    if tier.state != "ready":
        yield f"{tier.name}: {clean(tier.state)}"
    for what, counts in (("left", tier.evictions), ("dropped", tier.drops)):
        if counts:
            yield f"{tier.name}: {what} {_counts(counts)}"


def _style(cell: str) -> str:
    if cell in ("full", "ready"):
        return "green"
    if cell in ("miss", "refused") or cell.startswith(("open", "half")):
        return "red"
    return "yellow" if cell == "partial" else ""


def _bar(tier: TierFigures) -> str:
    if not tier.capacity_nbytes:
        return "-"
    share = min(1.0, tier.used_nbytes / tier.capacity_nbytes)
    full = round(share * _BAR)
    return f"{'█' * full}{'░' * (_BAR - full)} {100 * share:.0f} %"
