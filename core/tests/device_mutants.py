"""A correct model of a device, and mutants of it: each breaks one sentence of the contract as a real one might."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from lmcache_core.backend import API_VERSION
from lmcache_core.device import Device, DeviceRecord, DoneFence, Fence, Pages, Probe
from lmcache_core.devices.cpu import HostRecord
from lmcache_core.errors import DeviceError
from lmcache_core.layout import Layout


class Model(Device):
    """Block by block, at once."""

    api_version: ClassVar[Any] = (1, 0)
    torch_type: ClassVar[str] = "cpu"

    @classmethod
    def probe(cls) -> Probe:
        return Probe(1)

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
        self.check(pages, block_ids, layout, len(out))
        self.wait_for(after)
        return self.run(lambda: self.copy_out(pages, block_ids, layout, out, layers))

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
        self.check(pages, block_ids, layout, len(src))
        self.wait_for(after)
        return self.run(lambda: self.copy_in(src, layout, pages, block_ids, layers, skip_blocks))

    # What the mutants change.

    def check(self, pages: Pages, ids: Sequence[int], layout: Layout, buffers: int) -> None:
        if len(ids) != buffers * layout.blocks(layout.regions[0]):
            raise DeviceError(f"{len(ids)} ids for {buffers} buffers")
        for region in pages:
            for page in region:
                if ids and not 0 <= min(ids) <= max(ids) < len(page):
                    raise DeviceError(f"no such block: {min(ids)} or {max(ids)}")

    def wait_for(self, after: Fence | None) -> None:
        if after is not None:
            after.wait()

    def run(self, copy: Callable[[], None]) -> Fence:
        copy()
        return DoneFence()

    def bits(self, block: Any) -> bytes:
        data: bytes = block.tobytes()
        return data

    def copy_out(
        self, pages: Pages, ids: Sequence[int], layout: Layout, out: Sequence[memoryview], layers: range | None
    ) -> None:
        for buffer, offset, region, layer, block in self.places(layout, ids, layers, 0):
            data = self.bits(pages[region][layer][block])
            out[buffer][offset : offset + len(data)] = data

    def copy_in(
        self,
        src: Sequence[memoryview],
        layout: Layout,
        pages: Pages,
        ids: Sequence[int],
        layers: range | None,
        skip_blocks: int,
    ) -> None:
        for buffer, offset, region, layer, block in self.places(layout, ids, layers, skip_blocks):
            there = pages[region][layer][block]
            data = bytes(src[buffer][offset : offset + there.nbytes])
            pages[region][layer][block] = np.frombuffer(data, there.dtype).reshape(there.shape)

    def places(
        self, layout: Layout, ids: Sequence[int], layers: range | None, skip_blocks: int
    ) -> list[tuple[int, int, int, int, int]]:
        """(buffer, offset, region, layer, block) of each block to copy."""
        found = []
        offset = 0
        for number, region in enumerate(layout.regions):
            per_chunk = layout.blocks(region)
            for layer in range(region.layers):
                for place, block in enumerate(ids):
                    if (layers is None or layer in layers) and place >= skip_blocks:
                        at = offset + place % per_chunk * region.block_nbytes
                        found.append((place // per_chunk, at, number, layer, block))
                offset += per_chunk * region.block_nbytes
        return found


# The mutants.

MUTANTS: list[tuple[str, type[Model]]] = []


def breaks(name: str) -> Callable[[type[Model]], type[Model]]:
    def add(mutant: type[Model]) -> type[Model]:
        MUTANTS.append((f"test_{name}", mutant))
        return mutant

    return add


@breaks("the_api_version_is_a_literal_that_core_speaks")
class InheritsVersion(Model):
    api_version = API_VERSION


@breaks("the_torch_type_is_a_word")
class NamesOneOfThem(Model):
    torch_type = "cuda:0"


@breaks("a_probe_says_how_many_there_are_or_why_there_is_none")
class SaysNothing(Model):
    @classmethod
    def probe(cls) -> Probe:
        return Probe(0)


@breaks("a_probe_says_how_many_there_are_or_why_there_is_none")
class ProbeRaises(Model):
    @classmethod
    def probe(cls) -> Probe:
        raise OSError("libacme.so.1: cannot open shared object file")


@breaks("gather_brings_the_blocks_that_were_named_in_their_order")
class SortsIds(Model):
    def copy_out(
        self, pages: Pages, ids: Sequence[int], layout: Layout, out: Sequence[memoryview], layers: range | None
    ) -> None:
        super().copy_out(pages, sorted(ids), layout, out, layers)


@breaks("gather_brings_the_blocks_that_were_named_in_their_order")
class WritesWholePages(Model):
    """Copies in whole words of 16 bytes, over the end of what is odd."""

    def copy_out(
        self, pages: Pages, ids: Sequence[int], layout: Layout, out: Sequence[memoryview], layers: range | None
    ) -> None:
        super().copy_out(pages, ids, layout, out, layers)
        for view in out:
            words = np.frombuffer(view, np.uint8)
            beyond = np.lib.stride_tricks.as_strided(words, (-(-len(words) // 16) * 16,))
            beyond[len(words) :] = 0


@breaks("scatter_puts_the_blocks_where_they_were_named_in_their_order")
class AssumesARun(Model):
    def copy_in(
        self,
        src: Sequence[memoryview],
        layout: Layout,
        pages: Pages,
        ids: Sequence[int],
        layers: range | None,
        skip_blocks: int,
    ) -> None:
        run = range(min(ids, default=0), min(ids, default=0) + len(ids))
        if not run or run[-1] >= len(pages[0][0]):
            run = range(len(ids))
        super().copy_in(src, layout, pages, run, layers, skip_blocks)


@breaks("what_was_gathered_is_scattered_to_other_blocks_unchanged")
class RemembersWhereItWas(Model):
    """Keeps a map from content to block, and believes it."""

    last: ClassVar[Sequence[int]] = ()

    def copy_out(
        self, pages: Pages, ids: Sequence[int], layout: Layout, out: Sequence[memoryview], layers: range | None
    ) -> None:
        super().copy_out(pages, ids, layout, out, layers)
        self.last = ids  # type: ignore[misc]

    def copy_in(
        self,
        src: Sequence[memoryview],
        layout: Layout,
        pages: Pages,
        ids: Sequence[int],
        layers: range | None,
        skip_blocks: int,
    ) -> None:
        super().copy_in(src, layout, pages, self.last or ids, layers, skip_blocks)


@breaks("every_bit_pattern_survives")
class ComputesWithTheNumbers(Model):
    def bits(self, block: Any) -> bytes:
        data: bytes = (block * block.dtype.type(1) + block.dtype.type(0)).tobytes()
        return data


@breaks("pages_with_strides_are_used_as_they_lie")
class BelievesInContiguousPages(Model):
    def bits(self, block: Any) -> bytes:
        base = block if block.base is None else block.base
        while base.base is not None and isinstance(base.base, np.ndarray):
            base = base.base
        start = block.__array_interface__["data"][0] - base.__array_interface__["data"][0]
        flat = base.reshape(-1).view(np.uint8)
        data: bytes = flat[start : start + block.nbytes].tobytes()
        return data


@breaks("pages_with_strides_are_used_as_they_lie")
class ReadsTheStorageFromItsStart(Model):
    """Takes every layer for the first one in the storage that they share."""

    def bits(self, block: Any) -> bytes:
        base = block
        while isinstance(base.base, np.ndarray):
            base = base.base
        start = block.__array_interface__["data"][0] - base.__array_interface__["data"][0]
        if base.ndim == 3 and block.ndim == 1:
            start -= start % base[0].nbytes
        else:
            return super().bits(block)
        data: bytes = base.reshape(-1).view(np.uint8)[start : start + block.nbytes].tobytes()
        return data


@breaks("pages_with_strides_are_used_as_they_lie")
class KeepsHeadsFirst(Model):
    """Copies a block in the order of its memory."""

    def bits(self, block: Any) -> bytes:
        data: bytes = np.ravel(block, order="K").tobytes()
        return data


@breaks("a_range_of_layers_leaves_the_other_layers_alone")
class IgnoresLayers(Model):
    def places(
        self, layout: Layout, ids: Sequence[int], layers: range | None, skip_blocks: int
    ) -> list[tuple[int, int, int, int, int]]:
        return super().places(layout, ids, None, skip_blocks)


@breaks("a_range_of_layers_leaves_the_other_layers_alone")
class PacksTheLayersWanted(Model):
    """Writes the layers of a range to the front of the buffer, not to their places."""

    def places(
        self, layout: Layout, ids: Sequence[int], layers: range | None, skip_blocks: int
    ) -> list[tuple[int, int, int, int, int]]:
        found = super().places(layout, ids, layers, skip_blocks)
        least = min((offset for _, offset, *_ in found), default=0)
        return [(buffer, offset - least, *rest) for buffer, offset, *rest in found]  # type: ignore[misc]


@breaks("skipped_blocks_of_the_first_buffer_are_left_as_they_are")
class IgnoresSkip(Model):
    def places(
        self, layout: Layout, ids: Sequence[int], layers: range | None, skip_blocks: int
    ) -> list[tuple[int, int, int, int, int]]:
        return super().places(layout, ids, layers, 0)


@breaks("skipped_blocks_of_the_first_buffer_are_left_as_they_are")
class SkipsInEachBuffer(Model):
    def places(
        self, layout: Layout, ids: Sequence[int], layers: range | None, skip_blocks: int
    ) -> list[tuple[int, int, int, int, int]]:
        found = super().places(layout, ids, layers, 0)
        return [each for each in found if ids.index(each[4]) % layout.blocks(layout.regions[0]) >= skip_blocks]


@breaks("nothing_to_copy_is_fine")
class NeedsABlock(Model):
    def check(self, pages: Pages, ids: Sequence[int], layout: Layout, buffers: int) -> None:
        super().check(pages, ids, layout, buffers)
        assert min(ids) >= 0


@breaks("an_id_that_no_page_has_is_refused_before_anything_is_copied")
class ClipsIds(Model):
    def check(self, pages: Pages, ids: Sequence[int], layout: Layout, buffers: int) -> None:
        super().check(pages, [0] * len(ids), layout, buffers)

    def places(
        self, layout: Layout, ids: Sequence[int], layers: range | None, skip_blocks: int
    ) -> list[tuple[int, int, int, int, int]]:
        return super().places(layout, [min(max(i, 0), 23) for i in ids], layers, skip_blocks)


@breaks("an_id_that_no_page_has_is_refused_before_anything_is_copied")
class LetsIndexErrorOut(Model):
    """And, for the same reason, takes -1 for the last block."""

    def check(self, pages: Pages, ids: Sequence[int], layout: Layout, buffers: int) -> None:
        super().check(pages, [0] * len(ids), layout, buffers)


@breaks("an_id_that_no_page_has_is_refused_before_anything_is_copied")
class LooksWhenItGetsThere(Model):
    def check(self, pages: Pages, ids: Sequence[int], layout: Layout, buffers: int) -> None:
        super().check(pages, [0] * len(ids), layout, buffers)

    def places(
        self, layout: Layout, ids: Sequence[int], layers: range | None, skip_blocks: int
    ) -> list[tuple[int, int, int, int, int]]:
        return _Guarded(super().places(layout, ids, layers, skip_blocks))


class _Guarded(list[tuple[int, int, int, int, int]]):
    def __iter__(self) -> Any:
        for each in super().__iter__():
            if not 0 <= each[4] < 24:
                raise DeviceError(f"no block {each[4]}")
            yield each


@breaks("ids_for_more_or_fewer_buffers_are_refused_before_anything_is_copied")
class CopiesWhatThereIs(Model):
    def check(self, pages: Pages, ids: Sequence[int], layout: Layout, buffers: int) -> None:
        super().check(pages, list(ids)[:1] * (buffers * layout.blocks(layout.regions[0])), layout, buffers)

    def places(
        self, layout: Layout, ids: Sequence[int], layers: range | None, skip_blocks: int
    ) -> list[tuple[int, int, int, int, int]]:
        return [each for each in super().places(layout, ids, layers, skip_blocks) if each[0] < 2]


@breaks("gather_reads_after_the_fence_that_it_was_given")
@breaks("scatter_writes_after_the_fence_that_it_was_given")
class IgnoresTheFence(Model):
    def wait_for(self, after: Fence | None) -> None:
        return None


@breaks("scatter_writes_after_the_fence_that_it_was_given")
class WaitsWhenItHasWritten(Model):
    def wait_for(self, after: Fence | None) -> None:
        self.after = after

    def run(self, copy: Callable[[], None]) -> Fence:
        copy()
        if self.after is not None:
            self.after.wait()
        return DoneFence()


class _Thread:
    """The fence of a copy that a thread makes."""

    def __init__(self, copy: Callable[[], None]) -> None:
        self.finished = threading.Event()
        self._copy = copy
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._copy()
        self.finished.set()

    def done(self) -> bool:
        return self.finished.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        self._thread.join(timeout_s)
        return self.finished.is_set()

    def make_stream_wait(self, stream: Any) -> None:
        self.wait()


class InThreads(Model):
    """Correct: copies that end after the call has returned."""

    def run(self, copy: Callable[[], None]) -> Fence:
        return _Thread(copy)


class _Hasty(DoneFence):
    """Copies only when it is waited for."""

    __slots__ = ("copy",)

    def __init__(self, copy: Callable[[], None]) -> None:
        self.copy = copy

    def wait(self, timeout_s: float | None = None) -> bool:
        self.copy()
        return True


@breaks("a_fence_that_is_done_means_that_the_bytes_are_there")
class SaysDoneWhenQueued(Model):
    def run(self, copy: Callable[[], None]) -> Fence:
        return _Hasty(copy)


class _Forgetful(DoneFence):
    def done(self) -> bool:
        return False


@breaks("a_fence_completes_and_stays_complete")
class NeverDone(Model):
    def run(self, copy: Callable[[], None]) -> Fence:
        copy()
        return _Forgetful()


class _Silent(DoneFence):
    def wait(self, timeout_s: float | None = None) -> bool:
        return None if timeout_s == 0 else True  # type: ignore[return-value]


@breaks("a_fence_completes_and_stays_complete")
class WaitSaysNothing(Model):
    def run(self, copy: Callable[[], None]) -> Fence:
        copy()
        return _Silent()


class _Unheard(_Thread):
    """Begins when it is waited for, or asked; a stream that is made to wait is not heard."""

    def __init__(self, copy: Callable[[], None]) -> None:
        self.finished = threading.Event()
        self._copy = copy

    def done(self) -> bool:
        return self.wait()

    def wait(self, timeout_s: float | None = None) -> bool:
        if not self.finished.is_set():
            self._run()
        return True

    def make_stream_wait(self, stream: Any) -> None:
        return None


@breaks("a_stream_that_was_made_to_wait_for_a_fence_sees_the_copy")
class LetsStreamsGoOn(Model):
    def run(self, copy: Callable[[], None]) -> Fence:
        return _Unheard(copy)


@breaks("layer_by_layer_is_the_same_as_all_at_once")
class HasOneStagingBuffer(Model):
    """Copies in flight share the place that their arguments were put down in."""

    copy: Callable[[], None]

    def run(self, copy: Callable[[], None]) -> Fence:
        self.copy = copy
        return _Unheard(lambda: self.copy())


@breaks("two_requests_at_once_do_not_mix")
class SharesItsArguments(Model):
    """Keeps the ids of the call in itself, where the other thread's call replaces them."""

    ids: Sequence[int] = ()

    def __init__(self) -> None:
        super().__init__()
        self.both = threading.Barrier(2)

    def check(self, pages: Pages, ids: Sequence[int], layout: Layout, buffers: int) -> None:
        super().check(pages, ids, layout, buffers)
        self.ids = ids
        try:
            self.both.wait(10.0)
        except threading.BrokenBarrierError:
            pass  # the other one has failed: from now on nobody waits

    def places(
        self, layout: Layout, ids: Sequence[int], layers: range | None, skip_blocks: int
    ) -> list[tuple[int, int, int, int, int]]:
        return super().places(layout, self.ids, layers, skip_blocks)


@breaks("many_copies_leave_no_memory_threads_or_descriptors")
class KeepsHistory(Model):
    history: ClassVar[list[object]] = []

    def run(self, copy: Callable[[], None]) -> Fence:
        self.history.append(bytearray(64))
        return super().run(copy)


LEFT: list[tuple[threading.Event, threading.Thread]] = []
"""Threads that mutants leave, for the test to end."""


def _leave_thread() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="forgotten", daemon=True)
    thread.start()
    LEFT.append((end, thread))


@breaks("many_copies_leave_no_memory_threads_or_descriptors")
class LeavesThreads(Model):
    def run(self, copy: Callable[[], None]) -> Fence:
        if len(LEFT) < 200:
            _leave_thread()
        return super().run(copy)


@breaks("registered_memory_can_be_used_and_let_go")
class RegistersOnce(Model):
    registered = False

    def register(self, address: int, nbytes: int) -> None:
        if self.registered:
            raise DeviceError("already registered")
        self.registered = True


@breaks("registered_memory_can_be_used_and_let_go")
class LosesRegisteredMemory(Model):
    registered = False

    def register(self, address: int, nbytes: int) -> None:
        self.registered = True

    def run(self, copy: Callable[[], None]) -> Fence:
        return DoneFence() if self.registered else super().run(copy)


class Full(Model):
    """Correct, with all that a device may offer: no law is skipped for it."""

    Record: ClassVar[type[HostRecord]] = HostRecord
    path_names: ClassVar[tuple[str, ...]] = ("slow", "fast")
    gathers = scatters = "slow"

    @classmethod
    def identity(cls) -> dict[str, str]:
        return {"card": "model"}

    def unusable(self) -> dict[str, str]:
        return {}

    def use(self, *, gather: str, scatter: str) -> None:
        if not {gather, scatter} <= set(self.path_names):
            raise DeviceError("no such path")
        self.gathers, self.scatters = gather, scatter

    def staging(self, nbytes: int, pages: Pages) -> DeviceRecord:
        return self.Record(nbytes)


@breaks("every_path_copies_the_same_bytes")
class GathersTheWrongBlocksFast(Full):
    def copy_out(
        self, pages: Pages, ids: Sequence[int], layout: Layout, out: Sequence[memoryview], layers: range | None
    ) -> None:
        super().copy_out(pages, list(ids)[::-1] if self.gathers == "fast" else ids, layout, out, layers)


@breaks("every_path_copies_the_same_bytes")
class ForgetsTheSkipWhenFast(Full):
    def copy_in(
        self,
        src: Sequence[memoryview],
        layout: Layout,
        pages: Pages,
        ids: Sequence[int],
        layers: range | None,
        skip: int,
    ) -> None:
        super().copy_in(src, layout, pages, ids, layers, 0 if self.scatters == "fast" else skip)


@breaks("a_path_that_there_is_not_is_refused")
class TakesAnyPath(Full):
    def use(self, *, gather: str, scatter: str) -> None:
        self.gathers, self.scatters = gather, scatter


@breaks("a_path_that_there_is_not_is_refused")
class LooksAtOneDirection(Full):
    def use(self, *, gather: str, scatter: str) -> None:
        super().use(gather=gather, scatter=gather)


@breaks("close_twice_is_fine_and_leaves_no_thread")
class ClosesOnlyOnce(Model):
    closed = False

    def close(self) -> None:
        if self.closed:
            raise DeviceError("closed")
        self.closed = True


@breaks("close_twice_is_fine_and_leaves_no_thread")
class KeepsItsWorker(Model):
    worked = False

    def run(self, copy: Callable[[], None]) -> Fence:
        if not self.worked:
            self.worked = True
            _leave_thread()
        return super().run(copy)


# Staging memory.


@breaks("a_staged_record_is_as_long_as_was_asked")
class RoundsUp(Full):
    def staging(self, nbytes: int, pages: Pages) -> DeviceRecord:
        return HostRecord(-(-nbytes // (1 << 20)) * (1 << 20))


@breaks("a_staged_record_is_as_long_as_was_asked")
class GivesAllAsPayload(Full):
    class Record(HostRecord):
        def payload(self, nbytes: int) -> memoryview:
            return self.memory[4096:]


@breaks("a_header_page_is_there_when_it_was_written_and_read_as_a_copy")
class GivesAView(Full):
    class Record(HostRecord):
        def read_header(self) -> memoryview:
            return self.memory[:4096]


@breaks("a_header_page_is_there_when_it_was_written_and_read_as_a_copy")
class KeepsTheHeaderBeside(Full):
    class Record(HostRecord):
        def read_header(self) -> memoryview:
            return memoryview(self.header)

        def write_header(self, page: memoryview) -> None:
            self.header = bytes(page)


@breaks("chunks_go_through_staged_records_as_through_host_memory")
class ForgetsTheHeaderPage(Full):
    class Record(HostRecord):
        def payload(self, nbytes: int) -> memoryview:
            return self.memory[:nbytes]


@breaks("chunks_go_through_staged_records_as_through_host_memory")
class CopiesFromACopy(Full):
    """What a library reads into the record's memory is not what is scattered."""

    class Record(HostRecord):
        def payload(self, nbytes: int) -> memoryview:
            return memoryview(bytearray(super().payload(nbytes)))


@breaks("staged_records_are_apart")
class HasOneRecordAlone(Full):
    record: HostRecord | None = None

    def staging(self, nbytes: int, pages: Pages) -> DeviceRecord:
        if self.record is None or self.record.nbytes != nbytes:
            self.record = HostRecord(nbytes)
        return self.record


@breaks("more_staging_memory_than_there_is_is_a_device_error")
class LetsTheSystemsErrorOut(Full):
    def staging(self, nbytes: int, pages: Pages) -> DeviceRecord:
        if nbytes > 1 << 40:
            raise MemoryError
        return HostRecord(nbytes)


@breaks("staging_memory_is_given_back_with_its_record")
class KeepsRecords(Full):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[DeviceRecord] = []

    def staging(self, nbytes: int, pages: Pages) -> DeviceRecord:
        self.records.append(HostRecord(nbytes))
        return self.records[-1]
