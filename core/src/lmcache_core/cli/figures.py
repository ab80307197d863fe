"""What `lmc top` shows: a daemon's status and counters at one moment, and what they say of a stretch of time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lmcache_core.client.control import Control

Sample = tuple[str, frozenset[tuple[str, str]]]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One moment of one daemon."""

    at: float
    """Of the monotonic clock."""
    status: dict[str, Any]
    samples: dict[Sample, float]
    """Prometheus' samples by name and labels."""
    latest: list[dict[str, Any]]
    """Lookups, newest first."""

    @classmethod
    def of(cls, daemon: Control, timeout_s: float, *, latest: int = 8) -> Snapshot:
        status: dict[str, Any] = daemon.status(timeout_s)
        samples = parse(daemon.scrape(timeout_s))
        lookups: Any = daemon.recall(limit=latest, timeout_s=timeout_s)["latest"]
        return cls(time.monotonic(), status, samples, lookups)


@dataclass(frozen=True, slots=True)
class TierFigures:
    """One tier: what it holds now, and what it did in the stretch of time."""

    name: str
    backend: str
    state: str
    records: int
    used_nbytes: int
    capacity_nbytes: int | None
    queued: str
    read_nbytes: float = 0.0
    written_nbytes: float = 0.0
    read_s: float | None = None
    """Mean of a batch; None if there was none."""
    write_s: float | None = None
    evictions: dict[str, float] = field(default_factory=dict)
    drops: dict[str, float] = field(default_factory=dict)
    corruptions: float = 0.0


@dataclass(frozen=True, slots=True)
class Figures:
    """A stretch of time: the last interval, or all since the daemon's start."""

    seconds: float
    whole: bool
    """All since the start."""
    lookups: dict[str, float]
    tokens: float
    hit_tokens: float
    saved_s: float
    """Estimated."""
    load_nbytes: float
    store_nbytes: float
    tiers: list[TierFigures]

    @property
    def hit_share(self) -> float | None:
        """Of all tokens that were asked for; None if there were none."""
        return self.hit_tokens / self.tokens if self.tokens else None


def parse(text: str) -> dict[Sample, float]:
    """The samples of Prometheus' text format."""
    from prometheus_client.parser import text_string_to_metric_families

    return {
        (sample.name, frozenset(sample.labels.items())): float(sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def figures(now: Snapshot, before: Snapshot | None = None) -> Figures:
    """Of the time between two snapshots of one daemon; with one, or of two daemons, since the start."""
    same = before is not None and before.status["boot_id"] == now.status["boot_id"]
    earlier: Mapping[Sample, float] = before.samples if before is not None and same else {}
    change = {key: value - earlier.get(key, 0.0) for key, value in now.samples.items()}
    seconds = now.at - before.at if before is not None and same else float(now.status["uptime_s"])
    total = _Sums(change)
    status = now.status
    host = TierFigures(
        status["name"], "memory", "ready", status["records"], status["used_nbytes"], status["capacity_nbytes"], "",
        evictions=total.by("evictions", "reason", tier=status["name"]),
        drops=total.by("drops", "reason", tier=status["name"]),
    )  # fmt: skip
    return Figures(
        seconds=max(seconds, 1e-9),
        whole=not same,
        lookups=total.by("lookups", "result"),
        tokens=total.of("lookup_tokens"),
        hit_tokens=total.of("hit_tokens"),
        saved_s=total.of("ttft_saved_estimated_seconds"),
        load_nbytes=total.of("load_bytes"),
        store_nbytes=total.of("store_bytes"),
        tiers=[host, *(_tier(tier, total) for tier in status["tiers"])],
    )


def _tier(status: dict[str, Any], total: _Sums) -> TierFigures:
    name = status["name"]
    return TierFigures(
        name,
        status["backend"],
        "ready" if status["breaker"] == "closed" else f"{status['breaker']}: {status['reason']}",
        status["records"],
        status["used_nbytes"],
        status["capacity_nbytes"],
        f"{status['queued_loads']}/{status['queued_stores']}",
        read_nbytes=total.of("tier_read_bytes", tier=name),
        written_nbytes=total.of("tier_written_bytes", tier=name),
        read_s=total.mean("tier_read_seconds", tier=name),
        write_s=total.mean("tier_write_seconds", tier=name),
        evictions=total.by("evictions", "reason", tier=name),
        drops=total.by("drops", "reason", tier=name),
        corruptions=total.of("corruptions", tier=name),
    )


class _Sums:
    """Samples added up over the labels that are not asked for."""

    def __init__(self, samples: Mapping[Sample, float]) -> None:
        self._samples = samples

    def of(self, name: str, **labels: str) -> float:
        return sum(value for _, value in self._matching(f"lmcache_{name}_total", labels))

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """By the values of `label`, without those that are zero."""
        found: dict[str, float] = {}
        for have, value in self._matching(f"lmcache_{name}_total", labels):
            if value:
                key = dict(have).get(label, "")
                found[key] = found.get(key, 0.0) + value
        return found

    def mean(self, name: str, **labels: str) -> float | None:
        count = sum(value for _, value in self._matching(f"lmcache_{name}_count", labels))
        total = sum(value for _, value in self._matching(f"lmcache_{name}_sum", labels))
        return total / count if count else None

    def _matching(self, name: str, labels: Mapping[str, str]) -> Iterable[tuple[frozenset[tuple[str, str]], float]]:
        wanted = set(labels.items())
        return [(have, value) for (n, have), value in self._samples.items() if n == name and wanted <= have]
