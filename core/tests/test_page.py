"""The page: what it shows and never shows, who may look, what a token lets it do, and that it stays live under load."""

from __future__ import annotations

import base64
import http.client
import itertools
import json
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import daemons
import pytest
import tiny
from serve import Serve, joined, write_config
from tiny import CHUNK, RECORD, chain, load, model, open_pool, store, until

from lmcache_core import Chain, connect, history
from lmcache_core.errors import BackendError
from lmcache_core.keys import salt_id
from lmcache_core.metrics import Metrics
from lmcache_core.scrape import MAX_CONNECTIONS
from lmcache_core.server import page, samples
from lmcache_core.testing.dict_backend import DictBackend

TOKEN = "correct-horse-battery-staple"
Fetched = tuple[int, bytes, Any]


def fetch(address: str, path: str = "/", method: str = "GET", body: bytes | None = None, **headers: str) -> Fetched:
    """(status, body, headers); a header's name with underscores for hyphens."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    asked = urllib.request.Request(f"http://{address}{path}", body, named, method=method)
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), error.headers


def data(address: str, after: int = -1) -> dict[str, Any]:
    code, body, _ = fetch(address, f"/data.json?after={after}")
    assert code == 200
    found: dict[str, Any] = json.loads(body)
    return found


def fresh(address: str) -> dict[str, Any]:
    """The figures after the next sample."""
    number = data(address)["points"][-1]["number"]
    found: dict[str, Any] = {}

    def newer() -> bool:
        found.update(data(address, number))
        return bool(found["points"])

    assert until(newer)
    return found


@contextmanager
def serving(folder: Path, backends: Any = (), *, token: str = "", **settings: Any) -> Iterator[tuple[Any, str]]:
    """A daemon of this process with a page, and the page's address."""
    server = {"page": "127.0.0.1:0", "page_token": token}
    with daemons.serving(folder / "s", backends, server=server, **settings) as daemon:
        yield daemon, str(daemon.status()["page"])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "INTERVAL_S", 0.02)


# What it is


def test_there_is_no_page_unless_it_is_configured(tmp_path: Path) -> None:
    with daemons.serving(tmp_path / "s") as daemon:
        assert daemon.status()["page"] == ""
        assert "lmcache-samples" not in {thread.name for thread in threading.enumerate()}


def test_the_page_is_one_document_that_asks_nobody_else(tmp_path: Path) -> None:
    with serving(tmp_path) as (_, where):
        code, body, headers = fetch(where)
    html = body.decode()
    assert code == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert not re.findall(r"""\b(?:src|srcset|action|poster)\s*=|url\(|@import|<iframe|<object""", html)
    assert set(re.findall(r"""https?://[^\s"'/]+""", html)) == {"http://www.w3.org"}
    assert len(body) < 64 << 10


def test_a_browser_may_run_what_is_in_the_page_and_nothing_else(tmp_path: Path) -> None:
    with serving(tmp_path) as (_, where):
        _, body, headers = fetch(where)
    policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
    for kind in ("script", "style"):
        (inside,) = re.findall(f"<{kind}>(.*?)</{kind}>", body.decode(), re.DOTALL)
        digest = base64.b64encode(sha256(inside.encode()).digest()).decode()
        assert policy[f"{kind}-src"] == f"'sha256-{digest}'"
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert not re.search(r"<[^>]*\s(?:style|on[a-z]+)\s*=", body.decode())  # the policy would forbid it
    assert "innerHTML" not in body.decode()


# What it shows


def test_it_shows_hits_misses_and_why_tiers_evictions_and_plugins(tmp_path: Path, quick: None) -> None:
    with (
        serving(tmp_path, [DictBackend()], chunks=8) as (daemon, where),
        connect(daemon.socket_path, call_timeout_s=10.0) as cache,
    ):
        store(cache, chain(6))
        assert cache.drain(30)
        load(cache, chain(6), "hit")
        cache.lookup_answered(Chain.of(model(weights="other"), range(5 * CHUNK)), "miss", timeout_s=10)
        cache.release("miss")
        store(cache, chain(6, seed=1))
        assert cache.drain(30)
        found = fresh(where)
    now, point = found["overview"], found["points"][-1]
    assert point["lookups"] == [1, 0, 1, 0]
    assert point["hit_tokens"] == 6 * CHUNK
    assert (point["loads"], point["stores"]) == (6, 12)
    miss, hit = now["requests"]
    assert (hit["result"], hit["hit_tokens"], hit["tiers"]) == ("full", 6 * CHUNK, [["host", 6]])
    assert (miss["result"], miss["reason"], miss["model"]) == ("miss", "never stored", "org/tiny")
    assert list(now["meanings"]) == ["never stored"]
    assert "nobody computed this prefix" in now["meanings"]["never stored"]
    host, below = now["tiers"]
    assert (host["records"], host["used_nbytes"], host["capacity_nbytes"]) == (8, 8 * RECORD, 8 * RECORD)
    assert host["evictions"] == host["evictions_lately"] == {"capacity": 4}
    assert (below["name"], below["state"], below["records"]) == ("tier1", "closed", 12)
    assert below["write"]["batches"] >= 2
    assert below["write"]["p95_s"] >= below["write"]["p50_s"] > 0
    assert [row["name"] for row in now["plugins"] if row["kind"] == "core"] == ["lmcache-core"]


def test_slow_operations_are_remembered_with_what_they_were(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "SLOW_S", 0.0)
    with (
        serving(tmp_path, [DictBackend()], chunks=4) as (daemon, where),
        connect(daemon.socket_path, call_timeout_s=10.0) as cache,
    ):
        store(cache, chain(3))
        assert cache.drain(30)
        store(cache, chain(4, seed=1))
        assert cache.drain(30)
        load(cache, chain(3))
        slow = fresh(where)["overview"]["slow"]
    assert [one["operation"] for one in slow] == ["read", "write", "write"]
    assert slow[0] | {"at": 0, "seconds": 0} == {
        "at": 0, "tier": "tier1", "operation": "read", "seconds": 0, "records": 3, "nbytes": 3 * RECORD, "failed": 0,
    }  # fmt: skip


def test_slow_operations_are_kept_up_to_a_bound_and_quick_ones_not() -> None:
    kept = history.History()
    for number in range(3 * history.MAX_SLOW):
        kept.took("disk", "read", history.SLOW_S, number)
        kept.took("disk", "read", history.SLOW_S / 2, -1)
    assert [one.records for one in kept.slow()] == list(range(3 * history.MAX_SLOW - 1, 2 * history.MAX_SLOW - 1, -1))


def test_what_a_tier_was_late_with_is_a_slow_operation(tmp_path: Path) -> None:
    gate = threading.Event()

    class Stuck(DictBackend):
        api_version = (1, 0)

        def put_many(self, keys: Any, data: Any, *, timeout_s: float) -> Any:
            gate.wait(60)
            return super().put_many(keys, data, timeout_s=timeout_s)

    try:
        with tiny.open_local([Stuck()], timeout_s=0.05) as cache:
            store(cache, chain(2))
            assert until(lambda: bool(cache.history.slow()))
            (one,) = cache.history.slow()
            assert (one.operation, one.records, one.failed, one.seconds) == ("write", 2, 2, pytest.approx(0.1))
            gate.set()
    finally:
        gate.set()


def test_tenants_are_counted_and_nothing_tells_who_they_are(tmp_path: Path, quick: None) -> None:
    tenant = salt_id("acme-secret-salt")
    with (
        serving(tmp_path, [DictBackend()], token=TOKEN, tenant_quota_nbytes=4 * RECORD) as (daemon, where),
        connect(daemon.socket_path, call_timeout_s=10.0) as cache,
    ):
        prompt = chain(4, of=model(salt_id=tenant))
        store(cache, prompt)
        assert cache.drain(30)
        load(cache, prompt)
        text = fetch(where, "/data.json")[1].decode()
        text += fetch(where)[1].decode()
        found = fresh(where)["overview"]
    expected = {"count": 1, "quota_nbytes": 4 * RECORD, "largest_nbytes": 4 * RECORD, "near_quota": 1}
    assert [tier["tenants"] for tier in found["tiers"]] == [expected, expected]
    shards = [shard.shard_id.hex() for shard in prompt.model.shards]
    digests = [digest.hex() for digest in prompt.digests]
    for secret in (TOKEN, tenant.hex(), "acme", prompt.model.family.family_id.hex(), *shards, *digests):
        assert secret not in text


def test_passwords_in_what_a_store_says_and_control_characters_are_not_shown(tmp_path: Path, quick: None) -> None:
    with (
        serving(tmp_path, [DictBackend()]) as (daemon, where),
        connect(daemon.socket_path, call_timeout_s=10.0) as cache,
    ):
        why = f"redis://me:hunter2@cache:6379 is gone\x1b[2J\n{'x' * 1000}"
        daemon._pool.tiers[0].breaker.failed(why, fatal=True)
        cache.lookup_answered(chain(2), f"<b>\x00{'y' * 1000}", timeout_s=10)
        found = fresh(where)["overview"]
    assert found["problem"] == "tiers down: tier1"
    _, tier = found["tiers"]
    assert tier["state"] == "open"
    assert tier["reason"].startswith("redis://me:***@cache:6379 is gone?[2J?xx")
    assert len(tier["reason"]) == len(found["requests"][0]["request"]) == 301


# Who may look


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:9466", "127.8.8.8", "[::1]:80", "[::1]"])
def test_it_answers_to_names_of_this_machine(host: str, tmp_path: Path) -> None:
    assert page.refusal({"host": host}) == ""


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example:9466", "10.0.0.1", "[::2]", "0.0.0.0",
     "localhost:9466@evil", "localhost, evil", "::1", "127.1", "[127.0.0.1"],
)  # fmt: skip
def test_a_name_that_somebody_points_at_loopback_is_refused(host: str, tmp_path: Path) -> None:
    assert "loopback" in page.refusal({"host": host})


def test_over_the_wire_another_host_or_origin_gets_nothing(tmp_path: Path) -> None:
    with serving(tmp_path, token=TOKEN) as (daemon, where):
        right = {"Authorization": f"Bearer {TOKEN}"}
        for path in ("/", "/data.json"):
            assert fetch(where, path, Host="evil.example")[0] == 403
            assert fetch(where, path, Origin="http://evil.example")[0] == 403
            assert fetch(where, path, Origin="null")[0] == 403
            assert fetch(where, path, Origin=f"http://{where}")[0] == 200
        assert fetch(where, "/data.json", Sec_Fetch_Site="cross-site")[0] == 403
        assert fetch(where, "/data.json", Sec_Fetch_Site="same-origin")[0] == 200
        assert fetch(where, "/", Sec_Fetch_Site="cross-site")[0] == 200  # a link that leads here
        for elsewhere in ({"Origin": "http://evil.example"}, {"Sec_Fetch_Site": "same-site"}, {"Host": "evil.example"}):
            assert fetch(where, "/do/drain", "POST", b"", **right, **elsewhere)[0] == 403
        assert not daemon.commands.draining
        for _, _, headers in (fetch(where), fetch(where, "/data.json"), fetch(where, "/nowhere")):
            assert "Access-Control-Allow-Origin" not in headers
            assert headers["Cache-Control"] == "no-store"


def test_too_many_connections_at_once_are_closed_and_those_that_end_make_room(tmp_path: Path) -> None:
    with serving(tmp_path) as (_, where):
        host, _, port = where.partition(":")
        idle = [socket.create_connection((host, int(port)), timeout=30) for _ in range(MAX_CONNECTIONS)]
        try:
            one_more = http.client.HTTPConnection(host, int(port), timeout=30)
            one_more.connect()
            assert one_more.sock.recv(1) == b""
            one_more.close()
        finally:
            for sock in idle:
                sock.close()

        def answered() -> bool:
            try:
                return fetch(where, "/data.json")[0] == 200
            except (urllib.error.URLError, ConnectionError, http.client.HTTPException):
                return False

        assert until(answered)


# What it may do


def test_without_a_token_it_only_shows(tmp_path: Path) -> None:
    with serving(tmp_path) as (daemon, where):
        assert data(where)["overview"]["actions"] is False
        for given in ({}, {"Authorization": "Bearer "}, {"Authorization": f"Bearer {TOKEN}"}):
            code, body, _ = fetch(where, "/do/drain", "POST", b"", **given)
            assert (code, body) == (403, b"the page only shows: server.page_token is not configured\n")
        assert not daemon.commands.draining


def test_with_the_token_it_saves_and_drains_and_without_it_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tmp_path, [DictBackend()], token=TOKEN) as (daemon, where):
        assert data(where)["overview"]["actions"] is True
        right = {"Authorization": f"Bearer {TOKEN}"}
        for wrong in (
            {},
            {"Authorization": TOKEN},
            {"Authorization": f"Bearer {TOKEN}x"},
            {"Authorization": "Bearer ä"},
        ):
            asked = {name: value.encode().decode("latin-1") for name, value in wrong.items()}
            assert fetch(where, "/do/drain", "POST", b"", **asked)[0] == 401
        assert fetch(where, "/do/drain", **right)[0] == 404  # a link cannot
        assert fetch(where, "/do/other", "POST", b"", **right)[0] == 404
        assert fetch(where, "/do/drain", "POST", bytes(5000), **right)[0] == 413
        assert not daemon.commands.draining
        assert fetch(where, "/do/save", "POST", b"", **right)[:2] == (200, b'{"done":true}')
        assert not daemon.commands.draining
        assert fetch(where, "/do/drain", "POST", b"", **right)[:2] == (200, b'{"done":true}')
        assert daemon.commands.draining
    assert TOKEN not in caplog.text


# The last minutes


def test_only_the_points_that_are_new_are_sent(tmp_path: Path, quick: None) -> None:
    with serving(tmp_path) as (_, where):
        first = data(where)["points"]
        later = fresh(where)["points"]
        assert [point["number"] for point in first] == list(range(len(first)))
        assert later[0]["number"] > first[-1]["number"] or len(later) == 1
        assert data(where, 10**9)["points"] == []
        for junk in ("x", "-5", "1e3", "9" * 40, "%00", ""):
            assert len(data(where, junk)["points"]) >= len(first)  # type: ignore[arg-type]


def test_the_ring_of_points_is_bounded_and_keeps_the_newest() -> None:
    pool = open_pool()
    try:
        clock = iter(range(10_000))
        taken = samples.Samples(pool, Metrics(), lambda: 0, clock=lambda: float(next(clock)))
        for _ in range(samples.MAX_POINTS + 50):
            taken.take()
        found = [json.loads(point)["number"] for point in taken.after(-1)]
        assert found == list(range(50, samples.MAX_POINTS + 50))
        assert [json.loads(point)["number"] for point in taken.after(samples.MAX_POINTS + 47)] == [
            found[-2],
            found[-1],
        ][-2:]
        assert taken.after(found[-1]) == []
        assert sum(map(len, taken.after(-1))) < 256 << 10
    finally:
        pool.close()


def test_what_is_said_of_lately_forgets_what_was_before() -> None:
    pool = open_pool()
    try:
        now = [0.0]
        metrics = Metrics()
        taken = samples.Samples(pool, metrics, lambda: 0, clock=lambda: now[0])
        metrics.add("evictions", 7, tier="host", reason="capacity")
        for _ in range(400):
            taken.take()
            now[0] += samples.INTERVAL_S
        metrics.add("evictions", 2, tier="host", reason="capacity")
        seconds, lately, whole = taken.lately()
        assert 270 <= seconds <= 330
        assert lately.by("evictions", "reason", tier="host") == {"capacity": 2}
        assert whole.by("evictions", "reason", tier="host") == {"capacity": 9}
    finally:
        pool.close()


def test_quantiles_are_those_of_the_stretch() -> None:
    metrics = Metrics()
    metrics.observe_all("tier_read_seconds", [5.0] * 100, tier="disk")
    before = metrics.read()
    metrics.observe_all("tier_read_seconds", [0.004] * 90 + [0.04] * 10, tier="disk")
    change = metrics.read().since(before)
    assert change.spent("tier_read_seconds", tier="disk") == (100, pytest.approx(0.76))
    assert 0.0025 < (change.quantile("tier_read_seconds", 0.5, tier="disk") or 0) <= 0.005
    assert 0.025 < (change.quantile("tier_read_seconds", 0.95, tier="disk") or 0) <= 0.05
    assert change.quantile("tier_read_seconds", 0.5, tier="other") is None
    metrics.observe("tier_read_seconds", 1e6, tier="disk")
    assert metrics.read().since(before).quantile("tier_read_seconds", 1.0, tier="disk") == 10


def test_two_browsers_cost_one_overview_for_each_point(tmp_path: Path) -> None:
    made = []
    pool = open_pool()
    try:
        from lmcache_core.server.overview import Overview

        metrics = Metrics()
        taken = samples.Samples(pool, metrics, lambda: 0)
        overview = Overview(pool, metrics, taken, state=lambda: made.append(1) or {})  # type: ignore[func-returns-value]
        taken.take()
        assert overview.encoded() == overview.encoded()
        assert len(made) == 1
        taken.take()
        overview.encoded()
        assert len(made) == 2
    finally:
        pool.close()


def test_a_sample_that_fails_is_reported_and_the_next_one_taken(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    with serving(tmp_path) as (daemon, where):
        real = daemon.metrics.read
        calls = iter([True])

        def failing() -> Any:
            if next(calls, False):
                raise BackendError("on purpose")
            return real()

        daemon.metrics.read = failing
        assert until(lambda: bool(seen))
        assert fresh(where)["points"]


# Under load


@pytest.mark.parametrize("way", [("--page", "127.0.0.1:0"), ()])
def test_it_stays_live_at_5000_chunk_operations_a_second(way: tuple[str, ...], tmp_path: Path) -> None:
    config = write_config(tmp_path, host_nbytes=512 * RECORD, **({} if way else {"page": "127.0.0.1:0"}))
    with Serve(config, *way) as daemon:
        where = daemon.said("page ([^ ,]+)")[1]
        with joined(daemon.socket) as cache:
            stop, asked = threading.Event(), [0]

            def work() -> None:
                prompts = [chain(64, seed=seed) for seed in range(12)]
                while not stop.is_set():
                    prompt = prompts[asked[0] % len(prompts)]
                    store(cache, prompt)
                    load(cache, prompt, f"r{asked[0]}")
                    asked[0] += 1

            worker = threading.Thread(target=work)
            worker.start()
            try:
                seen: list[dict[str, Any]] = data(where)["points"]
                deadline = time.monotonic() + 120
                ages: list[float] = []
                while rate(seen) < 5000 or len(seen) < 4:
                    assert time.monotonic() < deadline, f"{rate(seen):.0f} a second, {len(seen)} points"
                    found = data(where, seen[-1]["number"])
                    seen += found["points"]
                    ages.append(found["overview"]["now"] - seen[-1]["at"])
                assert data(where)["overview"]["requests"][0]["request"].partition("/")[2].startswith("r")
            finally:
                stop.set()
                worker.join()
        assert [point["number"] for point in seen] == list(range(len(seen)))  # none was skipped
        assert max(ages) < 20
        assert daemon.stop() == 0


def rate(points: list[dict[str, Any]]) -> float:
    """Chunks loaded and stored a second, in the best of the intervals."""
    pairs = itertools.pairwise(points)
    return max(
        ((b["loads"] + b["stores"] - a["loads"] - a["stores"]) / (b["at"] - a["at"]) for a, b in pairs), default=0
    )
