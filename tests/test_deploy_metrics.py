"""The Grafana dashboard and the alerts: only metrics and labels that exist, alerts that fire when they should, and a
real Prometheus that answers every one of their questions about a real daemon."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import promql_parser as promql
import pytest
import yaml
from shared_node import MODEL, PROMPT, SHARD

from lmcache_core import Chain, connect
from lmcache_core.gauges import GAUGES
from lmcache_core.metrics import HELP

ROOT = Path(__file__).parent.parent
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yaml"
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy" / "grafana" / "lmcache.json").read_text(encoding="utf-8"))
RULES: list[dict[str, Any]] = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"][0]["rules"]
VARIABLES = {"$__rate_interval": "1m", "$__range": "1h", "$instance": ".*"}
SCRAPED = {"instance", "job"}
"""Labels that Prometheus adds."""


def targets(panels: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    for panel in panels:
        yield from targets(panel.get("panels", []))
        yield from ((panel["title"], target["expr"]) for target in panel.get("targets", []))


def plain(expression: str) -> str:
    """Without Grafana's variables."""
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    assert "$" not in expression, expression
    return expression


QUESTIONS = [(title, plain(expression)) for title, expression in targets(DASHBOARD["panels"])]
QUESTIONS += [(rule["alert"], rule["expr"]) for rule in RULES]


def documented() -> dict[str, tuple[str, set[str], str]]:
    """(type, labels, row) of each metric, by its name, as the documentation has it."""
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[1] in ("counter", "gauge", "histogram"):
            found[cells[0].strip("`")] = cells[1], set(re.findall(r"`(\w+)`", cells[2])), line
    return found


METRICS = documented()


def selectors(node: Any) -> Iterator[promql.VectorSelector]:
    """Every selector in an expression."""
    if isinstance(node, promql.VectorSelector):
        yield node
    for name in ("expr", "lhs", "rhs", "param", "vector_selector", "args"):
        below = getattr(node, name, None)
        for each in below if isinstance(below, list) else [below]:
            if each is not None:
                yield from selectors(each)


def aggregates(node: Any) -> Iterator[promql.AggregateExpr]:
    if isinstance(node, promql.AggregateExpr):
        yield node
    for name in ("expr", "lhs", "rhs", "args"):
        below = getattr(node, name, None)
        for each in below if isinstance(below, list) else [below]:
            if each is not None:
                yield from aggregates(each)


def labels_of(name: str) -> set[str]:
    """The labels of a metric as it is scraped; a test fails for one that does not exist."""
    if name == "up":
        return set(SCRAPED)
    assert name.startswith("lmcache_"), name
    bare = name.removeprefix("lmcache_")
    kinds = {"_total": "counter", "_bucket": "histogram", "_count": "histogram", "_sum": "histogram", "": "gauge"}
    for ending, kind in kinds.items():
        more = {"le"} if ending == "_bucket" else set()
        short = bare.removesuffix(ending) if ending else bare
        if bare.endswith(ending) and METRICS.get(short, ("",))[0] == kind:
            return METRICS[short][1] | more | SCRAPED
    raise AssertionError(f"there is no metric {name}")


def test_the_documentation_lists_the_metrics_that_there_are() -> None:
    assert set(METRICS) == set(HELP) | set(GAUGES)


@pytest.mark.parametrize(("title", "expression"), QUESTIONS, ids=[title for title, _ in QUESTIONS])
def test_an_expression_uses_only_metrics_and_labels_that_exist(title: str, expression: str) -> None:
    parsed = promql.parse(expression)
    found = list(selectors(parsed))
    assert found
    for selector in found:
        known = labels_of(selector.name)
        for matcher in selector.matchers.matchers:
            assert matcher.name in known, f"{selector.name} has no label {matcher.name}"
            if matcher.name not in SCRAPED:
                row = METRICS[re.sub("^lmcache_|_total$|_bucket$", "", selector.name)][2]
                for value in matcher.value.split("|"):
                    assert f"`{value}`" in row, f"{matcher.name} is never {value}"
    for aggregate in aggregates(parsed):
        known = set.union(*(labels_of(selector.name) for selector in selectors(aggregate.expr)))
        if aggregate.modifier is not None:
            assert set(aggregate.modifier.labels) <= known, f"{aggregate.modifier.labels} are not all among {known}"


@pytest.mark.parametrize(
    "name", ["lmcache_hits_total", "lmcache_hit_tokens", "lmcache_lookups_bucket", "hit_tokens_total"]
)
def test_a_metric_that_does_not_exist_is_found_out(name: str) -> None:
    with pytest.raises(AssertionError):
        labels_of(name)


def test_every_legend_and_text_uses_labels_that_are_left() -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            left = {
                label
                for one in aggregates(promql.parse(plain(target["expr"])))
                if one.modifier
                for label in one.modifier.labels
            }
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= left, panel["title"]
    for rule in RULES:
        told = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        have = set.union(*(labels_of(selector.name) for selector in selectors(promql.parse(rule["expr"]))))
        assert told <= have, rule["alert"]


def test_the_dashboard_shows_every_kind_of_metric_and_its_panels_do_not_overlap() -> None:
    asked = {selector.name for _, expression in QUESTIONS for selector in selectors(promql.parse(expression))}
    shown = {re.sub("^lmcache_|_total$|_bucket$", "", name) for name in asked}
    assert {"hit_tokens", "drops", "evictions", "breaker", "tier_read_seconds", "used_bytes", "corruptions", "queued",
            "tenants", "hook_failures", "plugin", "clients"} <= shown  # fmt: skip
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or panel["datasource"]["uid"] == "${datasource}"


# Prometheus itself


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"cannot run here: no {name} (apt-get install prometheus)")
    return found


def test_prometheus_reads_the_rules() -> None:
    ran = subprocess.run([tool("promtool"), "check", "rules", str(ALERTS)], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert f"{len(RULES)} rules found" in ran.stdout


def test_each_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    cases = yaml.safe_load((Path(__file__).parent / "alerts.yaml").read_text(encoding="utf-8"))
    fired = {case["alertname"] for each in cases["tests"] for case in each["alert_rule_test"] if case["exp_alerts"]}
    silent = {
        case["alertname"] for each in cases["tests"] for case in each["alert_rule_test"] if not case["exp_alerts"]
    }
    assert fired == silent == {rule["alert"] for rule in RULES}
    bare = [{key: value for key, value in rule.items() if key != "annotations"} for rule in RULES]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "lmcache", "rules": bare}]}))
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump(cases))
    command = [tool("promtool"), "test", "rules", "cases.yaml"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr + ran.stdout


@contextmanager
def process(command: list[str], where: Path, **settings: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose output goes to a file, from its start to its end."""
    with where.open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log, **settings) as running:
        try:
            yield running
        finally:
            running.terminate()
            try:
                running.wait(60)
            except subprocess.TimeoutExpired:
                running.kill()


def until(condition: Any, timeout_s: float = 90.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, condition
        time.sleep(0.05)
    return found


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def ask(port: int, expression: str) -> list[dict[str, Any]]:
    query = urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{query}", timeout=30) as answer:
        said: dict[str, Any] = json.load(answer)
    assert said["status"] == "success"
    result: list[dict[str, Any]] = said["data"]["result"]
    return result


def test_a_real_prometheus_answers_every_question_about_a_real_daemon(tmp_path: Path) -> None:
    server = tool("prometheus")
    sock, config = tmp_path / "s", tmp_path / "lmcache.yaml"
    disk = {"name": "disk", "backend": "disk", "capacity": "1MiB", "options": {"path": str(tmp_path / "store")}}
    tiers = [{"name": "host", "backend": "memory", "capacity": "256KiB", "tenant_quota": "128KiB"}, disk]
    config.write_text(
        json.dumps({"chunk_tokens": 64, "socket": str(sock), "tiers": tiers, "server": {"http": "127.0.0.1:0"}})
    )
    log = tmp_path / "daemon.log"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LMCACHE")}
    serve = [sys.executable, "-m", "lmcache_core.cli", "serve", "--config", str(config)]
    with process(serve, log, env=environment):
        http = until(lambda: re.search(r"http ([0-9.:]+)", log.read_text()))[1]
        jobs = [{"job_name": "lmcache", "static_configs": [{"targets": [http]}]}]
        settings = {"global": {"scrape_interval": "1s", "evaluation_interval": "1s"}, "scrape_configs": jobs}
        settings["rule_files"] = [str(ALERTS)]
        (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(settings))
        port = free_port()
        command = [server, f"--config.file={tmp_path}/prometheus.yaml", f"--storage.tsdb.path={tmp_path}/data"]
        with process([*command, f"--web.listen-address=127.0.0.1:{port}"], tmp_path / "prometheus.log"):

            def scraped() -> bool:
                try:
                    return bool(ask(port, 'up{job="lmcache"} == 1'))
                except (OSError, ValueError):
                    return False

            until(scraped)
            with connect(sock, call_timeout_s=10.0) as cache:
                pages = [[np.zeros((64 * 4, 8192), np.uint8) for _ in range(2)]]
                for turn in range(1, 6):
                    chain = Chain.of(MODEL, np.roll(PROMPT, turn))
                    ids = list(range(len(chain) * 4))
                    cache.store(chain, SHARD, range(len(chain)), pages, ids).wait(10)
                    hit = cache.lookup_answered(chain, f"r{turn}", timeout_s=10)
                    cache.retrieve(hit, SHARD, range(hit.chunks), pages, ids[: hit.chunks * 4]).wait(10)
                    cache.release(f"r{turn}")
                    # A rate needs what was counted between two scrapes.
                    until(partial(ask, port, f"sum(lmcache_lookups_total) >= {turn}"))
                answers: dict[str, list[Any]] = {}
                for title, expression in QUESTIONS:
                    answers.setdefault(title, []).extend(ask(port, expression))
            shown = ("Hit rate", "Lookups", "Prompt tokens a second", "Fill", "Used", "Writing a batch", "Evictions")
            for title in (*shown, "Circuit breakers", "Plugins in use", "Engines", "Tenants"):
                assert answers[title], title
            groups = urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/rules", timeout=30)
            with groups:
                (group,) = json.load(groups)["data"]["groups"]
            assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"}
            for rule in RULES:
                if rule["alert"] not in ("LMCacheTierTooSmall", "LMCacheNotStored"):
                    assert not answers[rule["alert"]], rule["alert"]
