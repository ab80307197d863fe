"""Counters, gauges and histograms of one cache, and their Prometheus text; `docs/operations.md` lists them."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

Labels = tuple[tuple[str, str], ...]

SECONDS_BUCKETS: Final = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
)

BYTES_BUCKETS: Final = tuple(4096 * 4**n for n in range(11))
"""4 KiB to 4 GiB."""
LIFETIME_BUCKETS: Final = (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 24 * 3600, 7 * 24 * 3600)
USES_BUCKETS: Final = (0, 1, 2, 4, 8, 16, 32, 64, 128)

HELP: Final[Mapping[str, str]] = {
    "lookups": "Lookups by result: full, partial, miss, refused (something was found and refused by cost).",
    "lookup_tokens": "Tokens asked for by lookups.",
    "hit_tokens": "Tokens that lookups reported.",
    "refused_tokens": "Tokens that were found and not reported: loading them would have cost more than computing them.",
    "cost_probes": "Hits that were let through though they looked dear, to measure again.",
    "ttft_saved_estimated_seconds": "Estimated: seconds of prefill that hits saved, less what loading was to take.",
    "loads": "Chunk loads of requests by result: ok, failed, late.",
    "load_bytes": "Payload bytes that reached an engine.",
    "load_seconds": "Seconds from asking for a request's chunks until they were in the engine's blocks.",
    "stores": "Chunk stores of requests by result: ok, skipped, failed.",
    "store_bytes": "Payload bytes taken from an engine.",
    "store_seconds": "Seconds from offering a request's chunks until they were in host memory.",
    "drops": "Records not written, by tier and reason.",
    "evictions": "Records that left a tier, by reason.",
    "evicted_age_seconds": "Time that records evicted for room had been in the tier (below host memory 1 in 8).",
    "evicted_idle_seconds": "Time since records evicted for room were used last (below host memory 1 in 8).",
    "evicted_uses": "Times that records evicted for room had been used in the tier (below host memory 1 in 8).",
    "corruptions": "Records that failed verification, by tier.",
    "tier_reads": "Record reads of a tier by result: ok, miss, corrupt, fault, late, tier unavailable.",
    "tier_read_bytes": "Record bytes read from a tier.",
    "tier_writes": "Record writes of a tier by result: ok, fault, full, late, busy (what was there is being removed).",
    "tier_written_bytes": "Record bytes written to a tier.",
    "tier_read_seconds": "Seconds per batch read from a tier.",
    "tier_read_batch_bytes": "Record bytes per batch read from a tier.",
    "tier_write_seconds": "Seconds per batch written to a tier.",
    "tier_write_batch_bytes": "Record bytes per batch written to a tier.",
    "direct_records": "Records of engines that go past host memory, by operation: load, store.",
    "tier_probe_seconds": "Seconds per question to a shared store what it has.",
    "hook_failures": "Hook calls that raised, by plugin.",
    "hook_drops": "Events dropped because hooks were slow.",
}

BUCKETS: Final[Mapping[str, tuple[float, ...]]] = {
    "evicted_age_seconds": LIFETIME_BUCKETS,
    "evicted_idle_seconds": LIFETIME_BUCKETS,
    "evicted_uses": USES_BUCKETS,
    "tier_read_batch_bytes": BYTES_BUCKETS,
    "tier_write_batch_bytes": BYTES_BUCKETS,
}
"""Upper bounds of the histograms that are not of short durations."""


@dataclass(slots=True)
class _Histogram:
    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters and histograms at one moment, or what was added to them between two."""

    counters: Mapping[tuple[str, Labels], float]
    histograms: Mapping[tuple[str, Labels], tuple[tuple[int, ...], float]]
    """Counts of the buckets, and the sum of the values."""

    def since(self, earlier: Reading) -> Reading:
        """What was added after `earlier`, a reading of the same metrics."""
        counters = {key: value - earlier.counters.get(key, 0.0) for key, value in self.counters.items()}
        histograms = {}
        for key, (counts, total) in self.histograms.items():
            before, sum_before = earlier.histograms.get(key, ((0,) * len(counts), 0.0))
            histograms[key] = tuple(now - then for now, then in zip(counts, before, strict=True)), total - sum_before
        return Reading(counters, histograms)

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """A counter by the values of `label`, without those that are zero."""
        found: dict[str, float] = {}
        wanted = set(labels.items())
        for (counter, have), value in self.counters.items():
            if counter == name and value and wanted <= set(have):
                where = dict(have).get(label, "")
                found[where] = found.get(where, 0.0) + value
        return found

    def total(self, name: str, **labels: str) -> float:
        """Sum of a counter over all label sets that include `labels`."""
        return sum(self.by(name, "", **labels).values())

    def spent(self, name: str, **labels: str) -> tuple[int, float]:
        """How many values the histogram of exactly these labels has, and their sum."""
        counts, total = self.histograms.get(_key(name, labels), ((), 0.0))
        return sum(counts), total

    def quantile(self, name: str, q: float, **labels: str) -> float | None:
        """As Prometheus estimates it from the buckets; None without a value."""
        counts, _ = self.histograms.get(_key(name, labels), ((), 0.0))
        left = q * sum(counts)
        if not left:
            return None
        bounds = BUCKETS.get(name, SECONDS_BUCKETS)
        below = 0.0
        for bound, count in zip(bounds, counts, strict=False):
            if count and left <= count:
                return below + (bound - below) * left / count
            left -= count
            below = bound
        return float(bounds[-1])


class Metrics:
    """Thread-safe.  Counters never fall.  Names come from `HELP`; gauges are read when asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[tuple[str, Labels], float] = {}
        self._histograms: dict[tuple[str, Labels], _Histogram] = {}
        self._gauges: dict[str, tuple[str, Callable[[], Mapping[Labels, float]]]] = {}

    def add(self, name: str, count: float = 1, **labels: str) -> None:
        """Count `count` more, of events, bytes, tokens or seconds; zero is not an event."""
        if count <= 0:
            if count:
                raise ValueError(f"counter {name} cannot fall: {count}")
            return
        key = _key(name, labels)
        with self._lock:
            self._counters[key] = self._counters.get(key, 0) + count

    def observe(self, name: str, value: float, **labels: str) -> None:
        """One value of a histogram; its buckets are those of `BUCKETS`, else `SECONDS_BUCKETS`."""
        self.observe_all(name, (value,), **labels)

    def observe_all(self, name: str, values: Iterable[float], **labels: str) -> None:
        """Several values of one histogram at once."""
        key = _key(name, labels)
        with self._lock:
            histogram = self._histograms.get(key)
            if histogram is None:
                bounds = BUCKETS.get(name, SECONDS_BUCKETS)
                histogram = self._histograms[key] = _Histogram(bounds, [0] * (len(bounds) + 1))
            bounds, counts = histogram.bounds, histogram.counts
            for value in values:
                counts[bisect.bisect_left(bounds, value)] += 1
                histogram.total += value

    def gauge(self, name: str, help_text: str, read: Callable[[], Mapping[Labels, float]]) -> None:
        """Register a gauge; `read` is called, quickly, whenever the metrics are collected."""
        with self._lock:
            self._gauges[name] = (help_text, read)

    def count(self, name: str, **labels: str) -> float:
        """Sum of a counter over all label sets that include `labels`."""
        wanted = set(labels.items())
        with self._lock:
            return sum(n for (counter, have), n in self._counters.items() if counter == name and wanted <= set(have))

    def read(self) -> Reading:
        """Everything but the gauges, at this moment; some ten microseconds under the lock."""
        with self._lock:
            histograms = {key: (tuple(found.counts), found.total) for key, found in self._histograms.items()}
            return Reading(dict(self._counters), histograms)

    def read_gauge(self, name: str) -> Mapping[Labels, float]:
        """What the gauge `name` says at this moment; nothing if there is none."""
        with self._lock:
            _, read = self._gauges.get(name, ("", dict))
        return read()

    def collect(self) -> Iterable[Metric]:
        """For a `prometheus_client` registry."""
        from prometheus_client.metrics_core import Metric

        with self._lock:
            counters = sorted(self._counters.items())
            histograms = sorted((key, h.bounds, list(h.counts), h.total) for key, h in self._histograms.items())
            gauges = list(self._gauges.items())
        families: dict[str, Metric] = {}

        def family(name: str, kind: str, help_text: str) -> Metric:
            return families.setdefault(name, Metric(f"lmcache_{name}", help_text, kind))

        # Samples one by one: a family made for fixed label names would mix up label sets that differ in them.
        for (name, labels), value in counters:
            family(name, "counter", HELP[name]).add_sample(f"lmcache_{name}_total", dict(labels), value)
        for (name, labels), bounds, counts, total in histograms:
            metric = family(name, "histogram", HELP[name])
            running = 0
            for bound, n in zip([*map(str, bounds), "+Inf"], counts, strict=True):
                running += n
                metric.add_sample(f"lmcache_{name}_bucket", {**dict(labels), "le": bound}, running)
            metric.add_sample(f"lmcache_{name}_count", dict(labels), running)
            metric.add_sample(f"lmcache_{name}_sum", dict(labels), total)
        for name, (help_text, read) in gauges:
            metric = family(name, "gauge", help_text)
            for labels, reading in read().items():
                metric.add_sample(f"lmcache_{name}", dict(labels), reading)
        return families.values()

    def prometheus_text(self) -> str:
        """All metrics in the Prometheus text format."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry).decode()


def _key(name: str, labels: Mapping[str, str]) -> tuple[str, Labels]:
    if name not in HELP:
        raise KeyError(f"metric {name} has no help text")
    return name, tuple(sorted(labels.items())) if len(labels) > 1 else tuple(labels.items())
