"""vLLM itself, in processes of its own: what one engine stored another loads, and says the same as without a cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from conftest import daemon, write_config
from engine import Engine, transfer_config

PROMPT = 1000
CHUNK = 64
TOLERANCE = 1e-4


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, 250, tokens)]


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether two answers agree, token by token, with what the model thought of each."""
    pairs = zip(ours["logprobs"], theirs["logprobs"], strict=True)
    return ours["tokens"] == theirs["tokens"] and all(abs(a - b) < TOLERANCE for a, b in pairs)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def plain(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine without us: what is right."""
    with Engine(llama, tmp_path_factory.mktemp("plain") / "log") as engine:
        yield engine


@pytest.mark.keeps_running
def test_two_engines_share_and_both_say_what_one_without_us_says(llama: Path, plain: Engine, tmp_path: Path) -> None:
    config = write_config(tmp_path, socket=tmp_path / "s")
    ours = {"kv_transfer_config": transfer_config(config)}
    tokens, whole = prompt(PROMPT), prompt(15 * CHUNK, seed=1)
    ask: dict[str, Any] = {"max_tokens": 16, "logprobs": 1}
    expected, expected_whole = plain.one(tokens, **ask), plain.one(whole, **ask)
    with daemon(config, tmp_path / "s"):
        with Engine(llama, tmp_path / "first", **ours) as first:
            miss, miss_whole = first.one(tokens, **ask), first.one(whole, **ask)
            hit = first.one(tokens, **ask)
        with Engine(llama, tmp_path / "second", **ours) as second:
            other, other_whole = second.one(tokens, **ask), second.one(whole, **ask)
    assert (miss["cached_tokens"], miss_whole["cached_tokens"]) == (0, 0)
    assert hit["cached_tokens"] == other["cached_tokens"] == 15 * CHUNK
    assert other_whole["cached_tokens"] == 15 * CHUNK
    for answer in (miss, hit, other):
        assert same(answer, expected)
    for answer in (miss_whole, other_whole):
        assert same(answer, expected_whole)


ZEROS = """
import lmcache_core.devices.cpu as cpu

scatter = cpu.CpuDevice.scatter
zeros = lambda src: [memoryview(bytes(len(each))) for each in src]
cpu.CpuDevice.scatter = lambda self, src, *a, **k: scatter(self, zeros(src), *a, **k)
"""


@pytest.mark.keeps_running
def test_with_other_bytes_the_engine_says_something_else(llama: Path, plain: Engine, tmp_path: Path) -> None:
    """The control: if it did not, the other tests would show nothing.  Through a daemon of the engine's own."""
    (tmp_path / "sitecustomize.py").write_text(ZEROS)
    config = write_config(tmp_path, socket=None)
    tokens = prompt(PROMPT)
    ask: dict[str, Any] = {"max_tokens": 16, "logprobs": 1}
    with Engine(llama, tmp_path / "log", paths=[tmp_path], kv_transfer_config=transfer_config(config)) as engine:
        miss, hit = engine.one(tokens, **ask), engine.one(tokens, **ask)
    assert same(miss, plain.one(tokens, **ask))
    assert hit["cached_tokens"] == 15 * CHUNK
    assert not same(hit, miss)
