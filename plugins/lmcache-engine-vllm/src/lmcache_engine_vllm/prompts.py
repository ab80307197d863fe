"""A request of vLLM as a chain: its namespace, its tokens, and what enters its prompt that is no token."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from lmcache_core import Chain, Model, NamespaceError, pack_extra, salt_id

from .geometry import Rectangle, model_of
from .identity import Identity, adapter_of


class Namespaces:
    """The models that requests belong to, by adapter and tenant.  Bounded: the oldest is worked out again."""

    _MAX_MODELS = 1024

    def __init__(self, identity: Identity, ranks: Sequence[Sequence[Rectangle]], *, key_secret: str) -> None:
        self.identity = identity
        self._ranks = ranks
        self._key_secret = key_secret
        self._epoch = ""
        self._models: dict[tuple[str, bytes], Model] = {}
        self._adapters: dict[tuple[str, str], Future[str]] = {}
        self._reader = ThreadPoolExecutor(1, "lmcache-vllm-adapters")

    def start_epoch(self, name: str) -> None:
        """From now on nothing that was stored before is found."""
        self._epoch = name
        self._models.clear()
        self._adapters.clear()

    def model(self, request: Any) -> Model | None:
        """The model of a request; None while its adapter is still being read.

        NamespaceError names what of the request cannot be part of a key.
        """
        adapter = self._adapter(request)
        if adapter is None:
            return None
        key = (adapter, salt_id(request.cache_salt, self._key_secret))
        found = self._models.get(key)
        if found is None:
            family = self.identity.family(adapter=key[0], salt_id=key[1], epoch=self._epoch)
            found = self._models[key] = model_of(family, self._ranks)
            if len(self._models) > self._MAX_MODELS:
                del self._models[next(iter(self._models))]
        return found

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)

    def _adapter(self, request: Any) -> str | None:
        """Read once for each adapter, in the background, unless its files are to be read anew."""
        lora = request.lora_request
        if lora is None:
            return ""
        key = (lora.lora_name, lora.lora_path)
        reading = self._adapters.get(key)
        if reading is None or getattr(lora, "load_inplace", False):
            if len(self._adapters) >= self._MAX_MODELS:
                self._adapters.clear()
            reading = self._adapters[key] = self._reader.submit(adapter_of, *key)
        return reading.result() if reading.done() else None


def chain_of(request: Any, model: Model, tokens: int) -> Chain:
    """The chain of the first `tokens` tokens of a request."""
    return Chain.of(model, _tokens(request, 0, tokens), extra_of(request, model.family.chunk_tokens))


def extended(chain: Chain, request: Any, tokens: int) -> Chain:
    """`chain`, which belongs to this request, up to its first `tokens` tokens."""
    if tokens <= chain.tokens:
        return chain
    extra = extra_of(request, chain.model.family.chunk_tokens)
    return chain.extend(_tokens(request, chain.tokens, tokens), extra)


def extra_of(request: Any, chunk_tokens: int) -> Mapping[int, bytes]:
    """By chunk: images and audio by their whole hashes and where they lie, prompt embeddings by their content."""
    items: dict[int, list[tuple[int, bytes]]] = {}
    for feature in request.mm_features or ():
        if not isinstance(feature.identifier, str) or not feature.identifier:
            raise NamespaceError("multimodal", f"a {feature.modality} input has no hash")
        start = feature.mm_position.offset
        for chunk in range(start // chunk_tokens, -(-(start + feature.mm_position.length) // chunk_tokens)):
            inside = chunk * chunk_tokens - start  # where in the input the chunk begins, or how far before it
            content = f"{feature.modality}\0{feature.identifier}\0{max(inside, 0)}".encode()
            items.setdefault(chunk, []).append((max(-inside, 0), content))
    embeds = request.prompt_embeds
    if embeds is not None:
        mask = request.prompt_is_token_ids
        for chunk in range(len(embeds) // chunk_tokens):
            rows = slice(chunk * chunk_tokens, (chunk + 1) * chunk_tokens)
            raw = embeds[rows].detach().to("cpu").contiguous().view(torch.uint8).numpy()
            head = f"embeds\0{embeds.dtype}\0".encode() + bytes(mask[rows] if mask is not None else ())
            items.setdefault(chunk, []).append((0, head + hashlib.sha256(raw).digest()))
    return {chunk: pack_extra(sorted(found)) for chunk, found in items.items()}


def _tokens(request: Any, start: int, stop: int) -> Any:
    prompt = request.prompt_token_ids
    if prompt is not None and start == 0 and stop == len(prompt):
        return prompt
    return request.all_token_ids[start:stop]
