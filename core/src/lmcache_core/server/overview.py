"""What a page says of this moment: the state of the daemon, its tiers, slow operations, requests and plugins."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

import msgspec

from .. import __version__, history
from ..breaker import BreakerState
from ..gauges import near_quota
from ..metrics import Metrics, Reading
from ..pool import Pool
from ..settings import mask_url
from ..shares import Tenants
from .samples import Samples

MAX_REQUESTS: Final = 20
MAX_SHOWN_SLOW: Final = 12
MAX_TEXT: Final = 300
_TENANTS_AGE_S: Final = 10.0
"""Counting tenants takes longer the more there are, under their tier's lock: not more often than this."""


class Overview:
    """Thread-safe.  Made at most once for each point of `samples`, however many look."""

    def __init__(
        self,
        pool: Pool,
        metrics: Metrics,
        samples: Samples,
        *,
        state: Callable[[], dict[str, Any]],
    ) -> None:
        """`state` is what the daemon adds of itself, such as `problem`."""
        self._pool = pool
        self._metrics = metrics
        self._samples = samples
        self._state = state
        self._lock = threading.Lock()
        self._made: tuple[int, bytes] = (-1, b"")
        self._tenants: tuple[float, list[Tenants]] = (float("-inf"), [])

    def encoded(self) -> bytes:
        """As JSON."""
        with self._lock:
            taken = self._samples.taken
            if self._made[0] != taken:
                self._made = taken, msgspec.json.encode(self.make())
            return self._made[1]

    def make(self) -> dict[str, Any]:
        """As JSON has it."""
        seconds, lately, whole = self._samples.lately()
        lookups = self._pool.history.lookups(MAX_REQUESTS)
        reasons = dict.fromkeys(one.reason for one in lookups if one.reason)
        return {
            "now": round(time.time(), 3),
            "version": __version__,
            "boot_id": self._pool.boot_id,
            "pid": os.getpid(),
            "leases": self._pool.leases.count(),
            "lately_s": round(seconds, 1),
            **self._state(),
            "tiers": self._tiers(lately, whole),
            "slow": [asdict(one) for one in self._pool.history.slow()[:MAX_SHOWN_SLOW]],
            "requests": [_request(one) for one in lookups],
            "meanings": {_shown(reason): _shown(history.meaning(reason)) for reason in reasons},
            "plugins": self._plugins(whole),
            "hook_drops": whole.total("hook_drops"),
        }

    def _tiers(self, lately: Reading, whole: Reading) -> list[dict[str, Any]]:
        pool = self._pool
        tenants = self._count_tenants()
        host = {
            "name": pool.name,
            "backend": "memory",
            "state": BreakerState.CLOSED.value,
            "reason": "",
            "records": pool.records(),
            "used_nbytes": pool.slab.used_nbytes,
            "capacity_nbytes": pool.slab.capacity_nbytes,
            "queued_loads": 0,
            "queued_stores": 0,
        }
        rows = [host]
        for tier in pool.tiers:
            status = tier.status()
            rows.append(
                {
                    "name": status.name,
                    "backend": status.backend,
                    "state": status.breaker,
                    "reason": _shown(status.reason),
                    "records": status.records,
                    "used_nbytes": status.used_nbytes,
                    "capacity_nbytes": status.capacity_nbytes,
                    "queued_loads": status.queued_loads,
                    "queued_stores": status.queued_stores,
                }
            )
        return [
            row | _worked(str(row["name"]), lately, whole) | {"tenants": _shares(of)}
            for row, of in zip(rows, tenants, strict=True)
        ]

    def _count_tenants(self) -> list[Tenants]:
        at, found = self._tenants
        if time.monotonic() - at > _TENANTS_AGE_S:
            found = [self._pool.tenants(), *(tier.ledger.tenants() for tier in self._pool.tiers)]
            self._tenants = time.monotonic(), found
        return found

    def _plugins(self, whole: Reading) -> list[dict[str, Any]]:
        failures = whole.by("hook_failures", "plugin")
        down = {tier.backend_name.partition("@")[0]: tier.name for tier in self._pool.tiers if not tier.ready}
        known = [dict(labels) for labels in self._metrics.read_gauge("plugin")]
        return [
            {
                **one,
                "failures": failures.get(one["name"], 0.0),
                "down": down.get(one["name"], ""),
            }
            for one in known
        ]


def _worked(name: str, lately: Reading, whole: Reading) -> dict[str, Any]:
    """What a tier did: how fast lately, what left it and what it never got since the start."""
    return {
        "read": _speed("tier_read_seconds", "tier_read_bytes", name, lately),
        "write": _speed("tier_write_seconds", "tier_written_bytes", name, lately),
        "evictions": whole.by("evictions", "reason", tier=name),
        "evictions_lately": lately.by("evictions", "reason", tier=name),
        "drops": whole.by("drops", "reason", tier=name),
        "drops_lately": lately.by("drops", "reason", tier=name),
        "corruptions": whole.total("corruptions", tier=name),
        "idle_s": lately.quantile("evicted_idle_seconds", 0.5, tier=name),
    }


def _speed(histogram: str, counter: str, name: str, lately: Reading) -> dict[str, Any]:
    batches, seconds = lately.spent(histogram, tier=name)
    return {
        "batches": batches,
        "nbytes": lately.total(counter, tier=name),
        "mean_s": seconds / batches if batches else None,
        "p50_s": lately.quantile(histogram, 0.5, tier=name),
        "p95_s": lately.quantile(histogram, 0.95, tier=name),
    }


def _shares(of: Tenants) -> dict[str, Any]:
    """Numbers only: who they are stays in the daemon."""
    return {
        "count": len(of.used),
        "quota_nbytes": of.quota_nbytes,
        "largest_nbytes": max(of.used, default=0),
        "near_quota": near_quota(of),
    }


def _request(one: history.Lookup) -> dict[str, Any]:
    return {
        "at": round(one.at, 3),
        "request": _shown(one.request),
        "model": _shown(one.family.model),
        "tokens": one.tokens,
        "hit_tokens": one.hit_tokens,
        "chunks": one.chunks,
        "hit_chunks": one.hit_chunks,
        "result": one.result,
        "reason": _shown(one.reason),
        "tiers": one.tiers,
    }


def _shown(text: str) -> str:
    """Text from elsewhere, of bounded length, without control characters and the passwords of URLs."""
    shown = "".join(char if char.isprintable() else "?" for char in mask_url(text)[: MAX_TEXT + 1])
    return shown if len(shown) <= MAX_TEXT else f"{shown[:MAX_TEXT]}…"
