"""Laws of device I/O: between a store and a device's memory go the records that host memory has, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ..backend import Backend, DeviceIO, SupportsDeviceIO
from ..device import DeviceRecord
from ..devices.cpu import HostRecord
from ..errors import BackendError, BackendFull, ChunkCorrupt
from ..keys import ChunkKey
from ..layout import PAGE_NBYTES
from . import memory
from .bench import BackendSubject, verdict
from .laws import expect, in_threads, law, outcome_of, skip

_SIZES: Final = (1, 2, 3, 16, 257)
"""Of records, in pages: whole ones, as they lie in a device's memory."""
_ROUNDS: Final = 30


class DeviceIOLaws(BackendSubject):
    """What holds for a backend whose `device_io` offers something on this machine."""

    def new_device_record(self, nbytes: int) -> DeviceRecord:
        """Optional: memory of the device that the backend's device I/O works with; by default the host's."""
        return HostRecord(nbytes)

    @law(since=(1, 0))
    def test_a_record_is_the_same_by_device_io_and_through_host_memory(self) -> None:
        io, bench = self._io(), self.bench
        for count in _SIZES:
            nbytes = self._io_nbytes(count)
            for put in (lambda key, nbytes: self._io_put(io, key, nbytes), bench.put):
                key = bench.key()
                expect(self._io_look(io, key, nbytes) == "missing", "a record that nobody put is there by device I/O")
                put(key, nbytes)
                for way, seen in (("device I/O", self._io_look(io, key, nbytes)), ("get", bench.look(key, nbytes))):
                    expect(seen == "present", f"a record of {nbytes} bytes is {seen} by {way}")
                expect(bench.backend.remove(key) is True, "remove of a record that device I/O put is not True")
                expect(self._io_look(io, key, nbytes) == "missing", "a record that was removed is there by device I/O")

    @law(since=(1, 0))
    def test_device_io_into_longer_memory_says_how_long_the_record_is(self) -> None:
        io, key, nbytes = self._io(), self.bench.key(), self._io_nbytes(2)
        self.bench.put(key, nbytes)
        into = self._io_poisoned(nbytes + PAGE_NBYTES)
        returned = io.get(key, into)
        expect(returned == nbytes, f"device I/O says {returned!r} of a record of {nbytes} bytes")
        seen = verdict(key, nbytes, _on_host(into)[:nbytes], returned)
        expect(seen == "present", f"a record of {nbytes} bytes, read to longer memory, is {seen}")

    @law(since=(1, 0))
    def test_a_record_longer_than_the_device_memory_is_corrupt(self) -> None:
        io, key, nbytes = self._io(), self.bench.key(), self._io_nbytes(3)
        self.bench.put(key, nbytes)
        into = self._io_poisoned(nbytes - PAGE_NBYTES)
        returned = outcome_of(lambda: io.get(key, into))
        expect(isinstance(returned, ChunkCorrupt), f"device I/O to memory too short: {returned!r}, not ChunkCorrupt")
        expect(memory.is_poison(_on_host(into)), "device I/O wrote to memory that is too short")

    @law(since=(1, 0))
    def test_the_capacity_holds_for_device_io(self) -> None:
        self._io()
        nbytes = self._io_nbytes(2)
        backend = self.bench.open_for(4 * nbytes)
        io = self._io(backend)
        keys = self.bench.keys(8)
        taken = [key for key in keys if self._io_puts_if_room(io, key, nbytes)]
        expect(1 <= len(taken) <= 4, f"device I/O put {len(taken)} records, the capacity has room for 4")
        for key in keys:
            wanted = "present" if key in taken else "missing"
            seen = self._io_look(io, key, nbytes)
            expect(seen == wanted, f"a record is {seen} after device I/O at the capacity, not {wanted}")
        backend.remove(taken[0])
        expect(self._io_puts_if_room(io, self.bench.key(), nbytes), "device I/O finds no room that remove gave back")

    @law(since=(1, 0))
    def test_readers_by_device_io_never_see_part_of_a_record(self) -> None:
        io, bench = self._io(), self.bench
        key, nbytes = bench.key(), self._io_nbytes(64)
        variants = (b"one", b"other")
        running = [None, None]

        def write(variant: bytes) -> Callable[[], None]:
            data = self._io_filled(key + variant, nbytes)

            def run() -> None:
                try:
                    for round_ in range(_ROUNDS):
                        io.put(key, data)
                        if round_ % 3 == 0:
                            bench.backend.remove(key)
                finally:
                    running.pop()

            return run

        def read() -> None:
            into = self._io_poisoned(nbytes)
            while running:
                returned = io.get(key, into)
                seen = "missing" if returned is None else verdict(key, nbytes, _on_host(into), returned, variants)
                expect(seen in ("present", "missing"), f"a reader by device I/O saw a record {seen}")

        in_threads(*map(write, variants), read, read)

    @law(since=(1, 0))
    def test_device_io_with_a_broken_store_is_a_backend_error(self) -> None:
        io, key, nbytes = self._io(), self.bench.key(), self._io_nbytes(2)
        self.bench.put(key, nbytes)
        self.break_store()
        self._expect_io_error("get from a broken store", lambda: io.get(key, self._io_poisoned(nbytes)), miss=True)
        self._expect_io_error("put to a broken store", lambda: self._io_put(io, self.bench.key(), nbytes))

    @law(since=(1, 0))
    def test_device_io_after_close_is_a_backend_error(self) -> None:
        io, key, nbytes = self._io(), self.bench.key(), self._io_nbytes(2)
        self.bench.put(key, nbytes)
        self.bench.close_backend()
        self._expect_io_error("get after close", lambda: io.get(key, self._io_poisoned(nbytes)), miss=True)
        self._expect_io_error("put after close", lambda: self._io_put(io, key, nbytes))

    def _expect_io_error(self, what: str, call: Callable[[], object], *, miss: bool = False) -> None:
        seen = outcome_of(call)
        if not (miss and seen is None):
            expect(isinstance(seen, BackendError), f"device I/O, {what}: {seen!r}, not a BackendError")

    def _io(self, backend: Backend[Any] | None = None) -> DeviceIO:
        backend = backend or self.bench.backend
        io = backend.device_io() if isinstance(backend, SupportsDeviceIO) else None
        if io is None:
            skip("the backend has no device I/O, or not on this machine")
        return io

    def _io_nbytes(self, pages: int) -> int:
        return self.bench.size(pages * PAGE_NBYTES)

    def _io_filled(self, identity: bytes, nbytes: int) -> DeviceRecord:
        record = self.new_device_record(nbytes)
        memory.replace(record.memory, memory.payload(identity, nbytes))
        return record

    def _io_poisoned(self, nbytes: int) -> DeviceRecord:
        record = self.new_device_record(nbytes)
        memory.replace(record.memory, memory.poison(nbytes))
        return record

    def _io_put(self, io: DeviceIO, key: ChunkKey, nbytes: int) -> None:
        io.put(key, self._io_filled(key, nbytes))

    def _io_puts_if_room(self, io: DeviceIO, key: ChunkKey, nbytes: int) -> bool:
        try:
            self._io_put(io, key, nbytes)
        except BackendFull:
            return False
        return True

    def _io_look(self, io: DeviceIO, key: ChunkKey, nbytes: int) -> str:
        into = self._io_poisoned(nbytes)
        returned = io.get(key, into)
        return verdict(key, nbytes, _on_host(into), returned)


def _on_host(record: DeviceRecord) -> memoryview:
    """A copy of what the record's memory holds now."""
    return memoryview(memory.contents(record.memory))
