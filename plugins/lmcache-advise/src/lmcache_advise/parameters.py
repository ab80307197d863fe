"""How many parameters a model has, and how many of them compute one token: from its config.json, to within a few %."""

from __future__ import annotations

from dataclasses import dataclass

from .kv import FULL, layer_kinds
from .models import DTYPE_NBYTES, ModelConfig


@dataclass(frozen=True, slots=True)
class Parameters:
    """Counts; in a mixture of experts few are active for one token."""

    total: float
    active: float
    nbytes: float
    """Of the weights: what the index of the checkpoint says, else the total at the width of its quantisation."""
    attention: float = 0.0
    """Operations of one token with one token before it, in all layers of full attention."""

    def operations(self, position: float) -> float:
        """To compute one token after so many others."""
        return 2 * self.active + self.attention * position


def parameters_of(config: ModelConfig) -> Parameters:
    hidden = config.integer("hidden_size", "n_embd", "d_model")
    layers = config.layers
    embedding = config.integer("vocab_size", default=32_000) * hidden
    tied = bool(config.values.get("tie_word_embeddings", False))
    dense = 3 * hidden * config.integer("intermediate_size", "ffn_dim", "n_inner", default=4 * hidden)
    experts = config.integer("n_routed_experts", "num_local_experts", "num_experts", default=0)
    attention = _attention(config, hidden)
    if not experts:
        total = active = layers * (attention + dense)
    else:
        width = 3 * hidden * config.integer("moe_intermediate_size", "intermediate_size")
        shared = config.integer("n_shared_experts", default=0) * width
        shared += 3 * hidden * config.integer("shared_expert_intermediate_size", default=0)
        first = min(layers, config.integer("first_k_dense_replace", default=0))
        used = config.integer("num_experts_per_tok", "num_experts_per_token", default=1)
        total = layers * attention + first * dense + (layers - first) * (experts * width + shared)
        active = layers * attention + first * dense + (layers - first) * (used * width + shared)
    both = embedding * (1 if tied else 2)
    nbytes = config.weights_nbytes or (total + both) * _width(config)
    full = layer_kinds(config).count(FULL)
    return Parameters(total + both, active + embedding, nbytes, full * _attention_operations(config, hidden))


def _attention(config: ModelConfig, hidden: int) -> float:
    heads = config.integer("num_attention_heads", "n_head", "num_heads")
    dim = config.integer("head_dim", default=hidden // max(1, heads))
    if not config.has("kv_lora_rank"):
        kv_heads = config.integer("num_key_value_heads", "num_kv_heads", "n_head_kv", default=heads)
        return 2.0 * hidden * dim * (heads + kv_heads)
    latent, rope = config.integer("kv_lora_rank"), config.integer("qk_rope_head_dim")
    nope, value = config.integer("qk_nope_head_dim", default=128), config.integer("v_head_dim", default=128)
    queries = heads * (nope + rope)
    lora = config.integer("q_lora_rank", default=0)
    query = lora * (hidden + queries) if lora else hidden * queries
    return float(query + hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden)


def _attention_operations(config: ModelConfig, hidden: int) -> float:
    """Of one layer: each head multiplies and adds its keys and its values once for every earlier token."""
    heads = config.integer("num_attention_heads", "n_head", "num_heads")
    if config.has("kv_lora_rank"):
        widths = config.integer("qk_nope_head_dim", default=128) + config.integer("qk_rope_head_dim")
        return 2.0 * heads * (widths + config.integer("v_head_dim", default=128))
    return 4.0 * heads * config.integer("head_dim", default=hidden // max(1, heads))


def _width(config: ModelConfig) -> float:
    """Bytes of a parameter."""
    quantisation = config.values.get("quantization_config")
    if isinstance(quantisation, dict):
        bits = quantisation.get("bits")
        if isinstance(bits, int) and 1 <= bits <= 16:
            return bits / 8
        method = str(quantisation.get("quant_method", ""))
        if "mxfp4" in method:
            return 4.25 / 8
        if "fp8" in method or "int8" in method:
            return 1.0
    return DTYPE_NBYTES[config.dtype]
