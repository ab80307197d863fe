"""Hooks: what a plugin may observe.  Called per request or per batch on the event thread, after the fact.

Data never flows through a hook; it flows through Backend, Device and Codec objects.  Each implementation is called by
itself: one that raises is logged once and does not keep the others from hearing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import pluggy

from .cache import JobResult
from .chain import Chain
from .keys import ChunkKey

if TYPE_CHECKING:
    from .requests import RequestReport

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
def lmcache_request_ended(report: RequestReport) -> None:
    """A request was released: what its lookup found, and what its loads did."""


@hookspec
def lmcache_prompt_stored(
    request: str, chain: Chain, span: range, tokens: Sequence[int], result: JobResult, ended_at: float
) -> None:
    """An engine's store of the chunks `span` of `chain` ended: they are in host memory, but for `result.failed`.

    `tokens` are those of the chain's first chunks, as far as they are known here; `ended_at` is in seconds since the
    epoch.
    """


@hookspec
def lmcache_cleared(shard_id: bytes) -> None:
    """Everything that nobody held was removed from every tier, of one shard or with b"" of all."""


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
