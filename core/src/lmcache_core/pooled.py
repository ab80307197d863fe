"""Chains and pages in front of a pool, here or in a daemon, with one mover thread for all copies."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from .cache import Cache, Hit, Job, JobResult
from .chain import Chain, Model, Shard
from .device import Device, Fence, Pages
from .errors import CacheError
from .events import Events
from .forks import tell_of_forks
from .index import Entry, Sink
from .late import LateCopies
from .leases import Found
from .metrics import Metrics
from .pool import Reservation
from .prompts import Prompts
from .requests import Part, RequestReport, Requests
from .trace import Trace
from .worth import Worth

if TYPE_CHECKING:
    from .scrape import HttpServer

log = logging.getLogger(__name__)

MAX_RESULTS: Final = 65_536
MAX_STORES: Final = 4096
"""Stores that wait for the mover; further ones are dropped and counted."""
_COPY_NBYTES: Final = 256 << 20
"""One call of the device copies about this much, so that loads need not wait long behind a store."""
_FENCE_TIMEOUT_S: Final = 30.0
_LOOK_INTERVAL_S: Final = 1.0
"""How often it is looked whether a copy that was given up has ended."""


class Mapped(Protocol):
    """An extent in this process's address space."""

    dropped: bool
    """Nothing new is copied there: what is still on its way does without pinning it."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


class PoolPort(Protocol):
    """What a pool does for a cache.  `Pool` does it in this process, `RemotePool` by asking a daemon."""

    @property
    def boot_id(self) -> str:
        """Another one means that every earlier lease is void."""

    def meet(self, pages: Pages) -> None:
        """Told of an engine's pages before anything of theirs is moved."""

    def lookup(
        self, chain: Chain, request: str, on_answered: Callable[[], None] | None = None, token_s: float = 0.0
    ) -> Found: ...
    def lookup_answered(self, chain: Chain, request: str, timeout_s: float, token_s: float = 0.0) -> Found: ...
    def release(self, request: str) -> None: ...
    def hold_resident(self, chain: Chain, request: str) -> int: ...
    def reserve(self, chain: Chain, shard: Shard, span: range) -> Reservation: ...
    def commit(self, entries: Sequence[Entry]) -> str: ...
    def abort(self, entries: Sequence[Entry], reason: str) -> None: ...
    def give_up(self, entries: Sequence[Entry], reason: str) -> Callable[[], None]: ...
    def acquire(self, chain: Chain, shard: Shard, span: range, sink: Sink, *, for_engine: bool = True) -> None: ...
    def unhold(self, entries: Sequence[Entry]) -> None: ...
    def extent(self, entry: Entry) -> Mapped | None:
        """Where its slot is; `None` for a record in the device's own memory."""
        ...

    def payload(self, entry: Entry) -> memoryview: ...
    def intact(self, entry: Entry) -> bool: ...
    def evict(self, chain: Chain) -> int: ...
    def drain(self, timeout_s: float) -> bool: ...
    def in_forked_child(self) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Transfer:
    """A job on its way: what it moves and what is still out."""

    job: Job
    kind: str
    request: str
    span: range
    outstanding: int
    started: float
    chain: Chain | None = None
    shard: Shard | None = None
    pages: Pages = ()
    block_ids: Sequence[int] = ()
    skip_blocks: int = 0
    after: Fence | None = None
    reservation: Reservation | None = None
    failed: dict[int, str] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)
    """What came from each tier; filled only if somebody listens."""
    resident: bool = False
    """Everything was in host memory when it was asked for."""
    nbytes: int = 0

    def blocks(self, position: int) -> Sequence[int]:
        """The block ids of one chunk of the span."""
        assert self.shard is not None
        each = self.shard.layout.blocks(self.shard.layout.regions[0])
        return self.block_ids[position * each : (position + 1) * each]


_Ready = tuple[_Transfer, int, Entry | None, str]


class PooledCache(Cache):
    """Owns its pool, device and events, and closes them.

    In a child that was forked while it was open it is an empty cache: everything is a miss, every job has failed.
    """

    def __init__(
        self,
        pool: PoolPort,
        device: Device,
        *,
        metrics: Metrics,
        events: Events,
        device_name: str = "",
        admission: bool = True,
        log_request: Callable[[RequestReport], None] | None = None,
    ) -> None:
        self.metrics = metrics
        self._worth = Worth() if admission else None
        self._requests = Requests(events, log_request)
        self._prompts = Prompts()
        self._http: HttpServer | None = None
        self.trace: Trace | None = None
        """Gets the tokens of every request; closed with the cache."""
        self._pool = pool
        self._device = device
        self._device_name = device_name or type(device).__name__
        self._events = events
        self._ids = itertools.count(1)
        self._results: deque[JobResult] = deque(maxlen=MAX_RESULTS)
        self._lock = threading.Lock()
        self._running: dict[_Transfer, None] = {}
        """In the order in which they began."""
        self._idle = threading.Condition(self._lock)
        self._closed = False
        self._forked = False
        self._said_forked = False
        self._registered: dict[Mapped, None] = {}
        self._ready: queue.SimpleQueue[_Ready | Callable[[], None] | None] = queue.SimpleQueue()
        self._stores: deque[_Transfer] = deque()
        self._late = LateCopies()
        self._mover = threading.Thread(target=self._move, name="lmcache-mover", daemon=True)
        self._mover.start()
        tell_of_forks(self)
        events.emit("lmcache_cache_started", cache=self)

    def serve_metrics(self, address: str) -> None:
        """Serve /metrics on "IP:PORT", port 0 for a free one, until the cache is closed; nothing for "".

        Raises ConfigError where the port is taken.
        """
        from .scrape import HttpServer, health  # their imports would slow every start

        self._http = HttpServer.start(address, health(self.metrics, lambda: ""), "metrics")

    @property
    def metrics_address(self) -> str:
        """Where the metrics are served; empty for nowhere."""
        return str(self._http.address) if self._http is not None else ""

    # The engine's side.

    def chain(self, tokens: Sequence[int] | Any, model: Model, *, extra: Mapping[int, bytes] | None = None) -> Chain:
        made = super().chain(tokens, model, extra=extra)
        if self._events.hears("lmcache_prompt_stored"):
            self._prompts.remember(made, tokens)
        if self.trace is not None and not self._forked:
            self.trace.made(made, tokens)
        return made

    def lookup(self, chain: Chain, request: str) -> Hit:
        if self._forked:
            return _no_hit(chain, request)
        began, token_s = time.monotonic(), self._worth.token_s(chain) if self._worth is not None else 0.0
        return self._hit(chain, request, self._pool.lookup(chain, request, None, token_s), began, token_s)

    def lookup_answered(self, chain: Chain, request: str, *, timeout_s: float) -> Hit:
        if self._forked:
            return _no_hit(chain, request)
        began, token_s = time.monotonic(), self._worth.token_s(chain) if self._worth is not None else 0.0
        found = self._pool.lookup_answered(chain, request, timeout_s, token_s)
        return self._hit(chain, request, found, began, token_s)

    def computed(self, model: Model, tokens: int, seconds: float, *, context_tokens: int = 0) -> None:
        if self._worth is not None:
            self._worth.computed(model, tokens, seconds, context_tokens)

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
        _check_span(hit.chain, shard, span, block_ids)
        block_tokens = shard.layout.regions[0].block_tokens
        if skip_tokens % block_tokens or not 0 <= skip_tokens < shard.layout.chunk_tokens:
            raise ValueError(f"skip_tokens {skip_tokens} is not whole blocks of {block_tokens} within the first chunk")
        if self._forked:
            return self._refuse("retrieve", hit.request, span)
        self._pool.meet(pages)
        transfer = self._begin("retrieve", hit.request, span, len(span))
        transfer.shard, transfer.pages, transfer.block_ids = shard, pages, block_ids
        transfer.skip_blocks = skip_tokens // block_tokens
        transfer.chain, transfer.resident = hit.chain, span.stop <= hit.resident
        self._acquire(transfer, hit.chain, shard, span)
        return transfer.job

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
        _check_span(chain, shard, span, block_ids)
        if self._forked:
            return self._refuse("store", request, span)
        self._pool.meet(pages)
        transfer = self._begin("store", request, span, 1)
        transfer.shard, transfer.pages, transfer.block_ids, transfer.after = shard, pages, block_ids, after
        transfer.chain = chain
        if len(self._stores) >= MAX_STORES:
            self.metrics.add("drops", len(span), tier="host", reason="queue full")
            self._end_now(transfer, "queue full")
        else:
            self._stores.append(transfer)
            self._ready.put((transfer, -1, None, ""))
        return transfer.job

    def prefetch(self, chain: Chain) -> Job:
        if self._forked:
            return self._refuse("prefetch", "", range(len(chain)))
        transfer = self._begin("prefetch", "", range(len(chain)), 1)
        request = f"prefetch {transfer.job.job_id}"

        def go() -> None:
            if transfer not in self._running:
                return
            found = self._pool.lookup(chain, request, lambda: self._ready.put(go))
            if found.pending:
                return
            span = range(found.restorable[-1] if found.restorable else 0)
            transfer.request, transfer.span = request, span
            with self._lock:
                transfer.outstanding = len(span) * len(chain.model.shards)
            if not transfer.outstanding:
                self._end(transfer)
            for shard in chain.model.shards if transfer.outstanding else ():
                self._acquire(transfer, chain, shard, span)

        go()
        return transfer.job

    def release(self, request: str) -> None:
        if not self._forked:
            self._pool.release(request)
            self._requests.ended(request)

    def pin(self, chain: Chain) -> int:
        return 0 if self._forked else self._pool.hold_resident(chain, _pin_name(chain))

    def unpin(self, chain: Chain) -> None:
        self.release(_pin_name(chain))

    def evict(self, chain: Chain) -> int:
        return 0 if self._forked else self._pool.evict(chain)

    def poll(self) -> list[JobResult]:
        results = []
        while self._results:
            results.append(self._results.popleft())
        return results

    def drain(self, timeout_s: float) -> bool:
        if self._forked:
            return True
        deadline = time.monotonic() + timeout_s
        with self._lock:
            if not self._idle.wait_for(lambda: not self._running, timeout_s):
                return False
        return self._pool.drain(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        if self._forked:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._http is not None:
            self._http.close()
        self._requests.close()
        self._events.emit("lmcache_cache_stopping", cache=self)
        self._ready.put(None)
        self._mover.join()
        self._late.wait(_FENCE_TIMEOUT_S)
        self._pool.close()
        while not self._ready.empty():
            self._ready.get()
        for extent in list(self._registered):
            self._unregister(extent)
        self._device.close()
        for transfer in list(self._running):
            self._end_now(transfer, "the cache was closed")
        self._events.close()
        if self.trace is not None:
            self.trace.close()

    def in_forked_child(self) -> None:
        """See `forks`: no lock, no thread and no extent of the parent is touched from here on."""
        self._forked = True
        self._results = deque(maxlen=MAX_RESULTS)
        self._pool.in_forked_child()

    # Jobs.

    def _refuse(self, kind: str, request: str, span: range) -> Job:
        """A job that has failed, in a forked child."""
        if not self._said_forked:
            self._said_forked = True
            log.warning("this process was forked off one with a cache open, and has none; open another here")
        job = Job(next(self._ids))
        failed = ((span.start, span.stop, "forked"),) if span else ()
        result = JobResult(job.job_id, request, kind, 0, failed)
        self._results.append(result)
        job._finish(result)
        return job

    def _hit(self, chain: Chain, request: str, found: Found, began: float, token_s: float) -> Hit:
        hit = found.hit(chain, request, self._pool.boot_id)
        self._requests.looked_up(hit, began, token_s)
        if self.trace is not None:
            self.trace.answered(hit)
        return hit

    def _begin(self, kind: str, request: str, span: range, outstanding: int) -> _Transfer:
        transfer = _Transfer(Job(next(self._ids)), kind, request, span, outstanding, time.monotonic())
        with self._lock:
            if self._closed:
                raise CacheError("the cache is closed")
            self._running[transfer] = None
        if not outstanding:
            self._end(transfer)
        return transfer

    def _acquire(self, transfer: _Transfer, chain: Chain, shard: Shard, span: range) -> None:
        put = self._ready.put
        for_engine = transfer.kind == "retrieve"
        self._pool.acquire(
            chain, shard, span, lambda i, entry, reason: put((transfer, i, entry, reason)), for_engine=for_engine
        )

    def _end(self, transfer: _Transfer) -> None:
        """Report a transfer, exactly once."""
        with self._lock:
            if transfer not in self._running:
                return
            del self._running[transfer]
            if not self._running:
                self._idle.notify_all()
        span, failed = transfer.span, transfer.failed
        skipped = transfer.reservation.skipped if transfer.reservation else 0
        if transfer.kind == "store":
            ok = len(span) - skipped - len(failed)
        else:
            ok = min(failed, default=len(span))
        seconds = time.monotonic() - transfer.started
        result = JobResult(
            transfer.job.job_id,
            transfer.request,
            transfer.kind,
            ok,
            _ranges(span.start, failed),
            skipped,
            transfer.nbytes,
            seconds,
        )
        self._count(transfer, result)
        if transfer.kind == "prefetch":
            self._pool.release(transfer.request)
        self._results.append(result)
        try:
            transfer.job._finish(result)
        except Exception:
            log.exception("a callback of job %d raised", transfer.job.job_id)

    def _end_now(self, transfer: _Transfer, reason: str) -> None:
        """End a transfer whose remaining parts will not come."""
        if transfer.reservation is not None:
            left = [(p, entry) for p, entry in transfer.reservation.new if p not in transfer.failed]
            transfer.failed |= dict.fromkeys((p for p, _ in left), reason)
        else:
            transfer.failed |= {p: reason for p in range(len(transfer.span)) if p not in transfer.failed}
        self._end(transfer)

    def _count(self, transfer: _Transfer, result: JobResult) -> None:
        name = {"store": "stores", "retrieve": "loads"}.get(transfer.kind)
        if name is None:
            return
        failed = len(transfer.failed)
        late = sum(reason == "late" for reason in transfer.failed.values())
        if name == "stores":
            self.metrics.add("stores", result.ok_chunks, result="ok")
            self.metrics.add("stores", result.skipped, result="skipped")
            self.metrics.add("stores", failed, result="failed")
            self.metrics.add("store_bytes", result.nbytes)
            self.metrics.observe("store_seconds", result.seconds)
            if transfer.chain is not None and self._events.hears("lmcache_prompt_stored"):
                self._events.emit(
                    "lmcache_prompt_stored",
                    request=transfer.request,
                    chain=transfer.chain,
                    span=transfer.span,
                    tokens=self._prompts.tokens(transfer.chain),
                    result=result,
                    ended_at=time.time(),
                )
            return
        self.metrics.add("loads", len(transfer.span) - failed, result="ok")
        self.metrics.add("loads", failed - late, result="failed")
        self.metrics.add("loads", late, result="late")
        self.metrics.add("load_bytes", result.nbytes)
        self.metrics.observe("load_seconds", result.seconds)
        if self._worth is not None and transfer.resident and not failed and transfer.chain is not None:
            self._worth.copied(transfer.chain.model, len(transfer.span), result.seconds)
        self._requests.loaded(
            transfer.request,
            transfer.started,
            result.seconds,
            ok=result.ok_chunks,
            failed=failed,
            nbytes=result.nbytes,
            parts=transfer.parts,
        )
        self._events.emit(
            "lmcache_chunks_retrieved",
            request=transfer.request,
            hit_chunks=result.ok_chunks,
            failed_chunks=failed,
            nbytes=result.nbytes,
            seconds=result.seconds,
        )

    # The mover thread.

    def _move(self) -> None:
        while self._take_turn():
            pass
        while self._stores:
            transfer = self._stores.popleft()
            if transfer.reservation is not None:
                left = [entry for p, entry in transfer.reservation.new if p not in transfer.failed]
                self._pool.abort(left, "the cache was closed")

    def _take_turn(self) -> bool:
        """Wait for something to do, and do it; False at the end.  Between turns nothing keeps an extent mapped."""
        goes_on = True
        arrived: dict[_Transfer, list[_Ready]] = {}
        item = self._next_item()
        while True:
            if item is None:
                goes_on = False
            elif callable(item):
                item()
            elif item[1] >= 0:
                arrived.setdefault(item[0], []).append(item)
            try:
                item = self._ready.get_nowait()
            except queue.Empty:
                break
        if self._late.look():
            for extent in [extent for extent in self._registered if extent.dropped]:
                self._unregister(extent)
        for transfer, ready in arrived.items():
            self._arrived(transfer, ready)
        if self._stores and goes_on:
            self._gather_some(self._stores[0])
        return goes_on

    def _next_item(self) -> _Ready | Callable[[], None] | None:
        try:
            return self._ready.get(timeout=_LOOK_INTERVAL_S if self._late else None)
        except queue.Empty:
            return _nothing

    def _arrived(self, transfer: _Transfer, ready: list[_Ready]) -> None:
        """Copy what has come into the engine's blocks, and end the transfer when nothing is out."""
        good: list[tuple[int, Entry]] = []
        if self._requests.wanted:
            _add_parts(transfer, [tier for _, _, entry, tier in ready if entry is not None])
        for _, position, entry, reason in ready:
            if entry is None:
                transfer.failed.setdefault(position, reason)
            else:
                good.append((position, entry))
        good.sort(key=lambda found: found[0])
        done = [entry for _, entry in good]
        if transfer.kind == "retrieve":
            done = [entry for part in _parts(good) for entry in self._scatter(transfer, part)]
        self._pool.unhold(done)
        with self._lock:
            transfer.outstanding -= len(ready)
        if not transfer.outstanding:
            self._end(transfer)

    def _scatter(self, transfer: _Transfer, part: list[tuple[int, Entry]]) -> list[Entry]:
        """Copy a part into the engine's blocks; return the entries of it that the device reads no more."""
        shard = transfer.shard
        assert shard is not None
        intact: list[tuple[int, Entry]] = []
        for position, entry in part:
            if self._pool.intact(entry):
                intact.append((position, entry))
            else:
                transfer.failed[position] = "overwritten"
        if not intact:
            return [entry for _, entry in part]
        skip = transfer.skip_blocks if intact[0][0] == 0 else 0
        ids = [block for position, _ in intact for block in transfer.blocks(position)]
        records = [self._pool.payload(entry) for _, entry in intact]
        problem, late = self._copy(
            lambda: self._device.scatter(records, shard.layout, transfer.pages, ids, skip_blocks=skip), intact
        )
        for position, entry in intact:
            if problem:
                transfer.failed[position] = problem
            elif not self._pool.intact(entry):
                transfer.failed[position] = "overwritten"
            else:
                transfer.nbytes += shard.layout.nbytes
        if late is None:
            return [entry for _, entry in part]
        reading = [entry for _, entry in intact]
        self._late.add(late, partial(self._pool.unhold, reading), self._extents(reading), records)
        return [entry for _, entry in part if entry not in reading]

    def _gather_some(self, transfer: _Transfer) -> None:
        """Copy the next part of a store out of the engine; loads that came meanwhile go before the part after it."""
        shard, chain = transfer.shard, transfer.chain
        assert shard is not None
        assert chain is not None
        if transfer.reservation is None:
            transfer.reservation = self._pool.reserve(chain, shard, transfer.span)
            transfer.failed = dict.fromkeys(transfer.reservation.refused, "no room")
        layout = shard.layout
        new = transfer.reservation.new
        count = max(1, _COPY_NBYTES // layout.nbytes)
        part, transfer.reservation.new = new[:count], new[count:]
        ids = [block for position, _ in part for block in transfer.blocks(position)]
        entries = [entry for _, entry in part]
        records = [self._pool.payload(entry) for entry in entries]
        problem, late = "", None
        if part:
            problem, late = self._copy(
                lambda: self._device.gather(transfer.pages, ids, layout, records, after=transfer.after), part
            )
        if problem:
            transfer.failed |= dict.fromkeys((position for position, _ in part), problem)
            if late is None:
                self._pool.abort(entries, problem)
            else:
                self._late.add(late, self._pool.give_up(entries, problem), self._extents(entries), records)
        else:
            if not transfer.reservation.new:
                transfer.job._set_gathered()
            problem = self._pool.commit(entries)
            if problem:
                transfer.failed |= dict.fromkeys((position for position, _ in part), problem)
            else:
                transfer.nbytes += len(part) * layout.nbytes
        if transfer.reservation.new:
            self._ready.put((transfer, -1, None, ""))
        else:
            self._stores.popleft()
            self._end(transfer)
            if self._stores:
                self._ready.put((self._stores[0], -1, None, ""))

    def _copy(self, copy: Callable[[], Fence], part: Iterable[tuple[int, Entry]]) -> tuple[str, Fence | None]:
        """Run a device's copy to its end; "" or what went wrong, and the fence of a copy that may still be running.

        A device plugin may raise anything.
        """
        self._register(part)
        try:
            fence = copy()
            if fence.wait(_FENCE_TIMEOUT_S):
                return "", None
            return f"device: not done in {_FENCE_TIMEOUT_S} s", fence
        except CacheError as error:
            return f"device: {error}", None
        except Exception as error:
            log.exception("device %s raised; this is its bug", self._device_name)
            return f"device: {error!r}", None

    def _extents(self, entries: Iterable[Entry]) -> list[Mapped]:
        found = dict.fromkeys(self._pool.extent(entry) for entry in entries)
        return [extent for extent in found if extent is not None]

    def _register(self, part: Iterable[tuple[int, Entry]]) -> None:
        """Pin each extent with the device before its first copy."""
        for extent in self._extents(entry for _, entry in part):
            with self._lock:
                if extent in self._registered or extent.dropped:
                    continue
                self._registered[extent] = None
            try:
                self._device.register(extent.address, extent.nbytes)
            except CacheError as error:
                log.warning("device %s copies through unpinned memory: %s", self._device_name, error)

    def _unregister(self, extent: Mapped) -> None:
        """Unpin an extent, unless a copy was given up that may still use it."""
        with self._lock:
            if extent not in self._registered or self._late.uses(extent):
                return
            del self._registered[extent]
        self._device.unregister(extent.address, extent.nbytes)

    def _unregister_later(self, extent: Mapped) -> None:
        """Unpin after the copies that the mover has begun; those that it begins later do not pin it again."""
        extent.dropped = True
        self._ready.put(partial(self._unregister, extent))


def _nothing() -> None:
    return None


def _no_hit(chain: Chain, request: str) -> Hit:
    return Hit(chain, request, 0, (), False, "", 0)


def _check_span(chain: Chain, shard: Shard, span: range, block_ids: Sequence[int]) -> None:
    if span.step != 1 or not 0 <= span.start <= span.stop <= len(chain):
        raise ValueError(f"{span} is not a span of the chain's {len(chain)} chunks")
    if not any(shard in group.shards for group in chain.model.groups):
        raise ValueError("the shard is none of the chain's model")
    each = shard.layout.blocks(shard.layout.regions[0])
    if len(block_ids) != len(span) * each:
        raise ValueError(f"{len(block_ids)} block ids for {len(span)} chunks of {each} blocks")


def _ranges(start: int, failed: dict[int, str]) -> tuple[tuple[int, int, str], ...]:
    """Failed positions as (start, stop, reason), neighbours with one reason joined."""
    ranges: list[tuple[int, int, str]] = []
    for position in sorted(failed):
        reason = failed[position]
        if ranges and ranges[-1][1] == start + position and ranges[-1][2] == reason:
            ranges[-1] = (ranges[-1][0], start + position + 1, reason)
        else:
            ranges.append((start + position, start + position + 1, reason))
    return tuple(ranges)


def _parts(good: list[tuple[int, Entry]]) -> Iterable[list[tuple[int, Entry]]]:
    if not good:
        return
    count = max(1, _COPY_NBYTES // good[0][1].layout.nbytes)
    for start in range(0, len(good), count):
        yield good[start : start + count]


def _add_parts(transfer: _Transfer, tiers: list[str]) -> None:
    seconds = time.monotonic() - transfer.started
    for tier, count in Counter(tiers).items():
        before = transfer.parts.get(tier)
        transfer.parts[tier] = Part(tier, count + (before.chunks if before else 0), seconds)


def _pin_name(chain: Chain) -> str:
    return f"pin {chain.digests[-1].hex() if chain.digests else ''}"
