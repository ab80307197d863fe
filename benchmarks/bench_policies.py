"""Eviction policies on replayed traces of multi-turn sessions, one-time documents and shared ones: hits in tokens.

Not a matter of time: a trace is made from a seed and replayed against the policy alone, as a tier would ask it, so
the figures are the same on every machine.  The limit of each row is a tier that never runs full.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from harness.measure import Options
from harness.report import Row, row_of

from lmcache_core.keys import ChunkKey
from lmcache_core.plugins import POLICIES, discover, load_offer
from lmcache_core.policy import EvictionPolicy, Item

SEED = 0
CHUNK_TOKENS = 256
REQUESTS, QUICK_REQUESTS = 12_000, 1_500
CAPACITIES = (1 << 17, 1 << 18, 1 << 19, 1 << 20)
"""In tokens."""
AGENTS, AGENT_CHUNKS = 8, 16
"""System prompts with tool definitions, and their length; the first is used most."""
SESSIONS = 60
"""Open at a time."""
TURNS = 8
"""Of a session, on average."""
TURN_CHUNKS = (1, 5)
SCANS, SCAN_CHUNKS = 0.12, (32, 128)
"""Share of requests that bring a document which nobody asks about again, and its length."""
SHARED = 400
"""Documents that many ask about, some of them much more than others."""

Prompt = Sequence[ChunkKey]


def rows(options: Options) -> Iterator[Row]:
    requests = QUICK_REQUESTS if options.quick else REQUESTS
    names = {offer.name: load_offer(offer) for offer in discover(POLICIES) if offer.dist == "lmcache-core"}
    for title, trace in (
        ("sessions", list(sessions(requests, scans=0.0))),
        ("sessions and one-time documents", list(sessions(requests, scans=SCANS))),
        ("questions about shared documents", list(questions(requests))),
    ):
        chunks = sum(map(len, trace))
        distinct = len({key for prompt in trace for key in prompt})
        millions = (f"{count * CHUNK_TOKENS / 1e6:.1f} M" for count in (chunks, distinct))
        what = "{:,} requests, {} tokens, {} distinct".format(len(trace), *millions)
        best = hit_chunks(trace, None, distinct)
        for capacity in CAPACITIES:
            for name, kind in names.items():
                hits = hit_chunks(trace, kind(), capacity // CHUNK_TOKENS)
                yield row_of(
                    "policies", f"{title}, {capacity >> 10}k, {name}", "% of tokens", [100 * hits / chunks],
                    limit=[100 * best / chunks], note=what,
                )  # fmt: skip


def sessions(requests: int, scans: float) -> Iterator[Prompt]:
    """The prompts of a service with many users at once, each longer than the last of its session."""
    choose = random.Random(SEED)
    agents = [chunks(f"agent {number}", 0, AGENT_CHUNKS) for number in range(AGENTS)]
    weights = [1 / (rank + 1) for rank in range(AGENTS)]
    running = [_Session.begin(choose, agents, weights, number) for number in range(SESSIONS)]
    begun = SESSIONS
    for number in range(requests):
        if choose.random() < scans:
            agent = choose.choices(agents, weights)[0]
            yield [*agent, *chunks(f"document {number}", len(agent), choose.randint(*SCAN_CHUNKS))]
            continue
        # Users differ in how long they think: some sessions are asked for again soon, some much later.
        index = choose.choices(range(SESSIONS), [session.pace for session in running])[0]
        session = running[index]
        session.prompt = [*session.prompt, *chunks(session.name, len(session.prompt), choose.randint(*TURN_CHUNKS))]
        yield session.prompt
        if choose.random() < 1 / TURNS:
            running[index] = _Session.begin(choose, agents, weights, begun)
            begun += 1


def questions(requests: int) -> Iterator[Prompt]:
    """One instruction, one of many documents, one question: what is asked about most changes slowly."""
    choose = random.Random(SEED)
    instruction = chunks("instruction", 0, 2)
    documents = [[*instruction, *chunks(f"shared {n}", 2, choose.randint(8, 64))] for n in range(SHARED)]
    weights = [1 / (rank + 1) for rank in range(SHARED)]
    for number in range(requests):
        document = choose.choices(documents, weights)[0]
        yield [*document, *chunks(f"question {number}", len(document), 1)]
        if number % 50 == 49:  # a document becomes as popular as another one was
            one, other = choose.sample(range(SHARED), 2)
            documents[one], documents[other] = documents[other], documents[one]


@dataclass(slots=True)
class _Session:
    name: str
    prompt: Prompt
    pace: float

    @classmethod
    def begin(cls, choose: random.Random, agents: Sequence[Prompt], weights: Sequence[float], number: int) -> _Session:
        return cls(f"session {number}", choose.choices(agents, weights)[0], choose.expovariate(1.0) + 0.05)


def chunks(name: str, first: int, count: int) -> list[ChunkKey]:
    """Keys of the chunks `first` to `first + count` of a text of that name."""
    return [ChunkKey(hashlib.shake_128(f"{name} {first + i}".encode()).digest(48)) for i in range(count)]


def hit_chunks(trace: Sequence[Prompt], policy: EvictionPolicy | None, capacity: int) -> int:
    """Chunks that are found, each prompt being stored after it was asked for, in a tier of `capacity` chunks.

    Without a policy nothing leaves.
    """
    there: set[ChunkKey] = set()
    found = 0
    for prompt in trace:
        hits = next((index for index, key in enumerate(prompt) if key not in there), len(prompt))
        found += hits
        missing = [(depth, key) for depth, key in enumerate(prompt) if key not in there]
        if policy is not None:
            for key in reversed(prompt[:hits]):
                policy.on_get(key)
            _make_room(policy, there, len(there) + len(missing) - capacity, set(prompt).__contains__)
            missing = missing[: capacity - len(there)]
            for depth, key in reversed(missing):
                policy.on_put(Item(key, depth, 1))
        there.update(key for _, key in missing)
    return found


def _make_room(
    policy: EvictionPolicy, there: set[ChunkKey], needed: int, is_pinned: Callable[[ChunkKey], bool]
) -> None:
    for key in policy.victims(needed, is_pinned) if needed > 0 else ():
        there.remove(key)
        policy.on_remove(key)
