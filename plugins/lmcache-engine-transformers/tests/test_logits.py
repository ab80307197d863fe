"""A restored prefix gives the logits of a computed one, and a wrong KV is seen by the same comparison."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from conftest import CHUNK, GREEDY, continued, difference, llama, past_of, prompt
from packaging.version import Version

from lmcache_engine_transformers import PrefixCache
from lmcache_engine_transformers.request import _CHUNKED_PREFILL_SINCE

CLOSE = 1e-4
"""Rounding of fp32 when one token is computed instead of many; a wrong KV moves these logits by more than 0.1."""
WRONG = 0.1


@pytest.mark.parametrize("tokens", [2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1, 5 * CHUNK + 7])
def test_a_restored_prompt_gives_the_logits_of_a_computed_one(prefix: PrefixCache, model: Any, tokens: int) -> None:
    ids = prompt(tokens)
    reference = model.generate(ids, **GREEDY)
    cold, cold_report = prefix.generate(ids, **GREEDY)
    warm, warm_report = prefix.generate(ids, **GREEDY)
    assert cold_report.hit_tokens == 0
    assert warm_report.hit_tokens == min(tokens // CHUNK * CHUNK, tokens - 1)
    assert difference(cold, reference) == 0.0
    assert difference(warm, reference) < CLOSE
    assert torch.equal(warm.sequences, reference.sequences)


def test_only_what_follows_the_prefix_is_computed(prefix: PrefixCache, model: Any) -> None:
    ids = prompt(3 * CHUNK + 5)
    prefix.generate(ids, **GREEDY)
    seen: list[int] = []
    hook = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        prefix.generate(ids, **GREEDY)
    finally:
        hook.remove()
    assert seen[0] == 5
    assert set(seen[1:]) == {1}


@pytest.mark.parametrize("wrong", ["zeroed values", "rotated keys", "swapped chunks"])
def test_a_wrong_kv_moves_the_logits(prefix: PrefixCache, model: Any, wrong: str) -> None:
    ids = prompt(4 * CHUNK + 3)
    reference, _ = prefix.generate(ids, **GREEDY)
    past, hit_tokens = prefix.restore(ids)
    layer = past.layers[1]
    if wrong == "zeroed values":
        layer.values = torch.cat([torch.zeros_like(layer.values[:, :, :CHUNK]), layer.values[:, :, CHUNK:]], dim=2)
    elif wrong == "rotated keys":
        layer.keys = layer.keys.roll(1, dims=2)
    else:
        layer.keys = torch.cat(
            [layer.keys[:, :, CHUNK : 2 * CHUNK], layer.keys[:, :, :CHUNK], layer.keys[:, :, 2 * CHUNK :]], 2
        )
    assert hit_tokens == 4 * CHUNK
    corrupted = continued(model, ids, past)
    assert difference(corrupted, reference) > WRONG


def test_feeding_a_whole_restored_prompt_would_be_wrong_and_is_not_done(prefix: PrefixCache, model: Any) -> None:
    ids = prompt(2 * CHUNK)
    reference, _ = prefix.generate(ids, **GREEDY)
    whole = past_of(model, ids)
    assert difference(continued(model, ids, whole), reference) > WRONG
    restored = prefix.restore(ids)
    assert restored.hit_tokens == restored.cache.get_seq_length() == 2 * CHUNK - 1
    assert difference(continued(model, ids, restored.cache), reference) < CLOSE


def test_a_prompt_of_one_chunk_and_a_prompt_shorter_than_one(prefix: PrefixCache) -> None:
    assert prefix.generate(prompt(CHUNK - 1), max_new_tokens=1).report.store is None
    prefix.generate(prompt(CHUNK), max_new_tokens=1)
    assert prefix.restore(prompt(CHUNK)).hit_tokens == CHUNK - 1
    assert prefix.restore(prompt(CHUNK - 1)).hit_tokens == 0


def test_a_prompt_of_one_token(prefix: PrefixCache, model: Any) -> None:
    output, report = prefix.generate([5], **GREEDY)
    assert report.hit_tokens == 0
    assert difference(output, model.generate(torch.tensor([[5]]), **GREEDY)) == 0.0


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_bfloat16_survives_bit_by_bit(cache: Any, attention: str) -> None:
    model = llama(torch.bfloat16)
    model.set_attn_implementation(attention)
    prefix = PrefixCache(cache, model, chunk_tokens=CHUNK, name="tiny")
    ids = prompt(3 * CHUNK + 2)
    past = past_of(model, ids)
    assert prefix.save(ids, past) is not None
    restored, hit_tokens = prefix.restore(ids)
    assert hit_tokens == 3 * CHUNK
    for ours, theirs in zip(restored.layers, past.layers, strict=True):
        assert ours.keys.dtype == torch.bfloat16
        assert torch.equal(ours.keys.view(torch.int16), theirs.keys[:, :, :hit_tokens].view(torch.int16))
        assert torch.equal(ours.values.view(torch.int16), theirs.values[:, :, :hit_tokens].view(torch.int16))
    reference = model.generate(ids, **GREEDY)
    assert difference(prefix.generate(ids, **GREEDY).output, reference) < 0.5
    assert torch.equal(prefix.generate(ids, **GREEDY).output.sequences, reference.sequences)


def test_a_conversation_restores_its_own_answers(prefix: PrefixCache, model: Any) -> None:
    ids = prompt(CHUNK + 9)
    for turn in range(3):
        output, report = prefix.generate(ids, **{**GREEDY, "max_new_tokens": 2 * CHUNK})
        assert difference(output, model.generate(ids, **{**GREEDY, "max_new_tokens": 2 * CHUNK})) < CLOSE
        known = 0 if turn == 0 else (ids.shape[1] - 3 - 1) // CHUNK * CHUNK
        assert report.hit_tokens == known
        ids = torch.cat([output.sequences, prompt(3, seed=turn)], dim=1)


def test_generated_tokens_are_left_out_when_asked(make: Any) -> None:
    prefix = make(llama(), store_generated=False)
    output, _ = prefix.generate(prompt(CHUNK), **{**GREEDY, "max_new_tokens": 2 * CHUNK})
    assert prefix.restore(output.sequences).hit_tokens == CHUNK


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2},
        {"num_beams": 2, "do_sample": True},
        {"do_sample": True, "num_return_sequences": 3},
        {"do_sample": True, "temperature": 0.7, "top_k": 20},
        *([{"prefill_chunk_size": 7}] if Version(transformers.__version__) >= _CHUNKED_PREFILL_SINCE else []),
        {"repetition_penalty": 1.3},
        {"guidance_scale": 1.5, "negative_prompt_ids": prompt(4, seed=9)},
    ],
    ids=lambda options: "+".join(options),
)
def test_every_mode_that_is_let_through_gives_what_it_gives_without_the_cache(
    prefix: PrefixCache, model: Any, options: dict[str, Any]
) -> None:
    ids = prompt(3 * CHUNK + 4)
    call = {**GREEDY, **options}
    torch.manual_seed(7)
    reference = model.generate(ids, **call)
    prefix.generate(ids, max_new_tokens=1)
    torch.manual_seed(7)
    output, report = prefix.generate(ids, **call)
    assert report.hit_tokens == 3 * CHUNK
    assert torch.equal(output.sequences, reference.sequences)
    assert difference(output, reference) < CLOSE


def test_beams_store_the_prompt_and_nothing_of_one_beam(prefix: PrefixCache, model: Any) -> None:
    ids = prompt(2 * CHUNK + 4)
    output, _ = prefix.generate(ids, **{**GREEDY, "num_beams": 3, "max_new_tokens": 2 * CHUNK})
    assert prefix.restore(output.sequences).hit_tokens == 2 * CHUNK
    assert difference(prefix.generate(ids, **GREEDY).output, model.generate(ids, **GREEDY)) < CLOSE


def test_a_shared_prefix_is_restored_and_the_rest_computed(prefix: PrefixCache, model: Any) -> None:
    ids = prompt(4 * CHUNK)
    prefix.generate(ids, **GREEDY)
    other = torch.cat([ids[:, : 2 * CHUNK + 5], prompt(2 * CHUNK, seed=3)], dim=1)
    output, report = prefix.generate(other, **GREEDY)
    assert report.hit_tokens == 2 * CHUNK
    assert difference(output, model.generate(other, **GREEDY)) < CLOSE


def test_latent_attention_with_keys_and_values_of_different_shape(cache: Any) -> None:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=128, hidden_size=32, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=16, v_head_dim=12, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        first_k_dense_replace=2, max_position_embeddings=256, initializer_range=0.3, eos_token_id=None,
    )  # fmt: skip
    model = DeepseekV3ForCausalLM(config).eval()
    prefix = PrefixCache(cache, model, chunk_tokens=CHUNK, name="tiny")
    ids = prompt(2 * CHUNK + 3)
    reference, _ = prefix.generate(ids, **GREEDY)
    output, report = prefix.generate(ids, **GREEDY)
    assert prefix.geometry.k_dim != prefix.geometry.v_dim
    assert report.hit_tokens == 2 * CHUNK
    assert difference(output, reference) < CLOSE
