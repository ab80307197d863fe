"""The half of the connector in vLLM's scheduler: which tokens are there, what is loaded and what is stored, per step.

Nothing here waits, copies or talks to a store: lookups and releases go through a thread, transfers to the workers.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lmcache_core import Cache, Chain, GroupKind, Hit, NamespaceError

from .geometry import Rectangle
from .kv_events import KVEvents
from .lookups import Lookup, Lookups
from .metadata import Load, RankCard, StepMetadata, Store, WorkerReport
from .pins import Pins
from .prompts import Namespaces, chain_of, extended
from .settings import Settings
from .spans import load_part, store_part, usable_chunks
from .stats import Stats

log = logging.getLogger("vllm.lmcache")

_TRANSFERS_IDLE_S: Final = 0.005
"""How long a worker may wait in a step without work for a transfer to end: vLLM would spin, and take its CPU time."""
_LOOKUPS_IDLE_S: Final = 0.001
_REFRESH_S: Final = 20.0
"""A request that waits longer for blocks asks again, lest what it was told expires."""
_STALE_S: Final = 0.1
"""One that waits longer for its turn, and was not told of its whole prompt, asks once more: more may be there."""


@dataclass(slots=True, eq=False)
class _Tracked:
    """One request: what it was told, and how much of it is stored."""

    request: Any
    chain: Chain
    lease: str
    limit: int
    """Tokens up to which chunks are stored."""
    stored: int = 0
    """Leading chunks that need no store."""
    lookup: Lookup | None = None
    asked_at: float = 0.0
    asked_again: bool = False
    start: int = 0
    """Tokens that vLLM had itself when it was last told of a hit."""
    refused: bool = False
    """Nothing more is loaded for it."""


@dataclass(frozen=True, slots=True)
class _Loading:
    lookup: Lookup
    digests: tuple[bytes, ...]
    tokens: int
    resident: int
    began: float


class SchedulerHalf:
    """Caches nothing until every rank has said what it holds."""

    def __init__(
        self,
        cache: Cache,
        settings: Settings,
        *,
        key_secret: str,
        prefix_caching: bool,
        speculative: bool,
        loads: bool = True,
        stores: bool = True,
        events: KVEvents | None = None,
    ) -> None:
        self.stats = Stats()
        self.events = events
        self._cache = cache
        self._settings = settings
        self._key_secret = key_secret
        self._prefix_caching = prefix_caching
        self._speculative = speculative
        self._may_load, self._may_store = loads, stores
        self._lookups = Lookups(cache, timeout_s=settings.lookup_timeout_s)
        self._session = uuid.uuid4().hex[:12]
        self._namespaces: Namespaces | None = None
        self._parts: tuple[Rectangle, ...] = ()
        self._ranks = 1
        self._manager: Any = None
        self._pins: Pins | None = None
        self._tracked: dict[str, _Tracked] = {}
        self._unstored: dict[str, _Tracked] = {}
        self._loads: list[Load] = []
        self._in_flight: dict[str, _Loading] = {}
        self._failed: set[str] = set()
        """Requests of these of which some rank could not load everything."""
        self._coming: Counter[bytes] = Counter()
        """Chunks that are on their way into blocks."""
        self._ranks_left: dict[int, int] = {}
        self._dropped: set[int] = set()
        self._store_ids = 0
        self._asking = False
        self._prompt = True
        """Whether the cache answered the last question within the grace."""
        self._grace_left_s = settings.lookup_grace_s
        """How long this step may still wait for first answers."""
        self._said: set[str] = set()

    # What vLLM tells at the start.

    def bind(self, manager: Any) -> None:
        self._manager = manager
        self._pins = Pins(manager.block_pool)

    def meet(self, cards: Sequence[RankCard]) -> None:
        """Every rank's card; one that cannot be cached, or that differs from the others, leaves caching off."""
        problem = next((card.problem for card in cards if card.problem), "")
        identities = {card.identity for card in cards}
        if not problem and len(identities) != 1:
            problem = "the ranks do not agree which model they run"
        identity = next(iter(identities), None)
        if problem or identity is None:
            log.warning("no KV is cached: %s", problem or "no rank said what it holds")
            return
        self._namespaces = Namespaces(identity, [card.rectangles for card in cards], key_secret=self._key_secret)
        self._parts = tuple({part.group: part for card in cards for part in card.rectangles}.values())
        self._ranks = len(cards)
        log.info(
            "caching %s in chunks of %d tokens, %d bytes each on this rank, %d ranks",
            identity.model,
            identity.chunk_tokens,
            sum(part.layout.nbytes for part in self._parts),
            self._ranks,
        )

    @property
    def chunk_tokens(self) -> int:
        return self._namespaces.identity.chunk_tokens if self._namespaces is not None else 0

    # Requests.

    def add(self, request: Any) -> None:
        """A new request: hash its prompt and ask for it."""
        if self._namespaces is None or request.request_id in self._tracked:
            return
        prompt_tokens = request.num_prompt_tokens
        if prompt_tokens < self.chunk_tokens and not self._settings.save_decode:
            return
        if getattr(request, "resumable", False):  # its tokens may be taken back
            self._say("streaming input", "a request whose prompt grows is not cached")
            return
        try:
            model = self._namespaces.model(request)
            if model is None:
                return
            chain = chain_of(request, model, prompt_tokens)
        except (NamespaceError, ValueError) as error:
            field = error.field if isinstance(error, NamespaceError) else "tokens"
            self._say(field, f"requests like {request.request_id} are not cached: {error}")
            return
        limit = prompt_tokens if not self._settings.save_decode else 1 << 62
        tracked = _Tracked(request, chain, f"{self._session}/{request.request_id}", limit)
        self._tracked[request.request_id] = tracked
        if self._may_store:
            self._unstored[request.request_id] = tracked
        if not self._may_load or getattr(request, "skip_reading_prefix_cache", False):
            tracked.refused = True
        else:
            self._ask(tracked)

    def matched(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """How many tokens after `local_tokens` can be loaded; None while that is not known yet."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.refused:
            return 0, False
        hit = self._answer(tracked)
        if hit is None:
            return (0, False) if tracked.refused else (None, False)
        stop = usable_chunks(hit, self._parts, request.num_tokens)
        end = stop * self.chunk_tokens
        if end <= local_tokens:
            return 0, False
        if self._prefix_caching and self._coming[hit.chain.digests[local_tokens // self.chunk_tokens]]:
            self._asking = True  # another request loads it, then vLLM has it itself
            return None, False
        tracked.start = local_tokens
        return end - local_tokens, True

    def allocated(self, request: Any, block_ids: Sequence[Sequence[int]], external_tokens: int) -> None:
        """The blocks that the hit is to be loaded into, or that the request goes on without one."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.lookup is None:
            return
        hit = tracked.lookup.hit
        if not external_tokens or hit is None:
            self._lookups.release(tracked.lookup)
            tracked.lookup = None  # should it be preempted, more may be there by then
            if hit is not None and all(part.kind is GroupKind.FULL for part in self._parts):
                tracked.stored = max(tracked.stored, hit.chunks)  # vLLM has it too
            return
        start, end = tracked.start, tracked.start + external_tokens
        parts = tuple(part for own in self._parts if (part := load_part(own, block_ids[own.group], start, end)))
        self._loads.append(Load(request.request_id, hit, parts))
        first, stop = start // self.chunk_tokens, end // self.chunk_tokens
        digests = hit.chain.digests[first:stop]
        self._coming.update(digests)
        resident = min(max(hit.resident * self.chunk_tokens - start, 0), external_tokens)
        self._in_flight[request.request_id] = _Loading(
            tracked.lookup, digests, external_tokens, resident, time.monotonic()
        )
        tracked.lookup = None
        tracked.stored = stop
        self.stats.add(hits=1, hit_tokens=external_tokens)

    def resident_tokens(self, request: Any) -> int:
        """Of the tokens being loaded for a request, those that are in host memory."""
        loading = self._in_flight.get(request.request_id)
        return loading.resident if loading is not None else 0

    def finished(self, request: Any) -> None:
        """A request that has ended, in whatever way.  What it still stores or loads goes on."""
        tracked = self._tracked.pop(request.request_id, None)
        self._unstored.pop(request.request_id, None)
        if tracked is not None and tracked.lookup is not None:
            self._lookups.release(tracked.lookup)

    # Steps.

    def step(self, output: Any) -> StepMetadata:
        """What the workers do in the step that `output` describes."""
        meta = StepMetadata(self._loads, [])
        self._loads = []
        if self._unstored and self._pins is not None:
            for request_id, tokens in output.num_scheduled_tokens.items():
                tracked = self._unstored.get(request_id)
                if tracked is not None:
                    self._plan_store(tracked, tokens, meta)
        if not output.total_num_scheduled_tokens:
            if self._in_flight or self.storing:
                meta.idle_s = _TRANSFERS_IDLE_S
            elif self._asking:
                meta.idle_s = _LOOKUPS_IDLE_S
        self._asking = False
        self._grace_left_s = self._settings.lookup_grace_s
        return meta

    @property
    def storing(self) -> bool:
        """Whether blocks are kept for stores, so that steps are needed to hear that they have ended."""
        return bool(self._pins)

    def heard(self, report: WorkerReport | None, received: Sequence[str]) -> None:
        """What the workers said at the end of a step."""
        if report is not None:
            self._dropped |= report.dropped
            for store_id, ranks in report.stored.items():
                left = self._ranks_left.get(store_id, 0) - ranks
                self._ranks_left[store_id] = left
                if left <= 0:
                    del self._ranks_left[store_id]
                    assert self._pins is not None
                    self._pins.let_go(store_id)
                    if self.events is not None:
                        self.events.stored(store_id, whole=store_id not in self._dropped)
                    self._dropped.discard(store_id)
            self._failed |= report.failed.keys() & self._in_flight.keys()
            for request_id, chunk in report.failed.items():
                tracked = self._tracked.get(request_id)
                if tracked is not None:
                    tracked.refused, tracked.stored = True, chunk
                    if self._may_store:
                        self._unstored[request_id] = tracked
        for request_id in received:
            self._loaded(request_id)

    def reset(self) -> None:
        """Nothing stored so far is found any more, and what runs now stores nothing: the weights may be others."""
        if self._namespaces is not None:
            self._namespaces.start_epoch(uuid.uuid4().hex)
        for tracked in self._tracked.values():
            if tracked.lookup is not None:
                self._lookups.release(tracked.lookup)
        self._tracked.clear()
        self._unstored.clear()
        if self.events is not None:
            self.events.cleared()

    def close(self) -> None:
        self._lookups.close()
        if self._namespaces is not None:
            self._namespaces.close()
        self._cache.close()

    # Lookups.

    def _ask(self, tracked: _Tracked) -> None:
        tracked.lookup = self._lookups.ask(tracked.lease, tracked.chain)
        tracked.asked_at = time.monotonic()
        self.stats.add(lookups=1, lookup_tokens=tracked.chain.tokens)

    def _answer(self, tracked: _Tracked) -> Hit | None:
        """What a request's lookup found; None while there is no answer, or for good if the request is refused."""
        lookup = tracked.lookup
        age_s = time.monotonic() - tracked.asked_at
        if lookup is not None and age_s > _STALE_S and not tracked.asked_again and lookup.falls_short():
            self._lookups.release(lookup)  # or the cache says again what it said
            tracked.asked_again, lookup = True, None
        if lookup is None or age_s > _REFRESH_S:  # preempted, or kept waiting
            if tracked.request.num_tokens > tracked.chain.tokens and self._settings.save_decode:
                tracked.chain = extended(tracked.chain, tracked.request, tracked.request.num_tokens)
            self._ask(tracked)
            lookup = tracked.lookup
        assert lookup is not None
        if self._prompt and self._grace_left_s > 0 and not lookup.heard():
            began = time.monotonic()
            self._prompt = lookup.wait(self._grace_left_s)
            self._grace_left_s -= time.monotonic() - began
        if lookup.done():
            self._prompt = True
            if lookup.hit is None:
                tracked.refused = True
            return lookup.hit
        if time.monotonic() > lookup.deadline:
            self._lookups.release(lookup)
            tracked.lookup, tracked.refused = None, True
            self.stats.add(late_lookups=1)
        else:
            self._asking = True
        return None

    def _loaded(self, request_id: str) -> None:
        loading = self._in_flight.pop(request_id, None)
        if loading is None:
            return
        for digest in loading.digests:
            self._coming[digest] -= 1
            if not self._coming[digest]:
                del self._coming[digest]
        self._lookups.release(loading.lookup)
        seconds = time.monotonic() - loading.began
        failed = request_id in self._failed
        self._failed.discard(request_id)
        self.stats.add(load_seconds=seconds, failed_loads=int(failed))
        log.info(
            "%s: %d tokens %s in %.1f ms, %d of them in host memory",
            request_id,
            loading.tokens,
            "could not all be loaded" if failed else "loaded",
            1e3 * seconds,
            loading.resident,
        )

    def _say(self, about: str, message: str) -> None:
        """One line for each reason, not for each request."""
        if about not in self._said and len(self._said) < 64:
            self._said.add(about)
            log.warning("%s", message)

    # Stores.

    def _plan_store(self, tracked: _Tracked, scheduled: int, meta: StepMetadata) -> None:
        """Store the chunks that this step completes, and keep their blocks until that is done."""
        request = tracked.request
        # A draft's KV at the last known token is a guess at the next one.
        guessed = 1 if self._speculative or any(part.draft for part in self._parts) else 0
        known = min(tracked.limit, request.num_tokens - guessed)
        stop = min(request.num_computed_tokens + scheduled, known) // self.chunk_tokens
        if stop > tracked.stored:
            self._store(tracked, stop, meta)
        if (tracked.stored + 1) * self.chunk_tokens > tracked.limit:
            del self._unstored[request.request_id]

    def _store(self, tracked: _Tracked, stop: int, meta: StepMetadata) -> None:
        assert self._pins is not None
        if stop > len(tracked.chain):
            tracked.chain = extended(tracked.chain, tracked.request, stop * self.chunk_tokens)
        tables = self._manager.get_blocks(tracked.request.request_id).blocks
        found = [store_part(own, tables[own.group], tracked.stored, stop) for own in self._parts]
        parts = tuple(each[0] for each in found if each is not None)
        held = [block for each in found if each is not None for block in each[1]]
        first, tracked.stored = tracked.stored, stop
        if not parts:
            return
        self._store_ids += 1
        chain = Chain(tracked.chain.model, tracked.chain.digests[:stop])
        meta.stores.append(Store(self._store_ids, tracked.request.request_id, chain, parts))
        self._pins.hold(self._store_ids, held)
        if self.events is not None:
            self.events.storing(self._store_ids, tracked.request, first * self.chunk_tokens, stop * self.chunk_tokens)
        self._ranks_left[self._store_ids] = self._ranks


def cards_in_order(cards: Mapping[Any, RankCard]) -> list[RankCard]:
    """By (pipeline, tensor) rank."""
    return [cards[key] for key in sorted(cards)]
