"""One row of a benchmark: our figure beside the machine's limit and the peer's, and whether the promise held."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final, TextIO

HIGHER_IS_BETTER: Final = {
    "GiB/s": True,
    "% stored": True,
    "% counted": True,
    "% of capacity": False,
    "ms": False,
    "CPU-ms/GB": False,
    "us/chunk": False,
    "CPU-s": False,
    "keys/s": True,
    "% of tokens": True,
    "KB": False,
    "MiB": False,
    "s": False,
    "% of mean": True,
    "requests": True,
    "points": False,
}
"""Every unit a row may have.  A ratio above 1 means that ours is better, whichever way the unit runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Must:
    """What a row has to reach; every field that is set has to hold."""

    ratio_limit: float | None = None
    ratio_peer: float | None = None
    at_most: float | None = None
    at_least: float | None = None

    def __str__(self) -> str:
        parts = [
            (self.ratio_limit, "{:.3g}x limit"),
            (self.ratio_peer, "{:.3g}x peer"),
            (self.at_most, "<= {:.4g}"),
            (self.at_least, ">= {:.4g}"),
        ]
        return ", ".join(text.format(value) for value, text in parts if value is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the report.  `limit` and `peer` are None where there is none, and `note` then says why."""

    bench: str
    row: str
    ours: float
    unit: str
    limit: float | None = None
    ratio_limit: float | None = None
    peer: float | None = None
    ratio_peer: float | None = None
    load: float = 0.0
    """The machine's 1-minute load average when the row's measuring began."""
    must: str = ""
    reached: bool | None = None
    """Whether `must` held; None when there is nothing to reach or a side that it needs is missing."""
    note: str = ""


def ratio(ours: float, other: float, unit: str) -> float:
    """How many times better than `other` ours is."""
    return ours / other if HIGHER_IS_BETTER[unit] else other / ours


def paired_ratio(ours: Sequence[float], other: Sequence[float] | None, unit: str) -> float | None:
    """The median over the rounds of each round's own ratio: load that hits a whole round cancels out.

    Of the medians, where the other side failed a round.  None without another side, and where one side is at zero,
    which nothing is a multiple of.
    """
    if not other or 0 in ours or 0 in other:
        return None
    if len(other) < len(ours):
        return ratio(statistics.median(ours), statistics.median(other), unit)
    return statistics.median(ratio(a, b, unit) for a, b in zip(ours, other, strict=True))


def row_of(
    bench: str,
    row: str,
    unit: str,
    ours: Sequence[float],
    *,
    limit: Sequence[float] | None = None,
    peer: Sequence[float] | None = None,
    must: Must | None = None,
    load: float = 0.0,
    note: str = "",
) -> Row:
    """The row of paired samples, one per round and side, all in `unit`."""
    made = Row(
        bench=bench,
        row=row,
        ours=statistics.median(ours),
        unit=unit,
        limit=statistics.median(limit) if limit else None,
        ratio_limit=paired_ratio(ours, limit, unit),
        peer=statistics.median(peer) if peer else None,
        ratio_peer=paired_ratio(ours, peer, unit),
        load=load,
        must=str(must or ""),
        note=note,
    )
    return replace(made, reached=_reached(made, must)) if must else made


def _reached(row: Row, must: Must) -> bool | None:
    held = True
    for wanted, seen, sign in (
        (must.ratio_limit, row.ratio_limit, 1),
        (must.ratio_peer, row.ratio_peer, 1),
        (must.at_least, row.ours, 1),
        (must.at_most, row.ours, -1),
    ):
        if wanted is None:
            continue
        if seen is None:
            return None
        held = held and sign * seen >= sign * wanted
    return held


def to_json(row: Row) -> str:
    """One line; figures keep four significant digits."""
    fields = {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in asdict(row).items()}
    return json.dumps(fields)


def print_table(rows: Iterable[Row], out: TextIO) -> None:
    """The rows for people, each printed as soon as it is known, its note below it."""
    heads = f"{'row':44} {'ours':>9} {'limit':>9} {'ratio':>6} {'peer':>9} {'ratio':>6} {'load':>5}  must reach"
    print(heads, file=out)
    for row in rows:
        verdict = {True: "held", False: "MISSED", None: "not judged" if row.must else ""}[row.reached]
        print(
            f"{f'{row.row} [{row.unit}]':44} {row.ours:9.4g} {_cell(row.limit, 9)} {_cell(row.ratio_limit, 6)} "
            f"{_cell(row.peer, 9)} {_cell(row.ratio_peer, 6)} {row.load:5.2f}  {row.must} {verdict}".rstrip(),
            file=out,
        )
        if row.note:
            print(f"    {row.note}", file=out)
        out.flush()


def _cell(value: float | None, width: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{width}.3g}"
