"""Laws of a backend's class, of one record, and of batches of records."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from ..errors import BackendError, BackendUnavailable, ChunkCorrupt
from ..keys import KEY_NBYTES, ChunkKey
from . import memory
from .bench import BackendSubject, verdict
from .laws import expect, expect_api_version, is_secret_name, law, outcome_of, skip

_SLACK_S: Final = 1.0


class RecordLaws(BackendSubject):
    """What holds for a backend that one thread uses through one handle."""

    # What the class says of itself.

    @law(since=(1, 0))
    def test_the_api_version_is_a_literal_that_core_speaks(self) -> None:
        expect_api_version(type(self.bench.backend))

    @law(since=(1, 0))
    def test_the_traits_make_sense(self) -> None:
        traits = self.bench.backend.traits
        expect(
            traits.alignment >= 1 and traits.alignment & (traits.alignment - 1) == 0,
            f"alignment must be a power of two, got {traits.alignment}",
        )
        expect(traits.io_threads >= 1, f"io_threads must be at least 1, got {traits.io_threads}")
        expect(
            traits.max_nbytes is None or traits.max_nbytes >= traits.alignment,
            f"max_nbytes must be None or at least the alignment, got {traits.max_nbytes}",
        )

    @law(since=(1, 0))
    def test_the_options_are_frozen_and_hide_secrets(self) -> None:
        options: Any = type(self.bench.backend).Options
        expect(dataclasses.is_dataclass(options), f"Options must be a dataclass, got {options!r}")
        expect(options.__dataclass_params__.frozen, "Options must be frozen: @dataclass(frozen=True)")
        shown = [f.name for f in dataclasses.fields(options) if f.repr and is_secret_name(f.name)]
        expect(not shown, f"the repr of Options shows {', '.join(shown)}: use field(repr=False)")

    # One record.

    @law(since=(1, 0))
    def test_a_record_comes_back_exactly(self) -> None:
        for nbytes in self.bench.sizes():
            key = self.bench.key()
            self.bench.put(key, nbytes)
            self.bench.expect_present(key, nbytes, "after a put")
            self.bench.expect_present(key, nbytes, "the second time")

    @law(since=(1, 0))
    def test_bytes_that_end_lines_and_texts_come_back(self) -> None:
        nbytes = self.bench.size(64)
        for end in (b"\r", b"\n", b"\r\n", b"\r\n\r\n", b"\0", b" ", b"\x1a", b"\xff"):
            key = self.bench.key()
            data = memory.filled(key, nbytes, self.bench.alignment)
            data[: len(end)] = data[nbytes - len(end) :] = end
            self.bench.backend.put(key, data)
            into = self.bench.buffer(nbytes)
            returned = self.bench.backend.get(key, into)
            expect(returned == nbytes, f"get of {nbytes} bytes that end in {end!r} returned {returned!r}")
            expect(into[:nbytes] == data[:nbytes], f"a record that begins and ends with {end!r} came back changed")

    @law(since=(1, 0))
    def test_get_writes_nothing_past_the_record(self) -> None:
        for nbytes in self.bench.sizes():
            key = self.bench.key()
            self.bench.put(key, nbytes)
            into = self.bench.buffer(memory.round_up(nbytes, self.bench.alignment) + 4 * self.bench.alignment)
            self.bench.backend.get(key, into)
            rest = into[memory.round_up(nbytes, self.bench.alignment) :]
            expect(memory.is_poison(rest), f"get of {nbytes} bytes wrote past the record")

    @law(since=(1, 0))
    def test_a_miss_is_none_and_touches_nothing(self) -> None:
        into = self.bench.buffer(self.bench.size(8192))
        returned = self.bench.backend.get(self.bench.key(), into)
        expect(returned is None, f"get of a key that was never put returned {returned!r}, not None")
        expect(memory.is_poison(into), "a miss wrote into the buffer")
        expect(self.bench.backend.contains(self.bench.key()) is False, "contains of an unknown key is not False")

    @law(since=(1, 0))
    def test_contains_follows_put_and_remove(self) -> None:
        key = self.bench.key()
        backend = self.bench.backend
        self.bench.put(key, self.bench.size(4096))
        expect(backend.contains(key) is True, "contains is not True after put")
        backend.remove(key)
        expect(backend.contains(key) is False, "contains is not False after remove")

    @law(since=(1, 0))
    def test_put_copies(self) -> None:
        key, nbytes = self.bench.key(), self.bench.size(8192)
        data = memory.filled(key, nbytes, self.bench.alignment)
        self.bench.backend.put(key, data)
        data[:] = bytes(nbytes)
        self.bench.expect_present(key, nbytes, "after the caller reused the buffer of its put")

    @law(since=(1, 0))
    def test_get_gives_each_caller_a_copy(self) -> None:
        key, nbytes = self.bench.key(), self.bench.size(8192)
        self.bench.put(key, nbytes)
        into = self.bench.buffer(nbytes)
        self.bench.backend.get(key, into)
        into[:] = bytes(nbytes)
        self.bench.expect_present(key, nbytes, "after a reader wrote into its own buffer")

    @law(since=(1, 0))
    def test_buffers_are_let_go_after_the_call(self) -> None:
        key, nbytes = self.bench.key(), self.bench.size(8192)
        for verb in (self.bench.backend.put, self.bench.backend.get):
            mapping = memory.mapping(nbytes, self.bench.alignment)
            view = memory.buffer_in(mapping, nbytes, self.bench.alignment)
            verb(key, view)
            try:
                view.release()
                mapping.close()
            except BufferError:
                expect(False, f"{verb.__name__} keeps a view of the caller's buffer")

    @law(since=(1, 0))
    def test_a_record_longer_than_the_buffer_is_refused_before_writing(self) -> None:
        key, nbytes = self.bench.key(), self.bench.size(3 * max(4096, self.bench.alignment))
        if nbytes <= self.bench.alignment:
            skip(f"no record is longer than the alignment of {self.bench.alignment}")
        self.bench.put(key, nbytes)
        into = self.bench.buffer(nbytes - self.bench.alignment)
        returned = outcome_of(lambda: self.bench.backend.get(key, into))
        expect(isinstance(returned, ChunkCorrupt), f"get into too short a buffer: {returned!r}, not ChunkCorrupt")
        expect(memory.is_poison(into), "get wrote into a buffer that is too short")
        self.bench.expect_present(key, nbytes, "after a get into too short a buffer")

    @law(since=(1, 0))
    def test_remove_says_whether_the_record_was_there(self) -> None:
        key, nbytes = self.bench.key(), self.bench.size(4096)
        expect(self.bench.backend.remove(key) is False, "remove of an unknown key is not False")
        self.bench.put(key, nbytes)
        expect(self.bench.backend.remove(key) is True, "remove of a record is not True")
        self.bench.expect_missing(key, nbytes, "after remove")
        expect(self.bench.backend.remove(key) is False, "the second remove is not False")

    @law(since=(1, 0))
    def test_a_second_put_of_the_same_key_is_harmless(self) -> None:
        key, nbytes = self.bench.key(), self.bench.size(8192)
        for _ in range(3):
            self.bench.put(key, nbytes)
            self.bench.expect_present(key, nbytes, "after putting the same record again")
        expect(self.bench.backend.remove(key) is True, "remove of a record that was put three times is not True")
        self.bench.expect_missing(key, nbytes, "after removing a record that was put three times")

    @law(since=(1, 0))
    def test_similar_keys_stay_distinct(self) -> None:
        nbytes = self.bench.size(64)
        base = bytes(self.bench.key())
        variants = [base]
        for bit in (*range(0, 8 * KEY_NBYTES, 13), 8 * KEY_NBYTES - 1):
            variants.append(bytes(b ^ (1 << bit % 8 if i == bit // 8 else 0) for i, b in enumerate(base)))
        # Letters that a file system may fold, bytes that end a name, numbers that lose their leading zeros.
        for tail in (b"A", b"a", b"/", b"\0", b"\n", b"%", b"\xff"):
            variants += [base[:16] + 32 * tail, base[:40] + 8 * tail, base[:16] + 16 * tail + base[32:]]
        variants += [base[16:32] + base[:16] + base[32:], base[:16] + base[:15:-1]]
        keys = [self.bench.own(ChunkKey(raw)) for raw in dict.fromkeys(variants)]
        for key in keys:
            self.bench.put(key, nbytes)
        for key in keys:
            self.bench.expect_present(key, nbytes, f"among {len(keys)} similar keys, {key.text}")
        self.bench.backend.remove(keys[0])
        for key in keys[1:]:
            self.bench.expect_present(key, nbytes, f"after {keys[0].text} was removed, {key.text}")

    @law(since=(1, 0))
    def test_a_record_over_max_nbytes_is_a_fault(self) -> None:
        limit = self.bench.backend.traits.max_nbytes
        if limit is None or limit > 1 << 26:
            skip("the backend states no max_nbytes, or one over 64 MiB")
        key, nbytes = self.bench.key(), memory.round_up(limit + 1, self.bench.alignment)
        try:
            self.bench.put(key, nbytes)
        except BackendError:
            self.bench.expect_missing(key, nbytes, "after a put over max_nbytes")
        else:
            expect(False, f"a put of {nbytes} bytes was taken, max_nbytes is {limit}")

    # Batches.

    @law(since=(1, 0))
    def test_contains_prefix_stops_at_the_first_hole(self) -> None:
        keys, nbytes = self.bench.keys(8), self.bench.size(64)
        for key in keys:
            self.bench.put(key, nbytes)
        for hole in (8, 5, 1, 0):
            if hole < 8:
                self.bench.backend.remove(keys[hole])
            count = self.bench.backend.contains_prefix(keys, timeout_s=10.0)
            expect(count == hole, f"contains_prefix of 8 keys, the first missing at {hole}: {count}")

    @law(since=(1, 0))
    def test_batches_answer_for_each_key_in_order(self) -> None:
        keys = self.bench.keys(6)
        sizes = [self.bench.size(1000 * i + 1) for i in range(6)]
        data = [self.bench.record(key, n) for key, n in zip(keys, sizes, strict=True)]
        stored = self.bench.backend.put_many(keys[::2], data[::2], timeout_s=10.0)
        expect(stored == [None] * 3, f"put_many of 3 records: {stored!r}, not [None, None, None]")
        into = [self.bench.buffer(n) for n in sizes]
        results = self.bench.backend.get_many(keys, into, timeout_s=10.0)
        expect(len(results) == len(keys), f"get_many of {len(keys)} keys gave {len(results)} results")
        for i, (key, n) in enumerate(zip(keys, sizes, strict=True)):
            seen = verdict(key, n, into[i], results[i])
            wanted = "missing" if i % 2 else "present"
            expect(seen == wanted, f"get_many: key {i} is {seen}, not {wanted}")
            seen = self.bench.look(key, n)
            expect(seen == wanted, f"get after put_many: key {i} is {seen}, not {wanted}")

    @law(since=(1, 0))
    def test_one_key_does_not_spoil_a_batch(self) -> None:
        step = max(4096, self.bench.alignment)
        keys, nbytes = self.bench.keys(3), self.bench.size(2 * step)
        if nbytes <= self.bench.alignment:
            skip(f"no record is longer than the alignment of {self.bench.alignment}")
        for key in keys:
            self.bench.put(key, nbytes)
        into = [self.bench.buffer(nbytes), self.bench.buffer(self.bench.alignment), self.bench.buffer(nbytes)]
        results = self.bench.backend.get_many(keys, into, timeout_s=10.0)
        expect(isinstance(results[1], ChunkCorrupt), f"get_many, too short a buffer: {results[1]!r}, not ChunkCorrupt")
        for i in (0, 2):
            seen = verdict(keys[i], nbytes, into[i], results[i])
            expect(seen == "present", f"get_many: key {i} is {seen} because key 1 failed")

    @law(since=(1, 0))
    def test_empty_batches_are_empty(self) -> None:
        backend = self.bench.backend
        answers = (
            backend.contains_prefix([], timeout_s=10.0),
            backend.get_many([], [], timeout_s=10.0),
            backend.put_many([], [], timeout_s=10.0),
        )
        expect(answers == (0, [], []), f"contains_prefix, get_many and put_many of nothing: {answers!r}")

    @law(since=(1, 0))
    def test_batches_return_at_their_deadline(self) -> None:
        keys, nbytes = self.bench.keys(64), self.bench.size(4096)
        for key in keys:
            self.bench.put(key, nbytes)
        self._expect_in_time(keys, nbytes, timeout_s=0.0, limit_s=_SLACK_S)

    @law(since=(1, 0))
    def test_a_stalled_store_keeps_nobody_beyond_the_deadline(self) -> None:
        keys, nbytes = self.bench.keys(4), self.bench.size(4096)
        for key in keys:
            self.bench.put(key, nbytes)
        with self.stall_store():
            self._expect_in_time(keys, nbytes, timeout_s=0.2, limit_s=0.2 + _SLACK_S)

    def _expect_in_time(self, keys: Sequence[ChunkKey], nbytes: int, timeout_s: float, limit_s: float) -> None:
        backend = self.bench.backend
        into = [self.bench.buffer(nbytes) for _ in keys]
        data = [self.bench.record(key, nbytes) for key in keys]
        batches: dict[str, Callable[[], object]] = {
            "contains_prefix": lambda: backend.contains_prefix(keys, timeout_s=timeout_s),
            "get_many": lambda: backend.get_many(keys, into, timeout_s=timeout_s),
            "put_many": lambda: backend.put_many(keys, data, timeout_s=timeout_s),
        }
        for name, call in batches.items():
            started = time.monotonic()
            results: object
            try:
                results = call()
            except BackendUnavailable:
                results = []
            took_s = time.monotonic() - started
            expect(took_s < limit_s, f"{name} of {len(keys)} keys with timeout_s={timeout_s} took {took_s:.2f} s")
            if isinstance(results, list) and results:
                expect(len(results) == len(keys), f"{name} answered for {len(results)} of {len(keys)} keys")
                late = [r for r in results if isinstance(r, BackendError) and not isinstance(r, BackendUnavailable)]
                expect(not late, f"{name}: a key that was not reached in time is BackendUnavailable, not {late[:1]!r}")
