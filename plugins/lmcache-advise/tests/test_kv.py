"""KV sizes and parameters of real shapes of config.json, against sums made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmcache_advise.kv import described, kv_of
from lmcache_advise.machine import engine_tokens_of, gpus_for
from lmcache_advise.models import ModelConfig, read_model
from lmcache_advise.parameters import parameters_of
from lmcache_core import ConfigError

LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "torch_dtype": "bfloat16",
    "max_position_embeddings": 8192,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280, "torch_dtype": "bfloat16",
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3, "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip
GEMMA3 = {
    "model_type": "gemma3", "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "sliding_window": 1024,
        "vocab_size": 262208,
    },
}  # fmt: skip
QWEN3_NEXT = {
    "model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "dtype": "bfloat16", "vocab_size": 151936,
    "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip


def config(values: dict[str, Any], tmp_path: Path) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(values))
    return read_model(tmp_path)


def test_grouped_heads_have_keys_and_values_for_each_kv_head_and_layer(tmp_path: Path) -> None:
    kv = kv_of(config(LLAMA_8B, tmp_path))
    assert kv.token_nbytes == 2 * 8 * 128 * 2 * 32 == 131072
    assert kv.load_nbytes(1000) == 1000 * 131072
    assert kv_of(config(LLAMA_8B, tmp_path), "fp8").token_nbytes == 65536
    assert (kv.gpu_nbytes(4), kv.gpu_nbytes(16)) == (131072 / 4, 131072 / 8)


def test_mla_has_one_latent_and_one_rotary_key_for_each_layer_on_every_gpu(tmp_path: Path) -> None:
    kv = kv_of(config(DEEPSEEK_V3, tmp_path))
    assert kv.token_nbytes == (512 + 64) * 2 * 61 == 70272
    assert kv.gpu_nbytes(8) == 70272
    indexed = kv_of(config(DEEPSEEK_V3 | {"index_head_dim": 128}, tmp_path))
    assert indexed.token_nbytes == 70272 + (128 + 4) * 61


def test_sliding_layers_are_loaded_for_their_window_only(tmp_path: Path) -> None:
    kv = kv_of(config(GEMMA3, tmp_path))
    each = 2 * 8 * 256 * 2
    assert described(kv.layers) == "8 full, 40 window"
    assert (kv.full_nbytes, kv.window_nbytes, kv.window_tokens) == (8 * each, 40 * each, 1024)
    assert kv.load_nbytes(10_000) == 10_000 * 8 * each + 1024 * 40 * each
    assert kv.load_nbytes(100) == 100 * 48 * each
    assert kv.dtype == "bfloat16"


def test_linear_layers_have_a_state_for_each_chunk(tmp_path: Path) -> None:
    kv = kv_of(config(QWEN3_NEXT, tmp_path))
    state = 36 * (32 * 128 * 128 * 2 + (2 * 16 * 128 + 32 * 128) * 3 * 2)
    assert described(kv.layers) == "12 full, 36 state"
    assert kv.token_nbytes == 12 * 2 * 2 * 256 * 2
    assert kv.state_nbytes == state
    assert kv.stored_nbytes(256) == kv.token_nbytes + state / 256
    in_32_bits = kv_of(config(QWEN3_NEXT | {"mamba_ssm_dtype": "float32"}, tmp_path))
    assert in_32_bits.state_nbytes - state == 36 * 32 * 128 * 128 * 2


@pytest.mark.parametrize(
    ("more", "layers"),
    [
        ({"sliding_window": 4096}, "32 window"),
        ({"sliding_window": 4096, "use_sliding_window": False}, "32 full"),
        ({"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 28}, "28 full, 4 window"),
        ({"sliding_window": 262144}, "32 full"),
        ({"sliding_window": 4096, "model_type": "gemma2"}, "16 full, 16 window"),
        ({"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 16}, "16 full, 16 window"),
        ({"layer_types": ["chunked_attention"] * 24 + ["full_attention"] * 8, "attention_chunk_size": 8192},
         "8 full, 24 window"),
        ({"num_kv_shared_layers": 12}, "20 full, 12 none"),
        ({"attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16}, "4 full, 28 state"),
        ({"hybrid_override_pattern": "M-M*" * 8, "mamba_d_state": 16}, "8 full, 16 state, 8 none"),
    ],
)  # fmt: skip
def test_what_each_layer_keeps_is_read_as_each_family_says_it(
    tmp_path: Path, more: dict[str, Any], layers: str
) -> None:
    assert described(kv_of(config(LLAMA_8B | more, tmp_path)).layers) == layers


def test_mamba_states_are_summed_by_hand_for_both_kinds(tmp_path: Path) -> None:
    first = LLAMA_8B | {"layer_types": ["mamba"] * 31 + ["attention"], "mamba_d_state": 16, "mamba_expand": 2}
    assert kv_of(config(first, tmp_path)).state_nbytes == 31 * (8192 * 16 * 2 + 8192 * 3 * 2)
    second = first | {"mamba_n_heads": 128, "mamba_d_head": 64, "mamba_n_groups": 2, "mamba_d_state": 128}
    assert kv_of(config(second, tmp_path)).state_nbytes == 31 * (8192 * 128 * 2 + (8192 + 2 * 2 * 128) * 3 * 2)


def test_a_checkpoint_that_asks_for_kv_in_8_bits_gets_it(tmp_path: Path) -> None:
    scheme = {"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}}
    assert kv_of(config(LLAMA_8B | scheme, tmp_path)).token_nbytes == 65536
    assert kv_of(config(LLAMA_8B | scheme, tmp_path), "bfloat16").token_nbytes == 131072


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"layer_types": ["conv"] * 32}, "layer_types: conv is not known here; give --kv-nbytes"),
        ({"layer_types": ["full_attention"] * 3}, "speaks of 3 layers, and num_hidden_layers is 32"),
        ({"layer_types": "full"}, "layer_types: expected a list of names"),
        ({"num_key_value_heads": "8"}, "num_key_value_heads: expected a number, got '8'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: 0 is not 1 to"),
        ({"num_hidden_layers": None}, "has no num_hidden_layers"),
        ({"hybrid_override_pattern": "MX"}, "hybrid_override_pattern: .'X'. is not known"),
    ],
)
def test_what_is_not_understood_is_named(tmp_path: Path, values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        kv_of(config(LLAMA_8B | values, tmp_path))


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"[" * 100_000, b"\xff"])
def test_a_file_that_is_no_config_is_named(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "config.json").write_bytes(raw)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_model(tmp_path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read: No such file"):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("values", "total", "active"),
    [(LLAMA_8B, 8.03e9, 7.5e9), (DEEPSEEK_V3, 671e9, 37e9), (QWEN3_NEXT, 80e9, 3e9)],
)
def test_parameters_are_within_some_per_cent_of_what_the_models_are_named_for(
    tmp_path: Path, values: dict[str, Any], total: float, active: float
) -> None:
    found = parameters_of(config(values, tmp_path))
    assert found.total == pytest.approx(total, rel=0.03)
    assert found.active == pytest.approx(active, rel=0.3)


def test_weights_are_as_large_as_the_index_beside_them_says_else_by_their_quantisation(tmp_path: Path) -> None:
    found = parameters_of(config(DEEPSEEK_V3, tmp_path))
    assert found.nbytes == found.total
    four = LLAMA_8B | {"quantization_config": {"quant_method": "awq", "bits": 4}}
    assert parameters_of(config(four, tmp_path)).nbytes == pytest.approx(8.03e9 / 2, rel=0.01)
    assert parameters_of(config(LLAMA_8B, tmp_path)).nbytes == pytest.approx(16.06e9, rel=0.01)
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 12345}}')
    assert parameters_of(config(LLAMA_8B, tmp_path)).nbytes == 12345
    (tmp_path / "model.safetensors.index.json").write_text("{")
    assert parameters_of(config(LLAMA_8B, tmp_path)).nbytes == pytest.approx(16.06e9, rel=0.01)


def test_attention_to_what_is_before_counts_in_every_head_of_every_full_layer(tmp_path: Path) -> None:
    found = parameters_of(config(LLAMA_8B, tmp_path))
    assert found.operations(1000) - found.operations(0) == 1000 * 32 * 4 * 4096
    assert found.operations(0) == 2 * found.active
    latent = parameters_of(config(DEEPSEEK_V3, tmp_path))
    assert latent.attention == 61 * 2 * 128 * (128 + 64 + 128)
    sliding = parameters_of(config(GEMMA3, tmp_path))
    assert sliding.attention == 8 * 4 * 16 * 256


def test_the_engines_own_cache_is_what_the_weights_leave(tmp_path: Path) -> None:
    gib = 1 << 30
    kv = kv_of(config(LLAMA_8B, tmp_path))
    assert engine_tokens_of(kv, 15 * gib, 80 * gib, 1) == (72 - 15 - 3) * gib / 131072
    assert engine_tokens_of(kv, 15 * gib, 80 * gib, 2) == pytest.approx((72 - 7.5 - 3) * gib / 65536)
    assert engine_tokens_of(kv, 150 * gib, 80 * gib, 1) == 0
    assert [gpus_for(each * gib, 80 * gib) for each in (15, 61, 140, 671)] == [1, 2, 4, 16]
