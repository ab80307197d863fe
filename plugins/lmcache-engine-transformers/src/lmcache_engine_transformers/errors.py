"""What this adapter refuses, said so that the reader knows what to change."""

from __future__ import annotations

from lmcache_core import CacheError


class Unsupported(CacheError):
    """`what` (a model, an argument, a cache) rules out reuse of a prefix; the message says why."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")
        self.what = what
