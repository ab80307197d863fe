"""The advice follows from the numbers given, and the command says it as text, JSON, YAML, page and picture."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lmcache_advise import page, units
from lmcache_advise.advice import Case, advise
from lmcache_advise.cli import advise as command
from lmcache_advise.distances import curve_of
from lmcache_advise.kv import Kv
from lmcache_advise.machine import DISK, HOST, REMOTE, Machine, Store
from lmcache_advise.serve_cli import serve
from lmcache_advise.workload import Workload, requests_of
from lmcache_advise.writing import capacity_text
from lmcache_core import load_config

GiB = 1 << 30
LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "torch_dtype": "bfloat16",
}  # fmt: skip
KV = Kv("llama", "bfloat16", "GQA", 131072.0, heads=8)
STORES = (
    Store(HOST, 64.0 * GiB, 20e9, 20e9, 0.0),
    Store(DISK, 2048.0 * GiB, 6e9, 3e9, 1e-3),
)


def case(users: int, *, prompt: int = 16_000, stores: tuple[Store, ...] = STORES, **more: Any) -> Case:
    """Users who talk in turns, an engine whose own cache has room for 100k tokens, host memory for 524k."""
    work = Workload(users=users, prompt_tokens=prompt, turns=16, turn_tokens=100, requests_per_s=0.5, seconds=20_000.0)
    found = requests_of(work, 256)
    machine = Machine(100_000.0, more.pop("prefill", 10_000.0), stores)
    return Case(curve_of(found), KV, machine, found.seconds, **more)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    return folder


def lmc(*arguments: object) -> Result:
    result = CliRunner().invoke(command, [str(each) for each in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.parametrize(
    ("users", "at_least", "at_most", "verdict"),
    [
        (3, 0, 100_000, "none"),
        (15, 250_000, 300_000, "host"),
        (26, 420_000, 500_000, "host"),
        (60, 1_000_000, 3_000_000, "host+disk"),
    ],
)
def test_the_known_boundaries_follow_from_what_each_place_has_room_for(
    users: int, at_least: int, at_most: int, verdict: str
) -> None:
    found = case(users)
    assert at_least < found.curve.size_for(0.95) < at_most
    assert advise(found).verdict == verdict


def test_the_same_requests_need_another_cache_where_the_numbers_are_others() -> None:
    few = case(9)
    assert advise(few).verdict == "host"
    larger_engine = Case(few.curve, KV, Machine(400_000.0, 10_000.0, STORES), few.seconds)
    assert advise(larger_engine).verdict == "none"
    fast_engine = Case(few.curve, KV, Machine(100_000.0, 1e6, STORES), few.seconds)
    assert advise(fast_engine).verdict == "none"
    assert any("loading takes longer than computing" in reason for reason in advise(fast_engine).reasons)
    small_host = (Store(HOST, 8.0 * GiB, 20e9, 20e9, 0.0), STORES[1])
    found = advise(case(15, stores=small_host))
    assert found.verdict == "disk"
    assert any("8 GiB have room for 65.5k tokens, no more than" in reason for reason in found.reasons)
    small_kv = Kv("mla", "fp8", "MLA", 8192.0)
    many = case(60)
    assert advise(many).verdict == "host+disk"
    assert advise(Case(many.curve, small_kv, many.machine, many.seconds)).verdict == "host"


def test_a_slow_disk_is_not_advised_and_a_remote_store_beyond_it_may_be() -> None:
    slow = (STORES[0], Store(DISK, 2048.0 * GiB, 0.5e9, 0.5e9, 1e-3), Store(REMOTE, 4096.0 * GiB, 5e9, 5e9, 2e-3))
    found = case(60, stores=slow)
    assert advise(found).verdict == "host+remote"
    host, disk, remote = found.plan({store.name: store.nbytes for store in slow}).levels
    assert disk.is_slower
    assert disk.saved_s == 0
    assert remote.hit_tokens == found.curve.hit_tokens(remote.tokens) - found.curve.hit_tokens(host.tokens)
    small = (STORES[0], Store(DISK, 128.0 * GiB, 6e9, 3e9, 1e-3), Store(REMOTE, 4096.0 * GiB, 5e9, 5e9, 2e-3))
    assert advise(case(150, stores=small)).verdict in ("host+remote", "host+disk+remote")


def test_a_tier_is_no_larger_than_it_needs_to_be() -> None:
    found = case(9)
    (level,) = advise(found).plan.levels
    assert 16 * GiB <= level.nbytes <= 32 * GiB
    largest = found.plan({HOST: 64.0 * GiB})
    assert largest.saved_s - advise(found).plan.saved_s <= 0.03 * largest.total_s


def test_every_second_is_accounted_for_by_hand() -> None:
    found = case(15)
    plan = found.plan({HOST: 64.0 * GiB})
    (level,) = plan.levels
    engine, host = found.curve.hit_tokens(100_000), found.curve.hit_tokens(64 * GiB / 131072)
    assert level.hit_tokens == host - engine
    assert level.compute_s == pytest.approx(level.hit_tokens / 10_000)
    assert level.load_s == pytest.approx(level.hit_tokens * 131072 / 20e9)
    assert plan.total_s == pytest.approx(found.curve.tokens / 10_000)
    assert plan.after_s == pytest.approx(plan.total_s - engine / 10_000 - level.compute_s + level.load_s)
    assert plan.hit_tokens == pytest.approx(host)


def test_a_store_that_cannot_keep_up_is_credited_with_what_it_can_and_said() -> None:
    slow = (Store(HOST, 64.0 * GiB, 2e8, 2e8, 0.0),)
    found = case(15, stores=slow, prefill=1_000.0)
    (level,) = found.plan({HOST: 64.0 * GiB}).levels
    wanted = level.hit_tokens * 131072 / found.seconds
    assert level.delivered == pytest.approx(2e8 / wanted)
    assert level.saved_s == pytest.approx((level.compute_s - level.load_s) * 2e8 / wanted)
    assert any("its bandwidth allows" in warning for warning in advise(found).warnings)
    assert any("would be written" in warning for warning in advise(found).warnings)


@pytest.mark.parametrize(("users", "tiers"), [(9, ["host"]), (60, ["host", "disk"]), (3, [])])
def test_the_configuration_is_one_that_core_loads(model: Path, tmp_path: Path, users: int, tiers: list[str]) -> None:
    file = tmp_path / "lmcache.yaml"
    result = lmc(
        model, "--users", users, "--prompt", "16k", "--turns", 16, "--turn-tokens", 100, "--rate", 0.5, "--time", "2h",
        "--engine-cache", "100k", "--prefill", "10k", "--host-memory", "64GiB", "--disk", "2TiB",
        "--disk-bandwidth", "6GB/s", "--disk-path", tmp_path / 'a "b"', "--yaml", file,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    if not tiers:
        assert file.read_text() == ""
        assert "No cache: the engine's own is enough" in result.output
        return
    config = load_config(file)
    assert [tier.name for tier in config.tiers] == tiers
    assert config.tiers[0].backend == "memory"
    assert config.tiers[0].capacity_nbytes is not None
    assert config.tiers[0].capacity_nbytes <= 64 * GiB
    if "disk" in tiers:
        assert config.tiers[1].options.table is not None
        assert str(tmp_path / 'a "b"') in file.read_text().replace('\\"', '"')
    assert config.chunk_tokens == 256


def test_a_remote_store_is_written_with_its_backend_and_url(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "lmcache.yaml"
    result = lmc(
        model, "--users", 60, "--prompt", "16k", "--rate", 0.5, "--time", "2h", "--engine-cache", "100k",
        "--prefill", "10k", "--host-memory", "64GiB", "--disk-bandwidth", "100MB/s", "--remote", "8TiB",
        "--remote-bandwidth", "5GB/s", "--remote-backend", "valkey", "--remote-url", "valkey://kv:6379/1",
        "--yaml", file,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    tiers = load_config(file).tiers
    assert [tier.backend for tier in tiers] == ["memory", "valkey"]
    assert "valkey://kv:6379/1" in file.read_text()


def test_every_command_in_the_documentation_exists_with_its_options() -> None:
    root = Path(__file__).parents[3]
    helps = {"advise": lmc("--help").output, "bench serve": CliRunner().invoke(serve, ["--help"]).output}
    shown = []
    for page_file in (root / "README.md", root / "plugins/lmcache-advise/README.md", *(root / "docs").glob("*.md")):
        for block in re.findall(r"^```sh\n(.*?)^```", page_file.read_text(), re.M | re.S):
            for line in block.replace("\\\n", " ").splitlines():
                name = next((name for name in helps if line.startswith(f"lmc {name} ")), None)
                if name is not None:
                    shown.append(name)
                    for option in re.findall(r" (--?[a-z][a-z-]*)", line.partition("#")[0]):
                        assert option in helps[name], f"{page_file.name}: {line}"
    assert shown.count("advise") >= 5
    assert shown.count("bench serve") >= 3


WORK = ("--users", "9", "--prompt", "16k", "--rate", "0.5", "--time", "1h", "--engine-cache", "100k")


def test_the_page_is_whole_and_asks_for_nothing_from_elsewhere(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    assert lmc(model, *WORK, "--html", file).exit_code == 0
    text = file.read_text()
    tags: list[str] = []
    void = {"meta", "line", "polyline", "rect"}

    class Checker(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            assert not {name for name, _ in attrs} & {"src", "href", "xlink:href"}, (tag, attrs)
            if tag not in void:
                tags.append(tag)

        def handle_endtag(self, tag: str) -> None:
            if tag not in void:
                assert tags.pop() == tag

    Checker().feed(text)
    assert tags == []
    assert not re.search(r"url\(|@import|https?://|<script", text)
    assert text.count("<svg") == 2
    assert "prefers-color-scheme:dark" in text
    assert "lmcache.yaml" in text
    assert "policy" in text


def test_the_picture_is_a_png(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    assert lmc(model, *WORK, "--no-policies", "--plot", file).exit_code == 0
    assert file.read_bytes().startswith(b"\x89PNG\r\n")
    assert file.stat().st_size > 10_000


def test_without_matplotlib_the_picture_says_what_to_install_and_nothing_else_needs_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = lmc(model, *WORK, "--no-policies", "--plot", tmp_path / "x.png")
    assert result.exit_code == 1
    assert "pip install 'lmcache-advise[plot]'" in result.output
    assert lmc(model, *WORK, "--html", tmp_path / "x.html").exit_code == 0


def test_the_json_has_every_figure_that_the_text_has(model: Path) -> None:
    found = json.loads(lmc(model, *WORK, "--json").stdout)
    assert found["verdict"] == "host"
    assert found["model"]["token_nbytes"] == 131072
    assert found["requests"] == 1800
    assert 0 < found["hits"]["engine"] < found["hits"]["with_plan"] <= found["hits"]["best"] < 1
    assert found["plan"]["tiers"][0]["name"] == "host"
    assert found["policies"]["host"].keys() >= {"s3fifo", "lru"}
    assert "--prefill" in found["assumed"][0]
    assert len(found["curve"]["tokens"]) == len(found["curve"]["share"])
    assert found["considered"][0]["tiers"] == []
    assert sorted(found["curve"]["share"]) == found["curve"]["share"]


def test_a_trace_is_advised_on_and_its_bad_lines_are_told(model: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    line = '{"timestamp": %d, "input_length": 20480, "output_length": 5, "hash_ids": %s}\n'
    lines = [line % (1000 * n, list(range(n % 5 * 100, n % 5 * 100 + 40))) for n in range(100)]
    lines[7] = "{\n"
    trace.write_text("".join(lines))
    result = lmc(model, trace, "--engine-cache", "30k", "--prefill", "10k")
    assert result.exit_code == 0, result.output
    assert f"left out: {trace}:8: " in result.output
    assert "Host memory" in result.stdout
    assert "99 requests" in result.stdout
    assert "working set  " in result.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "give a trace, or --users"),
        (("nowhere",), "nowhere: cannot be read"),
        (("nowhere", "--users", "3"), "not both"),
        (("--users", "3", "--prompt", "abc"), "'abc' is no count; write e.g. 100k"),
        (("--users", "3", "--host-memory", "64G"), "'64G' is no size; write e.g. 64GiB"),
        (("--users", "3", "--disk-bandwidth", "0"), "'0' is no bandwidth"),
        (("--users", "3", "--prompt", "100", "--shared", "200"), "a part of the prompt"),
    ],
)
def test_what_cannot_be_advised_on_says_why(model: Path, arguments: tuple[str, ...], text: str) -> None:
    result = lmc(model, *arguments)
    assert result.exit_code in (1, 2)
    assert text in result.output


def test_a_file_that_cannot_be_written_is_named(model: Path, tmp_path: Path) -> None:
    for option in ("--html", "--yaml", "--plot"):
        result = lmc(model, *WORK, "--no-policies", option, tmp_path / "no" / "such")
        assert result.exit_code == 1
        assert "cannot be written" in result.output


def test_kv_that_is_given_replaces_what_the_model_says(model: Path) -> None:
    found = json.loads(lmc(model, *WORK, "--kv-nbytes", "1MiB", "--json", "--no-policies").stdout)
    assert found["model"]["token_nbytes"] == 1 << 20
    assert found["policies"] == {}


def test_an_engine_without_a_cache_of_its_own_hits_nothing(model: Path) -> None:
    found = json.loads(lmc(model, *WORK[:-1], "0", "--json", "--no-policies").stdout)
    assert found["hits"]["engine"] == 0.0
    assert found["verdict"] == "host"


def test_requests_that_share_nothing_need_no_cache(model: Path, tmp_path: Path) -> None:
    trace = tmp_path / "t"
    trace.write_text("".join(json.dumps({"timestamp": n, "block_hashes": [n, n]}) + "\n" for n in range(50)))
    result = lmc(model, trace)
    assert "nothing to reuse" in result.stdout
    assert "No cache" in result.stdout


def test_sizes_and_counts_are_written_as_people_do() -> None:
    assert [capacity_text(each) for each in (64 * GiB, 1.5 * GiB, 1024 * GiB, 1)] == [
        "64GiB",
        "1536MiB",
        "1TiB",
        "1MiB",
    ]
    assert [units.size_text(each) for each in (10, 131072, 64 * GiB, 1023 * GiB)] == [
        "10 B",
        "128 KiB",
        "64 GiB",
        "1,023 GiB",
    ]
    assert [units.count_text(each) for each in (9999, 524_288, 3.5e6)] == ["9,999", "524k", "3.5M"]
    assert [units.time_text(each) for each in (3.75e-5, 2.5, 600)] == ["0.0375 ms", "2.5 s", "10 min"]
    assert set(page.VERDICTS) == {"none", "host", "disk", "host+disk", "host+remote", "host+disk+remote"}
