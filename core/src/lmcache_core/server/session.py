"""One connection to the daemon: what it may touch, what it holds, and what becomes of that when it is gone."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Final

from .. import wire
from ..cache import Hit
from ..chain import Chain, Model, Shard
from ..errors import CapacityError
from ..index import Entry
from ..keys import SHARD_ID_NBYTES
from ..metrics import Metrics
from ..pool import Pool

log = logging.getLogger(__name__)

MAX_REQUESTS: Final = 16_384
"""Of one connection; beyond it the oldest is released."""
MAX_UNSENT_NBYTES: Final = 64 << 20
"""A client that does not read its answers is dropped at this backlog."""


class Session:
    """Runs on the daemon's loop; only sinks and callbacks of the pool come from other threads."""

    def __init__(
        self,
        number: int,
        pool: Pool,
        loop: asyncio.AbstractEventLoop,
        send: Callable[[bytes, int | None], None],
        is_draining: Callable[[], bool],
        metrics: Metrics | None = None,
        on_answer: Callable[[Hit], None] | None = None,
    ) -> None:
        self.number = number
        self.client = ""
        self.is_engine = self.only_commands = False
        """What it has sent so far; neither, before anything."""
        self.requests: dict[str, None] = {}
        self.pins: set[str] = set()
        self.reserved: dict[int, Entry] = {}
        """Slots that this client is writing, by generation."""
        self.held: dict[int, Entry] = {}
        self._counts: Counter[int] = Counter()
        self._pool = pool
        self._loop = loop
        self._send_bytes = send
        self._is_draining = is_draining
        self._metrics = metrics or Metrics()
        self._on_answer = on_answer
        self._models: dict[int, Model] = {}
        self._extents: set[int] = set()
        self._arrivals: deque[tuple[int, bool, int, Entry | None, str]] = deque()
        self._flush_planned = False
        self._closed = False

    def handle(self, message: wire.ToDaemon) -> None:
        """Answer one message; WireError ends the connection."""
        match message:
            case wire.Lookup():
                self._lookup(message)
            case wire.Acquire():
                self._acquire(message)
            case wire.Unhold():
                self._unhold(message.generations)
            case wire.Release():
                self._pool.release(self._name(message.request))
                self.requests.pop(message.request, None)
                self.pins.discard(message.request)
            case wire.Reserve():
                self._reserve(message)
            case wire.Commit():
                entries = self._take_reserved(message.generations)
                self._pool.commit(entries)
                self._metrics.add("stores", len(entries), result="ok")
                self._metrics.add("store_bytes", sum(entry.layout.nbytes for entry in entries))
                self.send(wire.Count(message.call, len(entries)))
            case wire.Abort():
                self._metrics.add("stores", len(message.generations), result="failed")
                self._pool.abort(self._take_reserved(message.generations), message.reason)
            case wire.Define():
                self._define(message)
            case wire.Hold():
                self._hold(message)
            case wire.Evict():
                chain = self.chain(message.model, message.digests)
                self.send(wire.Count(message.call, self._pool.evict(chain)))
            case _:
                raise wire.WireError(f"unexpected {type(message).__name__}")

    def send(self, message: object) -> None:
        self._send_bytes(wire.encode(message), None)

    def extent_dropped(self, extent_id: int) -> None:
        if extent_id in self._extents:
            self._extents.discard(extent_id)
            self.send(wire.ExtentDropped(extent_id))

    def close(self) -> dict[int, Entry]:
        """End every lease and hold; what the client may still be writing is returned, out of the index."""
        self._closed = True
        for request in {*self.requests, *self.pins}:
            self._pool.release(self._name(request))
        self.requests.clear()
        self.pins.clear()
        for generation, entry in self.held.items():
            self._pool.unhold([entry] * self._counts[generation])
        self.held.clear()
        while self._arrivals:
            _, _, _, arrived, _ = self._arrivals.popleft()
            if arrived is not None:
                self._pool.unhold([arrived])
        reserved, self.reserved = self.reserved, {}
        self._metrics.add("stores", len(reserved), result="failed")
        self._pool.abort(list(reserved.values()), "the client is gone", give_slots=False)
        return reserved

    def chain(self, model: int, digests: bytes) -> Chain:
        """The chain that a message names."""
        return Chain(self._model(model), wire.split_digests(digests))

    def _name(self, request: str) -> str:
        return f"{self.number}/{request}"

    def _remember(self, request: str) -> None:
        self.requests.pop(request, None)
        self.requests[request] = None
        if len(self.requests) > MAX_REQUESTS:
            oldest = next(iter(self.requests))
            del self.requests[oldest]
            self._pool.release(self._name(oldest))

    def _define(self, message: wire.Define) -> None:
        if len(self._models) >= wire.MAX_MODELS and message.model not in self._models:
            raise wire.WireError(f"more than {wire.MAX_MODELS} models on one connection")
        for shard in message.definition.shards:
            if len(shard.shard_id) != SHARD_ID_NBYTES:
                raise wire.WireError(f"a shard_id of {len(shard.shard_id)} bytes")
        self._models[message.model] = message.definition

    def _model(self, number: int) -> Model:
        model = self._models.get(number)
        if model is None:
            raise wire.WireError(f"model {number} was not defined")
        return model

    def _shard(self, model: Model, number: int) -> Shard:
        shards = model.shards
        if not 0 <= number < len(shards):
            raise wire.WireError(f"shard {number} of a model with {len(shards)}")
        return shards[number]

    def _lookup(self, message: wire.Lookup) -> None:
        model = self._model(message.model)
        digests = wire.split_digests(message.digests)
        tail = max(0, min(message.tokens - len(digests) * model.family.chunk_tokens, model.family.chunk_tokens))
        chain = Chain(model, digests, bytes(4 * tail))
        request = message.request
        self._remember(request)

        def answered() -> None:
            self._loop.call_soon_threadsafe(self._answered, request)

        found = self._pool.lookup(chain, self._name(request), answered, message.token_s)
        if self._on_answer is not None:
            self._on_answer(found.hit(chain, self._name(request), self._pool.boot_id))
        longest = found.restorable[-1] if found.restorable else 0
        lengths = None if len(found.restorable) == longest else list(found.restorable)
        self.send(
            wire.FoundReply(
                message.call,
                found.resident,
                longest,
                lengths,
                found.pending,
                found.lease_id,
                found.refused,
                found.tiers,
            )
        )

    def _answered(self, request: str) -> None:
        if not self._closed:
            self.send(wire.Answered(request))

    def _hold(self, message: wire.Hold) -> None:
        chain = self.chain(message.model, message.digests)
        try:
            count = self._pool.hold_resident(chain, self._name(message.request))
        except CapacityError as error:
            log.warning("a pin is refused: %s", error)
            self.send(wire.Failed(message.call, str(error)))
            return
        self.pins.add(message.request)
        self.send(wire.Count(message.call, count))

    def _reserve(self, message: wire.Reserve) -> None:
        model = self._model(message.model)
        shard = self._shard(model, message.shard)
        chain = Chain(model, wire.split_digests(message.digests))
        if not 0 <= message.start <= len(chain):
            raise wire.WireError(f"a span that starts at {message.start} of {len(chain)} chunks")
        span = range(message.start, len(chain))
        if self._is_draining():
            self._metrics.add("stores", len(span), result="failed")
            self.send(wire.Reserved(message.call, [], [], [], 0, list(range(len(span)))))
            return
        reservation = self._pool.reserve(chain, shard, span)
        entries = [entry for _, entry in reservation.new]
        self._metrics.add("stores", reservation.skipped, result="skipped")
        self._metrics.add("stores", len(reservation.refused), result="failed")
        self.reserved |= {entry.generation: entry for entry in entries}
        self._open_extents(entries)
        self.send(
            wire.Reserved(
                message.call,
                [position for position, _ in reservation.new],
                [_slot(entry) for entry in entries],
                [entry.generation for entry in entries],
                reservation.skipped,
                reservation.refused,
            )
        )

    def _take_reserved(self, generations: list[int]) -> list[Entry]:
        wanted = dict.fromkeys(generations)  # all or none: what is taken here must be in somebody's hands
        if len(wanted) != len(generations):
            raise wire.WireError("one generation twice")
        for generation in wanted:
            if generation not in self.reserved:
                raise wire.WireError(f"generation {generation} was not reserved by this connection")
        return [self.reserved.pop(generation) for generation in generations]

    def _acquire(self, message: wire.Acquire) -> None:
        model = self._model(message.model)
        shard = self._shard(model, message.shard)
        digests = wire.split_digests(message.digests)
        if not 0 <= message.start <= wire.MAX_DEPTH:
            raise wire.WireError(f"a span that starts at {message.start}")
        chain = Chain(model, (b"",) * message.start + digests)
        span = range(message.start, len(chain))
        self._pool.acquire(chain, shard, span, partial(self._arrived, message.job, message.for_engine))

    def _arrived(self, job: int, for_engine: bool, position: int, entry: Entry | None, reason: str) -> None:
        """From any thread: collect what has arrived, and tell the client in one message."""
        self._arrivals.append((job, for_engine, position, entry, reason))
        if not self._flush_planned:
            self._flush_planned = True
            self._loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        self._flush_planned = False
        arrived: dict[int, list[tuple[int, Entry, str]]] = {}
        lost: dict[int, list[tuple[int, str]]] = {}
        ended: list[tuple[Entry | None, str]] = []
        while self._arrivals:
            job, for_engine, position, entry, reason = self._arrivals.popleft()
            if for_engine:
                ended.append((entry, reason))
            if entry is None:
                lost.setdefault(job, []).append((position, reason))
            elif self._closed:
                self._pool.unhold([entry])
            else:
                self.held[entry.generation] = entry
                self._counts[entry.generation] += 1
                arrived.setdefault(job, []).append((position, entry, reason))
        self._count_loads(ended)
        if self._closed:
            return
        host = self._pool.name
        for job, found in arrived.items():
            entries = [entry for _, entry, _ in found]
            self._open_extents(entries)
            positions = [position for position, _, _ in found]
            generations = [entry.generation for entry in entries]
            tiers = [tier for _, _, tier in found] if any(tier != host for _, _, tier in found) else []
            self.send(wire.Arrived(job, positions, [_slot(entry) for entry in entries], generations, tiers))
        for job, missing in lost.items():
            self.send(wire.Lost(job, [position for position, _ in missing], [reason for _, reason in missing]))

    def _count_loads(self, ended: list[tuple[Entry | None, str]]) -> None:
        counts = Counter("ok" if entry is not None else "late" if word == "late" else "failed" for entry, word in ended)
        for result, count in counts.items():
            self._metrics.add("loads", count, result=result)
        self._metrics.add("load_bytes", sum(entry.layout.nbytes for entry, _ in ended if entry is not None))

    def _unhold(self, generations: list[int]) -> None:
        entries = []
        for generation, count in Counter(generations).items():
            if self._counts[generation] < count:  # before anything is taken: what is, must be given back
                raise wire.WireError(f"generation {generation} is not held by this connection")
        for generation in generations:
            entries.append(self.held[generation])
            self._counts[generation] -= 1
            if not self._counts[generation]:
                del self._counts[generation], self.held[generation]
        self._pool.unhold(entries)

    def _open_extents(self, entries: list[Entry]) -> None:
        for entry in entries:
            extent_id = entry.slot.extent_id
            if extent_id not in self._extents:
                self._extents.add(extent_id)
                extent = self._pool.extent(entry)
                assert extent is not None  # a daemon's records are in its slab
                self._send_bytes(wire.encode(wire.ExtentOpened(extent_id, extent.nbytes)), extent.fd)


def _slot(entry: Entry) -> tuple[int, int, int]:
    return entry.slot.extent_id, entry.slot.offset, entry.slot.nbytes


def peer_of(sock: socket.socket) -> tuple[int, int, int]:
    """(pid, uid, gid) of the process at the other end of a Unix socket; pid 0 if it is in a namespace beside ours."""
    import struct

    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", raw)
    return pid, uid, gid
