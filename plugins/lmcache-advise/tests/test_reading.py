"""Each format of trace is read, and whatever is wrong with a line is said with file, line and reason."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmcache_advise.distances import curve_of
from lmcache_advise.reading import read_trace, with_older
from lmcache_advise.requests import Requests
from lmcache_advise.workload import Workload, requests_of
from lmcache_core import Chain, ConfigError, Family, Group, GroupKind, Layout, Model, Region, Shard, open_cache


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def mooncake(at_ms: int, *ids: int, tokens: int | None = None) -> dict[str, Any]:
    return {
        "timestamp": at_ms, "input_length": len(ids) * 512 if tokens is None else tokens, "output_length": 7,
        "hash_ids": list(ids),
    }  # fmt: skip


def shared(requests: Requests) -> list[int]:
    """How many of each request's first blocks an earlier one had."""
    seen: set[int] = set()
    found = []
    for begin, end in zip(requests.starts[:-1], requests.starts[1:], strict=True):
        blocks = requests.blocks[begin:end].tolist()
        found.append(sum(block in seen for block in blocks))
        seen.update(blocks)
    return found


def test_the_published_format_is_read_with_its_milliseconds_and_without_the_partial_block(tmp_path: Path) -> None:
    path = write(tmp_path / "t", mooncake(0, 1, 2), mooncake(1500, 1, 2, 3, tokens=1100), mooncake(3000, 9, 2))
    found = read_trace([path])
    assert (found.kind, found.lines, found.bad_lines) == ("mooncake", 3, 0)
    assert found.requests.at.tolist() == [0.0, 1.5, 3.0]
    assert found.requests.input_tokens.tolist() == [1024, 1100, 1024]
    assert found.requests.output_tokens.tolist() == [7, 7, 7]
    assert np.diff(found.requests.starts).tolist() == [2, 2, 2]
    assert shared(found.requests) == [0, 2, 0]
    assert found.requests.block_tokens == 512


def test_lines_of_tokens_share_the_chunks_that_are_equal_from_the_start(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    one = rng.integers(0, 150_000, 1000).tolist()
    other = [*one]
    other[600] += 1
    path = write(
        tmp_path / "t", {"timestamp": 1, "tokens": one}, {"at": 2, "token_ids": other},
        {"timestamp": 3, "prompt_token_ids": one, "model": "another"}, {"timestamp": 4, "tokens": one[:300]},
    )  # fmt: skip
    found = read_trace([path]).requests
    assert found.input_tokens.tolist() == [1000, 1000, 1000, 300]
    assert np.diff(found.starts).tolist() == [3, 3, 3, 1]
    assert shared(found) == [0, 2, 0, 1]
    assert shared(read_trace([path], block_tokens=100).requests) == [0, 6, 0, 3]


def test_lines_of_block_hashes_may_be_numbers_or_text(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t", {"timestamp": 1, "block_hashes": ["aa", "bb"]}, {"timestamp": 2, "block_hashes": ["aa", "cc"]},
        {"timestamp": 3, "block_hashes": [-5, 2**63]}, {"timestamp": 4, "block_hashes": [-5, 7], "input_length": 20},
    )  # fmt: skip
    found = read_trace([path]).requests
    assert shared(found) == [0, 1, 0, 1]
    assert found.block_tokens == 16
    assert found.input_tokens.tolist() == [32, 32, 32, 20]
    assert np.diff(found.starts).tolist() == [2, 2, 2, 1]


def test_what_a_cache_writes_is_read_again_file_by_file(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    trace = tmp_path / "trace"
    config.write_text(f"chunk_tokens: 16\ntrace: {{path: {trace}, max: 64KiB}}\n")
    layout = Layout(
        chunk_tokens=16,
        regions=(Region(name="kv", layers=1, block_tokens=16, block_nbytes=64, dtype="float16", packing="x"),),
    )
    families = [Family(model=name, weights="w", kv_dtype="float16", chunk_tokens=16) for name in ("a", "b")]
    models = [Model(f, (Group(GroupKind.FULL, (Shard.of(f, layout, layers=(0, 1)),)),)) for f in families]
    rng = np.random.default_rng(0)
    base = rng.integers(0, 1000, 160).tolist()
    with open_cache(config) as cache:
        for name, model, tokens in (
            ("first", models[0], base),
            ("first", models[0], base),
            ("second", models[0], [*base[:80], *base]),
            ("third", models[1], base),
        ):
            cache.lookup(cache.chain(tokens, model), name)
            cache.release(name)
    found = read_trace(with_older(trace))
    assert (found.kind, found.lines, found.bad_lines) == ("lmcache", 4, 0)
    assert found.requests.block_tokens == 16
    assert found.requests.input_tokens.tolist() == [160, 240, 160], "asked again, it is still one request"
    assert shared(found.requests) == [0, 5, 0]
    assert with_older(trace) == [trace]
    Path(f"{trace}.1").write_bytes(trace.read_bytes())
    assert with_older(trace) == [Path(f"{trace}.1"), trace]
    written = base64.b64decode(json.loads(trace.read_text().splitlines()[0])["digests"])
    assert written[:8] == Chain.of(models[0], base).digests[0][:8]


OURS = {
    "at": 1.0, "request": "r", "family": {"family_id": "00" * 16, "chunk_tokens": 16}, "input_tokens": 16,
    "digests": base64.b64encode(bytes(8)).decode(),
}  # fmt: skip


@pytest.mark.parametrize(
    ("good", "bad", "text"),
    [
        (mooncake(0, 1), '{"timestamp": 1, "input_le', "2: JSON is malformed"),
        (mooncake(0, 1), {"timestamp": 1, "hash_ids": []}, "2: Object missing required field `input_length`"),
        (mooncake(0, 1), mooncake(0, 1, 2, tokens=512), "2: 2 hash_ids for 512 tokens are no blocks of 512"),
        (mooncake(0, 1), mooncake(0, -1), "2: Expected `int` >= 0 - at `$.hash_ids"),
        (mooncake(0, 1), mooncake("x", 1), "2: Expected `float`, got `str` - at `$.timestamp`"),  # type: ignore[arg-type]
        (mooncake(0, 1), "[]", "2: Expected `object`, got `array`"),
        ({"timestamp": 1, "tokens": [1]}, {"tokens": [1]}, "2: no timestamp"),
        ({"timestamp": 1, "tokens": [1]}, {"timestamp": 1}, "2: neither tokens nor block_hashes"),
        (OURS, OURS | {"digests": "!"}, "2: digests or family_id are not as a trace has them"),
        (OURS, OURS | {"input_tokens": 32}, "2: 8 bytes of digests for 32 tokens"),
        (OURS, OURS | {"family": {"family_id": "00" * 16, "chunk_tokens": 32}}, "2: chunks of 32 tokens, after"),
    ],
)  # fmt: skip
def test_a_bad_line_is_left_out_and_named(tmp_path: Path, good: Any, bad: Any, text: str) -> None:
    found = read_trace([write(tmp_path / "t", good, bad, *[good] * 12)])
    assert found.bad_lines == 1
    assert found.bad[0].startswith(f"{tmp_path / 't'}:{text}")
    assert len(found.requests) in (13, 1)


def test_more_bad_lines_than_a_tenth_are_an_error_that_names_the_first(tmp_path: Path) -> None:
    path = write(tmp_path / "t", mooncake(0, 1), *["{"] * 20, *[mooncake(0, 1)] * 30)
    with pytest.raises(ConfigError) as caught:
        read_trace([path])
    text = str(caught.value)
    assert text.startswith("20 of 51 lines cannot be used as mooncake:\n")
    assert f"{path}:2: " in text
    assert f"{path}:6: " in text
    assert "and 15 more" in text


@pytest.mark.parametrize(
    ("content", "text"),
    [(b"", "empty"), (b"\n \n", "empty"), (b"hello\n", ":1: no trace that is known"), (b'{"a": 1}\n', ":1: no trace"),
     (b"\xff\xfe\n", ":1: no trace")],
)  # fmt: skip
def test_a_file_that_is_no_trace_is_named(tmp_path: Path, content: bytes, text: str) -> None:
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(ConfigError, match=text):
        read_trace([tmp_path / "t"])


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="t: cannot be read: No such file"):
        read_trace([tmp_path / "t"])


def test_a_workload_has_the_users_turns_and_shared_prompt_that_it_was_given() -> None:
    work = Workload(
        users=5, prompt_tokens=1000, turns=4, turn_tokens=100, shared_tokens=500, requests_per_s=1.0, seconds=2000.0
    )
    found = requests_of(work, 100)
    assert len(found) == 2000
    assert 1990 < found.seconds <= 2000
    assert sorted(set(found.input_tokens.tolist())) == [1000, 1100, 1200, 1300]
    counts = np.unique(found.input_tokens, return_counts=True)[1]
    assert counts.max() - counts.min() <= 10, "every conversation has each of its turns"
    hits = curve_of(found).hit_tokens(float("inf"))
    # Of four turns the first shares 500 tokens with all others, the next ones everything but the last 100.
    assert hits / found.tokens == pytest.approx((500 + 1000 + 1100 + 1200) / 4600, abs=0.01)
    assert requests_of(work, 100).blocks.tolist() == found.blocks.tolist()


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"users": 0}, "users: must be at least 1"),
        ({"shared_tokens": 2000}, "a part of the prompt"),
        ({"requests_per_s": 1e6}, "1 to 200,000 can be looked at"),
    ],
)
def test_a_workload_that_cannot_be_is_refused(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Workload(**({"users": 1, "prompt_tokens": 1000} | wrong))
