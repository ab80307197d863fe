"""The report of `lmc bench serve`: a table for the terminal, an object for programs, a page for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from .driving import Run
from .page import columns, list_html, table_html
from .svg import STYLE, Axis, Line, bar_chart, line_chart
from .units import count_text, time_text
from .verdict import Comparison, Figures, Verdict

WITH, WITHOUT = "with", "without"


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was measured; `runs` and `figures` by workload and side."""

    urls: Mapping[str, str]
    model: str
    settings: Mapping[str, Any]
    runs: Mapping[str, Mapping[str, Run]]
    figures: Mapping[str, Mapping[str, Figures]]
    compared: Mapping[str, Comparison]
    verdict: Verdict
    measured: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict.word,
            "reasons": list(self.verdict.reasons),
            "endpoints": dict(self.urls),
            "model": self.model,
            "settings": dict(self.settings),
            "measured": dict(self.measured),
            "load averages": {
                name: {side: [round(each, 2) for each in run.loads] for side, run in sides.items()}
                for name, sides in self.runs.items()
            },
            "workloads": {
                name: {side: asdict(each) for side, each in sides.items()} for name, sides in self.figures.items()
            },
            "compared": {name: asdict(each) for name, each in self.compared.items()},
            "requests": {
                name: {side: [_request(each) for each in run.outcomes] for side, run in sides.items()}
                for name, sides in self.runs.items()
            },
        }


def _request(outcome: Any) -> dict[str, Any]:
    fields = asdict(outcome.answer)
    del fields["text"]
    return {"session": outcome.session, "turn": outcome.turn, **fields}


def _measured(report: Report) -> str:
    notes = [*report.measured["notes"]]
    facts = [f"{name} {value}" for name, value in report.measured.items() if name != "notes"]
    loads = [
        f"load average {name}, {side}: {min(run.loads):.1f} to {max(run.loads):.1f}"
        for name, sides in report.runs.items()
        for side, run in sides.items()
    ]
    return "; ".join([*notes, *facts, *loads])


def rows_of(report: Report) -> list[list[str]]:
    rows = [["workload", "done", "TTFT mean", "p95", "tokens/s", "requests/s", "prompt tokens", "hits"]]
    for name, sides in report.figures.items():
        for side, each in sides.items():
            label = f"{name}, {side}" if len(report.urls) > 1 else name
            hits = "not said" if each.hit_rate is None else f"{each.hit_rate:.0%}"
            rows.append([
                label, f"{each.completed}/{each.asked}", time_text(each.ttft_mean_s), time_text(each.ttft_p95_s),
                f"{each.output_tokens_s:.1f}", f"{each.requests_s:.2f}", count_text(each.prompt_tokens), hits,
            ])  # fmt: skip
    return rows


def text_of(report: Report) -> str:
    out = [*columns(rows_of(report)), "", f"Verdict: {report.verdict.word}"]
    out += [f"  - {reason}" for reason in report.verdict.reasons]
    out += [f"  ! {line}" for line in errors_of(report)]
    return "\n".join(out) + "\n"


def errors_of(report: Report) -> list[str]:
    return [
        f"{name}, {side}: {count} requests failed: {text}"
        for name, sides in report.figures.items()
        for side, each in sides.items()
        for text, count in each.errors
    ]


def html_of(report: Report) -> str:
    """A page that needs nothing from anywhere."""
    sides = list(report.urls)
    names = list(report.figures)
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>{escape(report.verdict.word)}</title><style>{STYLE}</style></head><body>",
        "<h1>Does the cache help here?</h1>",
        f'<div class="verdict"><strong>{escape(report.verdict.word)}</strong>{list_html(report.verdict.reasons)}',
        list_html(errors_of(report)) + "</div>",
        f'<p class="dim">Model {escape(report.model)}; '
        + escape("; ".join(f"{side}: {url}" for side, url in report.urls.items()))
        + "; "
        + escape(", ".join(f"{name} {value}" for name, value in report.settings.items()))
        + "</p>",
        f'<p class="dim">{escape(_measured(report))}</p>',
        "<h2>Figures</h2>" + table_html(rows_of(report)),
    ]
    for title, pick in (
        ("Time to the first token, mean", "ttft_mean_s"),
        ("Time to the first token, p95", "ttft_p95_s"),
    ):
        groups = [
            (name, [getattr(report.figures[name][side], pick) for side in sides if side in report.figures[name]])
            for name in names
        ]
        parts.append(f"<h2>{title}</h2><figure>{bar_chart(title, groups, sides, Axis('seconds'))}</figure>")
    for name in names:
        lines = []
        for side in sides:
            if side not in report.runs[name]:
                continue
            times = sorted(each.answer.ttft_s for each in report.runs[name][side].outcomes if each.ok)
            lines.append(Line(side, times, [(index + 1) / len(times) for index in range(len(times))]))
        chart = line_chart(f"{name}: share of requests by TTFT", lines, Axis("seconds"), Axis("answered", percent=True))
        parts.append(f"<h2>{escape(name)}</h2><figure>{chart}<figcaption>Requests that have their first token after so "
                     "many seconds.</figcaption></figure>")  # fmt: skip
    return "\n".join([*parts, "</body></html>\n"])
