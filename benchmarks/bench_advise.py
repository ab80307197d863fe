"""`lmc advise` on a million requests: its time against a limit, and the error of its sample against every block.

The trace has the shape of the published one: blocks of 512 tokens by their hash ids, some 30 of them in a prompt; most
requests go on from an earlier one, some share a system prompt, some share nothing.  Made from a seed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from harness.measure import Options, load_average, seconds
from harness.report import Must, Row, row_of

REQUESTS, QUICK_REQUESTS = 1_000_000, 20_000
LIMIT_S: Final = 120.0
"""For a million requests."""
ERROR_POINTS: Final = 2.0
BLOCK_TOKENS: Final = 512
SESSIONS: Final = 4000
"""Open at a time."""
SAMPLES: Final = ((4, 16), (2, 4))
"""One reference in about so many is kept; of a short trace more must be."""
CAPACITIES: Final = tuple(1 << power for power in range(17, 27))
"""In tokens."""


def rows(options: Options) -> Iterator[Row]:
    try:
        from lmcache_advise.distances import curve_of
        from lmcache_advise.reading import read_trace
        from lmcache_advise.replay import shares_of
    except ImportError:
        yield row_of("advise", "requests", "s", [0.0], note="lmcache-advise is not installed: nothing was measured")
        return
    count = QUICK_REQUESTS if options.quick else REQUESTS
    path = options.directory / "trace.jsonl"
    blocks = write_trace(path, count)
    load = load_average()
    found = []

    def work() -> None:
        trace = read_trace([path])
        curve = curve_of(trace.requests)
        shares = [curve.share(capacity) for capacity in CAPACITIES]
        policies = shares_of(trace.requests, curve, CAPACITIES[5])
        found.append((trace.requests.rate, shares, policies))

    taken = seconds(work)
    (rate, _, _) = found[0]
    yield row_of(
        "advise", f"{count:,} requests", "s", [taken], limit=[LIMIT_S], must=Must(ratio_limit=1.0), load=load,
        note=f"{blocks:,} hash ids, {rate:.1%} of the blocks looked at; all policies replayed at one size",
    )  # fmt: skip
    exact = curve_of(read_trace([path], max_blocks=1 << 40).requests)
    for part in SAMPLES[options.quick]:
        sampled = read_trace([path], max_blocks=blocks // part).requests
        curve = curve_of(sampled)
        error = max(abs(curve.share(each) - exact.share(each)) for each in CAPACITIES)
        yield row_of(
            "advise", f"largest error, {sampled.rate:.1%} of the blocks", "points", [100 * error],
            limit=[ERROR_POINTS], must=Must(at_most=ERROR_POINTS), load=load,
            note=f"hit rate of LRU at {len(CAPACITIES)} sizes, {len(sampled.blocks):,} references against all",
        )  # fmt: skip


def write_trace(path: Path, count: int) -> int:
    """A trace of `count` requests; the number of its hash ids."""
    choose = random.Random(0)
    fresh, total = 1000, 0
    agents = [list(range(number * 40, number * 40 + choose.randint(2, 12))) for number in range(8)]
    sessions = [list(choose.choice(agents)) for _ in range(SESSIONS)]
    when = 0
    with path.open("w") as out:
        for _ in range(count):
            when += choose.randint(0, 300)
            kind = choose.random()
            if kind < 0.15:  # a document of its own
                ids = [*choose.choice(agents), *range(fresh, fresh + choose.randint(8, 60))]
                fresh += 61
            else:
                index = int(choose.random() ** 2 * SESSIONS)  # some talk more than others
                if len(sessions[index]) > 60 or choose.random() < 0.1:
                    sessions[index] = list(choose.choice(agents))
                sessions[index] += range(fresh, fresh + (step := choose.randint(1, 8)))
                fresh += step
                ids = sessions[index]
            total += len(ids)
            line = {"timestamp": when, "input_length": len(ids) * BLOCK_TOKENS, "output_length": 200, "hash_ids": ids}
            out.write(json.dumps(line, separators=(",", ":")) + "\n")
    return total
