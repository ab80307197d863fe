"""How large a model's KV is: bytes for each token of full attention, of sliding windows, and of recurrent states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from lmcache_core import ConfigError

from .models import DTYPE_NBYTES, ModelConfig

FULL: Final = "full"
WINDOW: Final = "window"
STATE: Final = "state"
NONE: Final = "none"
_KINDS: Final = {
    "full_attention": FULL, "attention": FULL, "sliding_attention": WINDOW, "chunked_attention": WINDOW,
    "linear_attention": STATE, "mamba": STATE, "mamba2": STATE,
}  # fmt: skip
_NEMOTRON: Final = {"M": STATE, "*": FULL, "-": NONE, "E": NONE}
_PATTERNS: Final = {"gemma3_text": 6, "gemma3": 6, "cohere2": 4}
"""Of older files that do not say it: every so many layers one has full attention, the others a window."""


@dataclass(frozen=True, slots=True)
class Kv:
    """Bytes of a model's KV on all ranks together, once: what a cache stores."""

    model: str
    dtype: str
    attention: str
    """ "GQA, 8 of 32 heads", "MLA", ..., for people."""
    full_nbytes: float
    """For each token, of the layers that need every token."""
    window_nbytes: float = 0.0
    """For each token, of the layers that need the last `window_tokens` only."""
    window_tokens: int = 0
    state_nbytes: float = 0.0
    """For each chunk, of the layers that need the state at its end only."""
    heads: int = 0
    """KV heads, which split over GPUs; 0 for MLA, whose latent every GPU has whole."""
    layers: tuple[tuple[str, int], ...] = ()

    @property
    def token_nbytes(self) -> float:
        return self.full_nbytes + self.window_nbytes

    def stored_nbytes(self, chunk_tokens: int) -> float:
        """What a token takes in a cache, its part of the chunk's recurrent state included."""
        return self.token_nbytes + self.state_nbytes / chunk_tokens

    def load_nbytes(self, tokens: float) -> float:
        """What is read to go on after a prefix of so many tokens."""
        if tokens <= 0:
            return 0.0
        return tokens * self.full_nbytes + min(tokens, self.window_tokens) * self.window_nbytes + self.state_nbytes

    def gpu_nbytes(self, gpus: int) -> float:
        """What a token takes on one of `gpus` tensor-parallel GPUs."""
        return self.token_nbytes / (min(gpus, self.heads) if self.heads else 1)


def kv_of(config: ModelConfig, dtype: str = "auto") -> Kv:
    """The KV of a model in `dtype`; "auto" is what its files say.  ConfigError for what is not understood."""
    name = _kv_dtype(config) if dtype == "auto" else dtype
    if name not in DTYPE_NBYTES:
        raise ConfigError(f"no KV dtype {name!r}: {', '.join(DTYPE_NBYTES)}")
    element = DTYPE_NBYTES[name]
    kinds = layer_kinds(config)
    per_layer, attention, heads = _attention(config, element)
    counts = {kind: kinds.count(kind) for kind in (FULL, WINDOW, STATE, NONE)}
    window = config.integer("sliding_window", "attention_chunk_size") if counts[WINDOW] else 0
    return Kv(
        config.model_type, name, attention,
        counts[FULL] * per_layer, counts[WINDOW] * per_layer, window,
        counts[STATE] * _state_nbytes(config) if counts[STATE] else 0.0,
        heads, tuple((kind, count) for kind, count in counts.items() if count),
    )  # fmt: skip


def layer_kinds(config: ModelConfig) -> list[str]:
    """What each layer keeps: full, window, state or none."""
    kinds = _listed(config) or _by_rule(config)
    if len(kinds) != config.layers:
        raise ConfigError(f"{config.path}: speaks of {len(kinds)} layers, and num_hidden_layers is {config.layers}")
    shared = config.integer("num_kv_shared_layers", default=0)
    return [*kinds[: len(kinds) - shared], *[NONE] * shared] if shared else kinds


def _listed(config: ModelConfig) -> list[str] | None:
    for field in ("layer_types", "layers_block_type"):
        names = config.names(field)
        if names is not None:
            unknown = sorted({each for each in names if each not in _KINDS})
            if unknown:
                raise ConfigError(
                    f"{config.path}: {field}: {', '.join(unknown)[:100]} is not known here; give --kv-nbytes instead"
                )
            return [_KINDS[each] for each in names]
    pattern = config.values.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        unknown = sorted(set(pattern) - set(_NEMOTRON))
        if unknown:
            raise ConfigError(f"{config.path}: hybrid_override_pattern: {unknown} is not known here; give --kv-nbytes")
        return [_NEMOTRON[letter] for letter in pattern]
    return None


def _by_rule(config: ModelConfig) -> list[str]:
    layers = range(config.layers)
    if config.has("full_attention_interval"):
        every = max(1, config.integer("full_attention_interval"))
        return [FULL if (index + 1) % every == 0 else STATE for index in layers]
    if config.has("attn_layer_period"):
        period, offset = max(1, config.integer("attn_layer_period")), config.integer("attn_layer_offset", default=0)
        return [FULL if index % period == offset else STATE for index in layers]
    if not config.has("sliding_window") or config.values.get("use_sliding_window") is False:
        return [FULL for _ in layers]
    if config.integer("sliding_window") >= config.integer("max_position_embeddings", default=1 << 40):
        return [FULL for _ in layers]
    every = config.integer("sliding_window_pattern", default=_PATTERNS.get(config.model_type, 0))
    if every:
        return [FULL if (index + 1) % every == 0 else WINDOW for index in layers]
    if config.model_type == "gemma2":
        return [FULL if index % 2 else WINDOW for index in layers]
    first = config.integer("max_window_layers", default=0) if config.values.get("use_sliding_window") else 0
    return [WINDOW if index >= first else FULL for index in layers]


def _attention(config: ModelConfig, element: float) -> tuple[float, str, int]:
    """Bytes of a token in one layer of attention, a word for it, and the KV heads that split over GPUs."""
    if config.has("kv_lora_rank"):
        latent = config.integer("kv_lora_rank") + config.integer("qk_rope_head_dim")
        nbytes = latent * element
        if config.has("index_head_dim"):  # keys of the sparse indexer: 8 bits each and a scale for 128
            index = config.integer("index_head_dim")
            nbytes += index + 4 * -(-index // 128)
        return nbytes, f"MLA, a latent of {latent}", 0
    heads = config.integer("num_attention_heads", "n_head", "num_heads")
    kv_heads = config.integer("num_key_value_heads", "num_kv_heads", "n_head_kv", default=heads)
    dim = config.integer("head_dim", default=config.integer("hidden_size", "n_embd", "d_model") // max(1, heads))
    value_dim = config.integer("v_head_dim", default=dim)
    kind = "MHA" if kv_heads == heads else "MQA" if kv_heads == 1 else "GQA"
    return kv_heads * (dim + value_dim) * element, f"{kind}, {kv_heads} of {heads} heads of {dim}", max(1, kv_heads)


def _state_nbytes(config: ModelConfig) -> float:
    """Of one layer and sequence: the recurrent state and the inputs of its convolution."""
    element = DTYPE_NBYTES[config.dtype]
    state = DTYPE_NBYTES.get(str(config.values.get("mamba_ssm_dtype", config.dtype)), element)
    if config.has("linear_num_value_heads"):
        keys = config.integer("linear_num_key_heads") * config.integer("linear_key_head_dim")
        value_heads, value_dim = config.integer("linear_num_value_heads"), config.integer("linear_value_head_dim")
        conv = (2 * keys + value_heads * value_dim) * (config.integer("linear_conv_kernel_dim") - 1)
        return value_heads * config.integer("linear_key_head_dim") * value_dim * state + conv * element
    depth = config.integer("mamba_d_state", "ssm_state_size", "state_size")
    kernel = config.integer("mamba_d_conv", "conv_kernel", "conv_kernel_size", default=4)
    if config.has("mamba_n_heads") or config.has("mamba_num_heads"):
        heads = config.integer("mamba_n_heads", "mamba_num_heads")
        inner = heads * config.integer("mamba_d_head", "mamba_head_dim")
        mixed = inner + 2 * config.integer("mamba_n_groups", "n_groups", default=1) * depth
    else:
        inner = mixed = config.integer("mamba_expand", "expand", default=2) * config.integer("hidden_size")
    return inner * depth * state + mixed * (kernel - 1) * element


def _kv_dtype(config: ModelConfig) -> str:
    """What the checkpoint asks for: KV in 8 bits where its quantisation says so, else the weights' dtype."""
    quantisation = config.values.get("quantization_config")
    scheme = quantisation.get("kv_cache_scheme") if isinstance(quantisation, dict) else None
    if isinstance(scheme, dict) and scheme.get("num_bits") == 8:
        return "fp8" if scheme.get("type", "float") == "float" else "int8"
    algorithm: Any = quantisation.get("kv_cache_quant_algo") if isinstance(quantisation, dict) else None
    return "fp8" if str(algorithm).upper() == "FP8" else config.dtype


def described(layers: Sequence[tuple[str, int]]) -> str:
    """ "10 full, 30 window", for people."""
    return ", ".join(f"{count} {kind}" for kind, count in layers)
