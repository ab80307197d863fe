"""Which calls of `generate()` can start from a restored prefix, and which are refused and why."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Final

import torch
import transformers
from packaging.version import Version
from transformers import GenerationConfig
from transformers.generation.configuration_utils import GenerationMode

from .errors import Unsupported

_MODES: Final = frozenset(
    {GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE}
)
_CHUNKED_PREFILL_SINCE: Final = Version("5.24.0")
"""The first release known to compute only what follows the prefix when it prefills in chunks."""
_HARMLESS: Final = frozenset(
    {
        "attention_mask",
        "logits_processor",
        "negative_prompt_attention_mask",
        "negative_prompt_ids",
        "prefix_allowed_tokens_fn",
        "stopping_criteria",
        "streamer",
        "synced_gpus",
        "tokenizer",
    }
)
"""Arguments that do not enter the model together with the prompt, or are checked here."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request that may start from a restored prefix."""

    ids: torch.Tensor
    """`[1, tokens]`"""
    rows: int
    """Sequences that generate() will run for it: beams, or several returned sequences."""


def as_tensor(input_ids: Any) -> torch.Tensor | None:
    """`[prompts, tokens]` from a tensor or list of one or more prompts."""
    if input_ids is None:
        return None
    ids = input_ids if isinstance(input_ids, torch.Tensor) else torch.tensor(input_ids, dtype=torch.long)
    return ids[None] if ids.ndim == 1 else ids


def as_ids(input_ids: Any) -> torch.Tensor:
    """`[1, tokens]` from a tensor or list of one prompt; Unsupported for anything else."""
    ids = as_tensor(input_ids)
    if ids is None:
        raise Unsupported("input_ids", "a prompt of token ids is needed")
    if ids.ndim != 2 or ids.is_floating_point():
        raise Unsupported("input_ids", f"token ids [1, tokens] are needed, got {ids.dtype} {tuple(ids.shape)}")
    if ids.shape[0] != 1:
        raise Unsupported("input_ids", f"a batch of {ids.shape[0]} prompts; call once per prompt")
    if ids.shape[1] == 0:
        raise Unsupported("input_ids", "an empty prompt")
    return ids


def check_request(model: Any, input_ids: Any, options: dict[str, Any]) -> Prompt:
    """Raise Unsupported for what would make a restored prefix wrong, or what enters the model but not the key."""
    for name in ("inputs", "inputs_embeds", "cache", "past_key_values", "assistant_model", "custom_generate"):
        if options.get(name) is not None:
            raise Unsupported(name, _WHY[name])
    ids = as_ids(input_ids)
    config: Any = copy.deepcopy(options.get("generation_config") or model.generation_config)
    others = config.update(**{key: value for key, value in options.items() if key != "generation_config"})
    for name, value in others.items():
        if name not in _HARMLESS and value is not None:
            raise Unsupported(name, "it enters the model with the prompt and is no part of the key")
    _check_config(config)
    _check_mask(others.get("attention_mask"), ids, config)
    return Prompt(ids, max(config.num_beams or 1, config.num_return_sequences or 1))


def _check_config(config: GenerationConfig) -> None:
    mode = config.get_generation_mode()
    if mode not in _MODES:
        raise Unsupported("generation mode", f"{mode.value} crops or rewrites the cache while it runs")
    if config.prefill_chunk_size is not None and Version(transformers.__version__) < _CHUNKED_PREFILL_SINCE:
        raise Unsupported(
            "prefill_chunk_size",
            f"transformers {transformers.__version__} would feed the whole prompt again on top of a restored prefix; "
            f"leave it out, or use transformers {_CHUNKED_PREFILL_SINCE}",
        )
    if config.use_cache is False:
        raise Unsupported("use_cache", "without a cache there is nothing to restore into")
    if config.cache_implementation not in (None, "dynamic", "dynamic_full"):
        raise Unsupported(
            "cache_implementation", f"{config.cache_implementation!r}; only a dynamic cache can be restored"
        )
    if config.token_healing:
        raise Unsupported("token_healing", "it changes the prompt after the lookup")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name):
            raise Unsupported(name, "a restored prefix has none")


def _check_mask(mask: Any, ids: torch.Tensor, config: GenerationConfig) -> None:
    if mask is None:
        pad, eos = config.pad_token_id, config.eos_token_id
        if pad is not None and pad not in (eos if isinstance(eos, list) else [eos]) and bool((ids == pad).any()):
            raise Unsupported(
                "input_ids", f"they hold pad tokens ({pad}), which generate() would hide; give attention_mask"
            )
        return
    if tuple(mask.shape) != tuple(ids.shape):
        raise Unsupported(
            "attention_mask", f"its shape {tuple(mask.shape)} is not that of input_ids {tuple(ids.shape)}"
        )
    if not bool((mask == 1).all()):
        raise Unsupported("attention_mask", "it hides tokens (padding), which moves the positions of the others")


_WHY: Final = {
    "inputs": "give the prompt as input_ids",
    "inputs_embeds": "embeddings are no part of the key; give input_ids",
    "cache": "the prefix cache brings its own; use restore() and save() to keep yours",
    "past_key_values": "the prefix cache brings its own; use restore() and save() to keep yours",
    "assistant_model": "assisted generation crops and rewrites the cache while it runs",
    "custom_generate": "what it does with the cache is not known",
}
