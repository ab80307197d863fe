"""Tiny models with random weights, and a cache of their KV: each test takes a fraction of a second."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from lmcache_core import LocalCache, load_config, open_cache
from lmcache_engine_transformers import PrefixCache
from lmcache_engine_transformers.geometry import cache_argument

CHUNK = 16
GREEDY = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}


def llama(dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    """Weights are drawn wide, so that a wrong KV moves the logits by whole units."""
    config = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "eos_token_id": None,
        **changes,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**config)).to(dtype).eval()


def prompt(tokens: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 128, (1, tokens), generator=torch.Generator().manual_seed(seed))


def logits(output: Any) -> torch.Tensor:
    return torch.stack(output.logits).float()


def continued(model: Any, ids: torch.Tensor, past: Any) -> Any:
    """generate() of transformers itself, from a cache."""
    return model.generate(ids, **{cache_argument(model): past}, **GREEDY)


def past_of(model: Any, ids: torch.Tensor) -> DynamicCache:
    """The cache after a plain forward pass."""
    past = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, use_cache=True, **{cache_argument(model): past})
    return past


def difference(one: Any, other: Any) -> float:
    """The largest difference of any logit of any step."""
    return float((logits(one) - logits(other)).abs().max())


@pytest.fixture(scope="session")
def model() -> Any:
    return llama()


def write_config(folder: Path, disk: bool = True, admission: str = "always") -> Path:
    """A host tier, and a disk tier below it unless told otherwise; files in `folder`."""
    tiers = ["{name: host, backend: memory, capacity: 4MiB}"]
    if disk:
        tiers.append(f"{{name: disk, backend: disk, capacity: 64MiB, options: {{path: {folder / 'store'}}}}}")
    lines = [f"chunk_tokens: {CHUNK}", "device: cpu", f"admission: {admission}", "tiers:"]
    lines += [f"  - {tier}" for tier in tiers]
    path = folder / "lmcache.yaml"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[LocalCache]:
    with open_cache(load_config(write_config(tmp_path, disk=False))) as opened:
        yield opened


@pytest.fixture
def prefix(cache: Any, model: Any) -> Iterator[PrefixCache]:
    with PrefixCache(cache, model, chunk_tokens=CHUNK, name="tiny") as opened:
        yield opened


@pytest.fixture
def make(cache: Any) -> Callable[..., PrefixCache]:
    def build(model: Any, **options: Any) -> PrefixCache:
        return PrefixCache(cache, model, **{"chunk_tokens": CHUNK, "name": "tiny", **options})

    return build
