"""The specification of a codec, as laws that any plugin's test-suite inherits.

class TestMyCodec(CodecLaws):
    def open_codec(self):
        return MyCodec()
"""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final

import numpy as np

from ..backend import ApiVersion
from ..codec import Codec
from ..errors import ChunkCorrupt
from ..layout import Layout, Region
from . import memory
from .laws import LawResult, Laws, expect, expect_api_version, in_threads, law, skip

_GUARD_NBYTES: Final = 4096
_ROUNDS: Final = 8
_MEMORY_NBYTES: Final = 8 << 20
"""What a decoder may allocate beyond a few times the chunk: tables, windows, the modules that it loads."""


def layouts() -> dict[str, Layout]:
    """Layouts that tempt: one byte, odd lengths, elements of every width, several regions, more than a megabyte."""

    def region(nbytes: int, dtype: str, *, layers: int = 1, name: str = "kv") -> Region:
        return Region(name=name, layers=layers, block_tokens=16, block_nbytes=nbytes, dtype=dtype, packing="law")

    def layout(*regions: Region, tokens: int = 16) -> Layout:
        return Layout(chunk_tokens=tokens, regions=regions)

    return {
        "one byte": layout(region(1, "uint8")),
        "bfloat16": layout(region(8192, "bfloat16", layers=4)),
        "an odd number of bytes": layout(region(4097, "float16", layers=3)),
        "float32": layout(region(4096, "torch.float32", layers=2), tokens=32),
        "a dtype nobody knows": layout(region(1000, "e5m2-by-someone")),
        "two regions": layout(region(3000, "bfloat16", name="conv"), region(999, "float32", name="state")),
        "more than a megabyte": layout(region(1 << 18, "bfloat16", layers=4, name="k"), region(999, "uint8")),
    }


def contents(layout: Layout) -> Iterator[tuple[str, bytes]]:
    """Raw chunks of `layout`: noise that nothing compresses, one byte repeated, and numbers like those of a model."""
    nbytes = layout.nbytes
    yield "noise", memory.payload(layout.fingerprint, nbytes)
    yield "zeros", bytes(nbytes)
    yield "ones", b"\xff" * nbytes
    floats = np.random.default_rng(nbytes).normal(0, 1, nbytes // 4 + 1).astype("<f4").view("<u4")
    yield "floats", (floats >> 16).astype("<u2").tobytes()[:nbytes].ljust(nbytes, b"\x3f")


class CodecLaws(Laws):
    """What the contract in `lmcache_core.codec` promises.  A subclass supplies `open_codec`."""

    codec: Codec

    def open_codec(self) -> Codec:
        """A new instance of the codec under test."""
        raise NotImplementedError

    def setup_law(self) -> None:
        self.codec = self.open_codec()

    def api_version(self) -> ApiVersion:
        version = getattr(self.codec, "api_version", None)
        return version if isinstance(version, tuple) else (1, 0)  # that it is none is for a law to say

    # What the class says of itself.

    @law(since=(1, 0))
    def test_the_api_version_is_a_literal_that_core_speaks(self) -> None:
        expect_api_version(type(self.codec))

    @law(since=(1, 0))
    def test_the_version_and_lossy_can_be_written_down(self) -> None:
        version: Any = self.codec.version
        expect(type(version) is int and 1 <= version <= 255, f"version must be 1 to 255, got {version!r}")
        expect(type(self.codec.lossy) is bool, f"lossy must be True or False, got {self.codec.lossy!r}")

    # There and back.

    @law(since=(1, 0))
    def test_a_chunk_comes_back_exactly(self) -> None:
        self._skip_if_lossy()
        for what, layout, raw in _cases():
            out = memory.buffer(layout.nbytes)
            self.codec.decode(self._encoded(raw, layout), layout, out)
            expect(bytes(out) == raw, f"{what}: decode of encode gives other bytes")

    @law(since=(1, 0))
    def test_another_instance_reads_what_one_has_written(self) -> None:
        for what, layout, raw in _cases():
            data = self._encoded(raw, layout)
            ours, others = memory.buffer(layout.nbytes), memory.buffer(layout.nbytes)
            self.codec.decode(data, layout, ours)
            self.open_codec().decode(data, layout, others)
            expect(bytes(ours) == bytes(others), f"{what}: a new instance decodes to other bytes")

    @law(since=(1, 0))
    def test_max_nbytes_is_an_upper_bound(self) -> None:
        for what, layout, raw in _cases():
            bound: Any = self.codec.max_nbytes(layout)
            expect(type(bound) is int and bound > 0, f"{what}: max_nbytes is {bound!r}")
            out = memory.buffer(bound + _GUARD_NBYTES)
            returned: Any = self.codec.encode(memory.filled_with(raw), layout, out)
            expect(
                type(returned) is int and 0 < returned <= bound, f"{what}: encode gave {returned!r}, bound is {bound}"
            )
            expect(memory.is_poison(out[bound:]), f"{what}: encode wrote past max_nbytes")

    @law(since=(1, 0))
    def test_encode_fits_in_exactly_max_nbytes(self) -> None:
        for what, layout, raw in _cases():
            out = memory.buffer(self.codec.max_nbytes(layout))
            try:
                self.codec.encode(memory.filled_with(raw), layout, out)
            except Exception as error:
                expect(False, f"{what}: encode into max_nbytes raised {type(error).__name__}: {error}")

    @law(since=(1, 0))
    def test_decode_writes_nothing_past_out(self) -> None:
        for what, layout, raw in _cases():
            around = memory.buffer(layout.nbytes + 2 * _GUARD_NBYTES)
            out = around[_GUARD_NBYTES : _GUARD_NBYTES + layout.nbytes]
            data = self._encoded(raw, layout)
            for damaged in (data, *_damaged(data, 4)):
                self._decode(what, damaged, layout, out)
                before, after = around[:_GUARD_NBYTES], around[_GUARD_NBYTES + layout.nbytes :]
                expect(memory.is_poison(before) and memory.is_poison(after), f"{what}: decode wrote outside of out")

    @law(since=(1, 0))
    def test_the_input_is_left_as_it_was(self) -> None:
        for what, layout, raw in _cases():
            source = memory.filled_with(raw)
            out = memory.buffer(self.codec.max_nbytes(layout))
            nbytes = self.codec.encode(source, layout, out)
            expect(bytes(source) == raw, f"{what}: encode changed the raw chunk")
            data = memory.filled_with(bytes(out[:nbytes]))
            self.codec.decode(data, layout, memory.buffer(layout.nbytes))
            expect(bytes(data) == bytes(out[:nbytes]), f"{what}: decode changed the stored bytes")

    @law(since=(1, 0))
    def test_buffers_are_let_go_after_the_call(self) -> None:
        layout = layouts()["bfloat16"]
        (_, raw), *_ = contents(layout)
        data = self._encoded(raw, layout)
        calls: tuple[Callable[[memoryview, memoryview], object], ...] = (
            lambda source, out: self.codec.encode(source, layout, out),
            lambda source, out: self.codec.decode(source, layout, out[: layout.nbytes]),
        )
        for name, call, given in zip(("encode", "decode"), calls, (raw, bytes(data)), strict=True):
            size = max(len(given), layout.nbytes, self.codec.max_nbytes(layout))
            maps = [memory.mapping(size), memory.mapping(size)]
            views = [memory.buffer_in(maps[0], len(given)), memory.buffer_in(maps[1], size)]
            views[0][:] = given
            call(*(view[:] for view in views))
            try:
                while views:
                    views.pop().release()
                while maps:
                    maps.pop().close()
            except BufferError:
                expect(False, f"{name} keeps a view of the caller's buffer")

    # What was not written by encode.

    @law(since=(1, 0))
    def test_decode_refuses_what_is_too_short_or_too_long(self) -> None:
        for what, layout, raw in _cases():
            data = bytes(self._encoded(raw, layout))
            cuts = sorted({0, 1, len(data) // 2, len(data) - 1} - {len(data)})
            for wrong in (*(data[:cut] for cut in cuts), data + b"\0", data + data):
                refused = self._decode(what, memory.filled_with(wrong), layout, memory.buffer(layout.nbytes))
                expect(refused, f"{what}: decode took {len(wrong)} bytes, {len(data)} were written")

    @law(since=(1, 0))
    def test_decode_refuses_a_chunk_of_another_size(self) -> None:
        known = layouts()
        for name, layout in known.items():
            for _, raw in contents(layout):
                data = self._encoded(raw, layout)
                for other_name, other in known.items():
                    if other.nbytes != layout.nbytes:
                        what = f"{name} as {other_name}"
                        refused = self._decode(what, data, other, memory.buffer(other.nbytes))
                        expect(refused, f"{what}: decode took a chunk of {layout.nbytes} bytes for {other.nbytes}")

    @law(since=(1, 0))
    def test_decode_of_anything_is_all_of_a_chunk_or_chunk_corrupt(self) -> None:
        # Bytes that decode left alone differ between two buffers that were filled differently.
        for what, layout, raw in _cases():
            data = self._encoded(raw, layout)
            for wrong in (*_garbage(layout, len(data)), *_damaged(data, _ROUNDS)):
                one, other = memory.buffer(layout.nbytes), memory.filled_with(b"\x5a" * layout.nbytes)
                refused = self._decode(what, wrong, layout, one)
                again = self._decode(what, wrong, layout, other)
                expect(refused == again, f"{what}: the same bytes are refused once and taken once")
                expect(refused or bytes(one) == bytes(other), f"{what}: decode left a part of out as it was")

    @law(since=(1, 0))
    def test_decode_allocates_no_more_than_a_few_chunks(self) -> None:
        for what, layout, raw in _cases():
            data = self._encoded(raw, layout)
            limit = 4 * max(self.codec.max_nbytes(layout), layout.nbytes) + _MEMORY_NBYTES
            out = memory.buffer(layout.nbytes)
            for wrong in (data, *_damaged(data, 3 * _ROUNDS)):
                tracemalloc.start()
                try:
                    self._decode(what, wrong, layout, out)
                    _, peak = tracemalloc.get_traced_memory()
                finally:
                    tracemalloc.stop()
                expect(peak <= limit, f"{what}: decode allocated {peak} bytes for a chunk of {layout.nbytes}")

    # Threads.

    @law(since=(1, 0))
    def test_one_instance_serves_many_threads(self) -> None:
        cases = [(layout, raw) for _, layout, raw in _cases() if layout.nbytes < 1 << 20]
        alone = [bytes(self._decoded(self._encoded(raw, layout), layout)) for layout, raw in cases]

        def work(seed: int) -> Callable[[], None]:
            def run() -> None:
                for index in random.Random(seed).choices(range(len(cases)), k=8 * _ROUNDS):
                    layout, raw = cases[index]
                    got = self._decoded(self._encoded(raw, layout), layout)
                    expect(bytes(got) == alone[index], "with 4 threads at work, decode of encode gives other bytes")

            return run

        in_threads(*(work(seed) for seed in range(4)))

    def _skip_if_lossy(self) -> None:
        if self.codec.lossy:
            skip("the codec is lossy")

    def _encoded(self, raw: bytes, layout: Layout) -> memoryview:
        """Exactly what encode wrote, in memory of its own."""
        out = memory.buffer(self.codec.max_nbytes(layout))
        nbytes = self.codec.encode(memory.filled_with(raw), layout, out)
        return memory.filled_with(bytes(out[:nbytes]))

    def _decoded(self, data: memoryview, layout: Layout) -> memoryview:
        out = memory.buffer(layout.nbytes)
        self.codec.decode(data, layout, out)
        return out

    def _decode(self, what: str, data: memoryview, layout: Layout, out: memoryview) -> bool:
        """Whether decode raised ChunkCorrupt; anything else that it raises breaks the law at hand."""
        try:
            self.codec.decode(data, layout, out)
        except ChunkCorrupt:
            return True
        except Exception as error:
            expect(False, f"{what}: decode raised {type(error).__name__} ({error}), not ChunkCorrupt")
        return False


def run_codec_laws(
    open_codec: Callable[[], Codec],
    *,
    known_failures: Mapping[str, str] | None = None,
    only: Sequence[str] = (),
    on_result: Callable[[LawResult], None] | None = None,
) -> list[LawResult]:
    """Check every law (or those named in `only`) on the codecs that `open_codec` makes.

    `on_result` hears of each law as it has been checked.
    """
    members = {"open_codec": lambda self: open_codec(), "known_failures": dict(known_failures or {})}
    laws: CodecLaws = type("LawsOfOneCodec", (CodecLaws,), members)()
    return laws.results(only, on_result)


@cache
def _cases() -> tuple[tuple[str, Layout, bytes], ...]:
    return tuple(
        (f"{what} of {name}", layout, raw) for name, layout in layouts().items() for what, raw in contents(layout)
    )


def _garbage(layout: Layout, encoded_nbytes: int) -> Iterator[memoryview]:
    """Bytes that no encoder wrote, in lengths that a decoder may take for its own."""
    for length in sorted({1, 8, 100, encoded_nbytes, layout.nbytes}):
        yield memory.filled(layout.fingerprint + b"garbage", length)
        yield memory.filled_with(b"\xff" * length)


def _damaged(data: memoryview, count: int) -> Iterator[memoryview]:
    """Copies with a bit or a few bytes changed: mostly near the front, where lengths stand."""
    rng = random.Random(len(data))
    for number in range(count):
        copy = memory.filled_with(bytes(data))
        at = rng.randrange(min(len(data), 64) if number % 4 else len(data))
        if number % 2:
            copy[at] ^= 1 << rng.randrange(8)
        else:
            stop = min(len(data), at + rng.choice((2, 4, 8)))
            copy[at:stop] = rng.choice((b"\xff", b"\x7f", b"\0")) * (stop - at)
        yield copy
