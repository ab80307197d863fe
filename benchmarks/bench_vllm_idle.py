"""What the connector costs vLLM when it brings nothing: CPU-seconds of all processes, ours with the daemon's.

Two loads on SmolLM2-135M with vLLM's own prefix cache on: short random prompts, which nobody asked before, and prompts
with common beginnings that vLLM's own cache holds.  The limit is the same engine without us.  The sides take turns
every 8 requests, some 3 seconds, and a round is the sum of 6 such turns: vLLM's processes spin while they wait for each
other, and how much CPU time that takes drifts by more than what is to be seen.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Final

from harness import vllm as vllms
from harness.daemon import serve
from harness.measure import MiB, Options, Timings, interleave, load_average
from harness.peer import Missing
from harness.report import Must, Row, row_of

KV_NBYTES: Final = 768 * MiB
HOST_NBYTES: Final = 512 * MiB
"""More than the texts of the second load, and soon full of the first, as a cache in service is."""
PAIRS: Final = 7
TURN_REQUESTS: Final = 8
"""As many as an engine works on at a time."""
ANSWER_TOKENS: Final = 16
RANDOM_TOKENS: Final = (32, 512)
DOCUMENTS: Final = 16
DOCUMENT_TOKENS: Final = 1024
"""16 of them are half of what the engine's own cache holds."""
QUESTION_TOKENS: Final = 32
SETTLE_S: Final = 0.5
"""Within what is measured, for work in the background to end."""
AT_MOST: Final = Must(ratio_limit=0.98)
Tokens = list[int]


def rows(options: Options) -> Iterator[Row]:
    vllm = vllms.find_vllm()
    if isinstance(vllm, Missing):
        print(f"vllm-idle: not measured: {vllm.reason}", file=sys.stderr)
        return
    if not options.quick and options.rounds < PAIRS:
        print(f"vllm-idle: fewer than {PAIRS} pairs: 2 % are not to be seen", file=sys.stderr)
    model = vllms.model(vllm, "smollm2")
    turns = 1 if options.quick else 6
    requests = turns * TURN_REQUESTS
    with ExitStack() as stack:
        served = stack.enter_context(serve(options.directory / "d", HOST_NBYTES, chunk_tokens=vllms.BLOCK_TOKENS))
        both = {
            "kv_cache_memory_bytes": KV_NBYTES,
            "max_num_seqs": TURN_REQUESTS,
            "enable_prefix_caching": True,
        }
        transfer = vllms.ours(served.socket, options.directory)
        ours = stack.enter_context(
            vllms.start(options, vllm, model, options.directory / "ours.log", kv_transfer_config=transfer, **both)
        )
        ours.pause()
        alone = stack.enter_context(vllms.start(options, vllm, model, options.directory / "alone.log", **both))
        alone.pause()
        for load, name, prompts in (
            ("no hits", f"{requests} random prompts of {RANDOM_TOKENS[0]} to {RANDOM_TOKENS[1]} tokens", _random),
            ("fits vLLM's cache", f"{requests} questions on {DOCUMENTS} texts of {DOCUMENT_TOKENS} tokens", _questions),
        ):
            began = load_average()
            sides = {
                "ours": _side(ours, (ours.pid, served.pid), prompts),
                "limit": _side(alone, (alone.pid,), prompts),
            }
            samples = interleave(sides, (options.rounds + 1) * turns)
            note = f"{name} a round, {ANSWER_TOKENS} tokens answered; limit: the same engine without us"
            for what, row, unit, must in (("cpu", load, "CPU-s", AT_MOST), ("wall", f"{load}, wall time", "s", None)):
                mine, limit = (_rounds(samples[side][what], turns) for side in sides)
                yield row_of("vllm-idle", row, unit, mine, limit=limit, must=must, load=began, note=note)


def _rounds(turns: list[float], each: int) -> list[float]:
    """Sums of `each` turns, without the first such sum: caches fill in it."""
    return [sum(turns[start : start + each]) for start in range(each, len(turns), each)]


def _side(engine: Any, pids: tuple[int, ...], prompts: Callable[[int], list[Tokens]]) -> Callable[[], Timings]:
    """CPU and wall seconds of one turn; both sides are asked the same in it."""
    turns = iter(range(1 << 30))

    def one() -> Timings:
        asked = [{"prompt_token_ids": tokens} for tokens in prompts(next(turns))]
        engine.resume()
        try:
            before, began = vllms.cpu_s(*pids), time.perf_counter()
            engine.generate(asked, max_tokens=ANSWER_TOKENS)
            wall = time.perf_counter() - began
            time.sleep(SETTLE_S)
            return {"cpu": vllms.cpu_s(*pids) - before, "wall": wall}
        finally:
            engine.pause()

    return one


def _random(turn: int) -> list[Tokens]:
    words = random.Random(turn)
    return [_words(words, words.randint(*RANDOM_TOKENS)) for _ in range(TURN_REQUESTS)]


def _questions(turn: int) -> list[Tokens]:
    """Each text comes up as often as the others; the questions are new in every turn."""
    words = random.Random(-1 - turn)
    texts = [(TURN_REQUESTS * turn + each) % DOCUMENTS for each in range(TURN_REQUESTS)]
    return [_words(random.Random(1 << 20 | text), DOCUMENT_TOKENS) + _words(words, QUESTION_TOKENS) for text in texts]


def _words(words: random.Random, count: int) -> Tokens:
    return [words.randrange(100, 40_000) for _ in range(count)]
