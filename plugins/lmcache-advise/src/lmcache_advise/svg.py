"""Line charts and bars as SVG, by hand: a page that needs nothing from anywhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

WIDTH: Final = 720
HEIGHT: Final = 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 16, 48

STYLE: Final = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1c1f24;--dim:#5b6470;--grid:#dfe3e8;--s0:#0b66c3;--s1:#b3541e;
--s2:#2e7d32;--s3:#7b3fa0;--card:#f5f7f9}
@media(prefers-color-scheme:dark){:root{--bg:#14171b;--fg:#e8eaed;--dim:#9aa4b0;--grid:#333a42;--s0:#6cb2ff;
--s1:#f0a06a;--s2:#7fd18a;--s3:#d0a2f0;--card:#1e2329}}
body{margin:0 auto;max-width:60rem;padding:1rem;background:var(--bg);color:var(--fg);font:16px/1.5 system-ui,sans-serif}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}figure{margin:1rem 0}svg{width:100%;height:auto}
figcaption,.dim{color:var(--dim);font-size:.9rem}.wide{overflow-x:auto}
table{border-collapse:collapse}th,td{padding:.3rem .7rem;text-align:right;border-bottom:1px solid var(--grid)}
th:first-child,td:first-child{text-align:left}pre{background:var(--card);padding:1rem;overflow-x:auto;border-radius:6px}
.verdict{background:var(--card);padding:1rem;border-left:4px solid var(--s0);border-radius:6px}
svg text{fill:var(--dim);font:12px system-ui,sans-serif}svg .grid{stroke:var(--grid)}
.s0{stroke:var(--s0)}.s1{stroke:var(--s1)}.s2{stroke:var(--s2)}.s3{stroke:var(--s3)}
svg .f0{fill:var(--s0)}svg .f1{fill:var(--s1)}svg .f2{fill:var(--s2)}svg .f3{fill:var(--s3)}
"""


@dataclass(frozen=True, slots=True)
class Line:
    """A series of one chart."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True, slots=True)
class Axis:
    """How one direction of a chart is told."""

    label: str
    log: bool = False
    percent: bool = False
    """Of values from 0 to 1."""

    def place(self, value: float, low: float, high: float) -> float:
        """0 to 1."""
        if self.log:
            value, low, high = (math.log10(max(each, 1e-12)) for each in (value, low, high))
        return (value - low) / (high - low) if high > low else 0.5

    def ticks(self, low: float, high: float) -> list[float]:
        if self.log:
            first, last = math.ceil(math.log10(max(low, 1e-12)) - 1e-9), math.floor(math.log10(max(high, 1e-12)) + 1e-9)
            return [10.0**power for power in range(first, last + 1)]
        if high <= low:
            return [low]
        step = 10 ** math.floor(math.log10((high - low) / 4))
        step = next(step * each for each in (1, 2, 2.5, 5, 10) if (high - low) / (step * each) <= 6)
        first = math.ceil(low / step - 1e-9)
        return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]

    def text(self, value: float) -> str:
        if self.percent:
            return f"{value:.0%}"
        for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if abs(value) >= limit:
                return f"{value / limit:g}{unit}"
        return f"{value:.6g}"


def line_chart(
    title: str, lines: Sequence[Line], x: Axis, y: Axis, marks: Sequence[tuple[str, float]] = ()
) -> str:  # fmt: skip
    """Lines over each other, with `marks` as vertical lines; read aloud as its title."""
    lines = [line for line in lines if len(line.x)]
    if not lines:
        return ""
    xs = [value for line in lines for value in line.x]
    low, high = min(xs), max(xs)
    top = max(max(line.y) for line in lines)
    peak = 1.0 if y.percent else (top or 1.0) * 1.05
    out = [_open(title)]
    out += _axes(x, y, (low, high), (0.0, peak))
    for index, (name, value) in enumerate(marks):
        if not low <= value <= high:
            continue
        at = _across(x.place(value, low, high))
        anchor = "end" if at > WIDTH - 120 else "start"
        out.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}" class="s1" stroke-dasharray="4 4"/>'
            f'<text x="{at + (-4 if anchor == "end" else 4):.1f}" y="{_TOP + 12 + 14 * (index % 5)}" '
            f'text-anchor="{anchor}">{escape(name)}</text>'
        )
    for index, line in enumerate(lines):
        points = " ".join(
            f"{_across(x.place(a, low, high)):.1f},{_down(y.place(b, 0.0, peak)):.1f}"
            for a, b in zip(line.x, line.y, strict=True)
        )
        out.append(f'<polyline points="{points}" fill="none" stroke-width="2.5" class="s{index % 4}"/>')
        if len(lines) > 1:
            out.append(
                f'<text x="{WIDTH - _RIGHT - 4}" y="{HEIGHT - _BOTTOM - 8 - 16 * index}" text-anchor="end" '
                f'class="f{index % 4}">{escape(line.name)}</text>'
            )
    return "".join([*out, "</svg>"])


def bar_chart(title: str, groups: Sequence[tuple[str, Sequence[float]]], names: Sequence[str], y: Axis) -> str:
    """Bars side by side, one for each of `names` in each group."""
    values = [value for _, each in groups for value in each]
    if not values:
        return ""
    peak = 1.0 if y.percent else (max(values) or 1.0) * 1.1
    out = [_open(title), *_axes(None, y, (0.0, 1.0), (0.0, peak))]
    wide = (WIDTH - _LEFT - _RIGHT) / len(groups)
    for number, (label, bars) in enumerate(groups):
        each = wide * 0.7 / max(1, len(bars))
        for index, value in enumerate(bars):
            left = _LEFT + wide * (number + 0.15) + each * index
            height = _down(0.0) - _down(value / peak)
            out.append(
                f'<rect x="{left:.1f}" y="{_down(value / peak):.1f}" width="{each * 0.92:.1f}" height="{height:.1f}" '
                f'class="f{index % 4}"><title>{escape(f"{label}, {names[index]}: {y.text(value)}")}</title></rect>'
            )
        middle = _LEFT + wide * (number + 0.5)
        out.append(f'<text x="{middle:.1f}" y="{HEIGHT - _BOTTOM + 18}" text-anchor="middle">{escape(label)}</text>')
    for index, name in enumerate(names):
        out.append(f'<text x="{_LEFT + 8 + 160 * index}" y="{HEIGHT - 8}" class="f{index % 4}">{escape(name)}</text>')
    return "".join([*out, "</svg>"])


def _open(title: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}"><title>{escape(title)}</title>'


def _axes(x: Axis | None, y: Axis, across: tuple[float, float], down: tuple[float, float]) -> list[str]:
    out = []
    for value in y.ticks(*down):
        at = _down(y.place(value, *down))
        out.append(
            f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}" class="grid"/>'
            f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{escape(y.text(value))}</text>'
        )
    for value in x.ticks(*across) if x is not None else ():
        at = _across(x.place(value, *across)) if x is not None else 0.0
        text = escape(x.text(value)) if x is not None else ""
        out.append(f'<text x="{at:.1f}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle">{text}</text>')
    if x is not None:
        out.append(f'<text x="{(WIDTH + _LEFT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x.label)}</text>')
    out.append(f'<text x="{_LEFT}" y="{_TOP - 4}">{escape(y.label)}</text>')
    return out


def _across(place: float) -> float:
    return _LEFT + place * (WIDTH - _LEFT - _RIGHT)


def _down(place: float) -> float:
    return HEIGHT - _BOTTOM - place * (HEIGHT - _TOP - _BOTTOM)
