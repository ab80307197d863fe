"""A pool that lives in a daemon: the same calls, over a Unix socket, on memory that both have mapped."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from .. import frame, wire
from ..buffers import Slot
from ..chain import Chain, Shard
from ..device import Pages
from ..errors import BackendUnavailable, CacheError
from ..index import Entry, Sink, State
from ..keys import ChunkKey
from ..layout import PAGE_NBYTES
from ..leases import Found
from ..local import Prefaults
from ..pool import Reservation
from .link import Link, MappedExtent

log = logging.getLogger(__name__)

_NOTHING: Final = Found(0, (), False, 0)
_RETRY_S: Final = (0.05, 0.1, 0.2, 0.5, 1.0)
_WATCH_S: Final = 0.5
MAX_REQUESTS: Final = 65_536
_SILENCE_S: Final = 5.0
"""A daemon that did not answer in time is not asked again for so long, unless it is heard from."""


@dataclass(slots=True)
class _Wanted:
    """Records that were asked for and have not come: position -> key."""

    link: Link
    sink: Sink
    keys: dict[int, ChunkKey]
    shard: Shard
    start: int
    deadline: float


class RemoteEntry(Entry):
    """A record in a slot of the daemon, good as long as the link on which it came."""

    __slots__ = ("extent", "link")

    def __init__(
        self, link: Link, extent: MappedExtent, key: ChunkKey, slot: Slot, shard: Shard, depth: int, generation: int
    ) -> None:
        super().__init__(key, slot, shard.layout, depth, State.READY, generation)
        self.link = link
        self.extent = extent


class RemotePool:
    """Never raises for a daemon that is absent, slow, restarted or killed: those are misses and dropped stores.

    `call_timeout_s` bounds each question, `load_timeout_s` each load.  A lost daemon is looked for in the background.
    """

    def __init__(
        self,
        path: Path,
        *,
        call_timeout_s: float = 0.25,
        connect_timeout_s: float = 1.0,
        load_timeout_s: float = 30.0,
    ) -> None:
        self.path = path
        self.on_drop: Callable[[MappedExtent], None] = lambda extent: None
        """Told of an extent that no later copy will use."""
        self._unended: set[Link] = set()
        """Lost links into whose slots a copy may still be writing."""
        self._client = uuid.uuid4().hex
        self._call_timeout_s = call_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._load_timeout_s = load_timeout_s
        self._link: Link | None = None
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._wanted: dict[int, _Wanted] = {}
        self._jobs = 0
        self._on_answered: dict[str, Callable[[], None]] = {}
        self._answered: set[str] = set()
        self._closing = False
        self._asked: OrderedDict[str, Link] = OrderedDict()
        """Requests that may hold something, and where."""
        self._pinned: dict[str, Link] = {}
        self._said_down = False
        self._ask_again_at = 0.0
        self._said_silent = False
        self._prefaults = Prefaults()
        self._reader = threading.Thread(target=self._run, name="lmcache-client", daemon=True)
        self._reader.start()
        self._watch = threading.Thread(target=self._watch_loads, name="lmcache-client-watch", daemon=True)
        self._watch.start()

    @property
    def boot_id(self) -> str:
        link = self._link
        return link.boot_id if link is not None else ""

    def wait_connected(self, timeout_s: float) -> bool:
        """Whether the daemon is there within `timeout_s`."""
        with self._lock:
            return self._changed.wait_for(lambda: self._link is not None, timeout_s)

    # PoolPort.

    def meet(self, pages: Pages) -> None:
        return None

    def lookup(
        self, chain: Chain, request: str, on_answered: Callable[[], None] | None = None, token_s: float = 0.0
    ) -> Found:
        if not len(chain):
            return _NOTHING
        with self._lock:
            self._answered.discard(request)
            if on_answered is not None:
                self._on_answered[request] = on_answered

        def question(link: Link, call: int) -> object:
            self._remember(request, link)
            return wire.Lookup(call, link.model(chain.model), b"".join(chain.digests), chain.tokens, request, token_s)

        reply = self._ask(question, wire.FoundReply)
        if reply is None:
            self._forget_callback(request)
            self.release(request)  # the question may have been heard, and leases held for it
            return _NOTHING
        if not reply.pending:
            self._forget_callback(request)
        lengths = tuple(range(1, reply.longest + 1)) if reply.lengths is None else tuple(reply.lengths)
        return Found(reply.resident, lengths, reply.pending, reply.lease_id, reply.refused, reply.tiers)

    def lookup_answered(self, chain: Chain, request: str, timeout_s: float, token_s: float = 0.0) -> Found:
        deadline = time.monotonic() + timeout_s
        while (found := self.lookup(chain, request, None, token_s)).pending:
            with self._lock:
                left = deadline - time.monotonic()
                if not self._changed.wait_for(lambda: request in self._answered or self._link is None, left):
                    break
        return found

    def release(self, request: str) -> None:
        self._forget_callback(request)
        asked, pinned = self._asked.pop(request, None), self._pinned.pop(request, None)
        link = asked or pinned
        if link is not None:
            self._tell_on(link, wire.Release(request))

    def hold_resident(self, chain: Chain, request: str) -> int:
        def question(link: Link, call: int) -> object:
            self._pinned[request] = link
            return wire.Hold(call, link.model(chain.model), b"".join(chain.digests), request)

        reply = self._ask(question, wire.Count)
        if reply is None:
            self.release(request)  # it may have been heard
            return 0
        return int(reply.count)

    def reserve(self, chain: Chain, shard: Shard, span: range) -> Reservation:
        asked: list[Link] = []

        def question(link: Link, call: int) -> object:
            asked.append(link)
            digests = b"".join(chain.digests[: span.stop])
            return wire.Reserve(call, link.model(chain.model), chain.model.shards.index(shard), span.start, digests)

        reply = self._ask(question, wire.Reserved)
        if reply is None:
            return Reservation([], 0, list(range(len(span))))
        keys = dict(enumerate(chain.keys(shard, span)))
        new: list[tuple[int, Entry]] = []
        for position, slot, generation in zip(reply.positions, reply.slots, reply.generations, strict=True):
            key = keys.pop(position, None)
            entry = self._entry(asked[0], key, slot, shard, span.start + position, generation) if key else None
            if entry is None:  # nonsense: the link is given up, and with it all that was reserved
                asked[0].abandon("the daemon reserved what was not asked for")
                return Reservation([], 0, list(range(len(span))))
            new.append((position, entry))
        with self._lock:
            if asked[0] is not self._link:  # lost already, and nothing of it must be written any more
                return Reservation([], 0, list(range(len(span))))
            asked[0].writing += len(new)
        return Reservation(new, reply.skipped, list(reply.refused))

    def commit(self, entries: Sequence[Entry]) -> str:
        """Publish what was copied in; "" or why that was not confirmed."""
        problem = ""
        for link, generations in _by_link(entries).items():
            try:
                call = link.next_call()
                link.ask(call, wire.Commit(call, generations), 4 * self._call_timeout_s)
            except BackendUnavailable as error:
                problem = f"the daemon did not confirm: {error}"
            self._wrote(link, len(generations))
        return problem

    def abort(self, entries: Sequence[Entry], reason: str) -> None:
        for link, generations in _by_link(entries).items():
            self._tell_on(link, wire.Abort(generations, reason))
            self._wrote(link, len(generations))

    def give_up(self, entries: Sequence[Entry], reason: str) -> Callable[[], None]:
        """The daemon is told when what is returned is called; others who wait for the records have deadlines."""
        return partial(self.abort, entries, reason)

    def _wrote(self, link: Link, count: int) -> None:
        """So many copies into slots of `link` have ended; the daemon keeps those of a lost one aside until then."""
        with self._lock:
            link.writing -= count
            if link.writing or link not in self._unended:
                return
            self._unended.discard(link)
            now = None if self._unended else self._link
        if now is not None:
            self._tell_on(now, wire.Quiet())

    def acquire(self, chain: Chain, shard: Shard, span: range, sink: Sink, *, for_engine: bool = True) -> None:
        keys = dict(enumerate(chain.keys(shard, span)))
        link = self._link
        if link is None or not keys:
            for position in keys:
                sink(position, None, "the daemon is not there")
            return
        with self._lock:
            self._jobs += 1
            job = self._jobs
            self._wanted[job] = _Wanted(link, sink, keys, shard, span.start, time.monotonic() + self._load_timeout_s)
            self._changed.notify_all()
        digests = b"".join(chain.digests[span.start : span.stop])
        try:
            number = chain.model.shards.index(shard)
            link.tell(lambda: wire.Acquire(job, link.model(chain.model), number, span.start, digests, for_engine))
        except CacheError:
            self._lose(job, "the daemon is gone")

    def unhold(self, entries: Sequence[Entry]) -> None:
        for link, generations in _by_link(entries).items():
            self._tell_on(link, wire.Unhold(generations))

    def extent(self, entry: Entry) -> MappedExtent:
        assert isinstance(entry, RemoteEntry)
        return entry.extent

    def payload(self, entry: Entry) -> memoryview:
        assert isinstance(entry, RemoteEntry)
        start = entry.slot.offset + PAGE_NBYTES
        return entry.extent.view[start : start + entry.layout.nbytes]

    def intact(self, entry: Entry) -> bool:
        assert isinstance(entry, RemoteEntry)
        page = entry.extent.view[entry.slot.offset : entry.slot.offset + PAGE_NBYTES]
        return frame.holds(page, entry.key, entry.layout.fingerprint, entry.layout.nbytes, entry.generation)

    def evict(self, chain: Chain) -> int:
        def question(link: Link, call: int) -> object:
            return wire.Evict(call, link.model(chain.model), b"".join(chain.digests))

        reply = self._ask(question, wire.Count)
        return reply.count if reply is not None else 0

    def drain(self, timeout_s: float) -> bool:
        reply = self._ask(lambda link, call: wire.Drain(call, timeout_s), wire.Count, timeout_s + self._call_timeout_s)
        return reply is not None and bool(reply.count)

    def status(self) -> dict[str, Any] | None:
        """The daemon's own account of itself; None if it did not answer."""
        reply = self._ask(lambda link, call: wire.Status(call), wire.StatusReply, 2.0)
        return reply.status if reply is not None else None

    def in_forked_child(self) -> None:
        """See `forks`; the cache in front of this pool asks nothing of it any more."""
        link, self._link = self._link, None
        if link is not None:
            link.in_forked_child()

    def close(self) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
            link = self._link
            self._changed.notify_all()
        if link is not None:
            link.abandon("closed")
        self._reader.join()
        self._watch.join()
        self._prefaults.join()

    # Questions.

    def _ask(self, question: Callable[[Link, int], object], kind: type[Any], timeout_s: float | None = None) -> Any:
        """The answer of type `kind`, or None when there is none in time; never raises for a daemon's fault."""
        link = self._link
        if link is None or (link.late and time.monotonic() < self._ask_again_at):
            return None
        call = link.next_call()
        try:
            reply = link.ask(call, lambda: question(link, call), timeout_s or self._call_timeout_s)
        except BackendUnavailable as error:
            log.debug("%s", error)
            self._say_silent(link, str(error))
            return None
        except CacheError as error:  # a question that cannot be put
            log.debug("%s", error)
            return None
        if not isinstance(reply, kind):
            link.abandon(f"the daemon answered with {type(reply).__name__}")
            return None
        return reply

    def _say_silent(self, link: Link, reason: str) -> None:
        """Spare the engine the next deadlines of a daemon that does not answer."""
        self._ask_again_at = time.monotonic() + _SILENCE_S
        with self._lock:
            if link.broken or not link.late or self._said_silent:
                return
            self._said_silent = True
        log.warning("daemon at %s: %s; going on without a cache until it answers", self.path, reason)

    def _say_answering(self, link: Link) -> None:
        with self._lock:
            if link.late or not self._said_silent:
                return
            self._said_silent = False
        log.info("daemon at %s: answers again", self.path)

    def _remember(self, request: str, link: Link) -> None:
        """Under the sender's lock."""
        self._asked[request] = link
        if len(self._asked) > MAX_REQUESTS:
            self._asked.popitem(last=False)  # the daemon has a bound of its own

    def _tell_on(self, link: Link, message: object) -> None:
        try:
            link.tell(message)
        except CacheError as error:  # its leases have ended with the link
            log.debug("%s", error)

    def _forget_callback(self, request: str) -> None:
        with self._lock:
            self._on_answered.pop(request, None)
            self._answered.discard(request)

    def _entry(
        self, link: Link, key: ChunkKey, slot: tuple[int, int, int], shard: Shard, depth: int, generation: int
    ) -> RemoteEntry | None:
        extent = link.extents.get(slot[0])
        fits = extent is not None and slot[1] >= 0 and slot[1] + slot[2] <= extent.nbytes
        if extent is None or not fits or slot[2] < frame.record_nbytes(shard.layout.nbytes):
            link.abandon(f"the daemon named slot {slot}, which we do not have")
            return None
        return RemoteEntry(link, extent, key, Slot(*slot), shard, depth, generation)

    # The reader thread.

    def _run(self) -> None:
        attempt = 0
        while not self._closing:
            try:
                link = Link(
                    self.path,
                    self._client,
                    connect_timeout_s=self._connect_timeout_s,
                    send_timeout_s=self._call_timeout_s,
                    quiet=(quiet := not self._unended),
                    on_open=self._prefaults.start,
                )
            except (OSError, CacheError) as error:
                self._say_down(f"cannot reach it: {error}")
                self._pause(attempt)
                attempt += 1
                continue
            began = time.monotonic()
            self._use(link, quiet)
            if self._said_down or self._said_silent:
                log.info("daemon at %s: connected again", self.path)
                self._said_down = self._said_silent = False
            reason = "closed"
            try:
                for message in link.messages():
                    self._heard(link, message)
            except (OSError, CacheError) as error:
                reason = link.broken or str(error)
            self._lost(link, reason)
            if time.monotonic() - began > _RETRY_S[-1]:
                attempt = 0
            else:  # it took us and threw us out
                self._pause(attempt)
                attempt += 1

    def _pause(self, attempt: int) -> None:
        with self._lock:
            self._changed.wait_for(lambda: self._closing, _RETRY_S[min(attempt, len(_RETRY_S) - 1)])

    def _use(self, link: Link, quiet: bool) -> None:
        with self._lock:
            self._link = link
            late = not quiet and not self._unended
            if self._closing:
                link.abandon("closed")
            self._changed.notify_all()
        if late:
            self._tell_on(link, wire.Quiet())

    def _lost(self, link: Link, reason: str) -> None:
        link.close(reason)  # first: what is wanted from now on is refused, what was is collected here
        with self._lock:
            self._link = None
            if link.writing:
                self._unended.add(link)
            jobs = [job for job, wanted in self._wanted.items() if wanted.link is link]
            callbacks = list(self._on_answered.values())
            self._on_answered.clear()
            self._asked.clear()
            self._pinned.clear()
            self._changed.notify_all()
        if not self._closing:
            self._say_down(reason)
        for job in jobs:
            self._lose(job, "the daemon is gone")
        for callback in callbacks:
            callback()
        extents = list(link.extents.values())
        link.extents.clear()
        for extent in extents:
            self.on_drop(extent)

    def _say_down(self, reason: str) -> None:
        said = self._said_down or self._said_silent
        self._said_down = True
        if not said:
            log.warning("daemon at %s: %s; going on without a cache until it is back", self.path, reason)

    def _heard(self, link: Link, message: wire.ToClient) -> None:
        match message:
            case wire.Arrived():
                self._arrived(link, message)
            case wire.Lost():
                for position, reason in zip(message.positions, message.reasons, strict=True):
                    self._answer(message.job, position, None, reason)
            case wire.Answered():
                with self._lock:
                    self._answered.add(message.request)
                    callback = self._on_answered.pop(message.request, None)
                    self._changed.notify_all()
                if callback is not None:
                    callback()
            case wire.ExtentDropped():
                extent = link.extents.pop(message.extent_id, None)
                if extent is not None:
                    self.on_drop(extent)
            case wire.Reserved():  # nobody waited that long
                link.tell(wire.Abort(message.generations, "answered too late"))
                self._say_answering(link)
            case _:
                log.debug("a late %s", type(message).__name__)
                self._say_answering(link)

    def _arrived(self, link: Link, message: wire.Arrived) -> None:
        with self._lock:
            wanted = self._wanted.get(message.job)
        if wanted is None:
            link.tell(wire.Unhold(message.generations))
            return
        tiers = message.tiers or ["host"] * len(message.positions)
        for position, slot, generation, tier in zip(
            message.positions, message.slots, message.generations, tiers, strict=True
        ):
            key = wanted.keys.get(position)
            if key is None:
                link.tell(wire.Unhold([generation]))
                continue
            entry = self._entry(link, key, slot, wanted.shard, wanted.start + position, generation)
            self._answer(message.job, position, entry, tier if entry is not None else "the daemon is gone")

    def _answer(self, job: int, position: int, entry: Entry | None, reason: str) -> None:
        with self._lock:
            wanted = self._wanted.get(job)
            if wanted is None or wanted.keys.pop(position, None) is None:
                return
            if not wanted.keys:
                del self._wanted[job]
        wanted.sink(position, entry, reason)

    def _lose(self, job: int, reason: str) -> None:
        with self._lock:
            wanted = self._wanted.pop(job, None)
            positions = list(wanted.keys) if wanted is not None else []
        if wanted is not None:
            for position in positions:
                wanted.sink(position, None, reason)

    def _watch_loads(self) -> None:
        """Answer for a daemon that is silent; asleep while nothing is wanted."""
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._closing or bool(self._wanted))
                if self._closing:
                    return
                self._changed.wait_for(lambda: self._closing, _WATCH_S)
                now = time.monotonic()
                late = [job for job, wanted in self._wanted.items() if wanted.deadline <= now]
            for job in late:
                self._lose(job, "late")


def _by_link(entries: Sequence[Entry]) -> dict[Link, list[int]]:
    grouped: dict[Link, list[int]] = {}
    for entry in entries:
        assert isinstance(entry, RemoteEntry)
        grouped.setdefault(entry.link, []).append(entry.generation)
    return grouped
