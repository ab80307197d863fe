"""Requests from a few numbers: users who talk in turns, each turn after all that was said before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from lmcache_core import ConfigError

from .requests import MAX_BLOCKS, Builder, Requests

MAX_REQUESTS: Final = 200_000
_BATCH: Final = 1 << 20
"""Block references that are made at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A service as people describe it; everything random comes from `seed`."""

    users: int
    """Conversations that are open at a time."""
    prompt_tokens: int
    """Of a conversation's first request, what is shared included."""
    turns: int = 8
    """Requests of one conversation; then its user begins another."""
    turn_tokens: int = 500
    """What a turn adds: the last answer and the next question."""
    output_tokens: int = 300
    shared_tokens: int = 0
    """The system prompt, the same for all."""
    requests_per_s: float = 1.0
    seconds: float = 3600.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("users", "prompt_tokens", "turns"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name.replace('_', ' ')}: must be at least 1")
        if self.shared_tokens > self.prompt_tokens:
            raise ConfigError("the shared tokens are a part of the prompt: there cannot be more of them")
        count = self.requests_per_s * self.seconds
        if not 1 <= count <= MAX_REQUESTS:
            raise ConfigError(
                f"{self.requests_per_s:g} requests/s for {self.seconds:g} s are {count:,.0f} requests; "
                f"1 to {MAX_REQUESTS:,} can be looked at"
            )


def requests_of(work: Workload, block_tokens: int = 256, max_blocks: int = MAX_BLOCKS) -> Requests:
    """The requests of a workload: arrivals at random, each from a user at random."""
    rng = np.random.default_rng(work.seed)
    count = max(1, int(work.requests_per_s * work.seconds))
    at = np.sort(rng.uniform(0.0, work.seconds, count))
    users = rng.integers(0, work.users, count)
    turn = rng.integers(0, work.turns, work.users)  # conversations do not begin all at once
    session = np.arange(work.users)
    begun = work.users
    builder = Builder(block_tokens, max_blocks)
    rows: list[tuple[float, int, int]] = []
    pending = 0
    for when, user in zip(at.tolist(), users.tolist(), strict=True):
        if turn[user] >= work.turns:
            turn[user], session[user] = 0, begun
            begun += 1
        length = work.prompt_tokens + int(turn[user]) * work.turn_tokens
        rows.append((when, int(session[user]), length))
        turn[user] += 1
        pending += length // block_tokens
        if pending > _BATCH:
            _add(builder, rows, work, block_tokens)
            rows, pending = [], 0
    _add(builder, rows, work, block_tokens)
    return builder.build()


def _add(builder: Builder, rows: list[tuple[float, int, int]], work: Workload, block_tokens: int) -> None:
    if not rows:
        return
    shared = work.shared_tokens // block_tokens
    ids = []
    for _, session, length in rows:
        blocks = np.full(length // block_tokens, session + 1, np.uint64)
        blocks[:shared] = 0
        ids.append(blocks)
    lengths = [length for _, _, length in rows]
    builder.add(
        [when for when, _, _ in rows], [len(each) for each in ids], np.concatenate(ids),
        lengths, [work.output_tokens] * len(rows),
    )  # fmt: skip
