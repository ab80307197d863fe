"""What the demo shows: progress, a table, the place of the extra space, and a plot."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from .answers import Tick
from .scenes import Outcome, Row

SCENES = 10
_RESTORED, _COMPUTED, _WITHOUT = "#2a9d8f", "#e9c46a", "#9aa5b1"


class Bars:
    """A bar over all scenes, and one for the scene that is playing."""

    def __init__(self, console: Console) -> None:
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<52}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            refresh_per_second=5,
        )
        self._all = self._bars.add_task("all scenes", total=SCENES)

    def __enter__(self) -> Bars:
        self._bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bars.stop()

    @contextmanager
    def scene(self, title: str, total: int | None) -> Iterator[Tick]:
        """Show `title` while the block runs; the tick that it gets moves the bar."""
        task = self._bars.add_task(title, total=total)
        if not self._bars.console.is_terminal:
            self._bars.console.print(f"  {title} ...", highlight=False)
        try:
            yield lambda: self._bars.advance(task)
        finally:
            self._bars.remove_task(task)
            self._bars.advance(self._all)


def show_start(console: Console, model: str, threads: int, config: Path) -> None:
    """What runs where, and with which configuration."""
    console.print(f"[bold]{model}[/], fp32, on {machine(threads)}")
    text = config.read_text()
    console.print(
        Panel(Syntax(text.strip(), "yaml", background_color="default", word_wrap=True), title=str(config), expand=False)
    )


def machine(threads: int) -> str:
    """The machine and how busy it is: figures of a busy one say little."""
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} CPUs ({threads} threads), load {load:.1f} in the last minute"


def show_outcome(console: Console, outcome: Outcome) -> None:
    """The table, the place of the extra space, and whether everything agrees."""
    table = Table(title="Time to first token", title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("request", no_wrap=True)
    for heading in ("prompt", "hit", "from", "loaded", "without", "with", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in outcome.rows:
        table.add_row(
            row.title,
            f"{row.prompt_tokens:,}",
            f"{row.hit_tokens:,}" if row.hit_tokens else "-",
            row.tier or "-",
            f"{row.nbytes / 2**20:.0f} MiB" if row.nbytes else "-",
            f"{row.without_s:.2f} s" if row.without_s is not None else "-",
            f"{row.with_s:.2f} s",
            f"[bold green]{_times(row)}[/]",
        )
    console.print(table)
    console.print(
        "Prompt and hit in tokens: the hit is restored, the rest computed. With and without the cache; a dash where no "
        "run without it was made. Loading the model is part of no figure.\n",
        style="dim",
    )
    place = outcome.parting
    where = Text.assemble(("before  ", "dim"), place.before, "\n", ("after   ", "dim"), *_marked(place.after))
    cost = (
        f"One space more (each · is a space): the prompts part at token {place.token:,}. The {place.chunks_kept} "
        f"chunks before it are still found, the {place.chunks_lost} from there on are lost and computed again."
    )
    console.print(Panel(Group(where, "", cost), title="why a cache misses", width=min(console.width, 100)))
    agreement = outcome.agreement
    verdict = "[bold green]the same[/]" if agreement.tokens_equal else "[bold red]NOT the same[/]"
    console.print(
        f"Greedy tokens are {verdict} with and without the cache in all {agreement.compared} comparisons; "
        f"no logit differs by more than {agreement.max_logit_diff:.1e}."
    )


def _times(row: Row) -> str:
    """How many times faster the first token came; empty where there is nothing to compare with."""
    if row.without_s is None or not row.hit_tokens:
        return ""
    factor = row.without_s / row.with_s
    return f"{factor:.0f}x" if factor >= 10 else f"{factor:.1f}x"


def save_plot(outcome: Outcome, path: Path, subtitle: str) -> None:
    """Time to first token beside the share of the prompt that was restored."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = outcome.rows[::-1]
    figure, (times, tokens) = plt.subplots(
        1, 2, figsize=(12, 0.62 * len(rows) + 2.1), sharey=True, width_ratios=(1.6, 1), layout="constrained"
    )
    _plot_times(times, rows)
    _plot_tokens(tokens, rows)
    for axes in (times, tokens):
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", color="#e5e7eb", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.margins(y=0.02)
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.07), ncols=2, frameon=False, fontsize=10)
    title = "A prompt that was computed once is loaded the next time"
    figure.suptitle(title, x=0.01, ha="left", fontsize=15, weight="bold")
    figure.supxlabel(subtitle, x=0.01, ha="left", fontsize=9, color="#6b7280")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _plot_times(axes: Any, rows: tuple[Row, ...]) -> None:
    places = range(len(rows))
    without = [row.without_s or 0.0 for row in rows]
    within = [row.with_s for row in rows]
    gap = max(*without, *within) * 0.01
    axes.barh([p + 0.2 for p in places], without, 0.36, color=_WITHOUT, label="without the cache")
    axes.barh([p - 0.2 for p in places], within, 0.36, color=_RESTORED, label="with the cache")
    for place, row in zip(places, rows, strict=True):
        if row.without_s is not None:
            axes.text(row.without_s + gap, place + 0.2, f"{row.without_s:.2f} s", va="center", fontsize=9)
        faster = f"   {_times(row)} faster" if _times(row) else ""
        axes.text(row.with_s + gap, place - 0.2, f"{row.with_s:.2f} s{faster}", va="center", fontsize=9, weight="bold")
    axes.set_yticks(list(places), [row.title for row in rows], fontsize=11)
    axes.set_xlim(0, max(*without, *within) * 1.16)
    axes.set_title("time to first token, seconds", loc="left", fontsize=11)


def _plot_tokens(axes: Any, rows: tuple[Row, ...]) -> None:
    places = list(range(len(rows)))
    hits = [row.hit_tokens for row in rows]
    rest = [row.prompt_tokens - row.hit_tokens for row in rows]
    axes.barh(places, hits, 0.55, color=_RESTORED, label="restored")
    axes.barh(places, rest, 0.55, left=hits, color=_COMPUTED, label="computed")
    for place, row in zip(places, rows, strict=True):
        if row.hit_tokens:
            text = f"{row.hit_tokens:,} from {row.tier}"
            axes.text(row.hit_tokens / 2, place, text, ha="center", va="center", fontsize=9, color="white")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_title("tokens of the prompt", loc="left", fontsize=11)


def _marked(text: str) -> list[tuple[str, str]]:
    """The text with its middle, where the space came in, standing out."""
    middle = (len(text) - 1) // 2
    return [(text[:middle], ""), (text[middle], "bold white on red"), (text[middle + 1 :], "")]
