"""What a run shows, and whether a cache is of use: the same requests with it and without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from .driving import Run

GAIN: Final = 0.05
"""By how much the mean time to the first token must be shorter to be worth a cache."""
LOSS: Final = 0.05
_RESAMPLES: Final = 2000
_FEWEST: Final = 8
"""Pairs of requests below which nothing is concluded."""

USE: Final = "use it"
NOT_HERE: Final = "do not use it here"
UNDECIDED: Final = "no verdict"


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one workload on one endpoint."""

    asked: int
    completed: int
    failed: int
    seconds: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    output_tokens_s: float
    requests_s: float
    prompt_tokens: int
    hit_rate: float | None
    """Of the prompt tokens, as the usage says; None where it does not."""
    errors: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same requests of one workload, with a cache and without."""

    pairs: int
    gain: float
    """Of the mean time to the first token: 0.3 is 30 % less; below zero it takes longer."""
    low: float
    high: float
    """Between which the gain lies, 95 times of 100."""
    throughput: float
    """Output tokens a second, as a multiple of those without."""

    @property
    def helps(self) -> bool:
        return self.pairs >= _FEWEST and self.low > 0 and self.gain >= GAIN

    @property
    def hurts(self) -> bool:
        return self.pairs >= _FEWEST and self.high < 0 and self.gain <= -LOSS


@dataclass(frozen=True, slots=True)
class Verdict:
    word: str
    reasons: tuple[str, ...]


def figures_of(run: Run) -> Figures:
    good = [outcome.answer for outcome in run.outcomes if outcome.ok]
    first = np.array([answer.ttft_s for answer in good]) if good else np.zeros(1)
    said = [answer for answer in good if answer.cached_tokens is not None]
    known = sum(answer.prompt_tokens for answer in said)
    errors = Counter(outcome.answer.error for outcome in run.outcomes if not outcome.ok)
    return Figures(
        run.asked, len(good), len(run.outcomes) - len(good), run.seconds,
        float(first.mean()), float(np.quantile(first, 0.5)), float(np.quantile(first, 0.95)),
        sum(answer.output_tokens for answer in good) / max(run.seconds, 1e-9), len(good) / max(run.seconds, 1e-9),
        sum(answer.prompt_tokens for answer in good),
        sum(answer.cached_tokens or 0 for answer in said) / known if known else None,
        tuple(errors.most_common(5)),
    )  # fmt: skip


def comparison_of(with_cache: Run, without: Run, seed: int = 0) -> Comparison:
    """Requests are paired by session and turn, so that what differs between them does not count."""
    ours = {(each.session, each.turn): each.answer.ttft_s for each in with_cache.outcomes if each.ok}
    theirs = {(each.session, each.turn): each.answer.ttft_s for each in without.outcomes if each.ok}
    both = sorted(ours.keys() & theirs.keys())
    rates = [figures_of(run).output_tokens_s for run in (with_cache, without)]
    throughput = rates[0] / rates[1] if rates[1] else 0.0
    if not both:
        return Comparison(0, 0.0, 0.0, 0.0, throughput)
    a, b = (np.array([side[key] for key in both]) for side in (ours, theirs))
    picks = np.random.default_rng(seed).integers(0, len(both), (_RESAMPLES, len(both)))
    gains = 1 - a[picks].mean(axis=1) / b[picks].mean(axis=1)
    low, high = (float(each) for each in np.quantile(gains, (0.025, 0.975)))
    return Comparison(len(both), float(1 - a.mean() / b.mean()), low, high, throughput)


def verdict_of(
    figures: Mapping[str, tuple[Figures, Figures]], compared: Mapping[str, Comparison]
) -> Verdict:  # fmt: skip
    """`figures` are those with the cache and without, by workload."""
    reasons = [
        f"{name}: the first token comes {abs(each.gain):.0%} {'sooner' if each.gain >= 0 else 'later'} "
        f"({each.low:+.0%} to {each.high:+.0%}, {each.pairs} pairs), {each.throughput:.2f}x the tokens a second"
        for name, each in compared.items()
    ]
    lost = {name: ours.failed for name, (ours, theirs) in figures.items() if ours.failed > theirs.failed}
    if lost:
        which = ", ".join(f"{count} of {name}" for name, count in lost.items())
        return Verdict(NOT_HERE, (f"requests failed that did not without it: {which}", *reasons))
    if not compared or all(each.pairs < _FEWEST for each in compared.values()):
        return Verdict(UNDECIDED, (f"fewer than {_FEWEST} requests were answered on both sides", *reasons))
    helped = [name for name, each in compared.items() if each.helps]
    hurt = [name for name, each in compared.items() if each.hurts]
    if hurt:
        reasons.insert(0, f"it makes requests slower: {', '.join(hurt)}")
    if helped and hurt:
        return Verdict(f"{USE} for {', '.join(helped)}; not for {', '.join(hurt)}", tuple(reasons))
    if helped:
        rest = [name for name in compared if name not in helped]
        return Verdict(USE if not rest else f"{USE} for {', '.join(helped)}", tuple(reasons))
    if not hurt:
        reasons.insert(0, f"nothing here gains {GAIN:.0%} or more of the time to the first token, beyond chance")
    return Verdict(NOT_HERE, tuple(reasons))


def verdict_alone(figures: Mapping[str, Figures]) -> Verdict:
    """Of one endpoint by itself."""
    said = [
        f"{name}: {each.hit_rate:.0%} of the prompt tokens came from a cache"
        for name, each in figures.items()
        if each.hit_rate is not None
    ]
    return Verdict(UNDECIDED, ("one endpoint alone says nothing of what another would do: give --baseline URL", *said))
