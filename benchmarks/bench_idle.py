"""CPU time of the whole process tree where the engine's own cache has everything: what ours costs when it is of no use.

An engine of matrix products, as many as a model of 135 million parameters has for 64 tokens (the end of a prompt that
its cache does not hold, and a short answer), answers prompts whose KV it has in its own pages.  Ours is attached as an
adapter attaches it: each prompt is hashed and looked up, there is nothing to load, what was not found is stored (all of
it once, before the rounds that count), and it is released; in this process, and through a daemon.  The limit is the
engine alone.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from harness.caches import CHUNK_TOKENS, ended, layout_of, memory_cache, model_of, paged
from harness.daemon import serve, slots
from harness.measure import Options, Timings, paired, private_buffer
from harness.report import Must, Row

from lmcache_core.cache import Cache
from lmcache_core.chain import Model, Shard
from lmcache_core.client.cache import connect
from lmcache_core.device import Pages

PROMPTS = 8
CHUNKS = 16
PARAMETERS, TOKENS, SIZE = 135_000_000, 64, 1024
TIMEOUT_S = 60.0
_TICKS = os.sysconf("SC_CLK_TCK")


class _Engine:
    """The weights of one layer, used for all of them."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self._weights = rng.standard_normal((SIZE, SIZE), dtype=np.float32)
        self._state = rng.standard_normal((TOKENS, SIZE), dtype=np.float32)

    def answer(self) -> None:
        state = self._state
        for _ in range(PARAMETERS // SIZE**2):
            state = np.tanh(state @ self._weights)


def rows(options: Options) -> Iterator[Row]:
    requests = 8 if options.quick else 32
    engine = _Engine()
    layout = layout_of(layers=2, blocks=16, block_nbytes=4096)
    model, shard = model_of(layout)
    pages = paged(private_buffer(PROMPTS * CHUNKS * layout.nbytes, huge=False), layout)
    with ExitStack() as at_end:
        local = at_end.enter_context(memory_cache(PROMPTS * CHUNKS, layout))
        served = at_end.enter_context(serve(options.directory / "daemon", slots(PROMPTS * CHUNKS, layout)))
        remote = at_end.enter_context(connect(served.socket, call_timeout_s=TIMEOUT_S))

        def alone() -> Timings:
            return {"all": _cpu(None, lambda: _serve(engine, requests, None, model, shard, pages))}

        def with_cache(cache: Cache, pid: int | None) -> Callable[[], Timings]:
            return lambda: {"all": _cpu(pid, lambda: _serve(engine, requests, cache, model, shard, pages))}

        for row, side in (
            ("in this process", with_cache(local, None)),
            ("through a daemon", with_cache(remote, served.pid)),
        ):
            measured = paired(options, {"ours": side, "limit": alone})
            yield measured.row(
                "idle", f"{requests} prompts of {CHUNKS} chunks, {row}", "CPU-s", "all", lambda taken: taken,
                must=Must(ratio_limit=0.98), note="the engine has all of it; limit: the engine alone",
            )  # fmt: skip


def _serve(engine: _Engine, requests: int, cache: Cache | None, model: Model, shard: Shard, pages: Pages) -> None:
    tokens = np.arange(CHUNKS * CHUNK_TOKENS, dtype=np.uint32)
    for number in range(requests):
        prompt = number % PROMPTS
        if cache is not None:
            tokens[0] = prompt
            chain = cache.chain(tokens, model)
            hit = cache.lookup(chain, f"r{number}")
        engine.answer()
        if cache is not None:
            if hit.chunks < CHUNKS:
                ids = range(prompt * CHUNKS * 16, (prompt + 1) * CHUNKS * 16)
                ended(cache.store(chain, shard, range(CHUNKS), pages, ids).wait(TIMEOUT_S))
            cache.release(f"r{number}")


def _cpu(pid: int | None, work: Callable[[], None]) -> float:
    """CPU seconds of this process while `work` runs, and of that other one."""
    before = _used(pid)
    work()
    return _used(pid) - before


def _used(pid: int | None) -> float:
    own = resource.getrusage(resource.RUSAGE_SELF)
    seconds = own.ru_utime + own.ru_stime
    if pid is not None:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        seconds += (int(fields[11]) + int(fields[12])) / _TICKS
    return seconds
