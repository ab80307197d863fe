"""What metrics, history, hooks and request lines cost: a load of 1 MiB chunks from host memory, with and without.

Ours counts everything, remembers losses and lookups, and calls the hooks of a plugin that does nothing with them.
The limit is the same cache, in the same memory, made to count, remember and tell nothing.  A request is looked up,
loaded and released.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.caches import ended, layout_of, model_of, new_chain, paged
from harness.measure import MiB, Options, Timings, milliseconds, paired, private_buffer, random_bytes, seconds
from harness.report import Must, Row

from lmcache_core.chain import Chain, Shard
from lmcache_core.config import parse_config
from lmcache_core.events import Events
from lmcache_core.frame import record_nbytes
from lmcache_core.history import History, Lookup
from lmcache_core.keys import ChunkKey
from lmcache_core.local import LocalCache
from lmcache_core.logs import request_log
from lmcache_core.metrics import Metrics
from lmcache_core.opening import open_cache
from lmcache_core.requests import Requests

CHUNKS = 64
REPEAT = 4
TIMEOUT_S = 60.0
_HOOKS = """
from lmcache_core import hookimpl

@hookimpl
def lmcache_request_ended(report):
    pass

@hookimpl
def lmcache_chunks_retrieved(request, hit_chunks):
    pass
"""


class _Silent(Metrics):
    """Counts nothing."""

    def add(self, name: str, count: float = 1, **labels: str) -> None:
        return None

    def observe_all(self, name: str, values: Iterable[float], **labels: str) -> None:
        return None


class _Forgetful(History):
    """Remembers nothing."""

    def lost(self, keys: Iterable[ChunkKey], tier: str, reason: str, policy: str = "") -> None:
        return None

    def answered(self, lookup: Lookup) -> None:
        return None


@dataclass(frozen=True, slots=True)
class _Watchers:
    """Everything in a cache that watches it."""

    metrics: Metrics
    history: History
    events: Events
    requests: Requests

    @classmethod
    def of(cls, cache: LocalCache) -> _Watchers:
        return cls(cache.metrics, cache.history, cache._events, cache._requests)

    def attach(self, cache: LocalCache) -> None:
        """Have these watch, and no others."""
        pool, leases = cache._pool, cache._pool.leases
        cache.metrics = pool._metrics = leases._metrics = self.metrics
        pool.history = leases._history = self.history
        cache._events = pool._events = self.events
        cache._requests = self.requests


def rows(options: Options) -> Iterator[Row]:
    layout = layout_of(layers=16, blocks=16, block_nbytes=4096)
    assert layout.nbytes == MiB
    model, shard = model_of(layout)
    chain = new_chain(model, CHUNKS)
    hooks = options.directory / "hooks.py"
    hooks.write_text(_HOOKS)
    tiers = f"tiers: [{{name: host, backend: memory, capacity: {CHUNKS * record_nbytes(layout.nbytes)}}}]"
    config = parse_config(f"{{device: cpu, {tiers}, plugins: {{inline: {hooks}}}}}", "benchmark", environ={})
    with _log_file(options.directory / "requests.log"), open_cache(config) as cache:
        assert isinstance(cache, LocalCache)
        source, target = private_buffer(CHUNKS * MiB, huge=False), private_buffer(CHUNKS * MiB, huge=False)
        source[:] = random_bytes(CHUNKS * MiB, seed=0)
        stored = cache.store(chain, shard, range(CHUNKS), paged(source, layout), range(CHUNKS * 16))
        assert ended(stored.wait(TIMEOUT_S)).ok_chunks == CHUNKS
        pages = paged(target, layout)
        watching = _Watchers.of(cache)
        blind = _Watchers(_Silent(), _Forgetful(), Events(None), Requests(Events(None)))
        writing = replace(watching, requests=Requests(watching.events, request_log("text")))

        def loads(watchers: _Watchers) -> Callable[[], Timings]:
            return lambda: _loads(cache, watchers, chain, shard, pages)

        many = replace(options, rounds=10 * options.rounds)
        for row, watchers, must in (
            ("metrics, history, hooks", watching, Must(ratio_limit=0.99)),
            ("and a line for each request", writing, None),
        ):
            measured = paired(many, {"ours": loads(watchers), "limit": loads(blind)})
            yield measured.row(
                "observe", f"load of {CHUNKS} x 1 MiB, {row}", "ms", "load", milliseconds,
                must=must, note="lookup, load, release; limit: the same, counting and telling nothing",
            )  # fmt: skip
        watching.attach(cache)
        assert cache.metrics.count("loads", result="ok") >= 2 * CHUNKS * REPEAT * many.rounds
        assert cache.metrics.count("hook_drops") == 0


@contextmanager
def _log_file(path: Path) -> Iterator[None]:
    """What core logs goes to a file, from INFO on, and nowhere else."""
    handler = logging.FileHandler(path)
    logger = logging.getLogger("lmcache_core")
    before = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.setLevel(before[0])
        logger.propagate = before[1]
        logger.removeHandler(handler)
        handler.close()


def _loads(cache: LocalCache, watchers: _Watchers, chain: Chain, shard: Shard, pages: Any) -> Timings:
    def load() -> None:
        for number in range(REPEAT):
            hit = cache.lookup(chain, f"request {number}")
            job = cache.retrieve(hit, shard, range(CHUNKS), pages, range(CHUNKS * 16))
            assert ended(job.wait(TIMEOUT_S)).ok_chunks == CHUNKS
            cache.release(f"request {number}")

    watchers.attach(cache)
    return {"load": seconds(load) / REPEAT}
