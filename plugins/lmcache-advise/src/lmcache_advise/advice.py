"""Which tiers are worth having, and how large: seconds of prefill saved, against what a simpler setup saves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from .distances import Curve
from .kv import Kv
from .machine import DISK, HOST, REMOTE, GiB, Machine, Store
from .units import count_text, size_text, time_text

_SHRINK: Final = 0.02
"""Of the time to compute all prompts: what the tiers together may lose for being smaller than they could be."""
_STEP: Final = 2**0.5
_SMALLEST: Final = GiB


@dataclass(frozen=True, slots=True)
class Level:
    """What one tier would do for a trace; all figures over the whole of it."""

    store: Store
    nbytes: float
    tokens: float
    """That it has room for."""
    hit_tokens: float
    """That are in it and in nothing nearer."""
    requests: int
    compute_s: float
    """That computing those tokens takes."""
    load_s: float
    delivered: float
    """The part of the loads that its bandwidth allows; 1 for all."""

    @property
    def saved_s(self) -> float:
        return max(0.0, self.compute_s - self.load_s) * self.delivered

    @property
    def is_slower(self) -> bool:
        """Whether loading takes longer than computing."""
        return self.hit_tokens > 0 and self.load_s >= self.compute_s


@dataclass(frozen=True, slots=True)
class Plan:
    """A choice of tiers and sizes, and what it saves."""

    levels: tuple[Level, ...]
    total_s: float
    """That computing all prompts takes, without any cache."""
    before_s: float
    """What the engine's own cache leaves to compute."""
    requests: int
    tokens: int
    engine_hit_tokens: float

    @property
    def saved_s(self) -> float:
        return sum(level.saved_s for level in self.levels)

    @property
    def after_s(self) -> float:
        return self.before_s - self.saved_s

    @property
    def hit_tokens(self) -> float:
        """With the engine's own."""
        return self.engine_hit_tokens + sum(lv.hit_tokens * lv.delivered for lv in self.levels if not lv.is_slower)

    @property
    def sizes(self) -> dict[str, float]:
        """Bytes by tier."""
        return {level.store.name: level.nbytes for level in self.levels}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(level.store.name for level in self.levels)


@dataclass(frozen=True, slots=True)
class Advice:
    """The plan to take, beside those that were not."""

    plan: Plan
    considered: tuple[Plan, ...]
    """Every combination at its largest."""
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    policies: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """By tier: hits of all prompt tokens, by policy."""
    policy: Mapping[str, str] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """ "none", "host", "host+disk", ..."""
        return "+".join(self.plan.names) or "none"


@dataclass(frozen=True, slots=True)
class Case:
    """What the plans are made for."""

    curve: Curve
    kv: Kv
    machine: Machine
    seconds: float
    chunk_tokens: int = 256
    worth: float = 0.05
    """What a tier must save to be worth having, of the time to compute all prompts."""

    def plan(self, sizes: Mapping[str, float]) -> Plan:
        """What tiers of those sizes in bytes save."""
        engine = self.curve.hit_tokens(self.machine.engine_tokens)
        reach, levels = self.machine.engine_tokens, []
        for store in self.machine.stores:
            if store.name not in sizes:
                continue
            level = self._level(store, sizes[store.name], reach)
            levels.append(level)
            if not level.is_slower:
                reach = max(reach, level.tokens)
        rate = self.machine.prefill_tokens_s
        before = (self.curve.tokens - engine) / rate
        return Plan(tuple(levels), self.curve.tokens / rate, before, self.curve.requests, self.curve.tokens, engine)

    def _level(self, store: Store, nbytes: float, reach: float) -> Level:
        tokens = nbytes / self.kv.stored_nbytes(self.chunk_tokens)
        hits = self.curve.hit_tokens(tokens) - self.curve.hit_tokens(reach)
        requests = self.curve.requests_between(reach, tokens)
        if hits <= 0 or not requests:
            return Level(store, nbytes, tokens, 0.0, 0, 0.0, 0.0, 1.0)
        read = requests * self.kv.load_nbytes(hits / requests)
        load = read / store.read_nbytes_s + requests * store.latency_s
        wanted = read / self.seconds if self.seconds > 0 else 0.0
        delivered = min(1.0, store.read_nbytes_s / wanted) if wanted else 1.0
        return Level(store, nbytes, tokens, hits, requests, hits / self.machine.prefill_tokens_s, load, delivered)


def advise(case: Case) -> Advice:
    """The simplest combination of tiers that is nearly as good as the best, each no larger than it needs to be."""
    plans = [case.plan({store.name: store.nbytes for store in chosen}) for chosen in _combinations(case)]
    best = max(plans, key=lambda plan: plan.saved_s)
    slack = case.worth * best.total_s
    chosen = next(plan for plan in plans if plan.saved_s >= best.saved_s - slack)
    plan = _shrunk(case, chosen)
    return Advice(plan, tuple(plans), tuple(_reasons(case, plans, plan)), tuple(_warnings(case, plan)))


def _combinations(case: Case) -> list[tuple[Store, ...]]:
    """None first, then by how much there is to run."""
    have = {store.name: store for store in case.machine.stores}
    wanted = ((), (HOST,), (DISK,), (HOST, DISK), (HOST, REMOTE), (HOST, DISK, REMOTE))
    return [tuple(have[name] for name in names) for names in wanted if all(name in have for name in names)]


def _shrunk(case: Case, plan: Plan) -> Plan:
    if not plan.levels:
        return plan
    sizes = plan.sizes
    share = _SHRINK * plan.total_s / len(sizes)
    wanted = plan.saved_s
    for name in reversed(plan.names):
        wanted -= share
        largest = sizes[name]
        size = min(largest, _SMALLEST)
        while size < largest and case.plan(sizes | {name: size}).saved_s < wanted:
            size *= _STEP
        sizes[name] = min(largest, _rounded(size))
    return case.plan(sizes)


def _rounded(nbytes: float) -> float:
    unit = GiB if nbytes < 64 * GiB else 8 * GiB if nbytes < 1024 * GiB else 128 * GiB
    return math.ceil(nbytes / unit - 1e-9) * unit


def _reasons(case: Case, plans: Sequence[Plan], plan: Plan) -> list[str]:
    curve, machine = case.curve, case.machine
    best = curve.hit_tokens(float("inf"))
    engine = curve.hit_tokens(machine.engine_tokens)
    said: list[str] = []
    if not best:
        return ["no two prompts share a prefix of a whole block: there is nothing to reuse"]
    if not plan.levels:
        top = max(plans, key=lambda each: each.saved_s)
        left = (best - engine) / curve.tokens
        said.append(
            f"the engine's own cache already has {engine / best:.0%} of the hits that any cache could have; "
            f"a larger one could add {left:.1%} of the prompt tokens"
        )
        said.append(
            f"the best of the tiers would save {top.saved_s / top.total_s:.1%} of computing the prompts; "
            f"it is not worth running one for {case.worth:.0%} or less (--worth)"
        )
        return [*said, *_too_small(case, plans), *_slower(plans)]
    for level in plan.levels:
        if not level.hit_tokens:
            continue
        said.append(
            f"{level.store.name}: {level.hit_tokens / curve.tokens:.1%} of the prompt tokens are in it and nothing "
            f"nearer; loading them takes {time_text(level.load_s / level.requests)} a request, computing them "
            f"{time_text(level.compute_s / level.requests)}"
        )
    return [*said, *_too_small(case, plans), *_not_more(plans, plan), *_slower(plans)]


def _not_more(plans: Sequence[Plan], plan: Plan) -> list[str]:
    said = []
    for other in plans:
        more = [name for name in other.names if name not in plan.names]
        if len(more) == 1 and set(plan.names) < set(other.names):
            gain = (other.saved_s - plan.saved_s) / plan.total_s
            said.append(f"no {more[0]}: it would save {max(0.0, gain):.1%} of computing the prompts more")
    return said


def _too_small(case: Case, plans: Sequence[Plan]) -> list[str]:
    found = {level.store.name: level for plan in plans for level in plan.levels}
    return [
        f"{name}: {size_text(level.nbytes)} have room for {count_text(level.tokens)} tokens, no more than the engine's "
        f"own cache of {count_text(case.machine.engine_tokens)}"
        for name, level in found.items()
        if level.tokens <= case.machine.engine_tokens
    ]


def _slower(plans: Sequence[Plan]) -> list[str]:
    found = {level.store.name: level for plan in plans for level in plan.levels if level.is_slower}
    return [
        f"{name}: loading takes longer than computing ({time_text(level.load_s / level.requests)} against "
        f"{time_text(level.compute_s / level.requests)} a request)"
        for name, level in found.items()
    ]


def _warnings(case: Case, plan: Plan) -> list[str]:
    said = []
    new = case.curve.tokens - plan.hit_tokens
    written = new * case.kv.stored_nbytes(case.chunk_tokens) / case.seconds if case.seconds > 0 else 0.0
    for level in plan.levels:
        if level.delivered < 1:
            said.append(
                f"{level.store.name}: its bandwidth allows {level.delivered:.0%} of the loads that are asked for"
            )
        if written > level.store.write_nbytes_s:
            said.append(
                f"{level.store.name}: {size_text(written)}/s would be written, it takes "
                f"{size_text(level.store.write_nbytes_s)}/s; the rest is dropped (write: second_use writes less)"
            )
    return said
