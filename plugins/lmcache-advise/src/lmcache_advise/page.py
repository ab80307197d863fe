"""The advice as text, as a page of its own, and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from lmcache_core import CacheError

from .advice import Plan
from .kv import described
from .study import Study
from .svg import STYLE, Axis, Line, line_chart
from .units import count_text, size_text, time_text

VERDICTS = {
    "none": "No cache: the engine's own is enough",
    "host": "Host memory",
    "disk": "Disk, without host memory",
    "host+disk": "Host memory and disk",
    "host+remote": "Host memory and a remote store",
    "host+disk+remote": "Host memory, disk and a remote store",
}


def text_of(study: Study) -> str:
    """For a terminal."""
    out = [f"{name:13}{value}" for name, value in facts(study)]
    out += ["", *columns(rows_of(study)), "", f"Advice: {headline(study)}"]
    out += [f"  - {reason}" for reason in study.advice.reasons]
    out += [f"  ! {warning}" for warning in study.advice.warnings]
    if study.advice.policies:
        out += ["", *columns(policy_rows(study))]
    if study.machine.assumed:
        out += ["", "Assumed, since it was not given:", *(f"  - {each}" for each in study.machine.assumed)]
    if study.yaml:
        out += ["", study.yaml.rstrip()]
    return "\n".join(out) + "\n"


def headline(study: Study) -> str:
    words = VERDICTS[study.advice.verdict]
    sizes = ", ".join(f"{level.store.name} {size_text(level.nbytes)}" for level in study.advice.plan.levels)
    return f"{words} ({sizes})" if sizes else words


def facts(study: Study) -> Iterator[tuple[str, str]]:
    kv, requests, curve = study.kv, study.requests, study.case.curve
    state = f", and {size_text(kv.state_nbytes)} of state a chunk" if kv.state_nbytes else ""
    window = f" ({size_text(kv.window_nbytes)} of it in a window of {kv.window_tokens:,})" if kv.window_nbytes else ""
    layers = f"{described(kv.layers)}; " if kv.layers else ""
    yield "model", f"{kv.model}: {layers}{kv.attention}, {kv.dtype}"
    yield "KV", f"{size_text(kv.token_nbytes)} a token{window}{state}"
    sample = f", {requests.rate:.2%} of the blocks looked at" if requests.rate < 1 else ""
    yield (
        "trace",
        (
            f"{len(requests):,} requests in {time_text(requests.seconds)}, {count_text(requests.tokens)} prompt "
            f"tokens, blocks of {requests.block_tokens}{sample}"
        ),
    )
    yield (
        "working set",
        (
            f"{count_text(study.working_tokens)} tokens ({size_text(study.working_tokens * kv.token_nbytes)}): an LRU "
            f"of that size has 95 % of all hits; at most {count_text(max(study.working, default=0))} tokens in use "
            f"within {time_text(study.window_s)}"
        ),
    )
    yield (
        "hits",
        (
            f"at best {curve.best:.1%} of the prompt tokens; the engine's own cache of "
            f"{count_text(study.machine.engine_tokens)} tokens: {study.engine_share:.1%}"
        ),
    )
    compute = 1 / study.machine.prefill_tokens_s
    loads = ", ".join(
        f"{store.name} {time_text(kv.load_nbytes(1e4) / 1e4 / store.read_nbytes_s)}" for store in study.machine.stores
    )
    yield "one token", f"to compute {time_text(compute)}; to load: {loads}"


def rows_of(study: Study) -> list[list[str]]:
    """A table of what each combination would do."""
    rows = [["tiers", "hits", "prefill a request", "saved of all computing"]]
    chosen = study.advice.plan
    plans = [*study.advice.considered]
    if all(plan.sizes != chosen.sizes for plan in plans):
        plans.append(chosen)
    for plan in plans:
        name = " + ".join(f"{lv.store.name} {size_text(lv.nbytes)}" for lv in plan.levels) or "engine's own cache alone"
        advised = "* " if plan.sizes == chosen.sizes else "  "
        rows.append([advised + name, f"{_hits(plan):.1%}", _prefill(plan), f"{_saved(plan):.1%}"])
    return rows


def policy_rows(study: Study) -> list[list[str]]:
    policies = study.advice.policies
    names = list(next(iter(policies.values())))
    rows = [["hits by policy", *names]]
    for tier, shares in policies.items():
        rows.append([tier, *(f"{shares[name]:.1%}" for name in names)])
    return rows


def html_of(study: Study) -> str:
    """A page that needs nothing from anywhere."""
    title = headline(study)
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
        "<h1>Is a KV cache worth it here?</h1>",
        f'<div class="verdict"><strong>{escape(title)}</strong>{list_html(study.advice.reasons)}',
        list_html([f"Beware: {each}" for each in study.advice.warnings]) + "</div>",
        "<h2>What was looked at</h2><dl>",
        *(f"<dt><strong>{escape(name)}</strong></dt><dd>{escape(value)}</dd>" for name, value in facts(study)),
        "</dl><h2>Hits by size of cache</h2><figure>" + _hits_chart(study),
        "<figcaption>An LRU of that many tokens, in per cent of all prompt tokens.</figcaption></figure>",
        "<h2>Tokens in use</h2><figure>" + _working_chart(study),
        f"<figcaption>Tokens asked for in the last {escape(time_text(study.window_s))}.</figcaption></figure>",
        "<h2>Choices</h2>" + table_html(rows_of(study)),
    ]
    if study.advice.policies:
        parts.append("<h2>Eviction policies</h2>" + table_html(policy_rows(study)))
    if study.machine.assumed:
        parts.append("<h2>Assumed, since it was not given</h2>" + list_html(study.machine.assumed))
    if study.yaml:
        parts.append(f"<h2>lmcache.yaml</h2><pre>{escape(study.yaml)}</pre>")
    return "\n".join([*parts, "</body></html>\n"])


def marks_of(study: Study) -> list[tuple[str, float]]:
    """What stands in the chart of sizes."""
    marks = [("engine", study.machine.engine_tokens)]
    marks += [(f"{lv.store.name} {size_text(lv.nbytes)}", lv.tokens) for lv in study.advice.plan.levels]
    return marks


def plot(study: Study, path: Path) -> None:
    """Both charts as a picture; CacheError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CacheError(
            "--plot needs matplotlib: pip install 'lmcache-advise[plot]' (--html needs nothing more)"
        ) from error
    figure = Figure(figsize=(9, 7), layout="constrained")
    above, below = figure.subplots(2, 1)
    above.semilogx(study.sizes, [100 * share for share in study.shares])
    for name, tokens in marks_of(study):
        above.axvline(max(tokens, 1.0), linestyle="--", color="tab:orange")
        above.annotate(name, (max(tokens, 1.0), 2), rotation=90, fontsize=8)
    above.set(xlabel="tokens of cache (LRU)", ylabel="hits, % of prompt tokens", ylim=(0, 100), title=headline(study))
    below.plot([each / 60 for each in study.times], [each / 1e3 for each in study.working])
    below.set(xlabel="minutes", ylabel=f"k tokens in use within {time_text(study.window_s)}", ylim=(0, None))
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise CacheError(f"{path}: cannot be written: {error.strerror}") from error


def _hits_chart(study: Study) -> str:
    lines = [Line("LRU", study.sizes, study.shares)]
    return line_chart(
        "Hits by size of cache", lines, Axis("tokens", log=True), Axis("hits", percent=True), marks_of(study)
    )


def _working_chart(study: Study) -> str:
    minutes = [each / 60 for each in study.times]
    return line_chart("Tokens in use", [Line("tokens", minutes, study.working)], Axis("minutes"), Axis("tokens"))


def _hits(plan: Plan) -> float:
    return plan.hit_tokens / plan.tokens if plan.tokens else 0.0


def _saved(plan: Plan) -> float:
    return plan.saved_s / plan.total_s if plan.total_s else 0.0


def _prefill(plan: Plan) -> str:
    return time_text(plan.after_s / plan.requests) if plan.requests else "-"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if not column else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def list_html(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>" if lines else ""


def table_html(rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:])
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
