"""vLLM itself: what was stored is loaded, and the engine says the same, to the probability, as without a cache.

Starting an engine takes half a minute: most of these tests share one process, which is given one engine after another.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from conftest import daemon, write_config
from engine import Engine, transfer_config

CHUNK = 64
TOLERANCE = 1e-4
ASK: dict[str, Any] = {"max_tokens": 16, "logprobs": 1}
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
pytestmark = pytest.mark.keeps_running  # engines and daemons that tests share


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, 250, tokens)]


def same(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float = TOLERANCE) -> bool:
    """Whether two answers agree, token by token, with what the model thought of each."""
    pairs = zip(ours["logprobs"], theirs["logprobs"], strict=True)
    return ours["tokens"] == theirs["tokens"] and all(abs(a - b) <= tolerance for a, b in pairs)


class Bench:
    """The process that the tests share, and a daemon that they may kill."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = write_config(folder, socket=folder / "s")
        self.llama = models.tiny_llama(folder / "llama")
        self.engine = Engine(self.llama, folder / "log", variables=ONE_PROCESS)
        self.expected: dict[int, dict[str, Any]] = {}

    def open(self, model: Path | None = None, *, cached: bool = True, **arguments: Any) -> Engine:
        """The next engine, with our connector unless told otherwise."""
        transfer = {"kv_transfer_config": transfer_config(self.config, lookup_timeout_s=5)} if cached else {}
        self.engine.reopen(model or self.llama, **transfer, **arguments)
        return self.engine


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    found = Bench(tmp_path_factory.mktemp("bench"))
    with found.engine, daemon(found.config, found.folder / "s"):
        for tokens in (1000, 15 * CHUNK):
            found.expected[tokens] = found.engine.one(prompt(tokens, tokens), **ASK)
        yield found


def test_a_hit_says_what_a_run_without_us_says_and_other_bytes_do_not(bench: Bench) -> None:
    engine = bench.open(enable_prefix_caching=False)
    for tokens, cached in ((1000, 15 * CHUNK), (15 * CHUNK, 15 * CHUNK)):
        miss, hit = (engine.one(prompt(tokens, tokens), **ASK) for _ in range(2))
        assert (miss["cached_tokens"], hit["cached_tokens"]) == (0, cached), engine.ask("metrics")
        assert same(miss, bench.expected[tokens])
        assert same(hit, bench.expected[tokens])
    engine.ask("corrupt", on=True)
    wrong = engine.one(prompt(1000, 1000), **ASK)
    engine.ask("corrupt", on=False)
    assert wrong["cached_tokens"] == 15 * CHUNK
    assert not same(wrong, bench.expected[1000]), "the control: the tests above show nothing"
    metrics = engine.ask("metrics")
    assert metrics["vllm:lmcache_hits"] == 3
    assert metrics["vllm:lmcache_stored_chunks"] == 30
    assert metrics["vllm:lmcache_hit_tokens"] == 3 * 15 * CHUNK


def test_what_vllm_has_itself_is_not_loaded(bench: Bench) -> None:
    engine = bench.open(enable_prefix_caching=True, max_num_batched_tokens=256)
    first, second = (engine.one(prompt(1000, 1000), **ASK) for _ in range(2))
    assert first["cached_tokens"] == second["cached_tokens"] == 15 * CHUNK
    assert same(first, bench.expected[1000])
    assert same(second, bench.expected[1000])
    longer = engine.one([*prompt(1000, 1000)[:700], *prompt(500, 3)], **ASK)
    assert longer["cached_tokens"] == 10 * CHUNK
    again = engine.one([*prompt(1000, 1000)[:700], *prompt(500, 3)], **ASK)
    assert same(again, longer)


def test_preempted_requests_say_the_same(bench: Bench) -> None:
    prompts = [{"prompt_token_ids": prompt(200, 50 + seed)} for seed in range(6)]
    sizes = {"max_model_len": 640, "max_num_batched_tokens": 640}
    ask = {"max_tokens": 150, "logprobs": 1}
    expected = bench.open(cached=False, **sizes).generate(prompts, **ask)
    engine = bench.open(kv_cache_memory_bytes=20 * 262_144, **sizes)
    answers = engine.generate(prompts, **ask)
    assert engine.ask("metrics")["vllm:num_preemptions"] > 0
    assert engine.ask("metrics")["vllm:lmcache_hits"] > 0
    for answer, right in zip(answers, expected, strict=True):
        assert same(answer, right)


def test_aborted_while_it_loads_a_request_leaves_the_others_alone(bench: Bench) -> None:
    engine = bench.open()
    for steps in range(4):
        engine.ask("abort", prompt={"prompt_token_ids": prompt(1000, 1000)}, after_steps=steps)
    assert same(engine.one(prompt(1000, 1000), **ASK), bench.expected[1000])


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8_e4m3"])
def test_in_half_precision_a_hit_is_what_vllms_own_hit_is(bench: Bench, cache_dtype: str) -> None:
    """A miss may differ: it is computed in other shapes."""
    half: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_dtype": cache_dtype}
    engine = bench.open(cached=False, enable_prefix_caching=True, **half)
    tokens = prompt(15 * CHUNK + 20, 7)
    engine.one(tokens, **ASK)
    own = engine.one(tokens, **ASK)
    engine = bench.open(**half)
    engine.one(tokens, **ASK)
    ours = engine.one(tokens, **ASK)
    assert own["cached_tokens"] == ours["cached_tokens"] == 15 * CHUNK
    assert same(ours, own, tolerance=0.0)


def test_latent_attention_is_restored(bench: Bench) -> None:
    model = models.tiny_mla(bench.folder / "mla")
    # Blocks of latents have 16 tokens on the CPU.
    shape: dict[str, Any] = {"load_format": "dummy", "block_size": 16, "max_num_batched_tokens": 4608}
    expected = bench.open(model, cached=False, **shape).one(prompt(500), **ASK)
    engine = bench.open(model, **shape)
    engine.one(prompt(500), **ASK)
    hit = engine.one(prompt(500), **ASK)
    assert hit["cached_tokens"] == 7 * CHUNK
    assert same(hit, expected)


def test_sliding_windows_are_restored(bench: Bench) -> None:
    model = models.tiny_gemma3(bench.folder / "gemma")
    asked = [prompt(1000, 1), prompt(12 * CHUNK, 2)]
    expected = [bench.open(model, cached=False).one(asked[0], **ASK), bench.engine.one(asked[1], **ASK)]
    engine = bench.open(model)
    for tokens in asked:
        engine.one(tokens, **ASK)
    hits = [engine.one(tokens, **ASK) for tokens in asked]
    assert hits[0]["cached_tokens"] == 15 * CHUNK
    assert hits[1]["cached_tokens"] >= 11 * CHUNK
    assert all(same(hit, right) for hit, right in zip(hits, expected, strict=True))


def test_after_a_reset_and_after_sleep_nothing_is_found(bench: Bench) -> None:
    engine = bench.open()
    tokens = prompt(1000, 1000)
    assert engine.one(tokens, **ASK)["cached_tokens"] == 15 * CHUNK
    assert engine.call("reset_prefix_cache", reset_connector=True)
    anew = engine.one(tokens, **ASK)
    assert anew["cached_tokens"] == 0
    assert engine.one(tokens, **ASK)["cached_tokens"] == 15 * CHUNK


def test_without_a_daemon_it_computes_and_with_the_next_one_it_caches_again(bench: Bench) -> None:
    """The daemon is killed and comes back; the engine goes on throughout."""
    folder = bench.folder / "second"
    folder.mkdir()
    socket = folder / "s"
    config = write_config(folder, socket=socket)
    engine = bench.engine
    engine.reopen(bench.llama, kv_transfer_config=transfer_config(config, lookup_timeout_s=5))
    tokens = prompt(1000, 1000)
    with daemon(config, socket):
        engine.ask("until_hit", prompt={"prompt_token_ids": tokens})  # it looks for its daemon once a second
        assert engine.one(tokens, **ASK)["cached_tokens"] == 15 * CHUNK
        engine.start("generate", prompts=[{"prompt_token_ids": prompt(1000, 20 + n)} for n in range(4)], **ASK)
    for answer in engine.finish():
        assert answer["finish"] == "length"
    alone = engine.one(tokens, **ASK)
    assert alone["cached_tokens"] == 0
    assert same(alone, bench.expected[1000])
    with daemon(config, socket):
        engine.ask("until_hit", prompt={"prompt_token_ids": tokens})
        found = engine.one(tokens, **ASK)
    assert found["cached_tokens"] == 15 * CHUNK
    assert same(found, bench.expected[1000])
