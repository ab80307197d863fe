"""Questions to the cache, asked on a thread of their own, so that no answer is ever waited for in a step."""

from __future__ import annotations

import heapq
import itertools
import logging
import queue
import threading
import time
from typing import Final

from lmcache_core import Cache, CacheError, Chain, Hit

log = logging.getLogger("vllm.lmcache.lookups")

_AGAIN_S: Final = 0.005
"""How often a question is put again that slower tiers have not answered."""
MAX_WAITING: Final = 65_536


class Lookup:
    """One question: `hit` is there once `done`, and then holds what it reports until `Lookups.release`."""

    __slots__ = ("_answered", "_heard", "chain", "deadline", "dropped", "hit", "name")

    def __init__(self, name: str, chain: Chain, deadline: float) -> None:
        self.name = name
        self.chain = chain
        self.deadline = deadline
        self.hit: Hit | None = None
        self.dropped = False
        self._answered = threading.Event()
        self._heard = threading.Event()

    def done(self) -> bool:
        return self._answered.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Until the cache's first word: the answer, or that slower tiers are asked."""
        return self._heard.wait(timeout_s)

    def heard(self) -> bool:
        return self._heard.is_set()

    def hear(self) -> None:
        """The cache has had its first word."""
        self._heard.set()

    def falls_short(self) -> bool:
        """Whether the answer is there, and is not the whole chain."""
        return self.done() and (self.hit is None or self.hit.chunks < len(self.chain))

    def settle(self, hit: Hit | None) -> None:
        self.hit = hit
        self._answered.set()
        self.hear()


class Lookups:
    """Asks `cache` in order.  After `close` nothing is asked, and what was asked has no hit."""

    def __init__(self, cache: Cache, *, timeout_s: float) -> None:
        self._cache = cache
        self._timeout_s = timeout_s
        self._asked: queue.SimpleQueue[Lookup | str | None] = queue.SimpleQueue()
        self._pending: list[tuple[float, int, Lookup]] = []
        self._order = itertools.count()
        self._thread = threading.Thread(target=self._run, name="lmcache-vllm-lookups", daemon=True)
        self._thread.start()

    def ask(self, name: str, chain: Chain) -> Lookup:
        """Ask for `chain`, to be held under `name`; returns at once."""
        lookup = Lookup(name, chain, time.monotonic() + self._timeout_s)
        if self._asked.qsize() > MAX_WAITING:
            lookup.settle(None)
        else:
            self._asked.put(lookup)
        return lookup

    def release(self, lookup: Lookup) -> None:
        """Give back what a question found or will find; returns at once.  Twice is fine."""
        lookup.dropped = True
        self._asked.put(lookup.name)

    def close(self) -> None:
        self._asked.put(None)
        self._thread.join()

    def _run(self) -> None:
        stopping = False
        while not stopping:
            try:
                item = self._asked.get(timeout=self._patience())
            except queue.Empty:
                self._ask_again()
                continue
            if item is None:
                stopping = True
            elif isinstance(item, str):
                self._give_back(item)
            else:
                self._answer(item)
            self._ask_again()
        for _, _, lookup in self._pending:
            lookup.settle(None)
        while not self._asked.empty():
            left = self._asked.get()
            if isinstance(left, Lookup):
                left.settle(None)

    def _patience(self) -> float | None:
        return max(0.0, self._pending[0][0] - time.monotonic()) if self._pending else None

    def _ask_again(self) -> None:
        while self._pending and self._pending[0][0] <= time.monotonic():
            _, _, lookup = heapq.heappop(self._pending)
            self._answer(lookup)

    def _answer(self, lookup: Lookup) -> None:
        if lookup.dropped:
            lookup.settle(None)
            return
        try:
            hit = self._cache.lookup(lookup.chain, lookup.name)
        except CacheError as error:
            log.warning("a lookup failed: %s", error)
            lookup.settle(None)
            return
        now = time.monotonic()
        if hit.pending and now < lookup.deadline:
            heapq.heappush(self._pending, (min(now + _AGAIN_S, lookup.deadline), next(self._order), lookup))
            lookup.hear()
            return
        lookup.settle(hit)

    def _give_back(self, name: str) -> None:
        try:
            self._cache.release(name)
        except CacheError as error:  # what it held has ended with the cache
            log.debug("%s", error)
