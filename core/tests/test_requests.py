"""What became of a request is told once, when it is released: to hooks, and as a line in the log."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from daemons import serving
from tiny import BLOCKS, CHUNK, RAW, Engine, chain, load, open_local, open_pool, store

from lmcache_core import RequestReport
from lmcache_core.backend import Context, NoOptions
from lmcache_core.client.cache import connect
from lmcache_core.config import parse_config
from lmcache_core.devices.cpu import CpuDevice
from lmcache_core.errors import ConfigError
from lmcache_core.events import Events
from lmcache_core.local import LocalCache
from lmcache_core.logs import JsonFormatter, lookup_log, request_log, request_text
from lmcache_core.metrics import Metrics
from lmcache_core.opening import open_cache
from lmcache_core.requests import MAX_OPEN
from lmcache_core.testing import DictBackend


@contextmanager
def told_of(*backends: DictBackend, **settings: Any) -> Iterator[tuple[LocalCache, list[RequestReport]]]:
    reports: list[RequestReport] = []
    metrics, events = Metrics(), Events(None)
    pool = open_pool(backends, metrics=metrics, events=events, **settings)
    with LocalCache(pool, CpuDevice(), metrics=metrics, events=events, log_request=reports.append) as cache:
        yield cache, reports


def dict_backend() -> DictBackend:
    return DictBackend(NoOptions(), Context(capacity_nbytes=None, timeout_s=5.0))


def test_a_report_has_the_lookup_the_load_and_what_each_tier_gave() -> None:
    with told_of(dict_backend()) as (cache, reports):
        of = chain(6)
        store(cache, of)
        assert cache.drain(10)
        with cache._pool._lock:
            entries = cache._pool._index.entries
            cache._pool._evict([entries[key] for key in of.keys(of.model.shards[0], range(4, 6))])
        hit, result = load(cache, of, request="r")
        assert (hit, result.ok_chunks) == (6, 6)
        (report,) = reports
        assert (report.request, report.tokens, report.hit_tokens) == ("r", of.tokens, 6 * CHUNK)
        assert report.tiers == (("host", 4), ("tier1", 2))
        assert {(part.tier, part.chunks) for part in report.parts} == {("host", 4), ("tier1", 2)}
        assert (report.loaded_chunks, report.failed_chunks, report.nbytes) == (6, 0, 6 * RAW)
        assert report.lookup_s > 0
        assert report.load_after_s + report.load_s > 0


def test_a_request_is_told_once_however_often_it_is_looked_up_or_released() -> None:
    with told_of() as (cache, reports):
        of = chain(2)
        for _ in range(3):
            cache.lookup(of, "r")
        assert reports == []
        cache.release("r")
        cache.release("r")
        cache.release("another")
        assert [report.request for report in reports] == ["r"]


def test_what_was_never_released_is_told_at_the_end_and_bounded() -> None:
    with told_of() as (cache, reports):
        of = chain(1)
        for number in range(MAX_OPEN + 10):
            cache.lookup(of, f"r{number}")
        assert [report.request for report in reports] == [f"r{number}" for number in range(10)]
    assert len(reports) == MAX_OPEN + 10


def test_nothing_is_gathered_when_nobody_listens() -> None:
    with open_local() as cache:
        store(cache, chain(2))
        hit = cache.lookup(chain(2), "r")
        engine = Engine(2 * BLOCKS)
        job = cache.retrieve(hit, chain(2).model.shards[0], range(2), engine.pages, range(2 * BLOCKS))
        assert job.wait(10) is not None
        assert not cache._requests._open
        assert not cache._prompts._tokens
        cache.release("r")


def test_through_a_daemon_the_engine_is_told_the_tiers_too(tmp_path: Path) -> None:
    reports: list[RequestReport] = []
    with (
        serving(tmp_path / "s", [dict_backend()]) as daemon,
        connect(tmp_path / "s", call_timeout_s=5.0, log_request=reports.append) as cache,
    ):
        of = chain(3)
        store(cache, of)
        assert cache.drain(10)
        with daemon._pool._lock:
            daemon._pool._evict(list(daemon._pool._index.entries.values())[:1])
        load(cache, of, request="r")
        (report,) = reports
        assert dict(report.tiers) == {"host": 2, "tier1": 1}
        assert sum(part.chunks for part in report.parts) == 3
        assert {part.tier for part in report.parts} >= {"tier1"}


REPORT = RequestReport(
    "chat-7", 1.0, tokens=640, hit_tokens=512, tiers=(("host", 1), ("disk", 1)),
    lookup_s=0.0023, load_s=0.01, saved_s=0.85,
)  # fmt: skip


def test_the_line_of_a_hit_and_of_a_miss_name_what_people_look_for() -> None:
    assert request_text(REPORT) == (
        "request 'chat-7': prefix hit of 512 of 640 prompt tokens (host 1, disk 1) in 12.3 ms, saved about 850 ms"
    )
    assert request_text(RequestReport("r", 1.0, tokens=640, refused_tokens=512)) == (
        "request 'r': no prefix hit of 640 prompt tokens in 0.0 ms, 512 tokens more refused by cost"
    )
    failed = RequestReport("r" * 1000, 1.0, tokens=32, hit_tokens=32, tiers=(("host", 2),), failed_chunks=1)
    assert request_text(failed).endswith("(host 2) in 0.0 ms, 1 chunks failed to load")
    assert len(request_text(failed)) < 200


@pytest.mark.parametrize("kind", ["text", "json"])
def test_a_line_is_written_for_each_request_when_asked(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    write = request_log(kind)
    assert write is not None
    with caplog.at_level(logging.INFO, "lmcache_core.requests"):
        write(REPORT)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    if kind == "text":
        assert record.getMessage() == request_text(REPORT)
    else:
        fields = json.loads(record.getMessage())
        assert (fields["event"], fields["request"], fields["hit_tokens"]) == ("request", "chat-7", 512)
    formatted = json.loads(JsonFormatter().format(record))
    assert (formatted["level"], formatted["request"], formatted["tiers"]) == (
        "INFO",
        "chat-7",
        [["host", 1], ["disk", 1]],
    )
    assert request_log("off") is None
    assert lookup_log("off") is None


def test_a_line_of_another_kind_is_json_too() -> None:
    record = logging.LogRecord("a.b", logging.WARNING, __file__, 1, "tier %s: %s", ("disk", 'left "alone"'), None)
    formatted = json.loads(JsonFormatter().format(record))
    assert formatted["message"] == 'tier disk: left "alone"'
    assert (formatted["logger"], formatted["level"]) == ("a.b", "WARNING")


def test_a_configuration_asks_for_the_lines(caplog: pytest.LogCaptureFixture) -> None:
    text = "{device: cpu, log_requests: text, chunk_tokens: 16, tiers: [{backend: memory, capacity: 1MiB}]}"
    with caplog.at_level(logging.INFO, "lmcache_core.requests"), open_cache(parse_config(text, environ={})) as cache:
        store(cache, chain(2))
        load(cache, chain(2), request="mine")
    lines = [record.getMessage() for record in caplog.records if record.name == "lmcache_core.requests"]
    assert len(lines) == 1
    assert "'mine': prefix hit of 32 of 35 prompt tokens" in lines[0]
    with pytest.raises(ConfigError, match="log_requests: 'loud' is none of off, text, json"):
        parse_config("log_requests: loud", environ={})


def test_a_daemon_says_of_each_lookup_why_there_was_no_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(tmp_path / "s", chunks=3) as daemon, connect(tmp_path / "s", call_timeout_s=5.0) as cache:
        daemon._pool.leases.on_lookup = lookup_log("text")
        store(cache, chain(2))
        with caplog.at_level(logging.INFO, "lmcache_core.requests"):
            load(cache, chain(3), request="mine")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "lmcache_core.requests"]
    assert line.endswith("/mine': prefix hit of 32 of 51 prompt tokens (host 2); then: never stored")
