"""A correct model of a backend, and mutants of it: each breaks one sentence of the contract as a real one might."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lmcache_core.backend import API_VERSION, Context, DeviceIO, Entry, GetResult, Traits
from lmcache_core.device import DeviceRecord
from lmcache_core.errors import BackendError, BackendFull, BackendUnavailable, ChunkCorrupt
from lmcache_core.keys import ChunkKey
from lmcache_core.testing import (
    BackendLaws,
    DictBackend,
    DictStore,
)


@dataclass(slots=True)
class ModelStore(DictStore):
    broken: bool = False
    answering: threading.Event = field(default_factory=threading.Event)


class Model(DictBackend):
    """A correct backend with every trait and capability, so that no law is skipped."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    traits: ClassVar[Traits] = Traits(persistent=True, shared=True, max_nbytes=1 << 21)
    store: ModelStore

    def __init__(self, context: Context, store: ModelStore) -> None:
        super().__init__(context=context, store=store)
        self.registered: list[tuple[int, int]] = []

    def put(self, key: ChunkKey, data: memoryview) -> None:
        if self.traits.max_nbytes is not None and len(data) > self.traits.max_nbytes:
            raise BackendFull(f"{len(data)} bytes are more than {self.traits.max_nbytes}")
        super().put(key, data)

    def register(self, address: int, nbytes: int) -> None:
        self.registered.append((address, nbytes))

    def unregister(self, address: int, nbytes: int) -> None:
        self.registered.remove((address, nbytes))

    def device_io(self) -> DeviceIO | None:
        return ModelIO(self)

    def contains_prefix(self, keys: Sequence[ChunkKey], *, timeout_s: float) -> int:
        if not self.store.answering.wait(timeout_s):
            raise BackendUnavailable("stalled")
        return super().contains_prefix(keys, timeout_s=timeout_s)

    def get_many(self, keys: Sequence[ChunkKey], into: Sequence[memoryview], *, timeout_s: float) -> list[GetResult]:
        if not self.store.answering.wait(timeout_s):
            return [BackendUnavailable("stalled") for _ in keys]
        return super().get_many(keys, into, timeout_s=timeout_s)

    def put_many(
        self, keys: Sequence[ChunkKey], data: Sequence[memoryview], *, timeout_s: float
    ) -> list[BackendError | None]:
        if not self.store.answering.wait(timeout_s):
            return [BackendUnavailable("stalled") for _ in keys]
        return super().put_many(keys, data, timeout_s=timeout_s)

    def _check_open(self) -> None:
        super()._check_open()
        if self.store.broken:
            raise BackendUnavailable("broken")


class ModelIO:
    """Device I/O of a model, for the CPU, whose memory is the host's."""

    def __init__(self, backend: Model) -> None:
        self.backend = backend

    def get(self, key: ChunkKey, into: DeviceRecord) -> int | None:
        return self.backend.get(key, into.memory)

    def put(self, key: ChunkKey, data: DeviceRecord) -> None:
        self.backend.put(key, data.memory)


class ModelLaws(BackendLaws):
    backend_class: ClassVar[type[Model]] = Model

    def setup_law(self) -> None:
        self.store = ModelStore()
        self.store.answering.set()
        super().setup_law()

    def open_backend(self, context: Context) -> Model:
        return self.backend_class(context, self.store)

    def break_store(self) -> None:
        self.store.broken = True

    @contextlib.contextmanager
    def stall_store(self) -> Iterator[None]:
        self.store.answering.clear()
        try:
            yield
        finally:
            self.store.answering.set()


def laws_of(mutant: type[Model]) -> ModelLaws:
    laws = ModelLaws()
    laws.backend_class = mutant  # type: ignore[misc]
    return laws


# The mutants.  Each breaks one sentence of the contract as a real backend might.

MUTANTS: list[tuple[str, type[Model]]] = []


def breaks(name: str) -> Callable[[type[Model]], type[Model]]:
    def add(mutant: type[Model]) -> type[Model]:
        MUTANTS.append((f"test_{name}", mutant))
        return mutant

    return add


@breaks("the_api_version_is_a_literal_that_core_speaks")
class InheritsVersion(Model):
    api_version = API_VERSION


@breaks("the_api_version_is_a_literal_that_core_speaks")
class NewerVersion(Model):
    api_version = (1, 99)


@breaks("the_api_version_is_a_literal_that_core_speaks")
class TextVersion(Model):
    api_version = "1.0"  # type: ignore[assignment]


@breaks("the_traits_make_sense")
class OddAlignment(Model):
    traits = Traits(alignment=3)


@breaks("the_traits_make_sense")
class NoThreads(Model):
    traits = Traits(io_threads=0)


@breaks("the_options_are_frozen_and_hide_secrets")
class ShowsPassword(Model):
    @dataclass(frozen=True)
    class Options:
        url: str
        redis_password: str = ""


@breaks("the_options_are_frozen_and_hide_secrets")
class ThawedOptions(Model):
    @dataclass
    class Options:
        url: str = ""


@breaks("a_record_comes_back_exactly")
class WholePagesOnly(Model):
    def put(self, key: ChunkKey, data: memoryview) -> None:
        super().put(key, data[: max(1, len(data) // 4096 * 4096)])


@breaks("bytes_that_end_lines_and_texts_come_back")
class ReadsMail(Model):
    def put(self, key: ChunkKey, data: memoryview) -> None:
        super().put(key, data[:-1] if data[-1:] == b"\r" else data)


@breaks("get_writes_nothing_past_the_record")
class ClearsTheRest(Model):
    def get(self, key: ChunkKey, into: memoryview) -> int | None:
        nbytes = super().get(key, into)
        if nbytes is not None:
            into[nbytes:] = bytes(len(into) - nbytes)
        return nbytes


@breaks("a_miss_is_none_and_touches_nothing")
class MissIsZero(Model):
    def get(self, key: ChunkKey, into: memoryview) -> int | None:
        return super().get(key, into) or 0


@breaks("a_miss_is_none_and_touches_nothing")
class MissClearsBuffer(Model):
    def get(self, key: ChunkKey, into: memoryview) -> int | None:
        if not self.contains(key):
            into[:1] = b"\0"
        return super().get(key, into)


@breaks("contains_follows_put_and_remove")
class RemembersForever(Model):
    def contains(self, key: ChunkKey) -> bool:
        self.seen = getattr(self, "seen", set()) | ({key} if super().contains(key) else set())
        return key in self.seen


@breaks("put_copies")
class KeepsTheBuffer(Model):
    def put(self, key: ChunkKey, data: memoryview) -> None:
        super().put(key, data)
        self.store.records[key] = (data, time.time())  # type: ignore[assignment]


@breaks("get_gives_each_caller_a_copy")
class ServesTheReadersBuffer(Model):
    def get(self, key: ChunkKey, into: memoryview) -> int | None:
        nbytes = super().get(key, into)
        if nbytes is not None:
            self.store.records[key] = (into[:nbytes], time.time())  # type: ignore[assignment]
        return nbytes


@breaks("buffers_are_let_go_after_the_call")
class HoldsAView(Model):
    def put(self, key: ChunkKey, data: memoryview) -> None:
        super().put(key, data)
        self.view = data[:]


@breaks("a_record_longer_than_the_buffer_is_refused_before_writing")
class FillsShortBuffer(Model):
    def get(self, key: ChunkKey, into: memoryview) -> int | None:
        record = self.store.records.get(key)
        if record is not None and len(record[0]) > len(into):
            into[:] = record[0][: len(into)]
            raise ChunkCorrupt("too long")
        return super().get(key, into)


@breaks("a_record_longer_than_the_buffer_is_refused_before_writing")
class CutsToTheBuffer(Model):
    def get(self, key: ChunkKey, into: memoryview) -> int | None:
        record = self.store.records.get(key)
        if record is not None and len(record[0]) > len(into):
            return len(into)
        return super().get(key, into)


@breaks("remove_says_whether_the_record_was_there")
class RemoveAlwaysTrue(Model):
    def remove(self, key: ChunkKey) -> bool:
        super().remove(key)
        return True


@breaks("a_second_put_of_the_same_key_is_harmless")
class CountsReferences(Model):
    def __init__(self, context: Context, store: ModelStore) -> None:
        super().__init__(context, store)
        self.references: Counter[ChunkKey] = Counter()

    def put(self, key: ChunkKey, data: memoryview) -> None:
        self.references[key] += 1
        super().put(key, data)

    def remove(self, key: ChunkKey) -> bool:
        self.references[key] -= 1
        return self.references[key] > 0 or super().remove(key)


class RenamesKeys(Model):
    @staticmethod
    def name(key: ChunkKey) -> ChunkKey:
        raise NotImplementedError

    def put(self, key: ChunkKey, data: memoryview) -> None:
        super().put(self.name(key), data)

    def get(self, key: ChunkKey, into: memoryview) -> int | None:
        return super().get(self.name(key), into)


@breaks("similar_keys_stay_distinct")
class ForgetsTheShard(RenamesKeys):
    @staticmethod
    def name(key: ChunkKey) -> ChunkKey:
        return ChunkKey(bytes(16) + key.digest)


@breaks("similar_keys_stay_distinct")
class TruncatesKeys(RenamesKeys):
    @staticmethod
    def name(key: ChunkKey) -> ChunkKey:
        return ChunkKey(key[:47] + b"\0")


@breaks("similar_keys_stay_distinct")
class FoldsCase(RenamesKeys):
    @staticmethod
    def name(key: ChunkKey) -> ChunkKey:
        return ChunkKey(key[:40] + key[40:].lower())


@breaks("a_record_over_max_nbytes_is_a_fault")
class TakesAnySize(Model):
    def put(self, key: ChunkKey, data: memoryview) -> None:
        DictBackend.put(self, key, data)


@breaks("contains_prefix_stops_at_the_first_hole")
class CountsAllPresent(Model):
    def contains_prefix(self, keys: Sequence[ChunkKey], *, timeout_s: float) -> int:
        return sum(self.contains(key) for key in keys)


@breaks("batches_answer_for_each_key_in_order")
class LeavesOutMisses(Model):
    def get_many(self, keys: Sequence[ChunkKey], into: Sequence[memoryview], *, timeout_s: float) -> list[GetResult]:
        return [r for r in super().get_many(keys, into, timeout_s=timeout_s) if r is not None]


@breaks("batches_answer_for_each_key_in_order")
class SortsKeys(Model):
    def get_many(self, keys: Sequence[ChunkKey], into: Sequence[memoryview], *, timeout_s: float) -> list[GetResult]:
        return super().get_many(sorted(keys, reverse=keys[0] < keys[1]), into, timeout_s=timeout_s)


@breaks("batches_answer_for_each_key_in_order")
class StoresTheFirstOnly(Model):
    def put_many(
        self, keys: Sequence[ChunkKey], data: Sequence[memoryview], *, timeout_s: float
    ) -> list[BackendError | None]:
        return super().put_many(keys[:1], data[:1], timeout_s=timeout_s) * len(keys)


@breaks("one_key_does_not_spoil_a_batch")
class RaisesForAll(Model):
    def get_many(self, keys: Sequence[ChunkKey], into: Sequence[memoryview], *, timeout_s: float) -> list[GetResult]:
        return [self.get(key, buffer) for key, buffer in zip(keys, into, strict=True)]


@breaks("one_key_does_not_spoil_a_batch")
class GivesUpAtTheFirst(Model):
    def get_many(self, keys: Sequence[ChunkKey], into: Sequence[memoryview], *, timeout_s: float) -> list[GetResult]:
        results = super().get_many(keys, into, timeout_s=timeout_s)
        failed = next((i for i, r in enumerate(results) if isinstance(r, BackendError)), len(results))
        return results[: failed + 1] + [BackendError("given up")] * (len(results) - failed - 1)


@breaks("empty_batches_are_empty")
class NeedsAKey(Model):
    def contains_prefix(self, keys: Sequence[ChunkKey], *, timeout_s: float) -> int:
        return super().contains_prefix(keys, timeout_s=timeout_s) if self.contains(keys[0]) else 0


@breaks("batches_return_at_their_deadline")
class NoDeadline(Model):
    def get_many(self, keys: Sequence[ChunkKey], into: Sequence[memoryview], *, timeout_s: float) -> list[GetResult]:
        never = threading.Event()
        for _ in keys:
            never.wait(0.02)
        return super().get_many(keys, into, timeout_s=timeout_s)


@breaks("batches_return_at_their_deadline")
class LateIsFull(Model):
    def put_many(
        self, keys: Sequence[ChunkKey], data: Sequence[memoryview], *, timeout_s: float
    ) -> list[BackendError | None]:
        return [BackendFull("too late") for _ in keys]


@breaks("a_stalled_store_keeps_nobody_beyond_the_deadline")
class WaitsForAnswers(Model):
    def put_many(
        self, keys: Sequence[ChunkKey], data: Sequence[memoryview], *, timeout_s: float
    ) -> list[BackendError | None]:
        return super().put_many(keys, data, timeout_s=timeout_s + 1.5)


@breaks("the_capacity_is_held")
class NoLimit(Model):
    def put(self, key: ChunkKey, data: memoryview) -> None:
        if len(data) <= (self.context.capacity_nbytes or len(data)):
            self.store.nbytes = 0
        super().put(key, data)


@breaks("the_capacity_is_held")
class EvictsByItself(Model):
    def put(self, key: ChunkKey, data: memoryview) -> None:
        try:
            super().put(key, data)
        except BackendFull:
            self.remove(next(iter(self.store.records)))
            super().put(key, data)
            raise


@breaks("a_record_larger_than_the_capacity_is_full")
class FirstAlwaysFits(Model):
    def put(self, key: ChunkKey, data: memoryview) -> None:
        if not self.store.records:
            self.store.nbytes = -len(data)
        super().put(key, data)


@breaks("a_second_put_is_not_counted_twice")
class CountsTwice(Model):
    def put(self, key: ChunkKey, data: memoryview) -> None:
        if key in self.store.records:
            self.store.nbytes += len(data)
        super().put(key, data)


@breaks("room_is_given_back")
class KeepsTheRoom(Model):
    def remove(self, key: ChunkKey) -> bool:
        before = self.store.nbytes
        removed = super().remove(key)
        self.store.nbytes = before
        return removed


@breaks("the_capacity_counts_what_was_there_at_open")
class CountsFromZero(Model):
    def __init__(self, context: Context, store: ModelStore) -> None:
        super().__init__(context, store)
        self.store.nbytes = 0


@breaks("the_capacity_is_that_of_all_handles_together")
class CountsForItself(Model):
    own_nbytes = 0

    def put(self, key: ChunkKey, data: memoryview) -> None:
        self.store.nbytes = self.own_nbytes
        super().put(key, data)
        self.own_nbytes = self.store.nbytes


@breaks("the_listing_names_exactly_what_is_there")
class ListsTheRemoved(Model):
    def entries(self, shard_id: bytes | None = None) -> Iterator[Entry]:
        self.listed = {**getattr(self, "listed", {}), **{e.key: e for e in super().entries()}}
        yield from (e for e in self.listed.values() if shard_id in (None, e.key.shard_id))

    def put(self, key: ChunkKey, data: memoryview) -> None:
        super().put(key, data)
        list(self.entries())


@breaks("the_listing_names_exactly_what_is_there")
class ListsTheSizeOnDisk(Model):
    def entries(self, shard_id: bytes | None = None) -> Iterator[Entry]:
        for entry in super().entries(shard_id):
            yield Entry(entry.key, -(-entry.nbytes // 4096) * 4096, entry.stored_at)


@breaks("the_listing_of_a_shard_is_of_that_shard")
class ListsEveryShard(Model):
    def entries(self, shard_id: bytes | None = None) -> Iterator[Entry]:
        return super().entries()


@breaks("the_listing_says_when_a_record_was_stored")
class ListsMonotonicTime(Model):
    def entries(self, shard_id: bytes | None = None) -> Iterator[Entry]:
        for entry in super().entries(shard_id):
            yield Entry(entry.key, entry.nbytes, time.monotonic())


@breaks("records_survive_reopening")
class StartsEmpty(Model):
    def __init__(self, context: Context, store: ModelStore) -> None:
        super().__init__(context, store)
        self.store.records.clear()


@breaks("another_handle_sees_the_same_records")
class RemembersMisses(Model):
    def get(self, key: ChunkKey, into: memoryview) -> int | None:
        self.missed: set[ChunkKey] = getattr(self, "missed", set())
        nbytes = None if key in self.missed else super().get(key, into)
        if nbytes is None:
            self.missed.add(key)
        return nbytes


@breaks("readers_never_see_part_of_a_record")
class WritesInTwoSteps(Model):
    def put(self, key: ChunkKey, data: memoryview) -> None:
        super().put(key, data[: len(data) // 2])
        time.sleep(0.001)
        super().put(key, data)


@breaks("many_threads_at_once_keep_records_right")
class OneScratchBuffer(Model):
    def get(self, key: ChunkKey, into: memoryview) -> int | None:
        record = self.store.records.get(key)
        if record is None:
            return None
        self.scratch = record[0]
        time.sleep(0)
        nbytes = min(len(self.scratch), len(into))
        into[:nbytes] = self.scratch[:nbytes]
        return nbytes


@breaks("any_history_may_forget_but_never_lies")
class BringsTheRemovedBack(Model):
    """Compacts itself at every third put, from a log in which removals are not written down."""

    puts = 0
    log: dict[ChunkKey, bytes]

    def put(self, key: ChunkKey, data: memoryview) -> None:
        super().put(key, data)
        self.puts += 1
        self.log = {**getattr(self, "log", {}), key: bytes(data)}
        if self.puts % 3 == 0:
            for logged, content in self.log.items():
                super().put(logged, memoryview(content))


@breaks("any_history_may_forget_but_never_lies")
class GivesOutAnOldPlace(Model):
    """Reads what lies in the place of a removed record, which another record has taken."""

    free: ChunkKey | None = None

    def remove(self, key: ChunkKey) -> bool:
        self.free = key
        return super().remove(key)

    def put(self, key: ChunkKey, data: memoryview) -> None:
        free = self.free
        if free is not None and free != key:
            self.store.records[free] = (bytes(data), 0.0)
            self.free = None
        super().put(key, data)


@breaks("a_broken_store_is_a_backend_error")
class LetsOSErrorOut(Model):
    def get(self, key: ChunkKey, into: memoryview) -> int | None:
        if self.store.broken:
            raise ConnectionResetError("peer went away")
        return super().get(key, into)


@breaks("a_broken_store_is_a_backend_error")
class ForgetsQuietly(Model):
    def put(self, key: ChunkKey, data: memoryview) -> None:
        with contextlib.suppress(BackendUnavailable):
            super().put(key, data)


@breaks("buffers_are_let_go_after_a_fault")
class KeepsItsFault(Model):
    """The frame of `get` holds the exception, whose traceback holds the frame, which holds a view."""

    def get(self, key: ChunkKey, into: memoryview) -> int | None:
        part = into[:]
        try:
            return super().get(key, part)
        except BackendError as error:
            fault = error
            raise fault from None


@breaks("buffers_are_let_go_after_a_fault")
class AnswersWithItsFault(Model):
    """As in a loop that gathers results: each keeps the frames that it came through."""

    def put_many(
        self, keys: Sequence[ChunkKey], data: Sequence[memoryview], *, timeout_s: float
    ) -> list[BackendError | None]:
        results: list[BackendError | None] = []
        for key, buffer in zip(keys, data, strict=True):
            part = buffer[:]
            try:
                results.append(self.put(key, part))  # type: ignore[func-returns-value]
            except BackendError as error:
                results.append(error)
        return results


@breaks("calls_after_close_are_backend_errors")
class CrashesAfterClose(Model):
    def close(self) -> None:
        self.store = None  # type: ignore[assignment]


@breaks("close_twice_is_fine_and_leaves_nothing")
class ClosesOnlyOnce(Model):
    def close(self) -> None:
        if self.closed:
            raise OSError("bad file descriptor")
        super().close()


LEFT: list[Any] = []
"""What the next two leave, for the test to clear away."""


@breaks("close_twice_is_fine_and_leaves_nothing")
class LeavesDescriptor(Model):
    def __init__(self, context: Context, store: ModelStore) -> None:
        super().__init__(context, store)
        LEFT.append(open(os.devnull))  # noqa: SIM115


@breaks("close_twice_is_fine_and_leaves_nothing")
class LeavesThread(Model):
    def __init__(self, context: Context, store: ModelStore) -> None:
        super().__init__(context, store)
        self.end = threading.Event()
        thread = threading.Thread(target=self.end.wait, name="forgotten")
        thread.start()
        LEFT.append((self.end, thread))


@breaks("registered_memory_can_be_used")
class LosesRegisteredMemory(Model):
    def get(self, key: ChunkKey, into: memoryview) -> int | None:
        return len(into) if self.registered and self.contains(key) else super().get(key, into)


@breaks("memory_that_was_let_go_can_be_used_and_registered_again")
class WantsToKnowMemory(Model):
    def __init__(self, context: Context, store: ModelStore) -> None:
        super().__init__(context, store)
        self.let_go = False

    def unregister(self, address: int, nbytes: int) -> None:
        super().unregister(address, nbytes)
        self.let_go = True

    def put(self, key: ChunkKey, data: memoryview) -> None:
        if self.let_go:
            raise BackendUnavailable("this memory is not registered")
        super().put(key, data)


# Device I/O.


class OtherIO(Model):
    """Its device I/O is what `io` says."""

    io: ClassVar[type[ModelIO]]

    def device_io(self) -> DeviceIO:
        return self.io(self)


@breaks("a_record_is_the_same_by_device_io_and_through_host_memory")
class LeavesOutTheHeaderPage(OtherIO):
    class io(ModelIO):
        def get(self, key: ChunkKey, into: DeviceRecord) -> int | None:
            return self.backend.get(key, into.payload(into.nbytes - 4096))

        def put(self, key: ChunkKey, data: DeviceRecord) -> None:
            self.backend.put(key, data.payload(data.nbytes - 4096))


@breaks("a_record_is_the_same_by_device_io_and_through_host_memory")
class KeepsAStoreOfItsOwn(OtherIO):
    class io(ModelIO):
        def get(self, key: ChunkKey, into: DeviceRecord) -> int | None:
            return self.backend.get(ChunkKey(bytes(key)[::-1]), into.memory)

        def put(self, key: ChunkKey, data: DeviceRecord) -> None:
            self.backend.put(ChunkKey(bytes(key)[::-1]), data.memory)


@breaks("device_io_into_longer_memory_says_how_long_the_record_is")
class SaysHowMuchMemoryThereWas(OtherIO):
    class io(ModelIO):
        def get(self, key: ChunkKey, into: DeviceRecord) -> int | None:
            return None if super().get(key, into) is None else into.nbytes


@breaks("a_record_longer_than_the_device_memory_is_corrupt")
class ReadsWhatFits(OtherIO):
    class io(ModelIO):
        def get(self, key: ChunkKey, into: DeviceRecord) -> int | None:
            whole = bytearray(1 << 21)
            nbytes = self.backend.get(key, memoryview(whole))
            if nbytes is None:
                return None
            done = min(nbytes, into.nbytes)
            into.memory[:done] = whole[:done]
            if done < nbytes:
                raise ChunkCorrupt(f"{done} of {nbytes} bytes")
            return done


@breaks("the_capacity_holds_for_device_io")
@breaks("device_io_after_close_is_a_backend_error")
class PutsPastTheBackend(OtherIO):
    class io(ModelIO):
        def put(self, key: ChunkKey, data: DeviceRecord) -> None:
            with self.backend.store.lock:
                self.backend.store.records[key] = (bytes(data.memory), time.time())


@breaks("the_capacity_holds_for_device_io")
class SaysUnavailableWhenFull(OtherIO):
    class io(ModelIO):
        def put(self, key: ChunkKey, data: DeviceRecord) -> None:
            try:
                super().put(key, data)
            except BackendFull as error:
                raise BackendUnavailable("no room") from error


@breaks("readers_by_device_io_never_see_part_of_a_record")
class WritesInPlace(OtherIO):
    class io(ModelIO):
        def put(self, key: ChunkKey, data: DeviceRecord) -> None:
            new = bytes(data.memory)
            for end in range(4096, len(new) + 1, 16384):
                super().put(key, data)
                with self.backend.store.lock:
                    torn = new[:end] + bytes(len(new) - end)
                    self.backend.store.records[key] = (torn, time.time())
                time.sleep(0)
            super().put(key, data)


@breaks("device_io_with_a_broken_store_is_a_backend_error")
class LetsTheLibrarysErrorOut(OtherIO):
    class io(ModelIO):
        def put(self, key: ChunkKey, data: DeviceRecord) -> None:
            if self.backend.store.broken:
                raise RuntimeError("error 5011")
            super().put(key, data)


@breaks("device_io_with_a_broken_store_is_a_backend_error")
class SwallowsWhatItCannotPut(OtherIO):
    class io(ModelIO):
        def put(self, key: ChunkKey, data: DeviceRecord) -> None:
            if not self.backend.store.broken:
                super().put(key, data)
