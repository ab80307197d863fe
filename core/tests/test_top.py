"""`lmc top`: the figures of a daemon, over a stretch of time or since its start, drawn, printed and as JSON."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import daemons
import pytest
import tiny
from rich.console import Console
from serve import lmc
from tiny import CHUNK, RECORD, chain, model, store

from lmcache_core import Chain, connect
from lmcache_core.cli import top
from lmcache_core.cli.figures import Snapshot, figures, parse
from lmcache_core.cli.target import target_of
from lmcache_core.testing.dict_backend import DictBackend


@pytest.fixture
def busy(tmp_path: Path) -> Any:
    """A daemon that has answered a full hit, a partial one and a miss, and evicted something."""
    socket = tmp_path / "s"
    with daemons.serving(socket, [DictBackend()], chunks=8) as daemon, connect(socket, call_timeout_s=10.0) as cache:
        prompt = chain(6)
        store(cache, prompt)
        assert cache.drain(30)
        for name, asked in (
            ("full", prompt),
            ("partial", prompt.extend(range(2 * CHUNK))),
            ("miss", Chain.of(model(weights="other"), range(5 * CHUNK))),
        ):
            cache.lookup_answered(asked, name, timeout_s=10)
            cache.release(name)
        yield daemon, cache, socket


def snapshot(socket: Path) -> Snapshot:
    with target_of(str(socket), None, 10.0).open() as control:
        return Snapshot.of(control, 10.0)


def test_the_figures_are_those_of_the_metrics(busy: Any) -> None:
    daemon, _, socket = busy
    found = json.loads(lmc("top", "--socket", socket, "--json").stdout)
    assert found["status"]["pid"] > 0
    shown = found["figures"]
    assert shown["whole"]
    assert shown["lookups"] == {"full": 1, "partial": 1, "miss": 1}
    asked = daemon.metrics.count("lookup_tokens")
    assert shown["tokens"] == asked
    assert shown["hit_share"] == pytest.approx(12 * CHUNK / asked)
    host, below = shown["tiers"]
    assert (host["backend"], host["records"], below["records"]) == ("memory", 6, 6)
    assert below["written_nbytes"] == 6 * RECORD
    assert below["write_s"] > 0
    assert below["read_s"] is None
    assert [one["request"].rpartition("/")[2] for one in found["latest"]] == ["miss", "partial", "full"]


def test_a_stretch_of_time_counts_only_what_was_in_it(busy: Any) -> None:
    _, cache, socket = busy
    before = snapshot(socket)
    cache.lookup_answered(chain(6), "again", timeout_s=10)
    cache.release("again")
    for seed in range(3):
        store(cache, chain(6, seed=seed + 1))
        assert cache.drain(30)  # or the next one might find what it needs held by a write
    now = snapshot(socket)
    found = figures(now, before)
    assert not found.whole
    assert found.lookups == {"full": 1}
    assert found.hit_share == pytest.approx(6 * CHUNK / (6 * CHUNK + 3))
    host, below = found.tiers
    assert below.written_nbytes == 18 * RECORD
    assert host.evictions == {"capacity": 16}
    text = "\n".join(top.lines(now, found))
    assert "1 lookups in" in text
    assert "16 capacity" in text


def test_another_daemon_in_between_starts_the_figures_anew(busy: Any) -> None:
    _, _, socket = busy
    now = snapshot(socket)
    earlier = Snapshot(now.at - 5, now.status | {"boot_id": "another"}, dict.fromkeys(now.samples, 99.0), [])
    found = figures(now, earlier)
    assert found.whole
    assert found.lookups == {"full": 1, "partial": 1, "miss": 1}


def test_printed_once_it_says_what_a_person_looks_for(busy: Any) -> None:
    daemon, _, socket = busy
    text = lmc("top", "--socket", socket, "--once").stdout
    assert text.startswith("ready: pid ")
    assert "3 lookups since the start" in text
    assert "1 full, 1 partial, 1 miss" in text
    assert "prefix hits: " in text
    assert "never stored" in text
    daemon._pool.tiers[0].breaker.failed("refused", fatal=True)
    text = lmc("top", "--socket", socket, "--once", "--over", "0.01").stdout
    assert text.startswith("tiers down: tier1")
    assert "open: refused" in text
    assert "in 0." in text


def test_the_live_view_is_drawn_again_and_outlives_a_daemon(tmp_path: Path) -> None:
    socket = tmp_path / "s"
    out = io.StringIO()
    console = Console(file=out, width=180, height=40, force_terminal=True)
    serving = daemons.serving(socket, [DictBackend()], chunks=8)
    daemon: Any = serving.__enter__()
    waits: list[float] = []

    class Enough(Exception):
        pass

    def pause(seconds: float) -> None:
        nonlocal daemon
        waits.append(seconds)
        if len(waits) == 1:
            with connect(socket, call_timeout_s=10.0) as cache:
                store(cache, chain(3))
                tiny.load(cache, chain(3), "seen")
        elif len(waits) == 2:
            serving.__exit__(None, None, None)
            daemon = None
        elif len(waits) == 3:
            raise Enough

    try:
        with pytest.raises(Enough):
            top.watch(target_of(str(socket), None, 10.0), 0.5, console, pause)
    finally:
        if daemon is not None:
            serving.__exit__(None, None, None)
    text = out.getvalue()
    assert waits == [0.5, 0.5, 0.5]
    assert "seen" in text
    assert "tier1" in text
    assert "trying again" in text
    assert "\x1b[?1049h" in text, "on a terminal it takes the whole screen, and gives it back"
    assert "\x1b[?1049l" in text


def test_without_a_daemon_it_says_so_at_once(tmp_path: Path) -> None:
    for arguments in ([], ["--once"], ["--json"]):
        result = lmc("top", "--socket", tmp_path / "none", *arguments)
        assert result.exit_code == 2
        assert "no daemon was started there" in result.output


def test_foreign_names_do_not_reach_the_terminal(busy: Any) -> None:
    _, cache, socket = busy
    cache.lookup_answered(chain(1, seed=9), "a\x1b[2Jb", timeout_s=10)
    cache.release("a\x1b[2Jb")
    text = lmc("top", "--socket", socket, "--once").stdout
    assert "\x1b" not in text
    assert "a?[2Jb" in text
    out = io.StringIO()
    now = snapshot(socket)
    Console(file=out, width=160).print(top.view(now, figures(now)))
    assert "\x1b[2J" not in out.getvalue()


def test_samples_are_told_apart_by_their_labels() -> None:
    lines = [f'lmcache_drops_total{{tier="{tier}",reason="x"}} {count}' for tier, count in (("a", 2), ("b", 3))]
    samples = parse("\n".join(["# TYPE lmcache_drops counter", *lines, ""]))
    assert samples["lmcache_drops_total", frozenset({("tier", "a"), ("reason", "x")})] == 2.0
    assert len(samples) == 2
    tier = {"backend": "x", "breaker": "closed", "reason": "", "records": 0, "used_nbytes": 0, "capacity_nbytes": None,
            "queued_loads": 0, "queued_stores": 0}  # fmt: skip
    status = {
        "boot_id": "x", "uptime_s": 1.0, "name": "host", "records": 0, "used_nbytes": 0, "capacity_nbytes": 1,
        "tiers": [tier | {"name": "a"}, tier | {"name": "b"}],
    }  # fmt: skip
    found = figures(Snapshot(1.0, status, samples, []))
    assert [each.drops for each in found.tiers] == [{}, {"x": 2.0}, {"x": 3.0}]


def test_eighty_columns_are_enough_for_every_figure() -> None:
    tier = {"name": "pool", "backend": "redis", "breaker": "open", "reason": "connection refused", "records": 12_345,
            "used_nbytes": 1 << 36, "capacity_nbytes": 1 << 37, "queued_loads": 10, "queued_stores": 99}  # fmt: skip
    status = {
        "boot_id": "x", "problem": "", "pid": 1, "uptime_s": 9.0, "clients": 1, "leases": 0, "records_in_use": 0,
        "name": "host", "records": 3, "used_nbytes": 1 << 33, "capacity_nbytes": 1 << 34, "tiers": [tier],
    }  # fmt: skip
    samples = {
        ("lmcache_tier_read_bytes_total", frozenset({("tier", "pool")})): 3.1e9,
        ("lmcache_tier_read_seconds_sum", frozenset({("tier", "pool")})): 3.0,
        ("lmcache_tier_read_seconds_count", frozenset({("tier", "pool")})): 24.0,
        ("lmcache_drops_total", frozenset({("tier", "pool"), ("reason", "tier unavailable")})): 77.0,
    }
    one = {"request": "3/" + "r" * 90, "at": time.time(), "result": "partial", "hit_chunks": 13, "chunks": 20}
    latest = [one | {"tokens": 5123, "reason": "not stored: queue full, and more"}]
    now = Snapshot(10.0, status, samples, latest)
    out = io.StringIO()
    Console(file=out, width=80).print(top.view(now, figures(now, Snapshot(8.0, status, {}, []))))
    text = out.getvalue()
    for figure in ("1.4 GiB/s", "125.0", "64.0 GiB", "10/99", "50 %", "77 tier unavailable", "connection refused"):
        assert figure in text
    for figure in ("partial", "13 of 20", "5,123"):
        assert figure in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_fill_and_the_saving_are_drawn() -> None:
    status = {
        "boot_id": "x", "problem": "", "pid": 1, "uptime_s": 100.0, "clients": 1, "leases": 0, "records_in_use": 0,
        "name": "host", "records": 3, "used_nbytes": 50, "capacity_nbytes": 100, "tiers": [],
    }  # fmt: skip
    samples = {
        ("lmcache_ttft_saved_estimated_seconds_total", frozenset[tuple[str, str]]()): 12.5,
        ("lmcache_lookups_total", frozenset({("result", "refused")})): 4.0,
        ("lmcache_corruptions_total", frozenset({("tier", "host")})): 1.0,
    }
    latest = [
        {
            "request": "r",
            "at": time.time(),
            "result": "miss",
            "hit_chunks": 0,
            "chunks": 2,
            "tokens": 40,
            "reason": "capacity",
        }
    ]
    now = Snapshot(1.0, status, samples, latest)
    out = io.StringIO()
    Console(file=out, width=160).print(top.view(now, figures(now)))
    text = out.getvalue()
    assert "███░░░ 50 %" in text
    assert "12.5 s of prefill saved (estimated)" in text
    assert "4 lookups since the start (0.0/s): 4 refused" in text
    assert "0 of 2" in text
