"""Laws of a device's staging memory: records that wait there lie as they would in a store, and come back whole."""

from __future__ import annotations

import gc
import os
from typing import Final

from ..device import DeviceRecord, Pages, SupportsStaging
from ..errors import DeviceError
from ..layout import PAGE_NBYTES
from . import memory
from .device_bench import KV, SHAPES, DeviceSubject, Engine, complete, random_chunks
from .laws import expect, law, outcome_of, skip

_ROUNDS: Final = 40
_RECORD_NBYTES: Final = 1 << 20
_TOO_MUCH_NBYTES: Final = 1 << 50
"""More than a process can address, and than any device has."""


class StagingLaws(DeviceSubject):
    """What holds for a device that supports `SupportsStaging`."""

    @law(since=(1, 0))
    def test_a_staged_record_is_as_long_as_was_asked(self) -> None:
        pages = Engine(self, KV).pages
        for count in (1, 2, 3, 257):
            nbytes = count * PAGE_NBYTES
            record = self._staging(nbytes, pages)
            expect(record.nbytes == nbytes, f"staging({nbytes}) gave a record of {record.nbytes} bytes")
            lies = len(memory.contents(record.memory))
            expect(lies == nbytes, f"staging({nbytes}) gave {lies} bytes of memory")
            for wanted in (nbytes - PAGE_NBYTES, max(0, nbytes - PAGE_NBYTES - 7)):
                found = len(record.payload(wanted))
                expect(found == wanted, f"payload({wanted}) of a record of {nbytes} bytes has the length {found}")

    @law(since=(1, 0))
    def test_a_header_page_is_there_when_it_was_written_and_read_as_a_copy(self) -> None:
        record = self._staging(3 * PAGE_NBYTES, Engine(self, KV).pages)
        before = os.urandom(3 * PAGE_NBYTES)
        memory.replace(record.memory, before)
        first, second = os.urandom(PAGE_NBYTES), os.urandom(PAGE_NBYTES)
        record.write_header(memory.filled_with(first))
        read = record.read_header()
        expect(read == first, "read_header does not give the page that write_header was given")
        expect(memory.contents(record.memory) == first + before[PAGE_NBYTES:], "write_header wrote something else too")
        record.write_header(memory.filled_with(second))
        expect(read == first, "what read_header gave changed with the record: it is no copy")
        expect(record.read_header() == second, "read_header does not give the page that was written last")

    @law(since=(1, 0))
    def test_chunks_go_through_staged_records_as_through_host_memory(self) -> None:
        for number, shape in enumerate(SHAPES):
            engine = Engine(self, shape, seed=50 + number)
            nbytes = shape.layout.nbytes
            ids = engine.some_ids(2)
            records = [self._staging(_record_nbytes(nbytes), engine.pages) for _ in range(2)]
            poison = memory.poison(records[0].nbytes)
            for record in records:
                memory.replace(record.memory, poison)
            payloads = [record.payload(nbytes) for record in records]
            complete(self.device.gather(engine.pages, ids, engine.layout, payloads), "gather")
            for record, chunk in zip(records, engine.chunks(ids), strict=True):
                wanted = poison[:PAGE_NBYTES] + chunk + poison[PAGE_NBYTES + nbytes :]
                expect(memory.contents(record.memory) == wanted, f"gather to a staged record ({shape}): other bytes")
            chunks = random_chunks(shape.layout, 2, seed=60 + number)
            for record, chunk in zip(records, chunks, strict=True):
                memory.replace(record.memory, os.urandom(PAGE_NBYTES) + chunk)
            complete(self.device.scatter(payloads, engine.layout, engine.pages, ids), "scatter")
            engine.store(chunks, ids)
            engine.check("after scatter from staged records")

    @law(since=(1, 0))
    def test_staged_records_are_apart(self) -> None:
        pages = Engine(self, KV).pages
        written = [(self._staging(3 * PAGE_NBYTES, pages), os.urandom(3 * PAGE_NBYTES)) for _ in range(4)]
        for record, data in written:
            memory.replace(record.memory, data)
        for record, data in written:
            expect(memory.contents(record.memory) == data, "two staged records share memory")

    @law(since=(1, 0))
    def test_more_staging_memory_than_there_is_is_a_device_error(self) -> None:
        pages = Engine(self, KV).pages
        self._staging(PAGE_NBYTES, pages)
        seen = outcome_of(lambda: self._staging(_TOO_MUCH_NBYTES, pages))
        expect(isinstance(seen, DeviceError), f"staging of {_TOO_MUCH_NBYTES} bytes: {seen!r}, not a DeviceError")
        self._staging(PAGE_NBYTES, pages)

    @law(since=(1, 0))
    def test_staging_memory_is_given_back_with_its_record(self) -> None:
        pages, data = Engine(self, KV).pages, bytes(_RECORD_NBYTES)

        def records() -> int:
            for _ in range(_ROUNDS):
                memory.replace(self._staging(_RECORD_NBYTES, pages).memory, data)
            gc.collect()
            return self.device_nbytes() + _resident_nbytes()

        records()
        before = records()
        kept = records() - before
        limit = _ROUNDS * _RECORD_NBYTES // 2
        expect(kept < limit, f"{_ROUNDS} records of {_RECORD_NBYTES} bytes were let go, {kept} bytes were kept")

    def _staging(self, nbytes: int, pages: Pages) -> DeviceRecord:
        device = self.device
        if not isinstance(device, SupportsStaging):
            skip("the device has no staging memory")
        return device.staging(nbytes, pages)


def _record_nbytes(payload_nbytes: int) -> int:
    return PAGE_NBYTES + memory.round_up(payload_nbytes, PAGE_NBYTES)


def _resident_nbytes() -> int:
    """Memory of this process, where the system tells."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        return 0
