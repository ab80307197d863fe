"""Prompts that share a prefix, generated without computing it again: lookup, restore, generate, store."""

from __future__ import annotations

import itertools
import logging
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from transformers import DynamicCache
from transformers.generation.stopping_criteria import StoppingCriteriaList

from lmcache_core import (
    Cache,
    CacheConfig,
    CacheError,
    Chain,
    Group,
    GroupKind,
    Hit,
    Job,
    Model,
    NamespaceError,
    Shard,
    load_config,
    open_cache,
)

from . import geometry as shapes
from .errors import Unsupported
from .namespace import family_of, state_of
from .request import Prompt, as_ids, as_tensor, check_request
from .timing import FirstToken

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The longest that a request waits for the cache before it goes on without; the sum bounds what a miss can cost."""

    lookup_timeout_s: float = 0.25
    """For tiers that answer late."""
    restore_timeout_s: float = 10.0
    store_timeout_s: float = 10.0
    """For the stores of earlier requests, so that the next turn of a conversation finds them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the cache did for one request."""

    prompt_tokens: int
    hit_tokens: int = 0
    """Tokens whose KV was restored, not computed."""
    resident_tokens: int = 0
    """Of the stored prefix, how much was in host memory at the lookup; the rest came from lower tiers."""
    refused_tokens: int = 0
    """Found too, and computed all the same: loading them would have taken longer."""
    nbytes: int = 0
    """Bytes restored."""
    lookup_s: float = 0.0
    restore_s: float = 0.0
    ttft_s: float = 0.0
    """From the call of generate() to its first new token, lookup and restore included."""
    uncached: str = ""
    """Why the cache had no part in it; empty otherwise."""
    store: Job | None = None
    """The store of what is new, in the background; `None` if there was nothing to store."""


class Generation(NamedTuple):
    """What generate() of transformers returned, and what the cache did."""

    output: Any
    report: Report


class Restored(NamedTuple):
    """A cache to continue from, and the number of prompt tokens in it."""

    cache: DynamicCache
    hit_tokens: int


@dataclass(frozen=True, slots=True)
class _Bound:
    """A model as the cache knows it, until something about it changes."""

    state: tuple[Any, ...]
    geometry: shapes.Geometry
    models: dict[str, Model] = field(default_factory=dict)
    """By tenant salt."""


class PrefixCache:
    """Saves and restores the KV of prompt prefixes of one model.  Safe to call from several threads.

    `name`, `weights` and `adapter` override what is found out about the model, see `namespace.family_of`; `salt`
    separates tenants.  A request or model that cannot be cached raises Unsupported or NamespaceError; with
    `strict=False` requests of that kind are generated without the cache, and the report says why.
    """

    def __init__(
        self,
        cache: Cache,
        model: Any,
        *,
        chunk_tokens: int = 256,
        name: str | None = None,
        weights: str | None = None,
        adapter: str | None = None,
        salt: str = "",
        key_secret: str = "",
        strict: bool = True,
        store_generated: bool = True,
        limits: Limits = Limits(),
        owned: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.cache = cache
        self.model = model
        self.limits = limits
        self._family = partial(
            family_of,
            chunk_tokens=chunk_tokens,
            name=name,
            weights=weights,
            adapter=adapter,
            key_secret=key_secret,
        )
        self._chunk_tokens = chunk_tokens
        self._weights_given = weights is not None
        self._salt = salt
        self._strict = strict
        self._store_generated = store_generated
        self._owned = owned
        self._clock = clock
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._session = uuid.uuid4().hex[:12]
        self._stores: list[Job] = []
        self._bound: _Bound | None = None
        self._argument = shapes.cache_argument(model)
        self.model_key(salt)

    def generate(self, input_ids: Any, *, salt: str | None = None, **options: Any) -> Generation:
        """`model.generate(input_ids, **options)` from the longest stored prefix; stores what was computed.

        `salt` is this request's tenant; one that is not legal costs the request its caching, no more.
        """
        start = self._clock()
        try:
            prompt = check_request(self.model, input_ids, options)
            model = self.model_key(self._salt if salt is None else salt)
        except (Unsupported, NamespaceError) as error:
            if self._strict and getattr(error, "field", "") != "salt":
                raise
            _log.warning("generated without the cache: %s", error)
            ids = as_tensor(input_ids)
            output, ttft_s = self._timed({"input_ids": ids, **options}, start)
            tokens = ids.shape[-1] if ids is not None else 0
            return Generation(output, Report(prompt_tokens=tokens, ttft_s=ttft_s, uncached=str(error)))
        ids = prompt.ids
        request = self._request()
        chain = self.cache.chain(_tokens(ids), model)
        past, chunks, report = self._restore(chain, request)
        if prompt.rows > 1 and chunks:
            past.batch_repeat_interleave(prompt.rows)
        if options.get("attention_mask") is None:
            options["attention_mask"] = torch.ones_like(ids)
        computing = self._clock()
        output, ttft_s = self._timed({"input_ids": ids, self._argument: past, **options}, start)
        if ttft_s:
            seconds = ttft_s - (computing - start)
            hit = report.hit_tokens
            self.cache.computed(model, prompt.ids.shape[1] - hit, seconds, context_tokens=hit)
        job = None
        try:
            job = self._save(self._longest(prompt, chain, output, past), past, chunks, request)
        except CacheError as error:
            _log.warning("not stored: %s", error)
        return Generation(output, replace(report, ttft_s=ttft_s, store=job))

    def restore(self, input_ids: Any, *, salt: str | None = None) -> Restored:
        """The longest stored prefix of one prompt, at most all of it but its last token, whose logits are needed."""
        ids = as_ids(input_ids)
        chain = self.cache.chain(_tokens(ids), self.model_key(self._salt if salt is None else salt))
        past, _, report = self._restore(chain, self._request())
        return Restored(past, report.hit_tokens)

    def save(self, input_ids: Any, past_key_values: DynamicCache, *, salt: str | None = None) -> Job | None:
        """Store the whole chunks of `input_ids` from the first row of a cache that holds them, in the background.

        The tensors must not be written to until `job.gathered`; generate() never does.  `None` without a whole chunk.
        """
        ids = as_ids(input_ids)
        chain = self.cache.chain(_tokens(ids), self.model_key(self._salt if salt is None else salt))
        return self._save(chain, past_key_values, 0, self._request())

    def model_key(self, salt: str = "") -> Model:
        """What `model` is to the cache, for one tenant; worked out again when the model has changed since."""
        with self._lock:
            state = state_of(self.model)
            if self._bound is None or self._bound.state != state:
                if self._bound is not None and self._weights_given:
                    raise NamespaceError(
                        "weights", "the model changed after its weights were named; make a new PrefixCache"
                    )
                self._bound = _Bound(state, shapes.probe(self.model))
            known = self._bound.models
            if salt not in known:
                family = self._family(self.model, self._bound.geometry, salt=salt)
                geometry = self._bound.geometry
                shard = Shard.of(
                    family,
                    geometry.layout(self._chunk_tokens),
                    layers=(0, geometry.layers),
                    heads=(0, geometry.k_heads),
                )
                known[salt] = Model(family, (Group(GroupKind.FULL, (shard,)),))
            return known[salt]

    @property
    def geometry(self) -> shapes.Geometry:
        if self._bound is None:
            raise RuntimeError("no model is bound")
        return self._bound.geometry

    def close(self) -> None:
        """Wait for the stores within their limit; a cache that was opened for this object is flushed and closed."""
        self._settle()
        if self._owned:
            if not self.cache.drain(self.limits.store_timeout_s):
                _log.warning("closed before everything had reached the lower tiers: they took too long")
            self.cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _request(self) -> str:
        return f"transformers-{self._session}-{next(self._numbers)}"

    def _restore(self, chain: Chain, request: str) -> tuple[DynamicCache, int, Report]:
        """A cache, the chunks that need no store, and the report; an empty cache on any failure of the cache."""
        self._settle()
        start = self._clock()
        report = Report(prompt_tokens=chain.tokens)
        try:
            hit = self.cache.lookup_answered(chain, request, timeout_s=self.limits.lookup_timeout_s)
            looked_up = self._clock()
            refused = hit.refused * self._chunk_tokens
            report = replace(report, lookup_s=looked_up - start, refused_tokens=refused)
            # The last token is computed again even if it is stored: its logits are what generate() needs, and with no
            # token left transformers would feed the whole prompt on top of the restored one.
            wanted = min(hit.chunks * self._chunk_tokens, chain.tokens - 1)
            if wanted > 0:
                keys, values, chunks = self._load(hit, -(-wanted // self._chunk_tokens))
                tokens = min(chunks * self._chunk_tokens, wanted)
                if tokens:
                    past = self._place(keys, values, tokens)
                    report = replace(
                        report,
                        hit_tokens=tokens,
                        resident_tokens=min(hit.resident * self._chunk_tokens, tokens),
                        nbytes=chunks * chain.model.shards[0].layout.nbytes,
                        restore_s=self._clock() - looked_up,
                    )
                    return past, chunks, report
        except CacheError as error:
            _log.warning("nothing restored: %s", error)
            report = replace(report, uncached=str(error))
        finally:
            self.cache.release(request)
        return DynamicCache(config=self.model.config), 0, report

    def _load(self, hit: Hit, chunks: int) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
        """Host tensors for `chunks` chunks, and how many leading chunks of them were filled in time."""
        (shard,) = hit.chain.model.shards
        keys, values = self.geometry.allocate(chunks * self._chunk_tokens)
        pages = [shapes.pages_of(keys, self._chunk_tokens), shapes.pages_of(values, self._chunk_tokens)]
        job = self.cache.retrieve(hit, shard, range(chunks), pages, range(chunks))
        result = job.wait(self.limits.restore_timeout_s)
        if result is None:
            # The job may still write into these tensors: nobody else gets them.
            _log.warning("nothing restored: the load took longer than %s s", self.limits.restore_timeout_s)
            return [], [], 0
        if result.ok_chunks < chunks:
            _log.warning("%d of %d chunks restored: %s", result.ok_chunks, chunks, result.failed)
        return keys, values, result.ok_chunks

    def _place(self, keys: list[torch.Tensor], values: list[torch.Tensor], tokens: int) -> DynamicCache:
        devices = self.geometry.devices
        return shapes.filled_cache(
            self.model,
            [k[:, :, :tokens].to(device) for k, device in zip(keys, devices, strict=True)],
            [v[:, :, :tokens].to(device) for v, device in zip(values, devices, strict=True)],
        )

    def _save(self, chain: Chain, past: DynamicCache, known_chunks: int, request: str) -> Job | None:
        """Store the chunks of `chain` after the `known_chunks` that came out of the cache."""
        span = range(known_chunks, len(chain))
        if not span:
            return None
        tensors = shapes.checked_tensors(past, self.geometry, span.stop * self._chunk_tokens)
        (shard,) = chain.model.shards
        pages = [shapes.pages_of(part, self._chunk_tokens) for part in tensors]
        job = self.cache.store(chain, shard, span, pages, span, request=request)
        with self._lock:
            self._stores = [other for other in self._stores if not other.done()] + [job]
        return job

    def _longest(self, prompt: Prompt, chain: Chain, output: Any, past: DynamicCache) -> Chain:
        """The chain of all tokens in the cache, or of the prompt where its rows differ after it."""
        if prompt.rows > 1 or not self._store_generated:
            return chain
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        new = sequences[0, chain.tokens : past.get_seq_length()]
        return chain.extend(_tokens(new[None])) if len(new) else chain

    def _settle(self) -> None:
        """Let earlier stores become readable, within `store_timeout_s`."""
        with self._lock:
            stores = list(self._stores)
        deadline = self._clock() + self.limits.store_timeout_s
        for job in stores:
            job.wait(max(0.0, deadline - self._clock()))
        with self._lock:
            self._stores = [job for job in self._stores if not job.done()]

    def _timed(self, arguments: dict[str, Any], start: float) -> tuple[Any, float]:
        """generate() of the model, and the time from `start` to its first new token."""
        first = FirstToken(self._clock)
        arguments["stopping_criteria"] = StoppingCriteriaList([*(arguments.get("stopping_criteria") or ()), first])
        return self.model.generate(**arguments), first.after(start)


def open_prefix_cache(model: Any, config: CacheConfig | str | Path | None = None, **options: Any) -> PrefixCache:
    """A PrefixCache over the tiers of a configuration, closed together with it; `options` are those of PrefixCache.

    Without `config`, $LMCACHE_CONFIG or ./lmcache.yaml is read.
    """
    settings = config if isinstance(config, CacheConfig) else load_config(config)
    cache = open_cache(settings)
    try:
        defaults = {"chunk_tokens": settings.chunk_tokens, "key_secret": settings.key_secret}
        return PrefixCache(cache, model, owned=True, **{**defaults, **options})
    except BaseException:
        cache.close()
        raise


def _tokens(ids: torch.Tensor) -> Any:
    return ids[0].cpu().numpy()
