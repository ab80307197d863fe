"""A hook plugin of plugin API 1.0: counts what it hears, and takes only the arguments that it needs."""

from __future__ import annotations

from collections import Counter
from typing import Any

from lmcache_core import ChunkKey, hookimpl

api_version = (1, 0)
heard: Counter[str] = Counter()


@hookimpl
def lmcache_cache_started(cache: Any) -> None:
    heard["started"] += 1


@hookimpl
def lmcache_cache_stopping() -> None:
    heard["stopping"] += 1


@hookimpl
def lmcache_chunks_stored(tier: str, keys: list[ChunkKey], nbytes: int, seconds: float) -> None:
    heard[f"stored in {tier}"] += len(keys)


@hookimpl
def lmcache_chunks_retrieved(request: str, hit_chunks: int, failed_chunks: int, nbytes: int, seconds: float) -> None:
    heard["retrieved"] += hit_chunks


@hookimpl
def lmcache_chunks_evicted(tier: str, keys: list[ChunkKey], reason: str) -> None:
    heard[f"evicted: {reason}"] += len(keys)


@hookimpl
def lmcache_tier_health(tier: str, healthy: bool, error: str) -> None:
    heard["health"] += 1
