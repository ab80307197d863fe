"""`lmc explain`: the place where prompts part, what stores have of them, and why a request missed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import daemons
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from serve import lmc
from tiny import CHUNK, RECORD, model, open_local, store

from lmcache_core import Chain, Context, connect, history
from lmcache_core.backends.disk import DiskBackend, DiskOptions
from lmcache_core.cli import explain_request, parting
from lmcache_core.testing.dict_backend import DictBackend

TOKENS = [int(t) for t in np.random.default_rng(3).integers(0, 50_000, 6 * CHUNK + 5)]
TEXT = "<|im_start|>system\nYou are a helpful assistant.\n\n# Tools\n" + "- a tool, with care\n" * 20


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LMCACHE_CONFIG", raising=False)


def explained(*arguments: object) -> dict[str, Any]:
    result = lmc("explain", *arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def files(a: object, b: object) -> tuple[Path, Path]:
    pair = Path("a"), Path("b")
    for path, what in zip(pair, (a, b), strict=True):
        path.write_text(what if isinstance(what, str) else json.dumps(what))
    return pair


def test_one_space_is_shown_with_its_line_and_column() -> None:
    a, b = files(TEXT, TEXT.replace("# Tools\n", "# Tools \n"))
    text = lmc("explain", a, b).stdout
    assert "line 4, column 8" in text
    lines = text.splitlines()
    (first,) = [line for line in lines if line.startswith("  A  ")]
    (second,) = [line for line in lines if line.startswith("  B  ")]
    (caret,) = [line for line in lines if line.strip() == "^"]
    at = caret.index("^")
    assert first[:at] == second[:at].replace("  B  ", "  A  ")
    assert (first[at], second[at : at + 2]) == ("↵", "·↵")
    assert "assistant.↵↵#·Tools" in first
    assert "B has one character more: «·»; only white space differs" in text
    assert "no --tokenizer" in text


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("helpful.", "helpful.", "equal"),
        ("\n\n#", "\n#", "A has one character more: «↵»"),
        ("\n", "\r\n", "«␍»; only white space"),
        ("<|im_start|>", "<s>", "a template marker differs"),
        ("helpful", "helpless", "A has «helpfu"),
        ("You", "YOU", "only upper and lower case differ"),
        ("assistant.", "assistant. It is 2026-11-29 14:05.", "a date, time or counter"),
        ("- a tool, with care\n" * 20, "", "B is the beginning of A, which goes on for 400 characters"),
        ("You are", " ".join(map(str, range(500))), "do not go on alike"),
    ],
)
def test_the_kind_of_change_is_named(old: str, new: str, said: str) -> None:
    other = TEXT.replace(old, new)
    a, b = files(TEXT, other)
    text = lmc("explain", a, b).stdout
    if said == "equal":
        assert "A and B are equal" in text
    else:
        assert said in text


def test_a_counter_and_an_id_are_told_apart_from_prose() -> None:
    for old, new, hint in (
        ("2026-11-28 14:02", "2026-11-29 09:13", "date, time or counter"),
        ("request 17", "request 18", "date, time or counter"),
        ("3fa85f64-5717", "9bc01d22-aa41", "random id"),
        ("cats", "dogs", None),
    ):
        a, b = f"Now {old}: and then the rest of it.", f"Now {new}: and then the rest of it."
        said = parting.describe(parting.change(a, b, parting.common(a, b)))
        assert (hint is None and ";" not in said) or (hint is not None and hint in said), said


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), max_size=60), st.lists(st.integers(0, 3), max_size=60))
def test_the_common_length_is_the_longest(a: list[int], b: list[int]) -> None:
    found = parting.common(a, b)
    assert a[:found] == b[:found]
    assert found == min(len(a), len(b)) or a[found] != b[found]


@settings(deadline=None)
@given(st.text(max_size=60), st.text(max_size=60), st.text(max_size=60))
def test_a_change_accounts_for_what_both_have(head: str, old: str, new: str) -> None:
    a, b = head + old, head + new
    at = parting.common(a, b)
    found = parting.change(a, b, at)
    parting.describe(found)
    if found.rejoined and a != b:
        assert (found.a, found.b) != ("", "")
        start = next(n for n in range(at, -1, -1) if a[n:].startswith(found.a) and b[n:].startswith(found.b))
        rest = a[start + len(found.a) :], b[start + len(found.b) :]
        assert rest[0][:12] == rest[1][:12]


@settings(deadline=None)
@given(st.text())
def test_nothing_that_is_shown_commands_a_terminal(text: str) -> None:
    assert parting.visible(text).isprintable()


def test_lost_chunks_are_counted_by_tokens(tmp_path: Path) -> None:
    other = [*TOKENS]
    other[3 * CHUNK + 2] += 1
    a, b = files(TOKENS, " ".join(map(str, other)))
    found = explained(a, b, "--chunk-tokens", CHUNK)["difference"]
    assert (found["common_tokens"], found["common_chunks"], found["lost_chunks"]) == (3 * CHUNK + 2, 3, 3)
    text = lmc("explain", a, b, "--chunk-tokens", CHUNK).stdout
    assert "the first 50 tokens are the same, 3 whole chunks of 16; 3 of B's 6 chunks are lost" in text
    assert f"token 50 (chunk 3): A {TOKENS[50]}, B {other[50]}" in text


def test_a_prompt_that_goes_on_loses_only_what_is_new() -> None:
    a, b = files(TOKENS, TOKENS + TOKENS[:CHUNK])
    found = explained(a, b, "--chunk-tokens", CHUNK)["difference"]
    assert (found["common_tokens"], found["token_a"], found["lost_chunks"]) == (len(TOKENS), "", 1)
    assert not found["equal"]
    assert "A ends" in lmc("explain", a, b, "--chunk-tokens", CHUNK).stdout


def test_the_chunk_size_is_the_configurations() -> None:
    Path("lmcache.yaml").write_text("chunk_tokens: 8")
    a, b = files(TOKENS, TOKENS)
    assert explained(a, b)["chunk_tokens"] == 8


def test_text_and_ids_are_not_compared_without_a_tokenizer() -> None:
    a, b = files(TOKENS, TEXT)
    result = lmc("explain", a, b)
    assert result.exit_code == 2
    assert "--tokenizer" in result.output
    a, b = files("1 2 3", "1 2 4")
    assert explained(a, b, "--text")["difference"]["at"]["offset"] == 4
    assert explained(a, b)["difference"]["common_tokens"] == 2


def test_what_is_wrong_with_the_call_is_said() -> None:
    a, b = files("x", "y")
    Path("bad").write_bytes(b"\xff\xfe")
    Path("large").write_text("4294967296 1")
    for arguments, text in (
        ([], "two prompts"),
        ([a, b, a], "two prompts"),
        ([a, b, "--request", "r"], "not both"),
        (["nothing", b], "cannot be read"),
        (["bad", b], "not UTF-8"),
        ([a, b, "--tokenizer", "bad"], "--tokenizer bad"),
        ([a, b, "--chunk-tokens", "0"], "chunk-tokens"),
    ):
        result = lmc("explain", *arguments)
        assert result.exit_code == 2, arguments
        assert text in result.output


# What stores have.


@pytest.fixture
def which(tmp_path: Path) -> list[str]:
    """A store in which two namespaces have the first prompt, one of them three chunks of it."""
    backend = DiskBackend(DiskOptions(path=str(tmp_path / "store")), Context())
    with open_local([backend]) as cache:
        store(cache, Chain.of(model(), TOKENS))
        two = Chain.of(model(shards=2, kv_dtype="bfloat16"), TOKENS)
        store(cache, two, shard=two.model.shards[0])
        store(cache, two, range(3), shard=two.model.shards[1])
        assert cache.drain(30)
    return ["-o", f"path={tmp_path}/store"]


def test_the_field_in_which_namespaces_differ_is_named_and_what_each_has(which: list[str]) -> None:
    other = [*TOKENS]
    other[CHUNK] += 1
    a, b = files(TOKENS, other)
    stored = explained(a, b, *which)["stored"]
    have = {n["family"]["kv_dtype"]: (n["chunks"], n["of"]) for n in stored["namespaces"]}
    assert have == {"float16": ([6, 1], [6, 6]), "bfloat16": ([3, 1], [6, 6])}
    assert stored["differences"] == [{"model": "org/tiny", "fields": {"kv_dtype": list(have)}}] or stored[
        "differences"
    ] == [{"model": "org/tiny", "fields": {"kv_dtype": list(have)[::-1]}}]
    text = lmc("explain", a, b, *which).stdout
    assert "6 of 6 chunks" in text
    assert "differ in kv_dtype" in text


def test_a_prompt_that_is_nowhere_is_said_to_be_nowhere(which: list[str]) -> None:
    a, _ = files([token + 1 for token in TOKENS], "")
    assert "none of them has the first chunk" in lmc("explain", a, *which).stdout
    assert [n["chunks"] for n in explained(a, *which)["stored"]["namespaces"]] == [[0], [0]]


def test_a_store_that_cannot_be_asked_hides_nothing_else(tmp_path: Path, which: list[str]) -> None:
    config = tmp_path / "c.yaml"
    here = {"name": "here", "backend": "disk", "options": {"path": f"{tmp_path}/store"}}
    gone = {"name": "gone", "backend": "disk", "options": {"path": f"{tmp_path}/gone"}}
    config.write_text(json.dumps({"tiers": [gone, here]}))
    a, _ = files(TOKENS, "")
    stored = explained(a, "--config", config)["stored"]
    assert {n["store"] for n in stored["namespaces"]} == {"here"}
    assert stored["problems"] == [f"gone: {tmp_path}/gone: there is no store"]
    assert not (tmp_path / "gone").exists()


# Requests that a daemon remembers.


def ask(path: Path, *arguments: object) -> tuple[int, str]:
    result = lmc("explain", "--socket", path, *arguments)
    return result.exit_code, result.stdout


def test_a_miss_after_an_eviction_names_tier_policy_and_time(tmp_path: Path) -> None:
    socket = tmp_path / "s"
    with daemons.serving(socket, chunks=8), connect(socket, call_timeout_s=5.0) as cache:
        prompt = Chain.of(model(), TOKENS)
        store(cache, prompt)
        assert tiny.load(cache, prompt, "first")[0] == 6
        for seed in range(3):
            store(cache, tiny.chain(6, seed=10 + seed))
        cache.lookup_answered(prompt, "second", timeout_s=10)
        cache.release("second")
        code, text = ask(socket, "--request", "first")
        assert code == 0
        assert "a full hit, 6 of 6 chunks" in text
        assert "found in host: 6 chunks" in text
        code, text = ask(socket, "--request", "second")
        assert code == 0
        assert "of 6 chunks" in text
        assert "evicted to make room" in text
        assert "tier host: capacity, chosen by the policy" in text
        cache.lookup_answered(Chain.of(model(weights="w9"), TOKENS), "third", timeout_s=10)
        cache.release("third")
        assert "no tier has had it" in ask(socket, "--request", "third")[1]
        code, text = ask(socket, "--request", "never seen")
        assert code == 1
        assert "is not remembered" in text
        assert "second" in text
        code, text = ask(socket, "--latest")
        assert code == 0
        assert [line.split()[0].rpartition("/")[2] for line in text.splitlines()[1:4]] == ["third", "second", "first"]
        found = json.loads(ask(socket, "--request", "second", "--json")[1])
        assert found["lookup"]["result"] in ("miss", "partial")


def test_a_corrupt_record_is_the_reason_of_the_miss_that_follows(tmp_path: Path) -> None:
    socket = tmp_path / "s"
    backend = DictBackend()
    with daemons.serving(socket, [backend], chunks=8), connect(socket, call_timeout_s=5.0) as cache:
        prompt = Chain.of(model(), TOKENS)
        store(cache, prompt)
        assert cache.drain(30)
        for seed in range(3):
            store(cache, tiny.chain(6, seed=10 + seed))
        assert cache.drain(30)
        key = prompt.keys(prompt.model.shards[0])[0]
        data = bytearray(backend.store.records[key][0])
        data[RECORD // 2 + 3] ^= 1
        backend.store.records[key] = (bytes(data), time.time())
        tiny.load(cache, prompt, "damaged")
        cache.lookup_answered(prompt, "after", timeout_s=10)
        cache.release("after")
        code, text = ask(socket, "--request", "after")
        assert code == 0
        assert "failed its check and was removed" in text


@pytest.mark.parametrize(
    "reason",
    [
        *(history.NEVER_STORED, history.BEING_STORED, history.TIER_DOWN, history.REFUSED_BY_COST, history.LATE),
        *("capacity", "removed", "corrupt", "lost", "not stored: queue full", "fault: no answer", "tier unavailable"),
    ],
)
def test_every_reason_has_its_sentence(reason: str) -> None:
    said = {history.meaning(other) for other in history._MEANINGS if other != reason}
    assert history.meaning(reason) not in said
    assert len(history.meaning(reason)) > 30


def test_a_refusal_by_cost_shows_both_estimates() -> None:
    lookup = {
        "at": 90.0, "request": "7/r", "tokens": 100, "chunks": 6, "hit_chunks": 0, "refused_chunks": 6,
        "result": "refused", "reason": history.REFUSED_BY_COST, "missing": "ab", "load_s": 0.05, "recompute_s": 0.02,
    }  # fmt: skip
    text = "\n".join(explain_request.lines({"lookup": lookup, "losses": {}}, "r", 100.0))
    assert "estimated 50.0 ms to load them, 20.0 ms to compute them" in text
    assert "10 s ago" in text
