"""Metrics: what Prometheus reads is what was counted."""

from __future__ import annotations

import ast
import math
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import lmcache_core
from lmcache_core.metrics import HELP, SECONDS_BUCKETS, Metrics
from lmcache_core.testing import in_threads

Sample = tuple[str, frozenset[tuple[str, str]]]


def scraped(metrics: Metrics) -> dict[Sample, float]:
    """What a Prometheus server would see."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.prometheus_text())
        for sample in family.samples
    }


def sample(name: str, **labels: str) -> Sample:
    return name, frozenset(labels.items())


def test_counters_are_scraped_with_their_labels_and_help() -> None:
    metrics = Metrics()
    metrics.add("lookups", result="full")
    metrics.add("lookups", 2, result="miss")
    metrics.add("lookup_tokens", 4096)
    seen = scraped(metrics)
    assert seen[sample("lmcache_lookups_total", result="full")] == 1
    assert seen[sample("lmcache_lookups_total", result="miss")] == 2
    assert seen[sample("lmcache_lookup_tokens_total")] == 4096
    assert f"# HELP lmcache_lookups_total {HELP['lookups']}" in metrics.prometheus_text()


def test_a_text_without_any_metric_is_valid() -> None:
    assert scraped(Metrics()) == {}


def test_the_order_in_which_labels_are_given_does_not_matter() -> None:
    metrics = Metrics()
    metrics.add("drops", tier="disk", reason="late")
    metrics.add("drops", reason="late", tier="disk")
    metrics.add("drops", reason="no room", tier="host")
    metrics.observe("tier_read_seconds", 0.1, tier="disk")
    seen = scraped(metrics)
    assert seen[sample("lmcache_drops_total", tier="disk", reason="late")] == 2
    assert seen[sample("lmcache_drops_total", tier="host", reason="no room")] == 1


def test_label_sets_that_differ_in_their_names_do_not_mix() -> None:
    metrics = Metrics()
    metrics.add("drops", 1, tier="disk")
    metrics.add("drops", 2, reason="late")
    metrics.add("drops", 4, tier="disk", reason="late")
    metrics.add("drops", 8)
    seen = {name: value for name, value in scraped(metrics).items() if name[0] == "lmcache_drops_total"}
    assert seen == {
        sample("lmcache_drops_total", tier="disk"): 1,
        sample("lmcache_drops_total", reason="late"): 2,
        sample("lmcache_drops_total", tier="disk", reason="late"): 4,
        sample("lmcache_drops_total"): 8,
    }
    assert metrics.prometheus_text().count("# TYPE lmcache_drops_total") == 1


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", "ä€😀", "{}", "a,b=c", "", " ", "\\n"])
def test_any_text_may_be_a_label(name: str) -> None:
    metrics = Metrics()
    metrics.add("drops", 7, tier=name, reason="x")
    assert scraped(metrics)[sample("lmcache_drops_total", tier=name, reason="x")] == 7


def test_a_counter_never_falls() -> None:
    metrics = Metrics()
    metrics.add("lookups", 3, result="full")
    with pytest.raises(ValueError, match="lookups.*-1"):
        metrics.add("lookups", -1, result="full")
    assert metrics.count("lookups") == 3


def test_zero_is_no_event() -> None:
    metrics = Metrics()
    metrics.add("lookups", 0, result="full")
    assert scraped(metrics) == {}


def test_counting_sums_over_the_labels_that_are_not_named() -> None:
    metrics = Metrics()
    for tier, reason, count in (("a", "x", 1), ("a", "y", 2), ("b", "x", 4)):
        metrics.add("drops", count, tier=tier, reason=reason)
    assert metrics.count("drops") == 7
    assert metrics.count("drops", tier="a") == 3
    assert metrics.count("drops", reason="x") == 5
    assert metrics.count("drops", reason="x", tier="b") == 4
    assert metrics.count("drops", reason="z") == 0
    assert metrics.count("evictions") == 0


def test_a_duration_is_in_every_bucket_that_is_not_below_it() -> None:
    metrics = Metrics()
    durations = (0.0, SECONDS_BUCKETS[0], 0.003, SECONDS_BUCKETS[-1], SECONDS_BUCKETS[-1] + 1e-9, 1e6)
    for seconds in durations:
        metrics.observe("tier_read_seconds", seconds, tier="disk")
    seen = scraped(metrics)
    for bound in (*map(str, SECONDS_BUCKETS), "+Inf"):
        labels = {"tier": "disk", "le": bound}
        found = [value for (name, have), value in seen.items() if name.endswith("_bucket") and dict(have) == labels]
        assert found == [sum(seconds <= float(bound) for seconds in durations)], bound
    assert seen[sample("lmcache_tier_read_seconds_count", tier="disk")] == len(durations)
    assert math.isclose(seen[sample("lmcache_tier_read_seconds_sum", tier="disk")], sum(durations))


def test_gauges_are_read_when_they_are_scraped() -> None:
    metrics = Metrics()
    values = {(("tier", "disk"),): 1.5, (("tier", "pool"),): 2.5}
    metrics.gauge("used", "Bytes.", lambda: values)
    metrics.gauge("plain", "One number.", lambda: {(): 9.0})
    metrics.gauge("nothing", "Nothing yet.", dict)
    assert scraped(metrics)[sample("lmcache_used", tier="disk")] == 1.5
    values[(("tier", "disk"),)] = 0.5  # a gauge may fall
    seen = scraped(metrics)
    assert seen[sample("lmcache_used", tier="disk")] == 0.5
    assert seen[sample("lmcache_used", tier="pool")] == 2.5
    assert seen[sample("lmcache_plain")] == 9.0


def test_no_count_is_lost_among_threads_while_others_scrape() -> None:
    metrics = Metrics()
    seen: list[float] = []

    def count() -> None:
        for number in range(2000):
            metrics.add("lookups", result=str(number % 7))
            metrics.observe("tier_read_seconds", 0.001 * (number % 5), tier="disk")

    def scrape() -> None:
        for number in range(30):
            metrics.gauge(f"gauge_{number}", "A number.", lambda: {(): 1.0})
            seen.append(sum(v for (name, _), v in scraped(metrics).items() if name == "lmcache_lookups_total"))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads change places wherever they can
    try:
        in_threads(count, count, scrape, scrape)
    finally:
        sys.setswitchinterval(interval)
    assert metrics.count("lookups") == 4000
    assert scraped(metrics)[sample("lmcache_tier_read_seconds_count", tier="disk")] == 4000
    assert len(seen) == 60
    assert max(seen) <= 4000


def test_every_metric_that_core_counts_has_a_help_text() -> None:
    root = Path(lmcache_core.__file__).parent
    used: set[str] = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            of = ast.unparse(node.func.value)
            if (
                node.func.attr in ("add", "observe")
                and of.endswith("metrics")
                and isinstance(node.args[0], ast.Constant)
            ):
                used.add(node.args[0].value)
    assert {"lookups", "tier_read_seconds", "drops"} <= used
    assert used <= set(HELP)


@pytest.mark.parametrize("name", ["no_such_metric", "lookup"])
def test_a_metric_without_help_is_refused_where_it_is_counted(name: str) -> None:
    metrics = Metrics()
    with pytest.raises(KeyError, match=name):
        metrics.add(name)
    with pytest.raises(KeyError, match=name):
        metrics.observe(name, 1.0)
    metrics.prometheus_text()
