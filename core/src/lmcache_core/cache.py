"""The contract of a cache, as an engine adapter sees it: chains in, hits and jobs out, nothing that waits."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from .chain import Chain, Model, Shard
from .device import Fence, Pages


@dataclass(frozen=True, slots=True)
class Hit:
    """What a lookup found, leased under its request until `Cache.release`.  Frozen, picklable; lengths in chunks."""

    chain: Chain
    request: str
    resident: int
    """Longest prefix whose records are leased in host memory already."""
    restorable: tuple[int, ...]
    """Every length from which the engine could go on, ascending: with only full attention 1, 2, ... n."""
    pending: bool
    """A slower tier has not answered yet: ask again with the same request."""
    boot_id: str
    lease_id: int
    refused: int = 0
    """Chunks that were found too, and would have cost more to load than to compute."""
    tiers: tuple[tuple[str, int], ...] = ()
    """Chunks by the tier that they are in, nearest first."""

    @property
    def chunks(self) -> int:
        """The longest restorable prefix."""
        return self.restorable[-1] if self.restorable else 0

    @property
    def tokens(self) -> int:
        """The longest restorable prefix in tokens."""
        return self.chunks * self.chain.model.family.chunk_tokens

    def at_most(self, tokens: int) -> int:
        """The longest restorable length, in chunks, of at most `tokens` tokens."""
        limit = tokens // self.chain.model.family.chunk_tokens
        return max((n for n in self.restorable if n <= limit), default=0)


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job ended.  Spans are chunk indices of the chain."""

    job_id: int
    request: str
    kind: str
    """"retrieve", "store" or "prefetch"."""
    ok_chunks: int
    """Leading chunks of the span that are usable (retrieve, prefetch); chunks stored now (store)."""
    failed: tuple[tuple[int, int, str], ...] = ()
    """(start, stop, reason) of what was not done."""
    skipped: int = 0
    """Chunks of a store that were there already."""
    nbytes: int = 0
    seconds: float = 0.0


class Job:
    """One asynchronous transfer.  Completes exactly once, whatever fails."""

    __slots__ = ("_callbacks", "_done", "_gathered", "_lock", "_result", "job_id")

    def __init__(self, job_id: int) -> None:
        self.job_id = job_id
        self._done = threading.Event()
        self._gathered = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[JobResult], None]] = []
        self._result: JobResult | None = None

    def done(self) -> bool:
        return self._done.is_set()

    @property
    def gathered(self) -> bool:
        """Whether the engine's blocks are free to change (store) or final (retrieve)."""
        return self._gathered.is_set()

    def wait_gathered(self, timeout_s: float | None = None) -> bool:
        return self._gathered.wait(timeout_s)

    def wait(self, timeout_s: float | None = None) -> JobResult | None:
        """The result, or `None` if the job has not ended in `timeout_s`."""
        return self._result if self._done.wait(timeout_s) else None

    def add_done_callback(self, callback: Callable[[JobResult], None]) -> None:
        """Call `callback` on the cache's mover thread when the job ends, or here and now if it has."""
        with self._lock:
            if self._result is None:
                self._callbacks.append(callback)
                return
        callback(self._result)

    def _set_gathered(self) -> None:
        self._gathered.set()

    def _finish(self, result: JobResult) -> None:
        with self._lock:
            if self._result is not None:
                raise RuntimeError(f"job {self.job_id} ended twice")
            self._result = result
            callbacks, self._callbacks = self._callbacks, []
        self._gathered.set()
        self._done.set()
        for callback in callbacks:
            callback(result)


class Cache(ABC):
    """A cache of one engine process.  Every call but `lookup_answered`, `drain` and `close`
    returns at once and does no I/O."""

    def chain(self, tokens: Sequence[int] | Any, model: Model, *, extra: Mapping[int, bytes] | None = None) -> Chain:
        """Hash a prompt, once per request."""
        return Chain.of(model, tokens, extra)

    @abstractmethod
    def lookup(self, chain: Chain, request: str) -> Hit:
        """What is stored of `chain`, leased under `request`.  Asked again, the same Hit unless that one was pending."""

    @abstractmethod
    def lookup_answered(self, chain: Chain, request: str, *, timeout_s: float) -> Hit:
        """`lookup` for callers that may wait: at most `timeout_s` for what is pending."""

    @abstractmethod
    def retrieve(
        self,
        hit: Hit,
        shard: Shard,
        span: range,
        pages: Pages,
        block_ids: Sequence[int],
        *,
        skip_tokens: int = 0,
    ) -> Job:
        """Load the chunks `span` of `shard` into the engine's blocks, in order; see `Device.gather` for `block_ids`.

        The first `skip_tokens` tokens of the span are left as they are (whole blocks of the first region).
        """

    @abstractmethod
    def store(
        self,
        chain: Chain,
        shard: Shard,
        span: range,
        pages: Pages,
        block_ids: Sequence[int],
        *,
        request: str = "",
        after: Fence | None = None,
    ) -> Job:
        """Save the chunks `span` of `shard` from the engine's blocks; those already there are skipped.

        The blocks must not change until `job.gathered`.  Without room the store is dropped and counted.
        """

    @abstractmethod
    def prefetch(self, chain: Chain) -> Job:
        """Bring what lower tiers have of `chain` into host memory."""

    @abstractmethod
    def release(self, request: str) -> None:
        """Give back exactly what `request` leased; unknown requests are ignored, twice is fine."""

    @abstractmethod
    def pin(self, chain: Chain) -> int:
        """Keep the resident prefix of `chain` in host memory until `unpin`; return its length in chunks.

        CapacityError if too many chains are pinned; a daemon that has that many pins nothing, and the length is 0.
        """

    @abstractmethod
    def unpin(self, chain: Chain) -> None:
        """Inverse of `pin`; a chain that is not pinned is ignored."""

    @abstractmethod
    def evict(self, chain: Chain) -> int:
        """Remove the records of `chain` that nobody uses from every tier; return how many left host memory."""

    def computed(self, model: Model, tokens: int, seconds: float, *, context_tokens: int = 0) -> None:  # noqa: B027
        """Tell how long the engine took to compute `tokens` tokens of a prompt, after `context_tokens` of it.

        From this the cache learns which hits are dearer than computing; an engine that does not say is refused none.
        """

    @abstractmethod
    def poll(self) -> list[JobResult]:
        """The jobs that ended since the last call, each once."""

    @abstractmethod
    def drain(self, timeout_s: float) -> bool:
        """Wait until what was stored has reached every tier it goes to; False at the timeout."""

    @abstractmethod
    def close(self) -> None:
        """End the threads and give everything back.  Twice is fine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
