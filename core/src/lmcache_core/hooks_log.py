"""The hook plugin `log`: one line per load of a request, one per change of a tier's health."""

from __future__ import annotations

import logging

from .hookspecs import hookimpl

api_version = (1, 0)
_log = logging.getLogger("lmcache_core.log")


@hookimpl
def lmcache_chunks_retrieved(request: str, hit_chunks: int, failed_chunks: int, nbytes: int, seconds: float) -> None:
    _log.info(
        "request %.64r: prefix hit of %d chunks, %d failed, %.1f MiB in %.1f ms",
        request, hit_chunks, failed_chunks, nbytes / (1 << 20), seconds * 1e3,
    )  # fmt: skip


@hookimpl
def lmcache_tier_health(tier: str, healthy: bool, error: str) -> None:
    if healthy:
        _log.info("tier %s is healthy again", tier)
    else:
        _log.warning("tier %s is unhealthy: %s", tier, error)
