"""The specification of a device, as laws that any plugin's test-suite inherits and `lmc conform` checks.

    class TestMyDevice(DeviceLaws):
        device_class = MyDevice

Without pytest: `run_device_laws(MyDevice)` returns one `LawResult` per law.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from ..device import Device, Probe, SupportsPaths
from ..errors import DeviceError
from .device_bench import (
    BLOCKS,
    KV,
    SHAPES,
    STRIDED,
    Buffers,
    Engine,
    Late,
    Shape,
    complete,
    poll,
    random_chunks,
    resources,
)
from .laws import LawBroken, LawResult, expect, expect_api_version, in_threads, law, outcome_of, skip
from .staging_laws import StagingLaws

_ROUNDS: Final = 40
_GROWTH_NBYTES: Final = 2048
"""Less than 32 bytes for each of 2 * `_ROUNDS` copies; what an interpreter keeps for itself it keeps once."""


class DeviceLaws(StagingLaws):
    """What the contract in `lmcache_core.device` promises.  A subclass supplies `device_class`."""

    # What the class says of itself.

    @law(since=(1, 0))
    def test_the_api_version_is_a_literal_that_core_speaks(self) -> None:
        expect_api_version(self.device_class)

    @law(since=(1, 0))
    def test_the_torch_type_is_a_word(self) -> None:
        word: Any = getattr(self.device_class, "torch_type", None)
        expect(isinstance(word, str) and word.isidentifier(), f'torch_type must be a word such as "cuda", got {word!r}')

    @law(since=(1, 0))
    def test_a_probe_says_how_many_there_are_or_why_there_is_none(self) -> None:
        kind = self.device_class
        for _ in range(2):
            probe: Any = kind.probe()
            expect(isinstance(probe, Probe), f"probe() returned {probe!r}, not a Probe")
            expect(type(probe.count) is int and probe.count >= 0, f"probe() counts {probe.count!r} devices")
            expect(probe.count or probe.reason, "probe() finds no device and gives no reason")

    # Bytes.

    @law(since=(1, 0))
    def test_gather_brings_the_blocks_that_were_named_in_their_order(self) -> None:
        for shape in SHAPES:
            engine = Engine(self, shape)
            ids = engine.some_ids(2)
            self.gather(engine, ids).check(engine.chunks(ids), f"gather ({shape})")
            engine.check("after gather")

    @law(since=(1, 0))
    def test_scatter_puts_the_blocks_where_they_were_named_in_their_order(self) -> None:
        for shape in SHAPES:
            engine = Engine(self, shape)
            ids = engine.some_ids(2)
            chunks = random_chunks(shape.layout, 2, seed=2)
            buffers = Buffers(shape.layout, 2).fill(chunks)
            self.scatter(engine, buffers, ids)
            engine.store(chunks, ids)
            engine.check("after scatter")
            buffers.check(chunks, f"scatter ({shape})")

    @law(since=(1, 0))
    def test_what_was_gathered_is_scattered_to_other_blocks_unchanged(self) -> None:
        for shape in SHAPES:
            source = Engine(self, shape, seed=3)
            target = Engine(self, shape, seed=4)
            ids, others = source.some_ids(2), target.some_ids(2)
            self.scatter(target, self.gather(source, ids), others)
            target.store(source.chunks(ids), others)
            target.check("after gather from one engine and scatter to another")

    @law(since=(1, 0))
    def test_every_bit_pattern_survives(self) -> None:
        # Negative zeros, subnormals, infinities, quiet and signalling NaNs with payloads: each is just bytes.
        special = {
            "float16": [0x8000, 0x0001, 0x7C00, 0xFC00, 0x7C01, 0x7DFF, 0x7E00, 0xFE5A],
            "float32": [0x80000000, 1, 0x7F800000, 0xFF800000, 0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0xFFC5A5A5],
            "float64": [1 << 63, 1, 0x7FF << 52, 0xFFF << 52, 0x7FF0000000000001, 0x7FF7FFFFFFFFFFFF, 0x7FF8 << 48,
                        0xFFFA5A5A5A5A5A5A],
        }  # fmt: skip
        for dtype, patterns in special.items():
            shape = Shape("special numbers", KV.layout, dtype)
            source, target = Engine(self, shape, seed=5, patterns=patterns), Engine(self, shape, seed=6)
            ids = source.some_ids(2)
            buffers = self.gather(source, ids)
            buffers.check(source.chunks(ids), f"gather ({shape})")
            self.scatter(target, buffers, ids)
            target.store(source.chunks(ids), ids)
            target.check("after scatter of special numbers")

    @law(since=(1, 0))
    def test_pages_with_strides_are_used_as_they_lie(self) -> None:
        for plane in STRIDED:
            shape = Shape(KV.name, KV.layout, KV.dtype, plane)
            engine = Engine(self, shape, seed=7)
            ids = engine.some_ids(3)
            self.gather(engine, ids).check(engine.chunks(ids), f"gather ({shape})")
            chunks = random_chunks(shape.layout, 3, seed=8)
            self.scatter(engine, Buffers(shape.layout, 3).fill(chunks), ids)
            engine.store(chunks, ids)
            engine.check("after scatter")

    @law(since=(1, 0))
    def test_a_range_of_layers_leaves_the_other_layers_alone(self) -> None:
        for shape in (KV, SHAPES[1]):
            for layers in (range(1), range(1, 2), range(1, shape.layout.regions[0].layers), range(1, 1)):
                engine = Engine(self, shape, seed=9)
                ids = engine.some_ids(2)
                when = f"gather of {layers} ({shape})"
                self.gather(engine, ids, layers=layers).check(engine.chunks(ids, layers), when)
                chunks = random_chunks(shape.layout, 2, seed=10)
                self.scatter(engine, Buffers(shape.layout, 2).fill(chunks), ids, layers=layers)
                engine.store(chunks, ids, layers)
                engine.check(f"after scatter of {layers}")

    @law(since=(1, 0))
    def test_skipped_blocks_of_the_first_buffer_are_left_as_they_are(self) -> None:
        for shape in (KV, SHAPES[1]):
            for skip_blocks in range(shape.layout.blocks(shape.layout.regions[0]) + 1):
                engine = Engine(self, shape, seed=11)
                ids = engine.some_ids(2)
                chunks = random_chunks(shape.layout, 2, seed=12)
                self.scatter(engine, Buffers(shape.layout, 2).fill(chunks), ids, skip_blocks=skip_blocks)
                engine.store(chunks, ids, skip=skip_blocks)
                engine.check(f"after scatter with skip_blocks={skip_blocks}")

    @law(since=(1, 0))
    def test_nothing_to_copy_is_fine(self) -> None:
        engine = Engine(self, KV)
        complete(self.device.gather(engine.pages, [], engine.layout, []), "gather of nothing")
        complete(self.device.scatter([], engine.layout, engine.pages, []), "scatter of nothing")
        engine.check("after scatter of nothing")

    @law(since=(1, 0))
    def test_an_id_that_no_page_has_is_refused_before_anything_is_copied(self) -> None:
        for wrong in (-1, BLOCKS, 1 << 40):
            for place in (0, -1):
                engine = Engine(self, KV)
                ids = engine.some_ids(2)
                ids[place] = wrong
                self._expect_refused(engine, ids, f"block id {wrong} of {BLOCKS} blocks")

    @law(since=(1, 0))
    def test_ids_for_more_or_fewer_buffers_are_refused_before_anything_is_copied(self) -> None:
        engine = Engine(self, KV)
        ids = engine.some_ids(3)
        per_chunk = engine.layout.blocks(engine.first)
        for count in (2 * per_chunk - 1, 2 * per_chunk + 1, per_chunk, 3 * per_chunk):
            self._expect_refused(engine, ids[:count], f"{count} block ids for 2 buffers of {per_chunk} blocks")

    def _expect_refused(self, engine: Engine, ids: list[int], what: str) -> None:
        out, src = Buffers(engine.layout, 2), Buffers(engine.layout, 2)
        poison = [bytes(view) for view in out.views]
        calls: dict[str, Callable[[], object]] = {
            "gather": lambda: self.device.gather(engine.pages, ids, engine.layout, out.views),
            "scatter": lambda: self.device.scatter(src.views, engine.layout, engine.pages, ids),
        }
        for name, call in calls.items():
            seen = outcome_of(call)
            expect(isinstance(seen, DeviceError), f"{name}, {what}: {seen!r}, not a DeviceError")
        out.check(poison, f"gather refused {what}, and yet")
        engine.check(f"scatter refused {what}")

    # Order.

    @law(since=(1, 0))
    def test_gather_reads_after_the_fence_that_it_was_given(self) -> None:
        engine = Engine(self, KV, seed=13)
        ids = engine.some_ids(2)
        after = self.engine_work(engine.compute)
        buffers = self.gather(engine, ids, after=after)
        _expect_used(after, "gather")
        buffers.check(engine.chunks(ids), "gather after a step of the engine (it read before the step had ended)")

    @law(since=(1, 0))
    def test_scatter_writes_after_the_fence_that_it_was_given(self) -> None:
        engine = Engine(self, KV, seed=14)
        ids = engine.some_ids(2)
        chunks = random_chunks(engine.layout, 2, seed=15)
        after = self.engine_work(engine.compute)
        self.scatter(engine, Buffers(engine.layout, 2).fill(chunks), ids, after=after)
        _expect_used(after, "scatter")
        engine.store(chunks, ids)
        engine.check("scatter after a step of the engine (the step wrote over it)")

    @law(since=(1, 0))
    def test_a_fence_that_is_done_means_that_the_bytes_are_there(self) -> None:
        shape = SHAPES[-1]
        engine = Engine(self, shape)
        ids = engine.some_ids(2)
        buffers = Buffers(shape.layout, 2)
        poll(self.device.gather(engine.pages, ids, engine.layout, buffers.views), "gather")
        buffers.check(engine.chunks(ids), "gather, when its fence said done")
        chunks = random_chunks(shape.layout, 2, seed=16)
        buffers.fill(chunks)
        poll(self.device.scatter(buffers.views, engine.layout, engine.pages, ids), "scatter")
        engine.store(chunks, ids)
        engine.check("scatter, when its fence said done")

    @law(since=(1, 0))
    def test_a_fence_completes_and_stays_complete(self) -> None:
        engine = Engine(self, KV)
        ids = engine.some_ids(1)
        buffers = Buffers(engine.layout, 1)
        fences = {
            "gather": self.device.gather(engine.pages, ids, engine.layout, buffers.views),
            "scatter": self.device.scatter(buffers.views, engine.layout, engine.pages, ids),
        }
        for name, fence in fences.items():
            early = fence.wait(0.0)
            expect(isinstance(early, bool), f"wait(0) of the fence of {name} returned {early!r}, not a bool")
            complete(fence, name)
            expect(fence.done() is True, f"the fence of {name} is not done after it was waited for")
            expect(fence.wait(None) is True, f"the fence of {name} is not complete when waited for again")

    @law(since=(1, 0))
    def test_a_stream_that_was_made_to_wait_for_a_fence_sees_the_copy(self) -> None:
        for seed in range(5):
            engine = Engine(self, SHAPES[-1], seed=seed)
            ids = engine.some_ids(2)
            chunks = random_chunks(engine.layout, 2, seed=17 + seed)
            buffers = Buffers(engine.layout, 2).fill(chunks)
            fence = self.device.scatter(buffers.views, engine.layout, engine.pages, ids)
            fence.make_stream_wait(self.engine_stream())
            engine.store(chunks, ids)
            try:
                engine.check("scatter, read on a stream that was made to wait")
            finally:
                complete(fence, "scatter")

    @law(since=(1, 0))
    def test_layer_by_layer_is_the_same_as_all_at_once(self) -> None:
        """As an engine does that computes one layer while others are copied: many copies in flight, none waited for."""
        for shape in (KV, SHAPES[-1]):
            engine = Engine(self, shape, seed=18)
            ids = engine.some_ids(4)
            chunks = random_chunks(shape.layout, 2, seed=19)
            per_chunk = engine.layout.blocks(engine.first)
            read, written = ids[: 2 * per_chunk], ids[2 * per_chunk :]
            out, src = Buffers(shape.layout, 2), Buffers(shape.layout, 2).fill(chunks)
            fences = []
            for layer in range(engine.first.layers):
                one = range(layer, layer + 1)
                fences.append(self.device.gather(engine.pages, read, shape.layout, out.views, layers=one))
                fences.append(self.device.scatter(src.views, shape.layout, engine.pages, written, layers=one))
            for fence in fences:
                complete(fence, "a copy of one layer")
            out.check(engine.chunks(read), f"gather layer by layer ({shape})")
            engine.store(chunks, written)
            engine.check("after scatter layer by layer")

    # Use.

    @law(since=(1, 0))
    def test_two_requests_at_once_do_not_mix(self) -> None:
        engines = [Engine(self, KV, seed=20 + number) for number in range(2)]
        device = self.device

        def work(engine: Engine, seed: int) -> Callable[[], None]:
            def run() -> None:
                for number in range(_ROUNDS):
                    ids = engine.some_ids(2)
                    chunks = random_chunks(engine.layout, 2, seed=100 * seed + number)
                    self.scatter(engine, Buffers(engine.layout, 2).fill(chunks), ids)
                    engine.store(chunks, ids)
                    self.gather(engine, ids).check(chunks, "gather beside the copies of another request")

            return run

        in_threads(*(work(engine, seed) for seed, engine in enumerate(engines)))
        expect(self.device is device, "the device changed")
        for engine in engines:
            engine.check("after the copies of two requests at once")

    @law(since=(1, 0))
    def test_many_copies_leave_no_memory_threads_or_descriptors(self) -> None:
        engine = Engine(self, KV)
        ids = engine.some_ids(2)
        buffers = Buffers(engine.layout, 2)

        def copies() -> None:
            for _ in range(_ROUNDS):
                complete(self.device.gather(engine.pages, ids, engine.layout, buffers.views), "gather")
                complete(self.device.scatter(buffers.views, engine.layout, engine.pages, ids), "scatter")
            gc.collect()

        copies()
        threads, descriptors = resources()
        device_nbytes = self.device_nbytes()
        already = tracemalloc.is_tracing()
        if not already:
            tracemalloc.start()
        try:
            grown = min(_growth(copies) for _ in range(3))
        finally:
            if not already:
                tracemalloc.stop()
        more_threads, more_descriptors = resources()
        expect(grown < _GROWTH_NBYTES, f"{2 * _ROUNDS} copies left {grown} bytes of host memory behind")
        expect(not more_threads - threads, f"copies left threads: {[t.name for t in more_threads - threads]}")
        expect(not more_descriptors - descriptors, f"copies left descriptors: {sorted(more_descriptors - descriptors)}")
        expect(
            self.device_nbytes() <= device_nbytes,
            f"copies left {self.device_nbytes() - device_nbytes} bytes of the device's memory behind",
        )

    @law(since=(1, 0))
    def test_registered_memory_can_be_used_and_let_go(self) -> None:
        engine = Engine(self, KV)
        ids = engine.some_ids(2)
        for number in range(3):
            buffers = Buffers(engine.layout, 2)
            self.device.register(buffers.address, buffers.nbytes)
            try:
                complete(self.device.gather(engine.pages, ids, engine.layout, buffers.views), "gather")
                buffers.check(engine.chunks(ids), "gather to registered memory")
                chunks = random_chunks(engine.layout, 2, seed=30 + number)
                self.scatter(engine, buffers.fill(chunks), ids)
                engine.store(chunks, ids)
                engine.check("after scatter from registered memory")
            finally:
                self.device.unregister(buffers.address, buffers.nbytes)
            buffers.check(chunks, "after memory was unregistered")

    @law(since=(1, 0))
    def test_every_path_copies_the_same_bytes(self) -> None:
        device = self.device
        if not isinstance(device, SupportsPaths):
            skip("the device has one way to copy")
        expect(device.path_names, "a device with paths names none")
        there = [name for name in device.path_names if name not in device.unusable()]
        expect(device.path_names[0] in there, f"the first path is not usable: {device.unusable()}")
        strided = [Shape(KV.name, KV.layout, KV.dtype, plane) for plane in STRIDED]
        for number, name in enumerate(there):
            device.use(gather=name, scatter=name)
            for shape in (*SHAPES, *strided):
                self._round_trip(shape, name, seed=40 + number)

    def _round_trip(self, shape: Shape, path: str, seed: int) -> None:
        """Through registered memory, which alone some paths can use; with the first block skipped on the way back."""
        engine = Engine(self, shape, seed=seed)
        ids = engine.some_ids(2)
        buffers = Buffers(shape.layout, 2)
        self.device.register(buffers.address, buffers.nbytes)
        try:
            complete(self.device.gather(engine.pages, ids, shape.layout, buffers.views), "gather")
            buffers.check(engine.chunks(ids), f"gather by {path} ({shape})")
            chunks = random_chunks(shape.layout, 2, seed=seed)
            self.scatter(engine, buffers.fill(chunks), ids, skip_blocks=1)
            engine.store(chunks, ids, skip=1)
            engine.check(f"after scatter by {path}")
        finally:
            self.device.unregister(buffers.address, buffers.nbytes)

    @law(since=(1, 0))
    def test_a_path_that_there_is_not_is_refused(self) -> None:
        device = self.device
        if not isinstance(device, SupportsPaths):
            skip("the device has one way to copy")
        first = device.path_names[0]
        for gather, scatter in (("no such path", first), (first, "no such path")):
            seen = outcome_of(partial(device.use, gather=gather, scatter=scatter))
            expect(isinstance(seen, DeviceError), f"a path that there is not: {seen!r}, not a DeviceError")

    @law(since=(1, 0))
    def test_close_twice_is_fine_and_leaves_no_thread(self) -> None:
        self.device.close()
        before, _ = resources()
        device = self.new_device()
        engine = Engine(self, SHAPES[-1])
        ids = engine.some_ids(2)
        buffers = Buffers(engine.layout, 2)
        complete(device.gather(engine.pages, ids, engine.layout, buffers.views), "gather")
        device.close()
        device.close()
        left = [thread.name for thread in resources()[0] - before]
        expect(not left, f"close left threads: {', '.join(left)}")


def _growth(work: Callable[[], None]) -> int:
    before = tracemalloc.get_traced_memory()[0]
    work()
    return tracemalloc.get_traced_memory()[0] - before


def _expect_used(fence: object, what: str) -> None:
    if isinstance(fence, Late) and not fence.finished:
        raise LawBroken(f"{what} did not wait for the fence that it was given")


def run_device_laws(
    device_class: type[Device],
    *,
    known_failures: Mapping[str, str] | None = None,
    only: Sequence[str] = (),
    on_result: Callable[[LawResult], None] | None = None,
) -> list[LawResult]:
    """Check every law (or those named in `only`) on a device of this class.

    `on_result` hears of each law as it has been checked.
    """
    members = {"device_class": device_class, "known_failures": dict(known_failures or {})}
    laws: DeviceLaws = type("LawsOfOneDevice", (DeviceLaws,), members)()
    return laws.results(only, on_result)
