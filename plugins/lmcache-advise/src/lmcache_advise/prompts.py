"""What a benchmark asks: agents, questions about documents, one system prompt for all, short prompts; from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .reading import read_trace, with_older

_WORDS: Final = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work government number night point home water room mother area
money story fact month lot right study book eye job word business issue side kind head house service friend father
power hour game line end member law car city community name president team minute idea kid body information back
parent face others level office door health person art war history party result change morning reason research girl
guy moment air teacher force education
"""
WORDS: Final = tuple(_WORDS.split())
"""Common ones: most tokenizers have one token for each."""
AGENT_TOKENS: Final = (20_000, 115_000)
"""The context of an agent's first turn and of its last."""
MAX_REQUESTS: Final = 100_000


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation: each turn is asked when the one before it was answered."""

    name: str
    system: str
    turns: tuple[str, ...]
    at_s: float = 0.0
    """When it begins, after the workload has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is asked."""

    users: int = 4
    sessions: int = 8
    """Conversations of agents; the other workloads ask as many requests as these have turns."""
    turns: int = 6
    scale: float = 1.0
    """Times the lengths that services have."""
    seed: int = 0

    def words(self, tokens: float) -> int:
        return max(4, round(tokens * self.scale))


def agent(size: Size) -> list[Session]:
    """A system prompt with tools, and turns that bring their results: 20,000 to 115,000 tokens, times the scale."""
    first, last = AGENT_TOKENS
    shared = text(size, "tools", size.words(first * 0.3))
    step = size.words((last - first) / max(1, size.turns - 1))
    sessions = []
    for number in range(size.sessions):
        task = text(size, f"task {number}", size.words(first * 0.7))
        more = [text(size, f"result {number} {turn}", step) for turn in range(1, size.turns)]
        sessions.append(Session(f"agent {number}", shared, (task, *more)))
    return sessions


def rag(size: Size) -> list[Session]:
    """A question about one of several documents, some of them asked about much more than others."""
    choose = random.Random(f"rag {size.seed}")
    count = max(2, size.sessions)
    documents = [text(size, f"document {number}", size.words(8000)) for number in range(count)]
    weights = [1 / (rank + 1) for rank in range(count)]
    return [
        Session(f"question {n}", "Answer from the document. " + choose.choices(documents, weights)[0],
                (text(size, f"question {n}", size.words(60)),))
        for n in range(size.sessions * size.turns)
    ]  # fmt: skip


def shared(size: Size) -> list[Session]:
    """One system prompt for everybody, and a short question."""
    system = text(size, "system", size.words(4000))
    count = size.sessions * size.turns
    return [Session(f"user {n}", system, (text(size, f"user {n}", size.words(200)),)) for n in range(count)]


def short(size: Size) -> list[Session]:
    """Prompts that share nothing and are short: where a cache is of no use, and must not be in the way."""
    choose = random.Random(f"short {size.seed}")
    count = size.sessions * size.turns
    return [
        Session(f"short {n}", "", (text(size, f"short {n}", size.words(choose.randint(100, 500))),))
        for n in range(count)
    ]


WORKLOADS: Final[dict[str, Callable[[Size], list[Session]]]] = {
    "agent": agent,
    "rag": rag,
    "shared": shared,
    "random": short,
}


def replayed(path: Path, size: Size, speed: float = 1.0) -> list[Session]:
    """The requests of a trace, which has no text: what was equal in it is equal here, and as far apart in time."""
    requests = read_trace(with_older(path)).requests
    begin = float(requests.at[0]) if len(requests) else 0.0
    words = size.words(requests.block_tokens)
    starts, blocks = requests.starts.tolist(), requests.blocks.tolist()
    found = []
    for number in range(min(len(requests), MAX_REQUESTS)):
        mine = [text(size, f"block {block}", words) for block in blocks[starts[number] : starts[number + 1]]]
        rest = int(requests.input_tokens[number]) % requests.block_tokens
        question = text(size, f"rest {number}", size.words(max(8, rest)))
        at = (float(requests.at[number]) - begin) / speed
        found.append(Session(f"request {number}", " ".join(mine), (question,), at))
    return found


def text(size: Size, name: str, words: int) -> str:
    """So many words that belong to the name and the seed."""
    return " ".join(random.Random(f"{size.seed} {name}").choices(WORDS, k=words))
