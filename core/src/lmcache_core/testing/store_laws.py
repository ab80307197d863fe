"""Laws of a store: capacity, listing, restart, sharing, many threads, faults, close."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from ..backend import Backend, SupportsListing, SupportsRegistration, SupportsUnregistration
from ..errors import BackendError, BackendFull
from ..keys import ChunkKey
from . import memory
from .bench import VANISHED, BackendSubject, verdict
from .laws import expect, in_threads, law, skip

_ROUNDS: Final = 30
_LET_GO_S: Final = 2.0


class StoreLaws(BackendSubject):
    """What holds for a backend as a store of many records, many threads and, where it says so, many handles."""

    # Capacity.

    @law(since=(1, 0))
    def test_the_capacity_is_held(self) -> None:
        bench, nbytes = self.bench, self.bench.size(8192)
        backend = bench.open_for(4 * nbytes)
        keys = bench.keys(12)
        taken = [key for key in keys if self._put_if_room(key, nbytes)]
        expect(taken, "no record was taken, though the capacity has room for 4")
        expect(len(taken) <= 4, f"{len(taken)} records were taken, the capacity has room for 4")
        for key in keys:
            if key in taken:
                bench.expect_present(key, nbytes, "taken within the capacity")
            else:
                bench.expect_missing(key, nbytes, "after BackendFull")
        backend.remove(taken[0])
        expect(self._put_if_room(bench.key(), nbytes), "no record is taken after one was removed from a full store")

    @law(since=(1, 0))
    def test_a_record_larger_than_the_capacity_is_full(self) -> None:
        bench, nbytes = self.bench, self.bench.size(8192)
        bench.open_for(nbytes - 1)
        key = bench.key()
        expect(not self._put_if_room(key, nbytes), "a record larger than the whole capacity was taken")
        bench.expect_missing(key, nbytes, "after BackendFull")

    @law(since=(1, 0))
    def test_a_second_put_is_not_counted_twice(self) -> None:
        bench, nbytes = self.bench, self.bench.size(8192)
        bench.open_for(3 * nbytes)
        key = bench.key()
        for count in range(1, 9):
            expect(self._put_if_room(key, nbytes), f"put {count} of the same record: no room, though it is there")
        expect(self._put_if_room(bench.key(), nbytes), "a record put 8 times takes the room of more than one")

    @law(since=(1, 0))
    def test_room_is_given_back(self) -> None:
        bench, nbytes = self.bench, self.bench.size(8192)
        backend = bench.open_for(2 * nbytes)
        for count in range(1, 21):
            key = bench.key()
            expect(self._put_if_room(key, nbytes), f"no room in round {count} of put and remove")
            backend.remove(key)

    @law(since=(1, 0))
    def test_the_capacity_counts_what_was_there_at_open(self) -> None:
        if not self.bench.backend.traits.persistent:
            skip("the backend is not persistent")
        bench, nbytes = self.bench, self.bench.size(8192)
        capacity = bench.used_nbytes() + 4 * nbytes
        bench.open_for(4 * nbytes)
        taken = 0
        for _ in range(6):
            taken += self._put_if_room(bench.key(), nbytes)
            bench.reopen(capacity)
        expect(taken <= 4, f"{taken} records were taken over several openings, the capacity has room for 4")

    @law(since=(1, 0))
    def test_the_capacity_is_that_of_all_handles_together(self) -> None:
        if not self.bench.backend.traits.shared:
            skip("the backend is not shared")
        bench, nbytes = self.bench, self.bench.size(8192)
        capacity = bench.used_nbytes() + 4 * nbytes
        one = bench.open_for(4 * nbytes)
        other = bench.open(capacity)
        keys = bench.keys(8)
        taken = sum(self._put_if_room(key, nbytes, (one, other)[i % 2]) for i, key in enumerate(keys))
        expect(1 <= taken <= 4, f"two handles took {taken} records, their capacity has room for 4 in all")
        for key in keys:
            other.remove(key)
        expect(self._put_if_room(bench.key(), nbytes, one), "what another handle removed is still counted")

    def _put_if_room(self, key: ChunkKey, nbytes: int, backend: Backend[Any] | None = None) -> bool:
        try:
            (backend or self.bench.backend).put(key, self.bench.record(key, nbytes))
        except BackendFull:
            return False
        return True

    # Listing.

    @law(since=(1, 0))
    def test_the_listing_names_exactly_what_is_there(self) -> None:
        backend = self._listing()
        shards = [os.urandom(16), os.urandom(16)]
        sizes = {self.bench.key(shard): self.bench.size(1 + 3000 * i) for i in range(5) for shard in shards}
        for key, nbytes in sizes.items():
            self.bench.put(key, nbytes)
        gone, twice, *_ = sizes
        backend.remove(gone)
        self.bench.put(twice, sizes[twice])
        del sizes[gone]
        listed = [entry for entry in backend.entries() if entry.key.shard_id in shards]
        expect(all(type(entry.key) is ChunkKey for entry in listed), "entries() must give ChunkKeys")
        seen = sorted((entry.key, entry.nbytes) for entry in listed)
        expect(seen == sorted(sizes.items()), f"entries() gave {len(seen)} of {len(sizes)} records, or other lengths")

    @law(since=(1, 0))
    def test_the_listing_of_a_shard_is_of_that_shard(self) -> None:
        backend = self._listing()
        shards = [os.urandom(16), os.urandom(16)]
        keys = {shard: sorted(self.bench.keys(3, shard)) for shard in shards}
        for key in (key for of_shard in keys.values() for key in of_shard):
            self.bench.put(key, self.bench.size(64))
        for shard in shards:
            seen = sorted(entry.key for entry in backend.entries(shard))
            expect(seen == keys[shard], f"entries(shard_id) gave {len(seen)} records, not the 3 of that shard")
        expect(not list(backend.entries(os.urandom(16))), "entries() of an unknown shard is not empty")

    @law(since=(1, 0))
    def test_the_listing_says_when_a_record_was_stored(self) -> None:
        backend = self._listing()
        key = self.bench.key()
        before = time.time()
        self.bench.put(key, self.bench.size(64))
        after = time.time()
        stored_at = [entry.stored_at for entry in backend.entries(key.shard_id)]
        ok = len(stored_at) == 1 and before - 5 <= stored_at[0] <= after + 5
        expect(ok, f"stored_at is {stored_at}, the put was at {before:.0f} (seconds since the epoch, within 5)")

    def _listing(self) -> Any:
        backend = self.bench.backend
        if not isinstance(backend, SupportsListing):
            skip("the backend cannot list")
        return backend

    # Handles.

    @law(since=(1, 0))
    def test_records_survive_reopening(self) -> None:
        if not self.bench.backend.traits.persistent:
            skip("the backend is not persistent")
        sizes = {self.bench.key(): nbytes for nbytes in self.bench.sizes()}
        for key, nbytes in sizes.items():
            self.bench.put(key, nbytes)
        gone = self.bench.key()
        self.bench.put(gone, self.bench.size(64))
        self.bench.backend.remove(gone)
        self.bench.reopen()
        for key, nbytes in sizes.items():
            self.bench.expect_present(key, nbytes, "after closing and opening again")
        self.bench.expect_missing(gone, self.bench.size(64), "removed before closing")

    @law(since=(1, 0))
    def test_another_handle_sees_the_same_records(self) -> None:
        one = self.bench.backend
        if not one.traits.shared:
            skip("the backend is not shared")
        other = self.bench.open()
        nbytes = self.bench.size(8192)
        for writer, reader in ((one, other), (other, one)):
            key = self.bench.key()
            self.bench.expect_missing(key, nbytes, "before another handle put it", reader)
            writer.put(key, self.bench.record(key, nbytes))
            expect(reader.contains(key), "a record that another handle put is not seen by contains")
            self.bench.expect_present(key, nbytes, "after another handle put it", reader)
            expect(reader.remove(key) is True, "remove of a record that another handle put is not True")
            self.bench.expect_missing(key, nbytes, "after another handle removed it", writer)

    # Threads.

    @law(since=(1, 0))
    def test_readers_never_see_part_of_a_record(self) -> None:
        # Two contents under one key tell a torn or mixed record from a whole one; a store may keep either.
        bench, backend = self.bench, self.bench.backend
        key = bench.key()
        sizes = {b"long": bench.size(300_000), b"short": bench.size(200_000)}
        data = {variant: bench.record(key, nbytes, variant) for variant, nbytes in sizes.items()}
        running = [None, None]

        def write(variant: bytes) -> Callable[[], None]:
            def run() -> None:
                try:
                    for round_ in range(_ROUNDS):
                        backend.put(key, data[variant])
                        if round_ % 3 == 0:
                            backend.remove(key)
                finally:
                    running.pop()

            return run

        def read() -> None:
            while running:
                into = bench.buffer(max(sizes.values()))
                returned = backend.get(key, into)
                whole = [v for v, n in sizes.items() if verdict(key, n, into, returned, (v,)) == "present"]
                expect(
                    returned is None or whole,
                    f"a reader saw {returned} bytes that are neither of the records of {sorted(sizes.values())} bytes",
                )

        in_threads(write(b"long"), write(b"short"), read, read)

    @law(since=(1, 0))
    def test_many_threads_at_once_keep_records_right(self) -> None:
        bench, backend = self.bench, self.bench.backend
        sizes = {bench.key(): bench.size(1 + 1500 * i) for i in range(12)}
        records = {key: bench.record(key, nbytes) for key, nbytes in sizes.items()}

        def work(seed: int) -> Callable[[], None]:
            def run() -> None:
                rng = random.Random(seed)
                for _ in range(4 * _ROUNDS):
                    keys = rng.sample(list(sizes), 3)
                    match rng.randrange(6):
                        case 0 | 1:
                            backend.put(keys[0], records[keys[0]])
                        case 2:
                            backend.remove(keys[0])
                        case 3:
                            backend.contains_prefix(keys, timeout_s=30.0)
                        case 4:
                            backend.put_many(keys, [records[key] for key in keys], timeout_s=30.0)
                        case _:
                            into = [bench.buffer(sizes[key]) for key in keys]
                            results = backend.get_many(keys, into, timeout_s=30.0)
                            for key, view, result in zip(keys, into, results, strict=True):
                                seen = verdict(key, sizes[key], view, result)
                                expect(
                                    seen in ("present", "missing", VANISHED),
                                    f"with 4 threads at work, a record is {seen}",
                                )

            return run

        in_threads(*(work(seed) for seed in range(4)))
        for key, nbytes in sizes.items():
            self.bench.put(key, nbytes)
            self.bench.expect_present(key, nbytes, "after 4 threads have worked")

    # Faults and the end.

    @law(since=(1, 0))
    def test_a_broken_store_is_a_backend_error(self) -> None:
        key, nbytes = self.bench.key(), self.bench.size(4096)
        self.bench.put(key, nbytes)
        self.break_store()
        for name, call in self._calls(self.bench.backend, key, nbytes):
            self._expect_no_foreign_error(f"{name} on a broken store", call)
        try:
            self.bench.put(self.bench.key(), nbytes)
        except BackendError:
            return
        expect(False, "a broken store took a record")

    @law(since=(1, 0))
    def test_buffers_are_let_go_after_a_fault(self) -> None:
        # An exception that a frame of its own traceback holds keeps the views in those frames until a collection.
        bench = self.bench
        key, nbytes = bench.key(), bench.size(3 * max(4096, bench.alignment))
        bench.put(key, nbytes)
        backend = bench.backend
        if nbytes > bench.alignment:
            self._expect_let_go("get into too short a buffer", nbytes - bench.alignment, lambda v: backend.get(key, v))
        self.break_store()
        timeout_s = _patience_s(backend)
        calls: dict[str, Callable[[memoryview], object]] = {
            "get": lambda view: backend.get(key, view),
            "put": lambda view: backend.put(key, view),
            "get_many": lambda view: backend.get_many([key], [view], timeout_s=timeout_s),
            "put_many": lambda view: backend.put_many([key], [view], timeout_s=timeout_s),
        }
        for verb, call in calls.items():
            self._expect_let_go(f"{verb} on a broken store", nbytes, call)

    def _expect_let_go(self, what: str, nbytes: int, call: Callable[[memoryview], object]) -> None:
        mapping = memory.mapping(nbytes, self.bench.alignment)
        view = memory.buffer_in(mapping, nbytes, self.bench.alignment)
        collects = gc.isenabled()
        gc.disable()
        try:
            with contextlib.suppress(BackendError):
                call(view)
            view.release()
            expect(_closes(mapping), f"{what}: a view of the caller's buffer is kept until a garbage collection")
        finally:
            if collects:
                gc.enable()

    @law(since=(1, 0))
    def test_calls_after_close_are_backend_errors(self) -> None:
        key, nbytes = self.bench.key(), self.bench.size(4096)
        backend = self.bench.open()
        backend.close()
        for name, call in self._calls(backend, key, nbytes):
            self._expect_no_foreign_error(f"{name} after close", call)

    @law(since=(1, 0))
    def test_close_twice_is_fine_and_leaves_nothing(self) -> None:
        nbytes = self.bench.size(8192)
        self.bench.reopen()  # what a library opens once and keeps is not this handle's
        self.bench.put(self.bench.key(), nbytes)
        self.bench.close_backend()
        gc.collect()
        threads, descriptors = set(threading.enumerate()), _descriptors()
        backend = self.bench.open()
        key = self.bench.key()
        self.bench.put(key, nbytes)
        self.bench.look(key, nbytes)
        backend.get_many([key], [self.bench.buffer(nbytes)], timeout_s=10.0)
        backend.remove(key)
        backend.close()
        backend.close()
        left = [thread.name for thread in threading.enumerate() if thread not in threads and thread.is_alive()]
        expect(not left, f"close left threads: {', '.join(left)}")
        gc.collect()
        more = [f"{n} ({target})" for n, target in _descriptors().items() if descriptors.get(n) != target]
        expect(not more, f"close left descriptors: {', '.join(more)}")

    @law(since=(1, 0))
    def test_registered_memory_can_be_used(self) -> None:
        backend = self.bench.backend
        if not isinstance(backend, SupportsRegistration):
            skip("the backend registers no memory")
        alignment, nbytes = self.bench.alignment, self.bench.size(8192)
        source, target = memory.mapping(nbytes, alignment), memory.mapping(nbytes, alignment)
        for mapping in (source, target):
            backend.register(memory.address_of(mapping), len(mapping))
        self._goes_through(source, target, nbytes, "registered memory")

    @law(since=(1, 0))
    def test_memory_that_was_let_go_can_be_used_and_registered_again(self) -> None:
        backend = self.bench.backend
        if not isinstance(backend, SupportsRegistration) or not isinstance(backend, SupportsUnregistration):
            skip("the backend registers no memory, or never lets it go")
        alignment, nbytes = self.bench.alignment, self.bench.size(8192)
        mapping = memory.mapping(nbytes, alignment)
        address = memory.address_of(mapping)
        for step in ("registered", "let go", "registered again"):
            if step == "let go":
                backend.unregister(address, len(mapping))
            else:
                backend.register(address, len(mapping))
            self._goes_through(mapping, mapping, nbytes, f"memory that was {step}")
        backend.unregister(address, len(mapping))

    def _goes_through(self, source: mmap.mmap, target: mmap.mmap, nbytes: int, what: str) -> None:
        """A record that is put from one mapping comes back to the other."""
        key = self.bench.key()
        data = memory.buffer_in(source, nbytes, self.bench.alignment)
        data[:] = memory.payload(key, nbytes)
        self.bench.backend.put(key, data)
        into = memory.buffer_in(target, nbytes, self.bench.alignment)
        seen = verdict(key, nbytes, into, self.bench.backend.get(key, into))
        expect(seen == "present", f"through {what}, a record is {seen}")

    def _calls(self, backend: Backend[Any], key: ChunkKey, nbytes: int) -> Iterator[tuple[str, Callable[[], object]]]:
        data, into = self.bench.record(key, nbytes), self.bench.buffer(nbytes)
        timeout_s = _patience_s(backend)
        yield "contains", lambda: backend.contains(key)
        yield "get", lambda: backend.get(key, into)
        yield "put", lambda: backend.put(key, data)
        yield "contains_prefix", lambda: backend.contains_prefix([key], timeout_s=timeout_s)
        yield "get_many", lambda: backend.get_many([key], [into], timeout_s=timeout_s)
        yield "put_many", lambda: backend.put_many([key], [data], timeout_s=timeout_s)
        if isinstance(backend, SupportsListing):
            listing: Any = backend
            yield "entries", lambda: list(listing.entries())
        yield "remove", lambda: backend.remove(key)

    def _expect_no_foreign_error(self, what: str, call: Callable[[], object]) -> None:
        with contextlib.suppress(BackendError):
            try:
                call()
            except BackendError:
                raise
            except Exception as error:
                expect(False, f"{what} raised {type(error).__name__} ({error}), not a BackendError")


def _patience_s(backend: Backend[Any]) -> float:
    """For a batch on a store that is broken: what the backend gives one record, 5 s at most."""
    return min(5.0, backend.context.timeout_s)


def _closes(mapping: mmap.mmap) -> bool:
    """Whether nobody holds a view of it, or not for longer than a thread takes to come out of what it called."""
    deadline = time.monotonic() + _LET_GO_S
    while True:
        try:
            mapping.close()
        except BufferError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0)  # lets other threads run: this waits for a condition, not for a time
        else:
            return True


def _descriptors() -> dict[str, str]:
    """Open descriptors of this process and what they are, where the system tells."""
    found: dict[str, str] = {}
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                found[name] = os.readlink(f"/proc/self/fd/{name}")
    return found
