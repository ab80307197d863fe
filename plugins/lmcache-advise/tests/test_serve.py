"""`lmc bench serve` against a real HTTP server that streams: workloads, figures, verdicts, faults."""

from __future__ import annotations

import json
import re
from datetime import datetime
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from openai_server import serving

from lmcache_advise.driving import Outcome, Run, alternate, drive, parts_of
from lmcache_advise.prompts import WORKLOADS, Session, Size, replayed
from lmcache_advise.serve_cli import serve
from lmcache_advise.serving import Answer, Endpoint, ask, checked_url
from lmcache_advise.verdict import NOT_HERE, UNDECIDED, USE, comparison_of, figures_of, verdict_of
from lmcache_core import ConfigError, __version__

SMALL = Size(users=3, sessions=3, turns=3, scale=0.01)


def lmc(*arguments: object, **environ: str) -> Result:
    result = CliRunner(env=environ).invoke(serve, [str(each) for each in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_an_agent_goes_from_20k_to_115k_tokens_times_the_scale_and_every_turn_repeats_the_last() -> None:
    with serving(cache=True) as server:
        sessions = WORKLOADS["agent"](SMALL)
        run = drive(Endpoint(server.url, "tiny"), sessions, 3)
    assert [len(session.turns) for session in sessions] == [3, 3, 3]
    assert run.asked == len(run.outcomes) == 9
    for number in range(3):
        mine = [each.answer for each in run.outcomes if each.session == f"agent {number}"]
        assert [answer.error for answer in mine] == ["", "", ""]
        assert mine[0].prompt_tokens == pytest.approx(200, rel=0.05)
        assert mine[2].prompt_tokens == pytest.approx(1150, rel=0.05)
        for before, after in pairwise(mine):
            assert after.cached_tokens is not None
            assert after.cached_tokens > before.prompt_tokens - 16
    bodies = [body["messages"] for body in server.asked if len(body["messages"]) > 2]
    assert {message["content"] for messages in bodies for message in messages if message["role"] == "assistant"} == {
        "word0 word1 word2 "
    }
    assert server.most_at_once <= 3
    assert all(body["stream"] and body["temperature"] == 0 for body in server.asked)


@pytest.mark.parametrize(("name", "shared"), [("rag", True), ("shared", True), ("random", False)])
def test_the_other_workloads_share_what_their_names_say(name: str, shared: bool) -> None:
    size = Size(users=2, sessions=4, turns=5, scale=0.1)
    sessions = WORKLOADS[name](size)
    assert len(sessions) == 20
    assert WORKLOADS[name](size) == sessions, "the same seed, the same prompts"
    other = WORKLOADS[name](Size(users=2, sessions=4, turns=5, scale=0.1, seed=1))
    assert not {each.turns for each in other} & {each.turns for each in sessions}
    with serving(cache=True) as server:
        found = figures_of(drive(Endpoint(server.url, "tiny"), sessions, 2))
    assert (found.completed, found.failed) == (20, 0)
    assert found.hit_rate is not None
    assert (found.hit_rate > 0.4) == shared


def test_a_trace_is_replayed_with_text_that_is_equal_where_it_was_equal(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    lines = [(0, [1, 2]), (10, [1, 2, 3]), (20, [9])]
    trace.write_text("".join(
        json.dumps({"timestamp": at, "input_length": 512 * len(ids) + 9, "hash_ids": [*ids, 77]}) + "\n"
        for at, ids in lines
    ))  # fmt: skip
    sessions = replayed(trace, Size(scale=0.1), speed=2.0)
    assert [session.at_s for session in sessions] == [0.0, 0.005, 0.01]
    one, two, three = (session.system.split() for session in sessions)
    assert (len(one), len(two), len(three)) == (102, 153, 51)
    assert two[:102] == one
    assert three != one[:51]
    with serving(cache=True) as server:
        result = lmc(server.url, "--trace", trace, "--scale", 0.1, "--out", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["workloads"]["trace"]["with"]["completed"] == 3


def test_a_cache_that_saves_time_is_advised_and_the_report_has_every_figure(tmp_path: Path) -> None:
    with serving(cache=True, compute_s=0.4) as ours, serving(cache=False, compute_s=0.4) as theirs:
        result = lmc(
            ours.url, "--baseline", theirs.url, "-w", "agent", "--users", 4, "--sessions", 4, "--turns", 4,
            "--scale", 0.01, "--out", tmp_path / "r.json", "--html", tmp_path / "r.html",
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "Verdict: use it" in result.stdout
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["verdict"] == USE
    assert found["model"] == "tiny"
    assert found["workloads"]["agent"]["with"]["hit_rate"] > 0.3
    assert found["workloads"]["agent"]["without"]["hit_rate"] is None
    assert found["compared"]["agent"]["pairs"] == 16
    assert len(found["requests"]["agent"]["with"]) == 16
    assert "text" not in found["requests"]["agent"]["with"][0]
    page = (tmp_path / "r.html").read_text()
    assert page.count("<svg") == 3
    assert not re.search(r"url\(|@import|<script|src=|href=", page)
    assert "use it" in page


def test_an_endpoint_that_does_not_say_what_it_cached_is_measured_all_the_same() -> None:
    with serving(cache=True, says_usage=False) as server:
        result = lmc(server.url, "-w", "random", "--sessions", 2, "--turns", 2, "--scale", 0.1)
    assert "not said" in result.stdout
    assert "4/4" in result.stdout
    assert f"Verdict: {UNDECIDED}" in result.stdout
    assert "give --baseline URL" in result.stdout


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("500", "500: {\"error\": {\"message\": \"out of memory\"}}"),
        ("cut", "the stream ended before it was done"),
        ("nonsense", "JSONDecodeError"),
        ("error", "engine died"),
    ],
)  # fmt: skip
def test_a_request_that_fails_says_how_and_ends_its_conversation(fault: str, text: str) -> None:
    with serving(cache=True, fault=fault) as server:
        run = drive(Endpoint(server.url, "tiny"), WORKLOADS["agent"](SMALL), 3)
    assert len(run.outcomes) == 3
    assert all(text in each.answer.error for each in run.outcomes)
    found = figures_of(run)
    assert (found.asked, found.completed, found.failed) == (9, 0, 3)


def test_requests_that_fail_with_the_cache_alone_are_a_verdict() -> None:
    with serving(cache=True, fault="500") as ours, serving(cache=False) as theirs:
        result = lmc(ours.url, "--baseline", theirs.url, "-w", "random", "--sessions", 2, "--turns", 2, "--scale", 0.1)
    assert f"Verdict: {NOT_HERE}" in result.stdout
    assert "requests failed that did not without it: 4 of random" in result.stdout
    assert "! random, with: 4 requests failed: 500" in result.stdout


def test_nobody_there_is_an_error_of_each_request_or_of_the_command() -> None:
    with serving(cache=True) as server:
        url = server.url
    assert "ConnectionRefusedError" in ask(Endpoint(url, "tiny"), []).error
    result = lmc(url)
    assert result.exit_code == 1
    assert "cannot be reached" in result.output


def test_an_endpoint_without_models_asks_for_a_name() -> None:
    with serving(cache=True, fault="no models") as server:
        assert "name one with --model" in lmc(server.url).output


def test_the_key_is_taken_from_the_environment_and_is_in_no_report(tmp_path: Path) -> None:
    with serving(cache=True) as server:
        result = lmc(
            server.url, "-w", "random", "--sessions", 1, "--turns", 1, "--scale", 0.1, "--api-key-env", "MY_KEY",
            "--out", tmp_path / "r.json", MY_KEY="sesame",
        )  # fmt: skip
    assert set(server.keys) == {"Bearer sesame"}
    assert "sesame" not in result.output + (tmp_path / "r.json").read_text()


def test_rounds_ask_the_endpoints_in_turn_each_first_as_often_as_the_other_and_everything_once() -> None:
    order: list[str] = []
    sessions = [Session(f"s{n}", "", (f"question {n}",) * 2, at_s=n / 1000 + 1e-3) for n in range(5)]
    with serving(cache=False) as one, serving(cache=False) as two:
        one.on_ask, two.on_ask = (lambda: order.append("without")), (lambda: order.append("with"))
        endpoints = {"without": Endpoint(one.url, "tiny"), "with": Endpoint(two.url, "tiny")}
        runs = alternate(endpoints, sessions, 2, rounds=3, limit_s=60)
    asked = [(side, len(list(each))) for side, each in groupby(order)]
    assert asked == [("without", 2), ("with", 6), ("without", 8), ("with", 4)]
    for run in runs.values():
        assert sorted((each.session, each.turn) for each in run.outcomes) == [
            (f"s{n}", turn) for n in range(5) for turn in range(2)
        ]
        assert run.asked == 10
        assert len(run.loads) == 6
        assert run.seconds > 0


def test_a_part_of_a_trace_begins_at_once_and_keeps_its_distances() -> None:
    sessions = [Session(f"s{n}", "", ("word",), at_s=100.0 * n) for n in range(5)]
    parts = parts_of(sessions, 2)
    assert [[(each.name, each.at_s) for each in part] for part in parts] == [
        [("s0", 0.0), ("s1", 100.0)],
        [("s2", 0.0), ("s3", 100.0), ("s4", 200.0)],
    ]
    assert len(parts_of(sessions, 9)) == 5


def test_a_report_says_when_with_what_and_on_how_busy_a_machine_it_was_measured(tmp_path: Path) -> None:
    with serving(cache=True) as server:
        lmc(
            server.url, "-w", "random", "--sessions", 2, "--turns", 1, "--note", "SmolLM2 <fp32>", "--note", "no load",
            "--rounds", 2, "--out", tmp_path / "r.json", "--html", tmp_path / "r.html",
        )  # fmt: skip
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["measured"]["notes"] == ["SmolLM2 <fp32>", "no load"]
    assert found["measured"]["lmcache-core"] == __version__
    assert datetime.fromisoformat(found["measured"]["began"]).tzinfo is not None
    assert len(found["load averages"]["random"]["with"]) == 4
    assert found["settings"]["rounds"] == 2
    page = (tmp_path / "r.html").read_text()
    assert "SmolLM2 &lt;fp32&gt;" in page
    assert "load average random, with" in page


def test_sessions_alternate_so_that_few_users_have_many_conversations_open() -> None:
    sessions = [Session(f"s{n}", "", tuple(f"question {n} {turn}" for turn in range(3))) for n in range(4)]
    with serving(cache=False) as server:
        run = drive(Endpoint(server.url, "tiny"), sessions, 1)
    asked = [body["messages"][-1]["content"] for body in server.asked]
    assert asked == [f"question {n} {turn}" for turn in range(3) for n in range(4)]
    assert [len(body["messages"]) for body in server.asked] == [1] * 4 + [3] * 4 + [5] * 4
    assert [(each.session, each.turn) for each in run.outcomes] == [(f"s{n}", t) for t in range(3) for n in range(4)]


def test_no_request_begins_after_the_limit() -> None:
    with serving(cache=True) as server:
        sessions = [Session(f"s{n}", "", ("word",) * 3) for n in range(5)]
        run = drive(Endpoint(server.url, "tiny"), sessions, 2, limit_s=0.0)
    assert run.outcomes == ()
    assert run.asked == 15
    assert server.asked == []


@pytest.mark.parametrize(
    ("url", "text"),
    [("127.0.0.1:8000", "is no URL"), ("ftp://x", "is no URL"), ("http://", "is no URL"),
     ("http://x:99999", "is no URL"),
     ("http://me:secret@x", "a password would be in every report")],
)  # fmt: skip
def test_a_url_that_is_none_is_refused(url: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        checked_url(url)
    assert checked_url("http://x:80/v1/") == "http://x:80/v1"


def test_an_endpoint_is_not_compared_with_itself() -> None:
    result = lmc("http://x/v1", "--baseline", "http://x/v1/")
    assert "compared with itself" in result.output


# The verdict, from times that are given.


def run_of(*times: float, tokens: int = 10, failed: int = 0) -> Run:
    good = [Outcome(f"s{n}", 0, Answer("x", at, at + 1, 100, tokens, 0)) for n, at in enumerate(times)]
    bad = [Outcome(f"f{n}", 0, Answer(error="500: no")) for n in range(failed)]
    return Run((*good, *bad), 10.0, len(times) + failed)


def verdict(**workloads: tuple[Run, Run]) -> Any:
    figures = {name: (figures_of(ours), figures_of(theirs)) for name, (ours, theirs) in workloads.items()}
    return verdict_of(figures, {name: comparison_of(*runs) for name, runs in workloads.items()})


SLOW = run_of(*[1.0 + n / 100 for n in range(20)])
FAST = run_of(*[0.5 + n / 100 for n in range(20)])


def test_every_verdict_follows_from_the_times() -> None:
    assert verdict(a=(FAST, SLOW)).word == USE
    assert verdict(a=(SLOW, FAST)).word == NOT_HERE
    assert verdict(a=(SLOW, SLOW)).word == NOT_HERE
    assert verdict(a=(FAST, SLOW), b=(SLOW, SLOW)).word == "use it for a"
    assert verdict(a=(FAST, SLOW), b=(SLOW, FAST)).word == "use it for a; not for b"
    assert verdict(a=(run_of(1.0, 2.0), run_of(3.0, 4.0))).word == UNDECIDED
    assert verdict().word == UNDECIDED
    assert verdict(a=(run_of(*[0.1] * 20, failed=1), SLOW)).word == NOT_HERE
    assert verdict(a=(FAST, run_of(*[1.0] * 20, failed=1))).word == USE


def test_a_gain_that_may_be_chance_is_none() -> None:
    ours = run_of(*([0.1] * 10 + [1.9] * 9))
    theirs = run_of(*([2.0] * 9 + [0.2] * 10))
    compared = comparison_of(ours, theirs)
    assert compared.pairs == 19
    assert compared.low < 0 < compared.high
    assert not compared.helps
    assert not compared.hurts
    assert comparison_of(ours, theirs) == compared


def test_figures_are_those_of_the_requests_that_were_answered() -> None:
    found = figures_of(run_of(1.0, 2.0, 3.0, failed=2))
    assert (found.asked, found.completed, found.failed) == (5, 3, 2)
    assert (found.ttft_mean_s, found.ttft_p50_s) == (2.0, 2.0)
    assert found.ttft_p95_s == pytest.approx(2.9)
    assert (found.output_tokens_s, found.requests_s, found.prompt_tokens) == (3.0, 0.3, 300)
    assert found.hit_rate == 0.0
    assert found.errors == (("500: no", 2),)
    assert figures_of(Run((), 0.0, 3)).completed == 0
