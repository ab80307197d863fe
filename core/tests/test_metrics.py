"""Metrics: what Prometheus reads is what was counted."""

from __future__ import annotations

import ast
import math
import re
import sys
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tiny import RECORD, chain, load, model, open_local, store

import lmcache_core
from lmcache_core.backend import Context, NoOptions
from lmcache_core.config import parse_config
from lmcache_core.gauges import GAUGES
from lmcache_core.keys import salt_id
from lmcache_core.metrics import HELP, SECONDS_BUCKETS, Metrics
from lmcache_core.opening import open_cache
from lmcache_core.testing import DictBackend, in_threads

LIFETIMES = {"evicted_age_seconds", "evicted_idle_seconds", "evicted_uses"}
"""Observed through a local name."""
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


def metrics_named(*methods: str) -> set[str]:
    """The metrics that core's sources count with these methods."""
    root = Path(lmcache_core.__file__).parent
    used: set[str] = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            of = ast.unparse(node.func.value)
            if node.func.attr in methods and of.endswith("metrics") and isinstance(node.args[0], ast.Constant):
                used.add(node.args[0].value)
    return used | (LIFETIMES if "observe_all" in methods else set())


def test_every_metric_that_core_counts_has_a_help_text() -> None:
    used = metrics_named("add", "observe", "observe_all")
    assert {"lookups", "tier_read_seconds", "drops"} <= used
    assert used == set(HELP)


def test_the_page_lists_every_metric_with_its_type() -> None:
    page = Path(__file__).parents[2] / "docs" / "operations.md"
    found = re.findall(r"^\| `(\w+)` \| (counter|gauge|histogram) \|", page.read_text(), re.MULTILINE)
    observed = metrics_named("observe", "observe_all")
    wanted = {name: "histogram" if name in observed else "counter" for name in HELP} | dict.fromkeys(GAUGES, "gauge")
    assert sorted(found) == sorted(wanted.items())


def test_every_gauge_that_core_registers_has_a_help_text() -> None:
    with open_local([DictBackend(NoOptions(), Context(capacity_nbytes=None, timeout_s=5.0))]) as cache:
        assert set(cache.metrics._gauges) == set(GAUGES) - {"clients", "plugin"}
        text = cache.metrics.prometheus_text()
    for name in cache.metrics._gauges:
        assert f"# HELP lmcache_{name} {GAUGES[name]}" in text


def test_a_cache_from_a_configuration_serves_its_metrics_and_says_what_it_runs(tmp_path: Path) -> None:
    text = "{device: cpu, metrics: '127.0.0.1:0', tiers: [{backend: memory, capacity: 1MiB}, "
    text += f"{{name: d, backend: disk, capacity: 1MiB, options: {{path: {tmp_path}}}}}]}}"
    with open_cache(parse_config(text, environ={})) as cache:
        with urllib.request.urlopen(f"http://{cache.metrics_address}/metrics", timeout=60) as answer:
            seen = {
                (one.name, frozenset(one.labels.items())): one.value
                for family in text_string_to_metric_families(answer.read().decode())
                for one in family.samples
            }
        for kind, name in (("backend", "disk"), ("policy", "s3fifo"), ("codec", "identity"), ("device", "cpu")):
            of = {"kind": kind, "name": name, "distribution": "lmcache-core", "version": lmcache_core.__version__}
            assert seen["lmcache_plugin", frozenset(of.items())] == 1
        assert seen[sample("lmcache_breaker", tier="d", state="closed")] == 1
        assert seen[sample("lmcache_breaker", tier="d", state="open")] == 0
        assert seen[sample("lmcache_capacity_bytes", tier="d")] == 1 << 20
        assert seen[sample("lmcache_queued", tier="d", operation="store")] == 0
        other = text.replace("127.0.0.1:0", cache.metrics_address).replace("1MiB}, {name: d", "2MiB}, {name: d")
        with open_cache(parse_config(other, environ={})) as second:  # the port is taken, which is no reason to fail
            assert second.metrics_address == ""


def test_how_long_records_lived_is_observed_when_they_are_evicted_for_room() -> None:
    now = [0.0]
    with open_local(chunks=2, clock=lambda: now[0]) as cache:
        store(cache, chain(2))
        now[0] = 10.0
        load(cache, chain(2))
        now[0] = 30.0
        store(cache, chain(2, seed=1))
        seen = scraped(cache.metrics)
    for name, total in (("age_seconds", 60.0), ("idle_seconds", 40.0), ("uses", 2.0)):
        assert seen[sample(f"lmcache_evicted_{name}_count", tier="host")] == 2
        assert seen[sample(f"lmcache_evicted_{name}_sum", tier="host")] == total
    assert seen[sample("lmcache_evicted_age_seconds_bucket", tier="host", le="15")] == 0
    assert seen[sample("lmcache_evicted_age_seconds_bucket", tier="host", le="60")] == 2


def test_records_below_are_followed_too_one_in_eight() -> None:
    backend = DictBackend(NoOptions(), Context(capacity_nbytes=None, timeout_s=5.0))
    with open_local([backend], chunks=64, tier_capacity_nbytes=16 * RECORD) as cache:
        for seed in range(16):
            store(cache, chain(8, seed=seed))
            assert cache.drain(60)
        tier = cache._pool.tiers[0]
        gone = cache.metrics.count("evictions", tier="tier1", reason="capacity")
        seen = scraped(cache.metrics)[sample("lmcache_evicted_uses_count", tier="tier1")]
        assert 0 < seen < gone / 3
        assert set(tier.ledger._lives) <= set(tier.known)


def test_tenants_are_counted_and_never_named() -> None:
    with open_local(chunks=64, tenant_quota_nbytes=4 * RECORD) as cache:
        for number, chunks in enumerate((1, 2, 4)):
            store(cache, chain(chunks, of=model(salt_id=salt_id(f"tenant-{number}"))))
        store(cache, chain(5))
        seen = scraped(cache.metrics)
        text = cache.metrics.prometheus_text()
    assert seen[sample("lmcache_tenants", tier="host")] == 3
    assert seen[sample("lmcache_tenant_quota_bytes", tier="host")] == 4 * RECORD
    assert seen[sample("lmcache_tenant_largest_bytes", tier="host")] == 4 * RECORD
    assert seen[sample("lmcache_tenants_near_quota", tier="host")] == 1
    for number in range(3):
        assert f"tenant-{number}" not in text
        assert salt_id(f"tenant-{number}").hex()[:8] not in text


@pytest.mark.parametrize("name", ["no_such_metric", "lookup"])
def test_a_metric_without_help_is_refused_where_it_is_counted(name: str) -> None:
    metrics = Metrics()
    with pytest.raises(KeyError, match=name):
        metrics.add(name)
    with pytest.raises(KeyError, match=name):
        metrics.observe(name, 1.0)
    metrics.prometheus_text()
