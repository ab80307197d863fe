"""A backend and a device that may do anything which a real one may do, or does: drawn from the seed, in simulated time.

What they see of core's memory while a call of theirs runs must not change under them: they look.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import numpy as np
from tiny import RAW

from lmcache_core.backend import ApiVersion, Backend, Context, Entry, GetResult, NoOptions, Traits
from lmcache_core.device import Device, DoneFence, Fence, Pages, Probe
from lmcache_core.errors import BackendError, BackendFull, BackendUnavailable, ChunkCorrupt, DeviceError
from lmcache_core.keys import ChunkKey
from lmcache_core.layout import PAGE_NBYTES, Layout

from .scheduler import Scheduler, SimulationError
from .threads import EPOCH, Event

READS: Final = ("vanish", "flip", "truncate", "swap", "tail_only", "nothing")
WRITES: Final = ("full", "short", "lose", "rot")
ANY: Final = ("unavailable", "broken", "foreign", "until_deadline", "stuck")


class ForeignError(RuntimeError):
    """Stands for whatever a plugin with a bug may raise."""


@dataclass(slots=True)
class Trouble:
    """When and how a backend fails; `heal` ends it."""

    rates: dict[str, float] = field(default_factory=dict)
    outages: list[tuple[float, float, bool]] = field(default_factory=list)
    """(from, to, black hole): refused at once, or no answer until the deadline."""
    latency_s: float = 0.001
    healed: bool = False

    def heal(self) -> None:
        self.healed = True

    def at(self, now: float) -> bool | None:
        """Whether it is down now, and a black hole; None if it is up."""
        if self.healed:
            return None
        return next((hole for start, end, hole in self.outages if start <= now < end), None)


@dataclass(slots=True)
class Records:
    """What a store holds; it outlives the backends that are opened on it."""

    data: dict[ChunkKey, tuple[bytes, float]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(len(record) for record, _ in self.data.values())


class SimBackend(Backend[NoOptions]):
    api_version: ClassVar[ApiVersion] = (1, 0)

    def __init__(
        self, scheduler: Scheduler, trouble: Trouble, records: Records, traits: Traits, context: Context
    ) -> None:
        super().__init__(NoOptions(), context)
        self.traits = traits  # type: ignore[misc]  # of this instance
        self.trouble = trouble
        self.records = records
        self.closed = False
        self._scheduler = scheduler
        self._random = random.Random(scheduler.random.random())
        self._unstuck = Event(scheduler)

    def heal(self) -> None:
        """No trouble from now on; who is stuck goes on."""
        self.trouble.heal()
        self.trouble.latency_s = min(self.trouble.latency_s, self.context.timeout_s / 100)
        self._unstuck.set()

    def get_many(self, keys: Sequence[ChunkKey], into: Sequence[memoryview], *, timeout_s: float) -> list[GetResult]:
        """As everybody's; nobody else may write to the buffers until it returns."""
        before = [bytes(buffer) for buffer in into]
        results: list[GetResult] = []
        deadline = self._scheduler.now + timeout_s
        for number, (key, buffer) in enumerate(zip(keys, into, strict=True)):
            results += super().get_many([key], [buffer], timeout_s=max(0.0, deadline - self._scheduler.now))
            self._expect_unchanged(into[number + 1 :], before[number + 1 :])
            before[number] = bytes(buffer)
        self._expect_unchanged(into, before)
        return results

    def put_many(
        self, keys: Sequence[ChunkKey], data: Sequence[memoryview], *, timeout_s: float
    ) -> list[BackendError | None]:
        """As everybody's; nobody may write to the records until it returns."""
        before = [bytes(record) for record in data]
        results = super().put_many(keys, data, timeout_s=timeout_s)
        self._expect_unchanged(data, before)
        return results

    def contains(self, key: ChunkKey) -> bool:
        fault = self._begin("contains", ())
        if fault == "lie":
            return self._random.random() < 0.5
        return key in self.records.data

    def get(self, key: ChunkKey, into: memoryview) -> int | None:
        fault = self._begin("get", READS)
        if fault == "vanish":
            self.records.data.pop(key, None)
        found = self.records.data.get(key)
        if fault == "swap" and self.records.data:
            found = self._random.choice(list(self.records.data.values()))
        if found is None:
            return None
        data = found[0]
        if len(data) > len(into):
            raise ChunkCorrupt(f"{key!r} has {len(data)} bytes, at most {len(into)} were expected")
        if fault == "flip":
            at = self._somewhere(len(data))
            data = data[:at] + bytes([data[at] ^ 1 << self._random.randrange(8)]) + data[at + 1 :]
        if fault == "truncate":
            data = data[: len(data) // 2]
        if fault == "nothing":
            return len(data)
        half = len(data) // 2
        if fault != "tail_only":
            into[:half] = data[:half]
        before = bytes(into[:half])
        self._pause()
        self._expect_unchanged([into[:half]], [before])
        into[half : len(data)] = data[half:] if fault != "tail_only" else bytes(len(data) - half)
        return len(data)

    def put(self, key: ChunkKey, data: memoryview) -> None:
        fault = self._begin("put", WRITES)
        before = bytes(data)
        self._pause()
        self._expect_unchanged([data], [before])
        if fault == "full":
            raise BackendFull("simulated: no room")
        if fault == "lose":
            return
        if fault == "rot":
            at = self._somewhere(len(before))
            before = before[:at] + bytes([before[at] ^ 255]) + before[at + 1 :]
        if fault == "short":
            before = before[: self._random.randrange(len(before))]
        old = self.records.data.get(key)
        nbytes = self.records.nbytes + len(before) - (len(old[0]) if old else 0)
        if self.context.capacity_nbytes is not None and nbytes > self.context.capacity_nbytes:
            raise BackendFull(f"simulated: {nbytes} bytes of {self.context.capacity_nbytes}")
        self.records.data[key] = (before, EPOCH + self._scheduler.now)
        if fault == "short":
            raise BackendUnavailable("simulated: the connection broke")

    def remove(self, key: ChunkKey) -> bool:
        self._begin("remove", ())
        return self.records.data.pop(key, None) is not None

    def entries(self, shard_id: bytes | None = None) -> Iterator[Entry]:
        self._begin("entries", ())
        listed = list(self.records.data.items())
        for key, (data, stored_at) in listed:
            if shard_id is None or key.shard_id == shard_id:
                yield Entry(key, len(data), stored_at)

    def close(self) -> None:
        self.closed = True

    def _somewhere(self, nbytes: int) -> int:
        """Half of the time in a record's payload, which is a small part of one so small."""
        first, end = self._random.choice(((0, nbytes), (PAGE_NBYTES, PAGE_NBYTES + RAW)))
        return self._random.randrange(min(first, nbytes - 1), min(end, nbytes))

    def _pause(self) -> None:
        self._scheduler.sleep(self._random.expovariate(1 / self.trouble.latency_s))

    def _expect_unchanged(self, memory: Sequence[memoryview], before: Sequence[bytes]) -> None:
        if any(bytes(buffer) != was for buffer, was in zip(memory, before, strict=True)):
            self._scheduler.fail(SimulationError("memory changed while a backend had it"))

    def _begin(self, verb: str, faults: tuple[str, ...]) -> str:
        """The fault of this call among `faults`; those that any call may have happen here."""
        if self.closed:
            raise BackendError("this backend is closed")
        down = self.trouble.at(self._scheduler.now)
        if down is not None:
            if down:
                self._scheduler.sleep(self.context.timeout_s)
            raise BackendUnavailable(f"simulated: {verb} was refused")
        self._pause()
        fault = self._draw((*ANY, *faults, "lie"))
        match fault:
            case "unavailable":
                raise BackendUnavailable(f"simulated: {verb} failed for now")
            case "broken":
                raise BackendError(f"simulated: {verb} failed")
            case "foreign":
                raise ForeignError(f"simulated: {verb} has a bug")
            case "until_deadline":
                self._scheduler.sleep(self.context.timeout_s)
                raise BackendUnavailable(f"simulated: {verb} had no answer")
            case "stuck":
                self._unstuck.wait(self.context.timeout_s * self._random.uniform(1, 12))
        return fault

    def _draw(self, faults: Sequence[str]) -> str:
        point = self._random.random()
        for fault in faults if not self.trouble.healed else ():
            point -= self.trouble.rates.get(fault, 0.0)
            if point < 0:
                return fault
        return ""


class SimFence:
    def __init__(self, scheduler: Scheduler, device: SimDevice) -> None:
        self._event = Event(scheduler)
        self._device = device

    def done(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        with self._device.busy:
            return self._event.wait(timeout_s)

    def make_stream_wait(self, stream: Any) -> None:
        return None

    def set(self) -> None:
        self._event.set()


class Busy:
    """How long the mover has been in the device."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._seconds = 0.0
        self._since: float | None = None

    def seconds(self) -> float:
        return self._seconds + (self._scheduler.now - self._since if self._since is not None else 0.0)

    def __enter__(self) -> None:
        self._since = self._scheduler.now

    def __exit__(self, *exc: object) -> None:
        self._seconds, self._since = self.seconds(), None


class SimDevice(Device):
    """A host device: copies at once, later, much later, half, or not at all."""

    api_version: ClassVar[ApiVersion] = (1, 0)
    torch_type: ClassVar[str] = "cpu"

    def __init__(self, scheduler: Scheduler, rates: dict[str, float]) -> None:
        self.busy = Busy(scheduler)
        self.rates = rates
        self.healed = False
        self.extents: dict[int, int] = {}
        self.unpinned: set[int] = set()
        self.pending = 0
        self._scheduler = scheduler
        self._random = random.Random(scheduler.random.random())

    @classmethod
    def probe(cls) -> Probe:
        return Probe(1)

    def register(self, address: int, nbytes: int) -> None:
        if address in self.extents:
            self._scheduler.fail(SimulationError("an extent was registered twice"))
        self.extents[address] = nbytes
        if self._draw("refuse_register"):
            raise DeviceError("simulated: no memory can be pinned")

    def unregister(self, address: int, nbytes: int) -> None:
        if self.extents.pop(address, None) != nbytes:
            self._scheduler.fail(SimulationError("an extent was unregistered that was not registered"))

    def close(self) -> None:
        while self.pending:
            self._scheduler.sleep(1.0)

    def gather(
        self,
        pages: Pages,
        block_ids: Sequence[int],
        layout: Layout,
        out: Sequence[memoryview],
        *,
        layers: range | None = None,
        after: Fence | None = None,
    ) -> Fence:
        def copy(buffer: memoryview, blocks: Sequence[int]) -> None:
            data = np.concatenate([pages[0][layer][list(blocks)].reshape(-1) for layer in range(len(pages[0]))])
            np.copyto(np.frombuffer(buffer, np.uint8), data)

        return self._copies(copy, block_ids, layout, out)

    def scatter(
        self,
        src: Sequence[memoryview],
        layout: Layout,
        pages: Pages,
        block_ids: Sequence[int],
        *,
        layers: range | None = None,
        skip_blocks: int = 0,
        after: Fence | None = None,
    ) -> Fence:
        def copy(buffer: memoryview, blocks: Sequence[int]) -> None:
            data = np.frombuffer(buffer, np.uint8).reshape(len(pages[0]), len(blocks), -1)
            for layer in range(len(pages[0])):
                pages[0][layer][list(blocks)] = data[layer]

        return self._copies(copy, block_ids, layout, src)

    def _copies(self, copy: Any, block_ids: Sequence[int], layout: Layout, memory: Sequence[memoryview]) -> Fence:
        each = layout.blocks(layout.regions[0])
        parts = [(buffer, block_ids[n * each : (n + 1) * each]) for n, buffer in enumerate(memory)]
        if len(block_ids) != each * len(memory):
            self._scheduler.fail(SimulationError(f"{len(block_ids)} block ids for {len(memory)} records"))
        for buffer in memory:
            self._expect_registered(buffer)
        if self._draw("device_late"):
            return self._later(copy, parts, self._random.uniform(10.0, 90.0))
        if self._draw("device_async"):
            return self._later(copy, parts, self._random.expovariate(1 / 0.01))
        with self.busy:
            for number, part in enumerate(parts):
                if self._draw("device_slow"):
                    self._scheduler.sleep(self._random.expovariate(1 / 0.05))
                if number and self._draw("device_foreign"):
                    raise ForeignError("simulated: the device plugin has a bug")
                if self._draw("device_error"):
                    raise DeviceError("simulated: the copy failed")
                copy(*part)
        return DoneFence()

    def _later(self, copy: Any, parts: list[tuple[memoryview, Sequence[int]]], seconds: float) -> Fence:
        fence = SimFence(self._scheduler, self)
        before = [bytes(buffer) for buffer, _ in parts]
        self.pending += 1

        def run() -> None:
            self._scheduler.sleep(seconds)
            for (buffer, blocks), was in zip(parts, before, strict=True):
                if bytes(buffer) != was:
                    self._scheduler.fail(SimulationError("a slot was written while the device was to copy it"))
                self._expect_registered(buffer)
                copy(buffer, blocks)
            self.pending -= 1
            fence.set()

        self._scheduler.start("device", run)
        return fence

    def _expect_registered(self, buffer: memoryview) -> None:
        address = int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])
        if not any(start <= address < start + nbytes for start, nbytes in self.extents.items()):
            self._scheduler.fail(SimulationError("the device was given memory that is not registered"))

    def _draw(self, fault: str) -> bool:
        return not self.healed and self._random.random() < self.rates.get(fault, 0.0)
