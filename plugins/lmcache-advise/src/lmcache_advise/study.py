"""Everything that is found out about one trace on one machine: figures, series to draw, the advice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np

from .advice import Advice, Case, Plan, advise
from .distances import working_set
from .kv import Kv, described
from .machine import Machine
from .replay import DEFAULT, shares_of
from .requests import Requests

_POINTS: Final = 80
_TIMES: Final = 120
_BETTER: Final = 0.02
"""By how many prompt tokens another policy must do better than the default to be named."""
WHOLE: Final = 0.95
"""The part of all hits that makes a working set."""


@dataclass(frozen=True, slots=True)
class Study:
    """One advice with all that it rests on."""

    kv: Kv
    machine: Machine
    advice: Advice
    case: Case
    requests: Requests
    working_tokens: float
    """Of the smallest LRU that has 95 % of the hits there are: what a cache must hold to be of use."""
    window_s: float
    sizes: tuple[float, ...]
    """Tokens; the shares of hits that an LRU of each has are `shares`."""
    shares: tuple[float, ...]
    times: tuple[float, ...]
    """Seconds after the first request; `working` are the tokens in use then, of the last `window_s`."""
    working: tuple[float, ...]
    yaml: str = ""

    @property
    def engine_share(self) -> float:
        return self.case.curve.share(self.machine.engine_tokens)

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        curve, plan = self.case.curve, self.advice.plan
        return {
            "verdict": self.advice.verdict,
            "reasons": list(self.advice.reasons),
            "warnings": list(self.advice.warnings),
            "assumed": list(self.machine.assumed),
            "model": {**asdict(self.kv), "token_nbytes": self.kv.token_nbytes, "layers": described(self.kv.layers)},
            "requests": len(self.requests),
            "seconds": self.requests.seconds,
            "prompt_tokens": self.requests.tokens,
            "block_tokens": self.requests.block_tokens,
            "sample": self.requests.rate,
            "working_set_tokens": self.working_tokens,
            "hits": {
                "best": curve.best,
                "engine": self.engine_share,
                "with_plan": plan.hit_tokens / curve.tokens if curve.tokens else 0.0,
            },
            "engine_tokens": self.machine.engine_tokens,
            "prefill_tokens_s": self.machine.prefill_tokens_s,
            "plan": _plan_json(plan),
            "considered": [_plan_json(each) for each in self.advice.considered],
            "policies": {tier: dict(shares) for tier, shares in self.advice.policies.items()},
            "curve": {"tokens": list(self.sizes), "share": list(self.shares)},
            "working_set": {"seconds": list(self.times), "tokens": list(self.working), "window_s": self.window_s},
            "yaml": self.yaml,
        }


def study_of(requests: Requests, case: Case, *, window_s: float, policies: bool = True) -> Study:
    """Look at the trace from all sides; `policies` also replays the eviction policies at the sizes advised."""
    curve = case.curve
    advice = advise(case)
    if policies:
        advice = with_policies(advice, requests, case)
    largest = max(4.0 * requests.block_tokens, float(curve.largest), 1.2 * case.machine.engine_tokens)
    sizes = np.geomspace(max(1.0, largest / 1e4), largest, _POINTS)
    times = np.linspace(0.0, requests.seconds, _TIMES) if len(requests) else np.zeros(0)
    begin = float(requests.at[0]) if len(requests) else 0.0
    working = working_set(requests, curve.segments, times + begin, window_s)
    return Study(
        case.kv, case.machine, advice, case, requests, curve.size_for(WHOLE), window_s,
        tuple(sizes.tolist()), tuple(curve.share(size) for size in sizes),
        tuple(times.tolist()), tuple(working.tolist()),
    )  # fmt: skip


def with_policies(advice: Advice, requests: Requests, case: Case) -> Advice:
    """The advice with a policy for each tier: the default, unless another does clearly better on this trace."""
    found: dict[str, Mapping[str, float]] = {}
    named: dict[str, str] = {}
    for level in advice.plan.levels:
        shares = shares_of(requests, case.curve, level.tokens)
        found[level.store.name] = shares
        best = max(shares, key=lambda name: shares[name])
        if shares[best] > shares.get(DEFAULT, 0.0) + _BETTER:
            named[level.store.name] = best
    return replace(advice, policies=found, policy=named)


def _plan_json(plan: Plan) -> dict[str, Any]:
    return {
        "tiers": [
            {
                "name": level.store.name,
                "nbytes": int(level.nbytes),
                "tokens": int(level.tokens),
                "hit_tokens": level.hit_tokens,
                "requests": level.requests,
                "compute_s": level.compute_s,
                "load_s": level.load_s,
                "delivered": level.delivered,
            }
            for level in plan.levels
        ],
        "prefill_s": {"no_cache": plan.total_s, "engine": plan.before_s, "with_tiers": plan.after_s},
        "saved_s": plan.saved_s,
    }
