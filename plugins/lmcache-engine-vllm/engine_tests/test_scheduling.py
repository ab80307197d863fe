"""Hits, preemption, abort and failure on vLLM's real scheduler: `rig` says what is checked in each step."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import daemon, write_config
from rig import Rig, answer_to, config_folder, prompt
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.lora.request import LoRARequest
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec

from lmcache_core import NamespaceError
from lmcache_engine_vllm import LMCacheCoreConnector, register
from lmcache_engine_vllm.geometry import check_groups
from lmcache_engine_vllm.lookups import Lookup
from lmcache_engine_vllm.prompts import chain_of

CHUNK = 64


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return config_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def rig(model: Path, node: Path) -> Iterator[Callable[..., Rig]]:
    """Engines of one test; closed at its end."""
    made: list[Rig] = []

    def make(**options: Any) -> Rig:
        made.append(Rig(model, node, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_second_engine_loads_what_the_first_stored(rig: Callable[..., Rig]) -> None:
    first, second = rig(weights="w1"), rig(weights="w1")
    tokens = prompt(200)
    first.ask(tokens)
    name = second.ask(tokens)
    assert first.cached != second.cached
    assert second.cached[name] == 192
    assert second.history[name] == [8]


def test_of_a_whole_prompt_the_last_token_alone_is_computed(rig: Callable[..., Rig]) -> None:
    engine = rig()
    tokens = prompt(4 * CHUNK)
    first = engine.ask(tokens, answer_tokens=3)
    second = engine.ask(tokens, answer_tokens=3)
    assert engine.history[second] == [1, 1, 1]
    assert engine.cached[second] == 4 * CHUNK - 1
    assert engine.answers[second] == engine.answers[first]


def test_a_prompt_shorter_than_a_chunk_is_left_alone(rig: Callable[..., Rig]) -> None:
    engine = rig()
    for _ in range(2):
        name = engine.ask(prompt(CHUNK - 1))
        assert engine.cached[name] == 0
    assert not engine.stores
    assert not engine.loads


def test_a_prompt_computed_in_pieces_is_stored_whole(rig: Callable[..., Rig]) -> None:
    first, second = rig(weights="pieces", batched_tokens=100), rig(weights="pieces", batched_tokens=100)
    tokens = prompt(330)
    name = first.ask(tokens)
    assert len(first.history[name]) == 4
    assert first.counted()["stored_chunks"] == 5
    assert second.cached[second.ask(tokens)] == 5 * CHUNK


def test_what_vllm_has_itself_is_neither_loaded_nor_overwritten(rig: Callable[..., Rig]) -> None:
    first, second = rig(weights="own"), rig(weights="own", prefix_caching=True)
    tokens = prompt(4 * CHUNK)
    first.ask(tokens)
    second.ask([*tokens[:112], *prompt(20, seed=9)])  # loads one chunk, computes the rest: vLLM has 7 blocks of ours
    (early,) = second.loads
    assert (early.parts[0].start, early.parts[0].stop) == (0, 1)
    second.ask(tokens)
    late = second.loads[1].parts[0]
    assert (late.start, late.stop, late.skip_blocks) == (1, 4, 3)  # tokens 112 on: inside the second chunk
    assert second.cached[list(second.cached)[-1]] == 4 * CHUNK - 1


def test_a_prompt_that_vllm_has_as_far_as_we_do_is_not_loaded(rig: Callable[..., Rig]) -> None:
    engine = rig(prefix_caching=True)
    tokens = prompt(200)
    engine.ask(tokens)
    name = engine.ask(tokens)
    assert engine.cached[name] == 192
    assert not engine.loads
    assert len(engine.stores) == 1, "it is not offered for storing again either"


def test_of_two_requests_that_want_the_same_chunks_one_loads_them(rig: Callable[..., Rig]) -> None:
    first, second = rig(weights="both"), rig(weights="both", prefix_caching=True)
    tokens = prompt(200)
    first.ask(tokens)
    names = [second.add(tokens), second.add(tokens)]
    second.run()
    assert len(second.loads) == 1
    assert [second.cached[name] for name in names] == [192, 192]


def test_requests_with_one_new_prefix_store_it_once(rig: Callable[..., Rig]) -> None:
    engine = rig()
    for _ in range(3):
        engine.add(prompt(200))
    engine.run()
    assert engine.counted()["stored_chunks"] == 3
    assert engine.counted()["skipped_chunks"] == 6


def test_preempted_requests_go_on_from_what_was_stored(rig: Callable[..., Rig]) -> None:
    plenty, few = rig(blocks=512), rig(blocks=36)
    prompts = [prompt(150, seed=seed) for seed in range(5)]
    expected = [plenty.answers[plenty.ask(tokens, answer_tokens=60)] for tokens in prompts]
    names = [few.add(tokens, answer_tokens=60) for tokens in prompts]
    for tracked in few.connector._scheduler._tracked.values():
        assert tracked.lookup.wait(30)  # so that they begin together and run out of blocks together
    few.run()
    assert [few.answers[name] for name in names] == expected
    again = [load.request_id for load in few.loads]
    assert again, "nothing was preempted: the test shows nothing"
    assert set(again) <= set(names)
    assert few.free_blocks == 35


@pytest.mark.parametrize("steps", range(5))
@pytest.mark.parametrize("stored", [False, True], ids=["storing", "loading"])
def test_an_aborted_request_leaves_no_block_behind(rig: Callable[..., Rig], steps: int, stored: bool) -> None:
    engine = rig(batched_tokens=100)
    tokens = prompt(300)
    if stored:
        engine.ask(tokens)
    name = engine.add(tokens, answer_tokens=5)
    for _ in range(steps):
        engine.step()
    engine.abort(name)
    engine.run()
    assert engine.free_blocks == 255
    assert engine.connector._scheduler._in_flight == {}
    assert engine.answers[engine.ask(tokens)] == [answer_to(tokens)]


def losing(engine: Rig, chunk: int) -> None:
    """From now on that chunk is not there when the worker asks for it."""
    cache = engine.worker._worker._cache
    retrieve = cache.retrieve

    def lose(hit: Any, *arguments: Any, **options: Any) -> Any:
        digests = list(hit.chain.digests)
        digests[chunk] = b"?" * 32
        return retrieve(replace(hit, chain=replace(hit.chain, digests=tuple(digests))), *arguments, **options)

    cache.retrieve = lose


def test_a_failed_chunk_costs_its_tokens_and_those_after_it(rig: Callable[..., Rig]) -> None:
    engine = rig()
    tokens = prompt(5 * CHUNK + 10)
    first = engine.ask(tokens)
    losing(engine, 2)
    second = engine.ask(tokens)
    assert engine.answers[second] == engine.answers[first]
    assert engine.history[second] == [3 * CHUNK + 10]
    assert len(engine.loads) == 1, "what failed is not tried again"


def test_a_load_that_fails_from_the_start_is_computed(rig: Callable[..., Rig]) -> None:
    engine = rig()
    tokens = prompt(3 * CHUNK)
    first = engine.ask(tokens)
    losing(engine, 0)
    second = engine.ask(tokens)
    assert engine.answers[second] == engine.answers[first]
    assert engine.history[second] == [3 * CHUNK]
    assert engine.free_blocks == 255


def test_where_vllm_is_told_to_a_failed_load_fails_its_request_alone(rig: Callable[..., Rig]) -> None:
    engine = rig(policy="fail")
    tokens = prompt(200)
    engine.ask(tokens)
    losing(engine, 1)
    failed = engine.add(tokens)
    other = engine.add(prompt(200, seed=5))
    engine.run()
    assert engine.finishes[failed] == "error"
    assert engine.answers[other] == [answer_to(prompt(200, seed=5))]
    assert engine.free_blocks == 255


def test_blocks_that_do_not_divide_the_chunk_make_it_longer(rig: Callable[..., Rig]) -> None:
    first, second = rig(weights="odd", block_tokens=48), rig(weights="odd", block_tokens=48)
    tokens = prompt(300)
    first.ask(tokens)
    assert second.cached[second.ask(tokens)] == 288


def test_generated_tokens_are_stored_where_that_is_asked_for(rig: Callable[..., Rig]) -> None:
    first, second = rig(weights="turns", save_decode=True), rig(weights="turns", save_decode=True)
    tokens = prompt(100)
    name = first.ask(tokens, answer_tokens=100)
    said = [*tokens, *first.answers[name]]
    assert len(said) == 200
    assert second.cached[second.ask([*said, *prompt(30, seed=3)])] == 192


def test_generated_tokens_are_not_stored_otherwise(rig: Callable[..., Rig]) -> None:
    engine = rig()
    tokens = prompt(100)
    name = engine.ask(tokens, answer_tokens=100)
    assert engine.cached[engine.ask([*tokens, *engine.answers[name]])] == CHUNK


@pytest.mark.parametrize("save_decode", [False, True])
def test_a_scheduler_that_runs_ahead_stores_what_is_known(rig: Callable[..., Rig], save_decode: bool) -> None:
    first = rig(weights=f"ahead{save_decode}", ahead=True, save_decode=save_decode)
    second = rig(weights=f"ahead{save_decode}", ahead=True, save_decode=save_decode)
    tokens = prompt(150)
    name = first.ask(tokens, answer_tokens=80)
    said = [*tokens, *first.answers[name]]
    assert second.cached[second.ask(said)] == (192 if save_decode else 128)


@pytest.mark.parametrize("window", [40, 64, 100])
def test_a_sliding_window_is_restored_with_the_rest(rig: Callable[..., Rig], window: int) -> None:
    options: dict[str, Any] = {"weights": f"window{window}", "windows": (window,), "batched_tokens": 128}
    first, second = rig(**options), rig(**options)
    tokens = prompt(450)
    first.ask(tokens)
    name = second.ask(tokens, answer_tokens=20)
    assert second.cached[name] == 7 * CHUNK
    assert second.answers[name][0] == answer_to(tokens)
    window_part = second.loads[0].parts[1]
    assert window_part.stop - window_part.start < 7, "all of it was loaded, not the window alone"


@pytest.mark.parametrize("window", [49, 64, 65, 80, 81])
def test_with_a_window_too_a_whole_prompt_is_restored_right(rig: Callable[..., Rig], window: int) -> None:
    options: dict[str, Any] = {"weights": f"whole{window}", "windows": (window,)}
    first, second = rig(**options), rig(**options)
    tokens = prompt(6 * CHUNK)
    first.ask(tokens)
    name = second.ask(tokens, answer_tokens=3)
    assert second.cached[name] in (6 * CHUNK - 1, 5 * CHUNK)
    assert second.answers[name][0] == answer_to(tokens)


def test_a_failed_load_of_several_groups_is_computed_anew(rig: Callable[..., Rig]) -> None:
    options: dict[str, Any] = {"weights": "groups", "windows": (64,)}
    engine = rig(**options)
    tokens = prompt(400)
    engine.ask(tokens)
    losing(engine, 5)
    name = engine.ask(tokens)
    assert sum(engine.history[name]) == 400
    assert engine.answers[name] == [answer_to(tokens)]


def test_after_a_reset_nothing_is_found_and_all_is_stored_anew(rig: Callable[..., Rig]) -> None:
    engine = rig()
    tokens = prompt(200)
    engine.ask(tokens)
    running = engine.add(prompt(200, seed=4))
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.run()
    assert engine.cached[running] == 0
    assert engine.cached[engine.ask(tokens)] == 0
    assert engine.cached[engine.ask(tokens)] == 192


def test_a_store_outlives_its_request_and_keeps_its_blocks_until_it_has_ended(rig: Callable[..., Rig]) -> None:
    engine = rig(blocks=20)
    tokens = prompt(200)
    hold, cache = threading.Event(), engine.worker._worker._cache
    device = cache._device
    gather = device.gather
    device.gather = lambda *arguments, **options: hold.wait(30) and gather(*arguments, **options)
    name = engine.add(tokens)
    engine.steps_until(lambda: name not in engine.scheduler.requests)
    assert engine.free_blocks == 7, "12 of 19 blocks are still read"
    hold.set()
    engine.run()
    assert engine.free_blocks == 19
    device.gather = gather
    assert engine.cached[engine.ask(tokens)] == 192


def test_a_lookup_that_is_not_answered_holds_up_nobody_else(rig: Callable[..., Rig]) -> None:
    engine = rig()
    tokens = prompt(200)
    engine.ask(tokens)
    cache = engine.connector._scheduler._cache
    lookup, answer = cache.lookup, threading.Event()
    cache.lookup = lambda chain, name: answer.wait(30) and lookup(chain, name)
    slow = engine.add(tokens)
    quick = engine.add(prompt(20, seed=2))
    engine.steps_until(lambda: quick not in engine.scheduler.requests)
    assert slow not in engine.history
    answer.set()
    engine.run()
    assert engine.cached[slow] == 192


def test_for_first_answers_a_step_waits_no_longer_in_all_than_the_grace(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = rig(lookup_grace_s=0.05)
    clock, allowed = [0.0], []

    def wait(lookup: Any, timeout_s: float) -> bool:
        allowed.append(timeout_s)
        clock[0] += 0.02
        return bool(lookup._heard.wait(30))

    held = threading.Event()
    lookup = engine.connector._scheduler._cache.lookup
    engine.connector._scheduler._cache.lookup = lambda chain, name: held.wait(30) and lookup(chain, name)
    names = [engine.add(prompt(200, seed=seed)) for seed in range(3)]
    monkeypatch.setattr("lmcache_engine_vllm.scheduler.time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(Lookup, "heard", lambda lookup: False)
    monkeypatch.setattr(Lookup, "wait", wait)
    held.set()
    engine.steps_until(lambda: all(name in engine.history for name in names))
    assert allowed == pytest.approx([0.05, 0.03, 0.01])


def test_a_step_does_not_wait_for_slower_tiers(rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = rig(lookup_grace_s=30.0, lookup_timeout_s=60.0)
    cache = engine.connector._scheduler._cache
    lookup, there = cache.lookup, threading.Event()
    cache.lookup = lambda chain, name: (
        lookup(chain, name) if there.is_set() else replace(lookup(chain, name), pending=True)
    )
    slow = engine.add(prompt(200))
    quick = engine.add(prompt(20, seed=2))
    engine.steps_until(lambda: quick not in engine.scheduler.requests)
    assert slow not in engine.history
    there.set()
    engine.run()


def test_a_request_that_has_waited_hears_of_what_was_stored_meanwhile(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = rig(weights="meanwhile"), rig(weights="meanwhile")
    tokens = prompt(200)
    early = second.add(tokens)
    asked = second.connector._scheduler._tracked[early].lookup
    assert asked.wait(30)
    assert asked.hit.chunks == 0
    first.ask(tokens)
    monkeypatch.setattr("lmcache_engine_vllm.scheduler._STALE_S", 0.0)
    second.run()
    assert second.cached[early] == 192


def test_a_lookup_that_is_late_is_a_miss(rig: Callable[..., Rig]) -> None:
    engine = rig(lookup_timeout_s=0.05)
    tokens = prompt(200)
    engine.ask(tokens)
    cache = engine.connector._scheduler._cache
    lookup, answer = cache.lookup, threading.Event()
    cache.lookup = lambda chain, name: answer.wait(30) and lookup(chain, name)
    name = engine.ask(tokens)
    answer.set()
    assert engine.cached[name] == 0


def test_tenants_do_not_share(rig: Callable[..., Rig]) -> None:
    engine = rig()
    tokens = prompt(200)
    engine.ask(tokens, cache_salt="a")
    assert engine.cached[engine.ask(tokens)] == 0
    assert engine.cached[engine.ask(tokens, cache_salt="b")] == 0
    assert engine.cached[engine.ask(tokens, cache_salt="a")] == 192


def test_a_salt_that_cannot_be_part_of_a_key_costs_that_request_its_caching(rig: Callable[..., Rig]) -> None:
    engine = rig()
    for _ in range(2):
        name = engine.ask(prompt(200), cache_salt="no spaces, please")
        assert engine.cached[name] == 0
    assert not engine.stores


def test_when_all_is_done_nothing_is_held(rig: Callable[..., Rig]) -> None:
    engine = rig(prefix_caching=True)
    tokens = prompt(300)
    engine.ask(tokens)
    engine.ask(prompt(100, seed=1))
    engine.scheduler.reset_prefix_cache()
    engine.ask(tokens)
    engine.abort(engine.add(tokens))
    engine.run()
    half = engine.connector._scheduler
    held = (half._tracked, half._unstored, half._in_flight, half._coming, half._ranks_left, half.storing)
    assert not any(held)
    deadline = time.monotonic() + 30
    while half._cache.daemon_status()["leases"]:
        assert time.monotonic() < deadline, "a lease is left"
        time.sleep(0.01)


@pytest.mark.parametrize("field", ["image", "embeds"])
def test_what_is_no_token_is_part_of_the_key_from_where_it_lies_on(rig: Callable[..., Rig], field: str) -> None:
    engine = rig()
    tokens = prompt(300)

    def fields(content: str) -> dict[str, Any]:
        if field == "image":
            position = SimpleNamespace(offset=130, length=100, get_num_embeds=lambda: 0)
            return {"mm_features": [SimpleNamespace(modality="image", identifier=content, mm_position=position)]}
        rows = torch.zeros(300, 4)
        rows[130:230] = float(len(content))
        return {"prompt_embeds": rows}

    def chain(content: str) -> tuple[bytes, ...]:
        request = SimpleNamespace(
            prompt_token_ids=tokens, all_token_ids=tokens, prompt_is_token_ids=None,
            **{"mm_features": [], "prompt_embeds": None, **fields(content)},
        )  # fmt: skip
        model = engine.connector._scheduler._namespaces.model(SimpleNamespace(lora_request=None, cache_salt=None))
        return chain_of(request, model, 300).digests

    one, other = chain("a"), chain("bb")
    assert one == chain("a")
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, True, False, False]


def test_an_adapter_is_told_apart_by_its_content(rig: Callable[..., Rig], tmp_path: Path) -> None:
    engine = rig()
    models = []
    for content in (b"one", b"two"):
        folder = tmp_path / content.decode()
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_bytes(content)
        lora = LoRARequest("style", 1, str(folder))
        request = SimpleNamespace(lora_request=lora, cache_salt=None)
        deadline = time.monotonic() + 30
        while (model := engine.connector._scheduler._namespaces.model(request)) is None:
            assert time.monotonic() < deadline
        models.append(model.family)
    assert models[0] != models[1]
    assert models[0].adapter.startswith("style@sha256:")


def test_an_adapter_that_cannot_be_read_costs_its_requests_their_caching(rig: Callable[..., Rig]) -> None:
    engine = rig()
    lora = LoRARequest("gone", 1, "/nowhere")
    for _ in range(3):
        assert engine.cached[engine.ask(prompt(200), lora_request=lora)] == 0
    assert not engine.stores


def test_ranks_that_do_not_agree_cache_nothing(rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture) -> None:
    engine = rig()
    card = engine.worker.get_handshake_metadata()
    other = replace(card, identity=replace(card.identity, weights="others"))
    engine.connector._scheduler._namespaces = None
    with caplog.at_level(logging.WARNING, "vllm.lmcache"):
        engine.connector._scheduler.meet([card, other])
    engine.ask(prompt(200))
    assert not engine.stores
    assert "the ranks do not agree" in caplog.text


def test_stored_chunks_are_announced_once_they_are_there(rig: Callable[..., Rig]) -> None:
    engine = rig(events=True)
    tokens = prompt(200)
    name = engine.add(tokens)
    hashes = list(engine.scheduler.requests[name].block_hashes)
    engine.run()
    engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.ask(prompt(10))
    stored, *cleared = engine.published
    assert stored.block_hashes == [maybe_convert_block_hash(each) for each in hashes[:12]]
    assert (stored.token_ids, stored.block_size, stored.medium) == (tokens[:192], 16, "CPU")
    assert {type(event).__name__ for event in cleared} == {"AllBlocksCleared"}


def test_guesses_that_were_wrong_are_never_stored(rig: Callable[..., Rig]) -> None:
    first, second = rig(weights="drafts", drafts=3, save_decode=True), rig(weights="drafts")
    tokens = prompt(100)
    name = first.ask(tokens, answer_tokens=120)
    said = [*tokens, *first.answers[name]]
    assert len(first.history[name]) < 100, "no guess was right: the test shows little"
    asked = second.ask(said)
    assert second.cached[asked] == 192
    assert second.answers[asked] == [answer_to(said)]


def test_states_of_which_no_prefix_can_be_kept_are_refused() -> None:
    spec = MambaSpec(block_size=64, shapes=((4, 4),), dtypes=(torch.float32,))
    groups = [KVCacheGroupSpec(["model.layers.0.mixer"], spec)]
    with pytest.raises(NamespaceError, match="KV cache group 0: MambaSpec is not supported"):
        check_groups(KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups))


def test_a_producer_loads_nothing_and_a_consumer_stores_nothing(rig: Callable[..., Rig]) -> None:
    producer, consumer = rig(weights="role", role="kv_producer"), rig(weights="role", role="kv_consumer")
    tokens = prompt(200)
    for engine, cached in ((consumer, 0), (producer, 0), (producer, 0), (consumer, 192)):
        assert engine.cached[engine.ask(tokens)] == cached
    assert not consumer.stores
    assert not producer.loads


def test_a_request_that_wants_the_logits_of_its_prompt_is_computed_whole(rig: Callable[..., Rig]) -> None:
    engine = rig()
    tokens = prompt(200)
    engine.ask(tokens)
    assert engine.cached[engine.ask(tokens, anew=True)] == 0


def test_a_chunk_that_a_window_has_left_in_part_is_not_stored(rig: Callable[..., Rig]) -> None:
    engine = rig(windows=(20,), batched_tokens=100)
    tokens = prompt(400)
    engine.ask(tokens)
    parts = [part for store in engine.stores for part in store.parts if part.group == 1]
    assert all(block for part in parts for block in part.block_ids), "vLLM's null block holds nothing"
    assert len(parts) < len(engine.stores) or any(part.start for part in parts)
    name = engine.ask(tokens)
    assert 0 < engine.cached[name] <= 6 * CHUNK
    assert engine.answers[name] == [answer_to(tokens)]


def test_vllm_is_told_where_a_hit_came_from(rig: Callable[..., Rig]) -> None:
    sources = pytest.importorskip("vllm.v1.metrics.cache_hit_source", reason="cannot run here: this vLLM does not ask")
    engine = rig()
    tokens = prompt(200)
    engine.ask(tokens)
    told: list[Any] = []
    ask = engine.connector.get_external_cache_hit_sources
    engine.connector.get_external_cache_hit_sources = lambda *arguments: told.append(ask(*arguments)) or told[-1]
    engine.ask(tokens)
    assert told == [{sources.CacheHitSource.HOST: 192}]


def test_the_plugin_entry_point_makes_the_connector_known_by_its_name() -> None:
    register()
    register()
    assert KVConnectorFactory.get_connector_class_by_name("LMCacheCoreConnector") is LMCacheCoreConnector


def test_a_daemon_that_hangs_costs_a_recompute_and_is_used_again_when_it_goes_on(model: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, socket=tmp_path / "s", patience="250ms")
    tokens = prompt(200)
    with daemon(config, tmp_path / "s") as process:
        engine = Rig(model, config, load_timeout_s=0.5)
        assert engine.worker._worker._cache._pool._load_timeout_s == 0.5
        engine.ask(tokens)
        name = engine.add(tokens)
        assert engine.connector._scheduler._tracked[name].lookup.wait(30)
        process.send_signal(signal.SIGSTOP)  # it is known to be there, and does not come
        engine.run()
        other = engine.ask(prompt(200, seed=1))
        process.send_signal(signal.SIGCONT)
        assert sum(engine.history[name]) == 200
        assert engine.answers[name] == [answer_to(tokens)]
        assert engine.cached[other] == 0
        deadline = time.monotonic() + 60
        while engine.cached[engine.ask(tokens)] != 192:
            assert time.monotonic() < deadline
        engine.close()
