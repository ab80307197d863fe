"""Everything but the tokens that decides the bytes of a model's KV, gathered in one place."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch

from lmcache_core import Family, NamespaceError, salt_id

from .geometry import Geometry

_VOLATILE: Final = frozenset({"_name_or_path", "_model_name_or_path", "transformers_version", "use_cache"})
"""Config entries that change without changing the KV."""
_LENGTH_DEPENDENT_ROPE: Final = frozenset({"dynamic", "longrope"})
_HASH_THREADS: Final = 4
_HASH_STEP_NBYTES: Final = 64 << 20


def family_of(
    model: Any,
    geometry: Geometry,
    *,
    chunk_tokens: int,
    name: str | None = None,
    weights: str | None = None,
    adapter: str | None = None,
    salt: str | None = None,
    key_secret: str = "",
) -> Family:
    """The namespace of `model` as it is now; NamespaceError names the field that cannot be determined.

    `weights` is a revision or digest that the caller vouches for; without it every parameter is hashed.  `adapter` must
    name (with a content digest) the active LoRA adapters of a model that has any.
    """
    _check_rope(model)
    return Family(
        model=name if name is not None else _name_of(model),
        weights=weights if weights is not None else weights_digest(model),
        kv_dtype=str(geometry.dtype).removeprefix("torch."),
        chunk_tokens=chunk_tokens,
        adapter=_adapter_of(model, adapter),
        tags=_tags_of(model),
        salt_id=salt_id(salt, key_secret),
    )


def weights_digest(model: Any) -> str:
    """ "sha256:..." over name, type, shape and every byte of the parameters and persistent buffers."""
    tensors = sorted(model.state_dict(keep_vars=True).items())
    places: dict[tuple[Any, ...], torch.Tensor] = {}
    for name, tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise NamespaceError("weights", f"{name} is a {type(tensor).__name__}, not a tensor; give weights=")
        if tensor.is_meta:
            raise NamespaceError("weights", f"{name} is not in memory (offloaded); give weights=")
        places.setdefault(_place(tensor), tensor)  # tied weights are hashed once
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        digests = dict(zip(places, pool.map(_tensor_digest, places.values()), strict=True))
    whole = hashlib.sha256()
    for name, tensor in tensors:
        head = json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode()
        whole.update(len(head).to_bytes(4, "little") + head + digests[_place(tensor)])
    return f"sha256:{whole.hexdigest()}"


def state_of(model: Any) -> tuple[Any, ...]:
    """Equal for two calls as long as nothing happened to the model that `family_of` would see; costs microseconds.

    Parameters that are replaced, moved or written in place (a training step, another checkpoint, merged adapters), the
    attention implementation and the active adapters all change it.
    """
    versions = hash(tuple((tensor.data_ptr(), _version(tensor)) for tensor in model.parameters()))
    return versions, model.config._attn_implementation, tuple(_adapters(model)), model.training


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _tensor_digest(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    digest = hashlib.sha256()
    for start in range(0, flat.numel(), _HASH_STEP_NBYTES):
        digest.update(flat[start : start + _HASH_STEP_NBYTES].cpu().numpy().data)
    return digest.digest()


def _name_of(model: Any) -> str:
    name = str(getattr(model, "name_or_path", "") or getattr(model.config, "_name_or_path", ""))
    if not name:
        raise NamespaceError("model", "the model does not say where it came from; give name=")
    return os.path.basename(os.path.abspath(name)) if os.path.isdir(name) else name


def _tags_of(model: Any) -> tuple[tuple[str, str], ...]:
    config = {key: value for key, value in model.config.to_dict().items() if key not in _VOLATILE}
    attention = model.config._attn_implementation
    if not attention:
        raise NamespaceError("attention", "the model does not say which attention implementation it uses")
    try:
        encoded = json.dumps(config, sort_keys=True, default=str)
    except TypeError as error:
        raise NamespaceError("config", f"cannot be written as JSON: {error}") from error
    tags = {
        "attention": str(attention),
        "class": type(model).__name__,
        "config": hashlib.sha256(encoded.encode()).hexdigest(),
    }
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        tags["quantization"] = str(method)
    return tuple(sorted(tags.items()))


def _check_rope(model: Any) -> None:
    """Frequencies that depend on the whole length give the same prefix other keys in a longer prompt."""
    kinds = _rope_kinds(model.config.get_text_config(decoder=True))
    for kind in kinds & _LENGTH_DEPENDENT_ROPE:
        raise NamespaceError("rope", f"{kind!r} scaling makes the keys of a prefix depend on the length of the prompt")


def _rope_kinds(config: Any) -> set[str]:
    """The rope types of a config; newer ones may hold one set of parameters per layer type."""
    found: set[str] = set()
    pending = [getattr(config, field, None) for field in ("rope_parameters", "rope_scaling")]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            found.update(str(item[key]) for key in ("rope_type", "type") if isinstance(item.get(key), str))
            pending += [value for value in item.values() if isinstance(value, dict)]
    return found


def _adapter_of(model: Any, adapter: str | None) -> str:
    active = sorted(set(_adapters(model)))
    if active and not adapter:
        raise NamespaceError(
            "adapter", f"the model has adapters ({', '.join(active)}); give adapter= with their digest"
        )
    if not active:
        return adapter or ""
    return f"{adapter} [{', '.join(active)}]"


def _adapters(model: Any) -> Iterator[str]:
    """What each adapter layer has active, by what peft's layers say of themselves; peft is not imported."""
    for module in model.modules():
        kind = type(module)  # asked of the class: a module answers slowly for what it has not
        if hasattr(kind, "active_adapters") and hasattr(kind, "disable_adapters") and hasattr(kind, "merged"):
            names = module.active_adapters
            yield "+".join(map(str, names)) + (" disabled" if module.disable_adapters else "")
