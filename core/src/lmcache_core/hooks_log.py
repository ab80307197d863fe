"""The hook plugin `log`: a line per load of a request and per change of a tier's health, and a summary at the end."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from .cache import JobResult
from .hookspecs import hookimpl
from .keys import ChunkKey

_log = logging.getLogger("lmcache_core.log")
_DAMAGED: Final = "corrupt"
"""The reason of leaving a tier that somebody should look at."""


class LogHooks:
    """One for each cache.  Called on its event thread, one call after the other."""

    api_version = (1, 0)

    def __init__(self) -> None:
        self._loads = 0
        self._chunks: Counter[str] = Counter()

    @hookimpl
    def lmcache_cache_started(self, cache: Any) -> None:
        _log.info("%s: ready", type(cache).__name__)

    @hookimpl
    def lmcache_chunks_stored(self, tier: str, keys: Sequence[ChunkKey], nbytes: int, seconds: float) -> None:
        self._chunks[f"stored in {tier}"] += len(keys)
        _log.debug("tier %s: stored %d chunks, %.1f MiB in %.1f ms", tier, len(keys), nbytes / (1 << 20), seconds * 1e3)

    @hookimpl
    def lmcache_chunks_retrieved(
        self, request: str, hit_chunks: int, failed_chunks: int, nbytes: int, seconds: float
    ) -> None:
        self._loads += 1
        self._chunks["loaded"] += hit_chunks
        self._chunks["failed to load"] += failed_chunks
        _log.info(
            "request %.64r: prefix hit of %d chunks, %d failed, %.1f MiB in %.1f ms",
            request, hit_chunks, failed_chunks, nbytes / (1 << 20), seconds * 1e3,
        )  # fmt: skip

    @hookimpl
    def lmcache_request_ended(self, report: Any) -> None:
        _log.debug("request %.64r: %d of %d tokens found", report.request, report.hit_tokens, report.tokens)

    @hookimpl
    def lmcache_prompt_stored(self, request: str, result: JobResult) -> None:
        self._chunks["taken from engines"] += result.ok_chunks
        _log.debug("request %.64r: %d chunks taken, %d there already", request, result.ok_chunks, result.skipped)

    @hookimpl
    def lmcache_cleared(self, shard_id: bytes) -> None:
        _log.info("cleared %s", shard_id.hex() or "everything")

    @hookimpl
    def lmcache_chunks_evicted(self, tier: str, keys: Sequence[ChunkKey], reason: str) -> None:
        self._chunks[f"left {tier}: {reason}"] += len(keys)
        level = logging.WARNING if reason == _DAMAGED else logging.DEBUG
        _log.log(level, "tier %s: %d chunks are gone: %s", tier, len(keys), reason)

    @hookimpl
    def lmcache_tier_health(self, tier: str, healthy: bool, error: str) -> None:
        if healthy:
            _log.info("tier %s is healthy again", tier)
        else:
            _log.warning("tier %s is unhealthy: %s", tier, error)

    @hookimpl
    def lmcache_cache_stopping(self, cache: Any) -> None:
        chunks = ", ".join(f"{count} {what}" for what, count in self._chunks.items() if count)
        _log.info("%s: stopping after %d loads; chunks: %s", type(cache).__name__, self._loads, chunks or "none")
