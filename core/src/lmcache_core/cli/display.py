"""Sizes, ages, tables and foreign text as the commands print them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def size(nbytes: int) -> str:
    """ "1.5 GiB"."""
    number = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            break
        number /= 1024
    return f"{number:.0f} {unit}" if unit == "B" or number >= 100 else f"{number:.1f} {unit}"


def ago(seconds: float) -> str:
    """ "3.2 h"."""
    for unit, name in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.0f} s"


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns as wide as they need to be."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def clean(text: str) -> str:
    """Text from elsewhere, without what a terminal would obey."""
    return "".join(char if char.isprintable() else "?" for char in text)
