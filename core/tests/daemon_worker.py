"""A process that forks workers, each a client that stores and loads at random and checks every byte it gets.

The words of a worker are "SOCKET SEED STEPS REPORT"; see workers.py.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from tiny import BLOCKS, Engine, chain
from workers import Proof, serve_forks

from lmcache_core import Cache
from lmcache_core.client.cache import connect

SEEDS = 24
LONGEST = 6


class Wrong(Exception):
    """Bytes of another record, or a job without an end."""


def step(cache: Cache, rng: random.Random, number: int, asked: dict[str, int]) -> int:
    """One random operation; how many chunks were proven right byte for byte."""
    of = chain(rng.randrange(1, LONGEST + 1), seed=rng.randrange(SEEDS))
    shard, span, request = of.model.shards[0], range(len(of)), f"r{number}"
    engine = Engine(len(of) * BLOCKS)
    draw = rng.random()
    if draw < 0.45:
        ids = engine.compute(of, shard, span)
        job = cache.store(of, shard, span, engine.pages, ids, request=request)
        result = job.wait(20)
        if result is None:
            raise Wrong(f"store {number} did not end")
        asked["stores"] += len(span)
        return 0
    if draw < 0.5:
        cache.pin(of)
        cache.unpin(of)
        return 0
    if draw < 0.53:
        cache.evict(of)
        return 0
    hit = cache.lookup_answered(of, request, timeout_s=5)
    asked["lookups"] += 1
    if draw < 0.6:  # forgotten
        return 0
    span = range(hit.chunks)
    asked["loads"] += len(span)
    job = cache.retrieve(hit, shard, span, engine.pages, list(range(len(span) * BLOCKS)))
    result = job.wait(40)
    if result is None:
        raise Wrong(f"load {number} did not end")
    failed = {chunk for start, stop, _ in result.failed for chunk in range(start, stop)}
    for chunk in span:
        if chunk not in failed and not engine.holds(of, shard, chunk, chunk * BLOCKS):
            raise Wrong(f"chunk {chunk} of {of!r} holds wrong bytes")
    cache.release(request)
    return len(span) - len(failed)


def work(words: list[str], proof: Proof) -> None:
    """`STEPS` operations, without end if that is 0."""
    path, seed, steps, report = words[0], int(words[1]), int(words[2]), words[3]
    rng = random.Random(seed)
    asked = dict.fromkeys(("stores", "loads", "lookups"), 0)
    with connect(path, call_timeout_s=5.0 if steps else 0.25) as cache:
        number = count = 0
        while not steps or number < steps:
            number += 1
            cache._pool.wait_connected(1.0)
            count += step(cache, rng, number, asked)
            proof.say(count, number)
        for name in ("stores", "loads"):
            for result in ("ok", "failed", "late", "skipped"):
                asked[f"{name} {result}"] = cache.metrics.count(name, result=result)
    Path(report).write_text(json.dumps(asked))


if __name__ == "__main__":
    serve_forks(work)
