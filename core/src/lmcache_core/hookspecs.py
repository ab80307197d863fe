"""Hooks: what a plugin may observe.  Called per request or per batch on the event thread, after the fact.

Data never flows through a hook; it flows through Backend, Device and Codec objects.  Each implementation is called by
itself: one that raises is logged once and does not keep the others from hearing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pluggy

from .keys import ChunkKey

PROJECT: Final = "lmcache_core"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def lmcache_cache_started(cache: Any) -> None:
    """The cache is ready and has served nothing yet."""


@hookspec
def lmcache_cache_stopping(cache: Any) -> None:
    """The cache will close its tiers soon."""


@hookspec
def lmcache_chunks_stored(tier: str, keys: Sequence[ChunkKey], nbytes: int, seconds: float) -> None:
    """A batch became readable in `tier`."""


@hookspec
def lmcache_chunks_retrieved(request: str, hit_chunks: int, failed_chunks: int, nbytes: int, seconds: float) -> None:
    """A request's load ended."""


@hookspec
def lmcache_chunks_evicted(tier: str, keys: Sequence[ChunkKey], reason: str) -> None:
    """`tier` dropped these records; `reason` is "capacity", "removed", "corrupt" or "lost"."""


@hookspec
def lmcache_tier_health(tier: str, healthy: bool, error: str) -> None:
    """A tier's circuit opened (`healthy` false) or closed again."""
