"""A tiny model, an engine's pages whose every byte names the chunk it belongs to, and caches over given backends."""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from lmcache_core import Backend, Chain, Family, Group, GroupKind, JobResult, Layout, LocalCache, Model, Region, Shard
from lmcache_core.buffers import Slab
from lmcache_core.codec import Codec, Identity
from lmcache_core.device import Device
from lmcache_core.devices.cpu import CpuDevice
from lmcache_core.events import Events
from lmcache_core.frame import record_nbytes
from lmcache_core.history import History
from lmcache_core.metrics import Metrics
from lmcache_core.policies.lru import LRU
from lmcache_core.policy import EvictionPolicy
from lmcache_core.pool import Pool, Write
from lmcache_core.sealing import Sealer
from lmcache_core.tier import Tier

CHUNK: Final = 16
LAYERS: Final = 2
BLOCK_TOKENS: Final = 4
BLOCKS: Final = CHUNK // BLOCK_TOKENS
BLOCK_NBYTES: Final = 64
RAW: Final = LAYERS * BLOCKS * BLOCK_NBYTES
RECORD: Final = record_nbytes(RAW)

LAYOUT: Final = Layout(
    chunk_tokens=CHUNK,
    regions=(
        Region(
            name="kv",
            layers=LAYERS,
            block_tokens=BLOCK_TOKENS,
            block_nbytes=BLOCK_NBYTES,
            dtype="float16",
            packing="test",
        ),
    ),
)


def family(**changes: Any) -> Family:
    fields = {"model": "org/tiny", "weights": "w1", "kv_dtype": "float16", "chunk_tokens": CHUNK}
    return Family(**fields | changes)


def model(shards: int = 1, **changes: Any) -> Model:
    """One full-attention group whose layers are split over `shards` rectangles."""
    fam = family(**changes)
    pieces = tuple(Shard.of(fam, LAYOUT, layers=(n * LAYERS, (n + 1) * LAYERS)) for n in range(shards))
    return Model(fam, (Group(GroupKind.FULL, pieces),))


def chain(chunks: int, *, seed: int = 0, of: Model | None = None, tail: int = 3) -> Chain:
    """A prompt of `chunks` whole chunks; prompts of one seed share a prefix."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 50_000, 100_000 if chunks > 1000 else 20_000)
    return Chain.of(of or model(), tokens[: chunks * CHUNK + tail])


def pattern(key: bytes) -> bytes:
    """A payload that names the record it belongs to."""
    return (hashlib.sha256(key).digest() * (RAW // 32 + 1))[:RAW]


class Engine:
    """Paged KV of one worker: `blocks` blocks, poisoned."""

    def __init__(self, blocks: int = 256) -> None:
        self.pages = [[np.full((blocks, BLOCK_NBYTES), 0xA5, np.uint8) for _ in range(LAYERS)]]

    def compute(self, of: Chain, shard: Shard, span: range, at: int = 0) -> list[int]:
        """Fill blocks from `at` on with the KV of the chunks in `span`; return the block ids."""
        for index, key in enumerate(of.keys(shard, span)):
            data = np.frombuffer(pattern(key), np.uint8).reshape(LAYERS, BLOCKS, BLOCK_NBYTES)
            for layer in range(LAYERS):
                first = at + index * BLOCKS
                self.pages[0][layer][first : first + BLOCKS] = data[layer]
        return list(range(at, at + len(span) * BLOCKS))

    def holds(self, of: Chain, shard: Shard, chunk: int, at: int) -> bool:
        """Whether the blocks from `at` on hold exactly the KV of that chunk."""
        found = b"".join(self.pages[0][layer][at : at + BLOCKS].tobytes() for layer in range(LAYERS))
        return found == pattern(of.keys(shard, range(chunk, chunk + 1))[0])

    def poisoned(self, at: int) -> bool:
        """Whether nothing was ever written to the chunk at `at`."""
        return all((self.pages[0][layer][at : at + BLOCKS] == 0xA5).all() for layer in range(LAYERS))


def open_pool(
    backends: Sequence[Backend[Any]] = (),
    *,
    chunks: int = 64,
    capacity_nbytes: int | None = None,
    extent_nbytes: int | None = None,
    write: Write = "through",
    timeout_s: float = 5.0,
    tier_capacity_nbytes: int | None = None,
    tenant_quota_nbytes: int | None = None,
    lease_timeout_s: float = 60.0,
    probe_interval_s: float = 1.0,
    clock: Callable[[], float] = time.monotonic,
    policy: Callable[[], EvictionPolicy] = LRU,
    codec: Codec | None = None,
    codec_name: str = "identity",
    max_queued_nbytes: int = 1 << 30,
    metrics: Metrics | None = None,
    events: Events | None = None,
) -> Pool:
    """Room for `chunks` tiny chunks in host memory over tiers for `backends`, nearest first."""
    metrics = metrics or Metrics()
    events = events or Events(None)
    history = History()
    names = itertools.count(1)
    sealer = Sealer(codec or Identity(), codec_name, lambda name: None)
    tiers = [
        Tier(
            f"tier{next(names)}",
            backend,
            backend_name=type(backend).__name__,
            sealer=sealer,
            new_policy=policy,
            tenant_quota_nbytes=tenant_quota_nbytes,
            capacity_nbytes=tier_capacity_nbytes,
            timeout_s=timeout_s,
            max_queued_nbytes=max_queued_nbytes,
            metrics=metrics,
            events=events,
            history=history,
            policy_name=getattr(policy, "__name__", ""),
            probe_interval_s=probe_interval_s,
            clock=clock,
        )
        for backend in backends
    ]
    for tier in tiers:
        tier.start()
    return Pool(
        Slab(capacity_nbytes or chunks * RECORD, extent_nbytes),
        tiers,
        new_policy=policy,
        metrics=metrics,
        events=events,
        history=history,
        policy_name=getattr(policy, "__name__", ""),
        write=write,
        tenant_quota_nbytes=tenant_quota_nbytes,
        lease_timeout_s=lease_timeout_s,
        clock=clock,
    )


@contextmanager
def open_local(backends: Sequence[Backend[Any]] = (), *, device: Device | None = None, **settings: Any) -> Any:
    """A LocalCache over `open_pool`; its pool is `cache._pool`."""
    metrics = settings.setdefault("metrics", Metrics())
    events = settings.setdefault("events", Events(None))
    cache = LocalCache(open_pool(backends, **settings), device or CpuDevice(), metrics=metrics, events=events)
    try:
        yield cache
    finally:
        cache.close()


def store(cache: LocalCache, of: Chain, span: range | None = None, shard: Shard | None = None) -> JobResult:
    """Compute and store the chunks of `span`, and wait for the job."""
    shard = shard or of.model.shards[0]
    span = span or range(len(of))
    engine = Engine(len(span) * BLOCKS)
    ids = engine.compute(of, shard, span)
    result = cache.store(of, shard, span, engine.pages, ids).wait(10)
    assert result is not None, "a job must end"
    return result


def load(cache: LocalCache, of: Chain, request: str = "r", chunks: int | None = None) -> tuple[int, JobResult]:
    """Look up, retrieve what is restorable, check every byte, release; (hit chunks, result)."""
    shard = of.model.shards[0]
    hit = cache.lookup_answered(of, request, timeout_s=10)
    span = range(hit.chunks if chunks is None else chunks)
    engine = Engine(max(1, len(span)) * BLOCKS)
    result = cache.retrieve(hit, shard, span, engine.pages, list(range(len(span) * BLOCKS))).wait(10)
    assert result is not None, "a job must end"
    failed = {chunk for start, stop, _ in result.failed for chunk in range(start, stop)}
    for chunk in span:
        at = chunk * BLOCKS
        if chunk in failed:
            assert engine.poisoned(at), f"chunk {chunk} failed and its blocks were written"
        else:
            assert engine.holds(of, shard, chunk, at), f"chunk {chunk} holds wrong bytes"
    cache.release(request)
    return hit.chunks, result


def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> bool:
    """Wait for a condition that another thread brings about; whether it came."""
    pause = threading.Event()
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        pause.wait(0.001)
    return True
