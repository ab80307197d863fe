"""Sizes, rates and counts as people write them: "64GiB", "20GB/s", "8.5k", and back."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    _Float = click.ParamType[float]
else:  # older versions of click have it not generic
    _Float = click.ParamType

_SIZES: Final = {
    **{f"{letter}iB": 1024 ** (index + 1) for index, letter in enumerate("KMGTP")},
    **{f"{letter}B": 1000 ** (index + 1) for index, letter in enumerate("kMGTP")},
    "B": 1,
    "": 1,
}
_COUNTS: Final = {"": 1, "k": 1000, "M": 1_000_000, "G": 1_000_000_000}
_TIMES: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "min": 60.0, "h": 3600.0}
_TEXT: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


class Quantity(_Float):
    """A number above zero (or zero, where that makes sense) with one of several units behind it."""

    def __init__(
        self, name: str, units: dict[str, float], example: str, suffix: str = "", *, zero: bool = False
    ) -> None:
        self.name = name
        self._units = units
        self._example = example
        self._suffix = suffix
        self._zero = zero

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if not isinstance(value, str):
            return float(value)
        match = _TEXT.fullmatch(value.removesuffix(self._suffix) if self._suffix else value)
        if match is None or match[2] not in self._units or not (float(match[1]) > 0 or self._zero):
            units = ", ".join(unit for unit in self._units if unit)
            self.fail(f"{value!r} is no {self.name}; write e.g. {self._example} (units: {units})", param, ctx)
        return float(match[1]) * self._units[match[2]]


SIZE: Final = Quantity("size", dict(_SIZES), "64GiB")
RATE: Final = Quantity("bandwidth", dict(_SIZES), "20GB/s", "/s")
COUNT: Final = Quantity("count", dict(_COUNTS), "100k")
COUNT_OR_NONE: Final = Quantity("count", dict(_COUNTS), "100k", zero=True)
TIME: Final = Quantity("time", dict(_TIMES), "2ms")


def size_text(nbytes: float) -> str:
    """ "1.5 GiB": three digits and a binary unit."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"


def count_text(count: float) -> str:
    """ "524k" for 524,288."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if count >= limit:
            scale = 1e3 if unit == "k" else limit
            return f"{count / scale:.3g}{unit}" if count / scale < 1000 else f"{count / scale:,.0f}{unit}"
    return f"{count:,.0f}"


def time_text(seconds: float) -> str:
    """ "12.3 ms"."""
    if seconds >= 120:
        return f"{seconds / 60:,.3g} min" if seconds < 7200 else f"{seconds / 3600:,.3g} h"
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms"
