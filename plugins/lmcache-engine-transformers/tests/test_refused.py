"""What would make a restored prefix wrong is refused, by a name that says what to change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import CHUNK, GREEDY, difference, llama, past_of, prompt
from packaging.version import Version
from transformers import (
    DynamicCache,
    GenerationConfig,
    MistralConfig,
    MistralForCausalLM,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)

from lmcache_core import NamespaceError
from lmcache_engine_transformers import PrefixCache, Unsupported, request

IDS = prompt(2 * CHUNK + 3)
HIDDEN = torch.cat([torch.zeros(1, 2), torch.ones(1, 2 * CHUNK + 1)], dim=1).long()


@pytest.mark.parametrize(
    ("what", "ids", "options"),
    [
        ("input_ids", torch.cat([IDS, IDS]), {}),
        ("input_ids", torch.zeros(1, 0, dtype=torch.long), {}),
        ("input_ids", torch.zeros(1, 4), {}),
        ("input_ids", None, {}),
        ("input_ids", torch.cat([torch.zeros(1, 2, dtype=torch.long), IDS], dim=1), {}),
        ("inputs_embeds", None, {"inputs_embeds": torch.zeros(1, 4, 32)}),
        ("inputs", None, {"inputs": IDS}),
        ("attention_mask", IDS, {"attention_mask": HIDDEN}),
        ("attention_mask", IDS, {"attention_mask": torch.ones(1, 3)}),
        ("position_ids", IDS, {"position_ids": torch.arange(2 * CHUNK + 3)[None]}),
        ("pixel_values", IDS, {"pixel_values": torch.zeros(1, 3, 8, 8)}),
        ("cache", IDS, {"cache": DynamicCache()}),
        ("past_key_values", IDS, {"past_key_values": DynamicCache()}),
        ("use_cache", IDS, {"use_cache": False}),
        ("cache_implementation", IDS, {"cache_implementation": "static"}),
        ("cache_implementation", IDS, {"generation_config": GenerationConfig(cache_implementation="static")}),
        ("generation mode", IDS, {"prompt_lookup_num_tokens": 3}),
        ("assistant_model", IDS, {"assistant_model": llama()}),
        ("custom_generate", IDS, {"custom_generate": "somewhere/else"}),
        ("token_healing", IDS, {"token_healing": True}),
        ("output_hidden_states", IDS, {"output_hidden_states": True}),
        ("output_attentions", IDS, {"output_attentions": True}),
    ],
)
def test_a_request_that_cannot_start_from_a_prefix_is_refused_by_name(
    prefix: PrefixCache, what: str, ids: Any, options: dict[str, Any]
) -> None:
    with pytest.raises(Unsupported) as refused:
        prefix.generate(ids, **options)
    assert refused.value.what == what


def test_an_attention_mask_that_hides_nothing_is_let_through(prefix: PrefixCache) -> None:
    prefix.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=1)
    assert prefix.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=1).report.hit_tokens == 2 * CHUNK


def test_prefill_in_chunks_is_refused_where_transformers_would_feed_the_prompt_twice(
    prefix: PrefixCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request, "_CHUNKED_PREFILL_SINCE", Version("999"))
    with pytest.raises(Unsupported, match="prefill_chunk_size: transformers .* would feed the whole prompt again"):
        prefix.generate(IDS, prefill_chunk_size=8)


@pytest.mark.parametrize(
    ("ids", "options"),
    [
        (torch.cat([IDS, IDS]), {}),
        (torch.cat([torch.zeros(1, 2, dtype=torch.long), IDS], dim=1), {}),
        (IDS, {"attention_mask": HIDDEN}),
        (IDS, {"cache_implementation": "static"}),
        (None, {"inputs_embeds": torch.ones(1, 4, 32)}),
    ],
)
def test_without_strict_such_a_request_is_generated_without_the_cache(
    make: Any, model: Any, ids: Any, options: dict[str, Any]
) -> None:
    prefix = make(model, strict=False)
    prefix.generate(IDS, **GREEDY)
    output, report = prefix.generate(ids, **options, **GREEDY)
    given = {} if ids is None else {"input_ids": ids}
    assert difference(output, model.generate(**given, **options, **GREEDY)) == 0.0
    assert report.uncached
    assert report.hit_tokens == 0
    assert report.store is None


@pytest.mark.parametrize("salt", ["a/b", "a" * 129, "naïve"])
def test_an_illegal_salt_costs_one_request_its_caching_and_no_more(prefix: PrefixCache, model: Any, salt: str) -> None:
    prefix.generate(IDS, **GREEDY)
    output, report = prefix.generate(IDS, salt=salt, **GREEDY)
    assert report.uncached.startswith("salt: ")
    assert salt not in report.uncached
    assert difference(output, model.generate(IDS, **GREEDY)) == 0.0
    assert prefix.generate(IDS, **GREEDY).report.hit_tokens == 2 * CHUNK


def sliding(**changes: Any) -> Any:
    config = MistralConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3, **changes,
    )  # fmt: skip
    return MistralForCausalLM(config).eval()


def test_sliding_window_layers_are_refused(make: Any) -> None:
    with pytest.raises(Unsupported, match="model: 3 of 3 layers, from layer 0 on, .*DynamicSlidingWindowLayer"):
        make(sliding(sliding_window=8))


def test_a_model_with_some_sliding_layers_is_refused(make: Any) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=16,
    )  # fmt: skip
    with pytest.raises(Unsupported, match="1 of 2 layers"):
        make(Gemma2ForCausalLM(config).eval())


def test_a_recurrent_model_is_refused(make: Any) -> None:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    config = Lfm2Config(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["conv", "full_attention"],
    )  # fmt: skip
    with pytest.raises(Unsupported, match="LinearAttentionLayer"):
        make(Lfm2ForCausalLM(config).eval())


def test_the_same_model_without_its_window_is_not_refused(make: Any) -> None:
    prefix = make(sliding(sliding_window=None))
    prefix.generate(IDS, max_new_tokens=1)
    assert prefix.restore(IDS).hit_tokens == 2 * CHUNK


def test_an_encoder_decoder_model_is_refused(make: Any) -> None:
    config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(Unsupported, match="encoder-decoder"):
        make(T5ForConditionalGeneration(config).eval())


def test_a_model_in_training_mode_is_refused_also_when_it_goes_there_later(make: Any) -> None:
    model = llama()
    prefix = make(model)
    model.train()
    with pytest.raises(Unsupported, match="training mode"):
        prefix.generate(IDS, max_new_tokens=1)
    with pytest.raises(Unsupported, match="training mode"):
        make(model)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_length_of_the_prompt_is_refused(make: Any, kind: str) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    with pytest.raises(NamespaceError, match=f"rope: '{kind}' scaling"):
        make(llama(rope_parameters=rope))


def test_rope_that_does_not_is_let_through(make: Any) -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    prefix = make(llama(rope_parameters=rope))
    prefix.generate(IDS, max_new_tokens=1)
    assert prefix.restore(IDS).hit_tokens == 2 * CHUNK


def test_a_static_cache_is_not_saved(prefix: PrefixCache, model: Any) -> None:
    with pytest.raises(Unsupported, match="cache: a StaticCache"):
        prefix.save(IDS, StaticCache(config=model.config, max_cache_len=64))


def test_a_cache_that_holds_too_little_or_something_else_is_not_saved(prefix: PrefixCache, model: Any) -> None:
    past = past_of(model, IDS[:, :CHUNK])
    with pytest.raises(Unsupported, match=f"cache: keys of layer 0 .*{2 * CHUNK} or more"):
        prefix.save(IDS, past)
    with pytest.raises(Unsupported, match="cache: layer 0 is empty"):
        prefix.save(IDS, DynamicCache(config=model.config))
    with pytest.raises(Unsupported, match="cache: 2 layers where the model has 3"):
        prefix.save(IDS, past_of(llama(num_hidden_layers=2), IDS))
    with pytest.raises(Unsupported, match=r"cache: keys of layer 0 are torch\.bfloat16"):
        prefix.save(IDS, past_of(llama(torch.bfloat16), IDS))
