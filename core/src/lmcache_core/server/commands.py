"""What people and scripts ask of a daemon, over either of its sockets: how it is, and that it does something."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from .. import wire
from ..chain import Chain, Model
from ..errors import CapacityError
from ..pool import Pool

log = logging.getLogger(__name__)

MAX_PINS: Final = 1024
MAX_FAMILIES: Final = 4096
MAX_DRAIN_S: Final = 3600.0
_SLICE_S: Final = 0.5
"""A drain looks this often whether the daemon ends."""

MAX_RECALLED: Final = 4096

Command = wire.Status | wire.Recall | wire.Scrape | wire.Drain | wire.Clear | wire.Pin | wire.Unpin


class Commands:
    """Runs on the daemon's loop.  `answer` gives a coroutine, since a drain takes its time."""

    def __init__(self, pool: Pool, status: Callable[[], dict[str, object]], metrics: Callable[[], str]) -> None:
        self.draining = False
        """No new stores are taken."""
        self._pool = pool
        self._status = status
        self._metrics = metrics
        self._drains = asyncio.Lock()
        self._stopping = False
        self._families: OrderedDict[bytes, set[bytes]] = OrderedDict()
        self._pins: set[str] = set()

    def learn(self, model: Model) -> None:
        """Remember which shards a family has, for `clear`."""
        shards = self._families.setdefault(model.family.family_id, set())
        shards.update(shard.shard_id for shard in model.shards)
        self._families.move_to_end(model.family.family_id)
        if len(self._families) > MAX_FAMILIES:
            self._families.popitem(last=False)

    async def answer(self, command: Command, chain_of: Callable[[int, bytes], Chain]) -> wire.Reply:
        """Do what a command says; `chain_of(model, digests)` is the connection's."""
        match command:
            case wire.Status():
                return wire.StatusReply(command.call, self._status())
            case wire.Recall():
                digests = wire.split_digests(command.digests)[:MAX_RECALLED]
                limit = max(0, min(command.limit, MAX_RECALLED))
                return wire.StatusReply(command.call, self._pool.history.report(command.request, digests, limit))
            case wire.Scrape():
                loop = asyncio.get_running_loop()  # not on its thread: the first time, a library is imported
                return wire.StatusReply(command.call, {"text": await loop.run_in_executor(None, self._metrics)})
            case wire.Drain():
                if command.refuse_new and not self.draining:
                    self.draining = True
                    log.info("draining: no new stores are taken")
                return wire.Count(command.call, int(await self.drain(command.timeout_s)))
            case wire.Clear():
                return wire.Count(command.call, self._clear(command.namespace))
            case wire.Pin():
                chain = chain_of(command.model, command.digests)
                name = _pin_name(chain)
                if len(self._pins) >= MAX_PINS and name not in self._pins:
                    return wire.Failed(command.call, f"{MAX_PINS} prompts are pinned, which is the limit; unpin one")
                try:
                    count = self._pool.hold_resident(chain, name)
                except CapacityError as error:
                    return wire.Failed(command.call, str(error))
                self._pins.add(name)
                return wire.Count(command.call, count)
            case wire.Unpin():
                name = _pin_name(chain_of(command.model, command.digests))
                known = name in self._pins
                self._pins.discard(name)
                self._pool.release(name)
                return wire.Count(command.call, int(known))

    async def drain(self, timeout_s: float) -> bool:
        """Save what is not below yet; False at the timeout, when a tier refuses, or when the daemon ends.

        One thread at a time waits for the tiers, however many ask.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(max(timeout_s, 0.0), MAX_DRAIN_S)
        try:
            async with asyncio.timeout_at(deadline):
                await self._drains.acquire()
        except TimeoutError:
            return False
        try:
            while not self._stopping:
                began, left = loop.time(), max(0.0, deadline - loop.time())
                part = min(left, _SLICE_S)
                if await loop.run_in_executor(None, self._pool.drain, part):
                    return True
                if part == left or loop.time() - began < part / 2:  # time is up, or a tier refuses
                    return False
            return False
        finally:
            self._drains.release()

    def stop(self) -> None:
        """End the drains that others asked for."""
        self.draining = self._stopping = True

    @property
    def pins(self) -> int:
        """Prompts that are pinned."""
        return len(self._pins)

    def _clear(self, namespace: bytes) -> int:
        shards = {namespace, *self._families.get(namespace, ())}
        for tier in self._pool.tiers:
            shards.update(tier.ledger.shards_of(namespace))
        count = sum(self._pool.clear(shard_id) for shard_id in shards)
        log.info("cleared %s: %d records", namespace.hex() or "all", count)
        return count


def _pin_name(chain: Chain) -> str:
    shards = "".join(shard.shard_id.hex() for shard in chain.model.shards[:1])
    return f"pin {shards} {chain.digests[-1].hex() if chain.digests else ''}"
