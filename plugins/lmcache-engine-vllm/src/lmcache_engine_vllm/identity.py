"""Everything but tokens and tenant that decides the bytes of an engine's KV, gathered in one place."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lmcache_core import Family, NamespaceError

from .weights import files_digest, weights_of

_VOLATILE: Final = frozenset({"_name_or_path", "transformers_version", "use_cache"})
"""Config entries that change without changing the KV."""
_LENGTH_DEPENDENT_ROPE: Final = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True, slots=True)
class Identity:
    """The same for every request of an engine and for every rank.  Picklable."""

    model: str
    weights: str
    kv_dtype: str
    chunk_tokens: int
    tags: tuple[tuple[str, str], ...]

    def family(self, *, adapter: str = "", salt_id: bytes = b"", epoch: str = "") -> Family:
        """The namespace of one request; `epoch` sets apart what was computed after the engine's weights changed."""
        tags = self.tags if not epoch else tuple(sorted((*self.tags, ("epoch", epoch))))
        return Family(
            model=self.model,
            weights=self.weights,
            kv_dtype=self.kv_dtype,
            chunk_tokens=self.chunk_tokens,
            adapter=adapter,
            tags=tags,
            salt_id=salt_id,
        )


def identity_of(vllm_config: Any, *, kv_dtype: str, chunk_tokens: int, weights: str = "") -> Identity:
    """What `vllm_config` loads; NamespaceError names the field that cannot be determined.

    `weights` is a revision that the operator vouches for, instead of a digest of the files.
    """
    model_config, cache_config = vllm_config.model_config, vllm_config.cache_config
    if getattr(cache_config, "calculate_kv_scales", False):
        raise NamespaceError("kv scales", "calculate_kv_scales makes the KV depend on the first request")
    parallel = vllm_config.parallel_config
    for field in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, field, 1) > 1:
            raise NamespaceError(field, "ranks that share out tokens are not supported")
    if parallel.pipeline_parallel_size > 1:
        raise NamespaceError("pipeline_parallel_size", "pipeline stages are not supported yet")
    path = Path(model_config.model)
    return Identity(
        model=path.resolve().name if path.exists() else str(model_config.model),
        weights=weights or weights_of(model_config, vllm_config.load_config),
        kv_dtype=kv_dtype,
        chunk_tokens=chunk_tokens,
        tags=_tags(vllm_config),
    )


def adapter_of(name: str, folder: str) -> str:
    """Name and content of a LoRA adapter."""
    path = Path(folder)
    if not path.exists():
        raise NamespaceError("lora", f"{name}: {path} is not a local folder, its content is not known")
    return f"{name}@{files_digest(path)}"


def _tags(vllm_config: Any) -> tuple[tuple[str, str], ...]:
    model_config = vllm_config.model_config
    config = {key: value for key, value in model_config.hf_config.to_dict().items() if key not in _VOLATILE}
    try:
        encoded = json.dumps(config, sort_keys=True, default=str)
    except TypeError as error:
        raise NamespaceError("config", f"cannot be written as JSON: {error}") from error
    tags = {
        "config": hashlib.sha256(encoded.encode()).hexdigest(),
        "dtype": str(model_config.dtype).removeprefix("torch."),
        "engine": "vllm",
    }
    quantization = getattr(model_config, "quantization", None)
    if quantization:
        tags["quantization"] = str(quantization)
    if getattr(model_config, "disable_sliding_window", False):
        tags["sliding_window"] = "disabled"
    if _rope_kinds(config) & _LENGTH_DEPENDENT_ROPE:  # the longest prompt decides which frequencies are used
        tags["rope_tokens"] = str(model_config.max_model_len)
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None and draft.model != model_config.model:  # layers of its own, with KV of their own
        tags["draft"] = f"{speculative.method} {weights_of(draft, vllm_config.load_config)}"
    return tuple(sorted(tags.items()))


def _rope_kinds(config: Any) -> set[str]:
    """The rope types anywhere in a config."""
    found: set[str] = set()
    pending = [config]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            found.update(str(item[key]) for key in ("rope_type", "type") if isinstance(item.get(key), str))
            pending += [value for value in item.values() if isinstance(value, dict)]
    return found
