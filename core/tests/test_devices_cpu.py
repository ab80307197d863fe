"""The cpu device: blocks of any layout out and back, on poisoned memory; wrong calls move no byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from gil_probe import releases_gil
from hypothesis import given, settings
from hypothesis import strategies as st

import lmcache_core.devices.cpu
from lmcache_core.devices.cpu import CpuDevice
from lmcache_core.errors import DeviceError
from lmcache_core.layout import Layout, Region

POISON = 0xA5
BLOCKS = 24
DEVICE = CpuDevice()


def region(name: str, layers: int, block_nbytes: int, block_tokens: int = 4) -> Region:
    return Region(
        name=name, layers=layers, block_tokens=block_tokens, block_nbytes=block_nbytes, dtype="x", packing="x"
    )


# Arrays of BLOCKS blocks whose bytes lie in different ways; each takes the bytes of a block.


def flat(nbytes: int) -> Any:
    return np.full((BLOCKS, nbytes), POISON, np.uint8)


def wide(nbytes: int) -> Any:
    return np.full((BLOCKS, nbytes), POISON, np.uint8).view(np.uint16).reshape(BLOCKS, 2, -1)


def widest(nbytes: int) -> Any:
    return np.full((BLOCKS, nbytes), POISON, np.uint8).view(np.uint64)


def one_element(nbytes: int) -> Any:
    return np.full((BLOCKS, nbytes), POISON, np.uint8).view(np.dtype((np.void, nbytes))).reshape(BLOCKS)


def one_element_strided(nbytes: int) -> Any:
    return np.full((BLOCKS, 2 * nbytes), POISON, np.uint8).view(np.dtype((np.void, nbytes)))[:, 1]


def every_other(nbytes: int) -> Any:
    return np.full((2 * BLOCKS, nbytes), POISON, np.uint8)[::2]


def transposed(nbytes: int) -> Any:
    return np.full((BLOCKS, nbytes // 8, 8), POISON, np.uint8).swapaxes(1, 2)


def inner_view(nbytes: int) -> Any:
    """K or V of one array that holds both."""
    return np.full((BLOCKS, 2, nbytes), POISON, np.uint8)[:, 1]


def fortran(nbytes: int) -> Any:
    return np.full((BLOCKS, nbytes), POISON, np.uint8, order="F")


def unaligned(nbytes: int) -> Any:
    return np.full(BLOCKS * nbytes + 1, POISON, np.uint8)[1:].reshape(BLOCKS, nbytes)


KINDS: tuple[Callable[[int], Any], ...] = (
    flat, wide, widest, one_element, one_element_strided, every_other, transposed, inner_view, fortran, unaligned,
)  # fmt: skip


@dataclass
class Engine:
    layout: Layout
    pages: list[list[Any]]

    @classmethod
    def of(cls, layout: Layout, kinds: Sequence[Callable[[int], Any]] = (flat,)) -> Engine:
        pages = [
            [kinds[(layer + index) % len(kinds)](each.block_nbytes) for layer in range(each.layers)]
            for index, each in enumerate(layout.regions)
        ]
        return cls(layout, pages)

    def block(self, region: int, layer: int, block: int) -> bytes:
        return np.ascontiguousarray(self.pages[region][layer][block, ...]).tobytes()

    def fill(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        for each, planes in zip(self.layout.regions, self.pages, strict=True):
            for page in planes:
                for block in range(BLOCKS):
                    data = random.integers(0, 256, each.block_nbytes, np.uint8)
                    there = page[block, ...]
                    there[...] = data.view(page.dtype).reshape(there.shape)

    def everything(self) -> list[list[bytes]]:
        return [[np.ascontiguousarray(page).tobytes() for page in planes] for planes in self.pages]

    def chunk(self, ids: Sequence[int]) -> bytes:
        """The bytes of one chunk as the layout defines them: region by region, layer by layer, block by block."""
        return b"".join(
            self.block(index, layer, block)
            for index, each in enumerate(self.layout.regions)
            for layer in range(each.layers)
            for block in ids
        )


def buffers(layout: Layout, count: int) -> list[memoryview]:
    """Poisoned buffers at odd addresses."""
    return [memoryview(bytearray([POISON]) * (layout.nbytes + 1))[1:] for _ in range(count)]


def poisoned(buffer: memoryview) -> bool:
    return bytes(buffer) == bytes([POISON]) * len(buffer)


ONE = Layout(chunk_tokens=8, regions=(region("kv", 2, 64),))
SEVERAL = Layout(chunk_tokens=12, regions=(region("k", 3, 64), region("v", 2, 32), region("scale", 1, 16)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", [ONE, SEVERAL], ids=["one", "several"])
def test_chunks_come_out_as_the_layout_says_and_go_back_where_they_are_sent(
    kind: Callable[[int], Any], layout: Layout
) -> None:
    per_chunk = layout.blocks(layout.regions[0])
    engine = Engine.of(layout, (kind,))
    engine.fill(1)
    ids = [int(block) for block in np.random.default_rng(2).permutation(BLOCKS)[: 3 * per_chunk]]
    out = buffers(layout, 3)
    assert DEVICE.gather(engine.pages, ids, layout, out).done()
    for index, buffer in enumerate(out):
        assert bytes(buffer) == engine.chunk(ids[index * per_chunk : (index + 1) * per_chunk])
    other = Engine.of(layout, (kind,))
    targets = [int(block) for block in np.random.default_rng(3).permutation(BLOCKS)[: 3 * per_chunk]]
    assert DEVICE.scatter(out, layout, other.pages, targets).done()
    assert other.chunk(targets) == engine.chunk(ids)
    for block in set(range(BLOCKS)) - set(targets):
        assert set(other.chunk([block])) == {POISON}


@given(
    data=st.data(),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    layers=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    per_chunk=st.integers(1, 3),
    chunks=st.integers(0, 3),
)
@settings(max_examples=150, deadline=None)
def test_any_layout_makes_the_round_trip(
    data: st.DataObject, kinds: list[Callable[[int], Any]], layers: list[int], per_chunk: int, chunks: int
) -> None:
    sizes = st.sampled_from((16, 32, 48, 600))
    regions = tuple(region(f"r{index}", count, data.draw(sizes)) for index, count in enumerate(layers))
    layout = Layout(chunk_tokens=4 * per_chunk, regions=regions)
    engine, other = Engine.of(layout, kinds), Engine.of(layout, kinds[::-1])
    engine.fill(4)
    blocks = st.permutations(range(BLOCKS)).map(lambda order: order[: chunks * per_chunk])
    ids, targets = data.draw(blocks), data.draw(blocks | st.just(list(range(chunks * per_chunk))))
    skip = data.draw(st.integers(0, per_chunk)) if chunks else 0
    out = buffers(layout, chunks)
    DEVICE.gather(engine.pages, ids, layout, out)
    DEVICE.scatter(out, layout, other.pages, targets, skip_blocks=skip)
    for index, (block, target) in enumerate(zip(ids, targets, strict=True)):
        if index < skip:
            assert set(other.chunk([target])) == {POISON}
        else:
            assert other.chunk([target]) == engine.chunk([block])


@pytest.mark.parametrize("kind", [flat, transposed])
def test_layers_are_moved_alone_and_the_rest_is_left_as_it_is(kind: Callable[[int], Any]) -> None:
    engine = Engine.of(SEVERAL, (kind,))
    engine.fill(5)
    ids = [7, 3, 11]
    whole, parts = buffers(SEVERAL, 1), buffers(SEVERAL, 1)
    DEVICE.gather(engine.pages, ids, SEVERAL, whole)
    DEVICE.gather(engine.pages, ids, SEVERAL, parts, layers=range(1, 2))
    expected = bytearray([POISON]) * SEVERAL.nbytes
    starts = {(0, 1): 192, (1, 1): 576 + 96}  # the second layer of "k" and of "v"; "scale" has only one
    for (index, _), start in starts.items():
        nbytes = 3 * SEVERAL.regions[index].block_nbytes
        expected[start : start + nbytes] = whole[0][start : start + nbytes]
    assert parts[0] == expected
    for layers in (range(0), range(1), range(2, 3)):
        DEVICE.gather(engine.pages, ids, SEVERAL, parts, layers=layers)
    assert parts[0] == whole[0]
    other = Engine.of(SEVERAL, (kind,))
    DEVICE.scatter(whole, SEVERAL, other.pages, ids, layers=range(1, 2))
    for index, each in enumerate(SEVERAL.regions):
        for layer in range(each.layers):
            for block in ids:
                moved = other.block(index, layer, block) == engine.block(index, layer, block)
                assert moved == (layer == 1)


@pytest.mark.parametrize("layers", [range(3, 4), range(-1, 2), range(9)])
def test_layers_that_the_layout_lacks_are_refused(layers: range) -> None:
    out = buffers(SEVERAL, 1)
    engine = Engine.of(SEVERAL)
    with pytest.raises(DeviceError, match=r"layers.*3"):
        DEVICE.gather(engine.pages, [0, 1, 2], SEVERAL, out, layers=layers)
    assert poisoned(out[0])


@pytest.mark.parametrize("ids", [[0, BLOCKS], [-1, 0], [0, 10**6], [0, 2**31], [0, -(2**31)], [0, 2**70]])
def test_a_block_that_no_page_has_is_refused_before_anything_is_copied(ids: list[int]) -> None:
    engine, out = Engine.of(ONE), buffers(ONE, 1)
    before = engine.everything()
    with pytest.raises(DeviceError, match="block ids"):
        DEVICE.gather(engine.pages, ids, ONE, out)
    assert poisoned(out[0])
    with pytest.raises(DeviceError, match="block ids"):
        DEVICE.scatter([memoryview(bytes(ONE.nbytes))], ONE, engine.pages, ids)
    assert engine.everything() == before


def test_a_block_that_only_the_last_page_lacks_is_refused_before_anything_is_copied() -> None:
    engine, out = Engine.of(ONE), buffers(ONE, 1)
    engine.pages[0][1] = engine.pages[0][1][:5]
    with pytest.raises(DeviceError, match="'kv' has 5 blocks"):
        DEVICE.gather(engine.pages, [0, 5], ONE, out)
    assert poisoned(out[0])
    engine.pages[0][1] = engine.pages[0][1][:0]
    with pytest.raises(DeviceError, match="'kv' has 0 blocks"):
        DEVICE.gather(engine.pages, [0, 1], ONE, out)


@pytest.mark.parametrize("ids", [[[0, 1]], [[0], [1]], [0.5, 1], ["0", "1"], [None, 1], [0, 1j]])
def test_ids_that_are_no_flat_row_of_whole_numbers_are_refused(ids: Any) -> None:
    with pytest.raises(DeviceError, match="block ids"):
        DEVICE.gather(Engine.of(ONE).pages, ids, ONE, buffers(ONE, 1))


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8, np.uint64])
def test_ids_may_be_arrays_of_any_integers(dtype: Any) -> None:
    engine, out = Engine.of(ONE), buffers(ONE, 1)
    engine.fill(6)
    DEVICE.gather(engine.pages, np.array([9, 2], dtype), ONE, out)  # type: ignore[arg-type]
    assert bytes(out[0]) == engine.chunk([9, 2])


def test_a_block_that_would_be_written_twice_is_refused_before_anything_is_copied() -> None:
    engine = Engine.of(ONE)
    before = engine.everything()
    src = [memoryview(bytes(ONE.nbytes))] * 2
    for ids in ([0, 0, 1, 2], [0, 1, 2, 0], [3, 2, 2, 1]):
        with pytest.raises(DeviceError, match="twice"):
            DEVICE.scatter(src, ONE, engine.pages, ids)
    assert engine.everything() == before
    DEVICE.scatter(src, ONE, engine.pages, [5, 1, 5, 2], skip_blocks=1)  # the first 5 is not written
    assert engine.chunk([5, 1, 2]) == bytes(3 * 128)


def test_a_block_may_be_read_twice() -> None:
    engine, out = Engine.of(ONE), buffers(ONE, 1)
    engine.fill(7)
    DEVICE.gather(engine.pages, [4, 4], ONE, out)
    assert bytes(out[0]) == engine.chunk([4, 4])


@pytest.mark.parametrize("skip", [-1, 3, 100])
def test_skipping_more_than_the_first_chunk_is_refused(skip: int) -> None:
    engine = Engine.of(ONE)
    before = engine.everything()
    with pytest.raises(DeviceError, match=f"skip.*{skip}"):
        DEVICE.scatter([memoryview(bytes(ONE.nbytes))] * 2, ONE, engine.pages, [0, 1, 2, 3], skip_blocks=skip)
    assert engine.everything() == before


def test_skipping_without_anything_to_scatter_is_nothing() -> None:
    DEVICE.scatter([], ONE, Engine.of(ONE).pages, [], skip_blocks=1)


@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_ids_for_another_number_of_chunks_are_refused_with_the_numbers(count: int) -> None:
    with pytest.raises(DeviceError, match=f"{count} block ids for 1 chunks of 2 blocks"):
        DEVICE.gather(Engine.of(ONE).pages, list(range(count)), ONE, buffers(ONE, 1))


@pytest.mark.parametrize("nbytes", [0, ONE.nbytes - 1, ONE.nbytes + 1, 2 * ONE.nbytes])
def test_a_buffer_that_is_not_one_chunk_is_refused_before_anything_is_copied(nbytes: int) -> None:
    engine = Engine.of(ONE)
    before = engine.everything()
    good, bad = buffers(ONE, 1)[0], memoryview(bytearray(nbytes))
    with pytest.raises(DeviceError, match=f"buffer 1.*{nbytes}.*{ONE.nbytes}"):
        DEVICE.gather(engine.pages, [0, 1, 2, 3], ONE, [good, bad])
    assert poisoned(good)
    with pytest.raises(DeviceError, match=f"buffer 1.*{nbytes}.*{ONE.nbytes}"):
        DEVICE.scatter([good, bad], ONE, engine.pages, [0, 1, 2, 3])
    assert engine.everything() == before


def test_wrong_pages_are_named() -> None:
    engine, out = Engine.of(SEVERAL), buffers(SEVERAL, 1)
    k, v, scale = engine.pages
    for pages, says in (
        ([k, v], "2 regions of pages for a layout of 3"),
        ([k[:2], v, scale], "'k': 2 layers of pages, the layout has 3"),
        ([k, [v[0], v[0][:, :31]], scale], "'v': blocks of 31 bytes, the layout has 32"),
        ([k, [v[0], k[0]], scale], "'v': blocks of 64 bytes, the layout has 32"),
    ):
        with pytest.raises(DeviceError, match=says):
            DEVICE.gather(pages, [0, 1, 2], SEVERAL, out)
        with pytest.raises(DeviceError, match=says):
            DEVICE.scatter(out, SEVERAL, pages, [0, 1, 2])
    assert poisoned(out[0])


def test_regions_of_different_block_sizes_are_refused() -> None:
    mixed = Layout(chunk_tokens=8, regions=(region("kv", 1, 64, 4), region("state", 1, 64, 8)))
    with pytest.raises(DeviceError, match="one block size"):
        DEVICE.gather(Engine.of(mixed).pages, [0, 1], mixed, buffers(mixed, 1))


class WatchedFence:
    def __init__(self, on_wait: Callable[[], None]) -> None:
        self.on_wait = on_wait

    def done(self) -> bool:
        return False

    def wait(self, timeout_s: float | None = None) -> bool:
        self.on_wait()
        return True

    def make_stream_wait(self, stream: Any) -> None:
        raise NotImplementedError


def test_copies_wait_for_the_compute_that_they_follow() -> None:
    engine, out = Engine.of(ONE), buffers(ONE, 1)
    DEVICE.gather(engine.pages, [0, 1], ONE, out, after=WatchedFence(lambda: engine.fill(8)))
    assert bytes(out[0]) == engine.chunk([0, 1])
    before = engine.everything()
    seen: list[bool] = []
    DEVICE.scatter(
        out, ONE, engine.pages, [2, 3], after=WatchedFence(lambda: seen.append(engine.everything() == before))
    )
    assert seen == [True]
    assert engine.chunk([2, 3]) == bytes(out[0])


def test_nothing_to_copy_is_done_at_once() -> None:
    assert DEVICE.gather(Engine.of(ONE).pages, [], ONE, []).done()
    assert DEVICE.scatter([], ONE, Engine.of(ONE).pages, []).wait(0)


def test_it_is_always_there() -> None:
    assert CpuDevice.probe().count == 1
    assert CpuDevice.torch_type == "cpu"


LARGE = Layout(chunk_tokens=64, regions=(region("kv", 1, 1 << 19),))
ORDERS = {"scattered": [*range(0, 16, 2), 23, 21, 19, 17, 15, 13, 11, 9], "in a row": list(range(16))}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", [flat, widest, inner_view])
def test_copies_release_the_gil(kind: Callable[[int], Any], order: str) -> None:
    engine, out = Engine.of(LARGE, (kind,)), buffers(LARGE, 1)
    ids = ORDERS[order]
    alone = CpuDevice(copy_threads=1)  # waiting for other threads would release it in any case
    assert releases_gil(lambda: alone.gather(engine.pages, ids, LARGE, out))
    assert releases_gil(lambda: alone.scatter(out, LARGE, engine.pages, ids))


@pytest.mark.parametrize(("copy_s", "naps"), [(60e-6, 3), (100e-6, 0)])
def test_a_thread_that_waits_for_the_gil_has_it_between_short_copies_too(
    copy_s: float, naps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    class Clock:
        """Every copy takes as long."""

        now = 0.0

        def perf_counter(self) -> float:
            self.now += copy_s
            return self.now

        def sleep(self, seconds: float) -> None:
            slept.append(seconds)

    monkeypatch.setattr(lmcache_core.devices.cpu, "time", Clock())
    monkeypatch.setattr(lmcache_core.devices.cpu, "_STACK_NBYTES", 0)  # else one copy, where they lie so by chance
    layout = Layout(chunk_tokens=4, regions=(region("kv", 35, 64),))
    engine = Engine.of(layout)
    DEVICE.gather(engine.pages, [1], layout, buffers(layout, 1))
    assert slept == [1e-6] * naps


NBYTES = 32
PLACES = {
    "adjacent": [0, 24, 48, 72, 96],
    "apart": [0, 29, 58, 87, 116],
    "in two heaps": [0, 24, 100, 124, 148],
    "at any distance": [0, 30, 70, 94, 150],
    "backwards": [120, 90, 60, 30, 0],
    "overlapping": [0, 12, 24, 36, 48],
    "no whole block apart": [0, 24.25, 48.5, 72.75, 97],
}
"""Where the layers begin in one piece of memory, in blocks."""


@pytest.mark.parametrize("stack_nbytes", [0, 2 * 3 * NBYTES, 4 << 20])
@pytest.mark.parametrize("ids", [[7, 3, 11, 0, 23, 4], [7, 8, 9, 2, 3, 4]], ids=["scattered", "neighbours"])
@pytest.mark.parametrize("skip", [0, 1, 3])
@pytest.mark.parametrize("place", PLACES)
def test_wherever_layers_lie_in_one_piece_of_memory_all_of_them_and_nothing_else_is_moved(
    place: str, skip: int, ids: list[int], stack_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmcache_core.devices.cpu, "_STACK_NBYTES", stack_nbytes)
    layout = Layout(chunk_tokens=12, regions=(region("kv", 5, NBYTES),))

    def engine() -> tuple[Any, Engine]:
        memory = np.full(200 * NBYTES, POISON, np.uint8)
        starts = [int(blocks * NBYTES) for blocks in PLACES[place]]
        return memory, Engine(layout, [[memory[s : s + BLOCKS * NBYTES].reshape(BLOCKS, NBYTES) for s in starts]])

    memory, source = engine()
    memory[:] = np.random.default_rng(12).integers(0, 256, len(memory), np.uint8)
    out = buffers(layout, 2)
    DEVICE.gather(source.pages, ids, layout, out)
    assert [bytes(buffer) for buffer in out] == [source.chunk(ids[:3]), source.chunk(ids[3:])]
    (memory, target), (expected, apart) = engine(), engine()
    DEVICE.scatter(out, layout, target.pages, ids, skip_blocks=skip)
    for layer, page in enumerate(apart.pages[0]):
        for number, block in enumerate(ids[skip:], start=skip):
            start = (layer * 3 + number % 3) * NBYTES
            page[block] = np.frombuffer(out[number // 3][start : start + NBYTES], np.uint8)
    assert memory.tobytes() == expected.tobytes()


def test_layers_at_equal_distances_are_copied_in_one_call_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    share = CpuDevice._share

    def counted(device: CpuDevice, copy: Any, planes: Any, *more: Any) -> None:
        copied.append(len(planes))
        share(device, copy, planes, *more)

    monkeypatch.setattr(CpuDevice, "_share", counted)
    layout = Layout(chunk_tokens=4, regions=(region("kv", 30, 64),))
    pages = [list(np.zeros((30, BLOCKS, 64), np.uint8))]
    DEVICE.gather(pages, [5, 6], layout, buffers(layout, 2))
    DEVICE.scatter(buffers(layout, 2), layout, pages, [5, 6])
    DEVICE.gather(pages, [5, 6], layout, buffers(layout, 2), layers=range(3, 12))
    DEVICE.gather([[*pages[0][:29], np.zeros((BLOCKS, 64), np.uint8)]], [5, 6], layout, buffers(layout, 2))
    assert copied == [1, 1, 1, 2]


def test_a_layer_that_may_not_be_written_is_not_written_beside_those_that_may() -> None:
    layout = Layout(chunk_tokens=4, regions=(region("kv", 3, 64),))
    pages = [list(np.zeros((3, BLOCKS, 64), np.uint8))]
    pages[0][1].flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        DEVICE.scatter(buffers(layout, 1), layout, pages, [5])
    assert not pages[0][1].any()


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_large_copies_shared_among_threads_are_the_same(threads: int) -> None:
    layout = Layout(chunk_tokens=12, regions=(region("k", 3, 1 << 19), region("v", 2, 1 << 19)))
    engine, other = Engine.of(layout, (flat, inner_view)), Engine.of(layout, (flat,))
    engine.fill(10)
    device = CpuDevice(copy_threads=threads)
    ids, out = [5, 1, 9, 0, 2, 8], buffers(layout, 2)
    device.gather(engine.pages, ids, layout, out)
    assert [bytes(buffer) for buffer in out] == [engine.chunk(ids[:3]), engine.chunk(ids[3:])]
    device.scatter(out, layout, other.pages, ids, skip_blocks=1)
    assert other.chunk(ids[1:]) == engine.chunk(ids[1:])
    assert set(other.chunk(ids[:1])) == {POISON}
    device.close()
    device.close()


def test_what_fails_in_a_helping_thread_is_raised() -> None:
    layout = Layout(chunk_tokens=4, regions=(region("kv", 4, 1 << 22),))
    engine = Engine.of(layout)
    engine.pages[0][3].flags.writeable = False
    device = CpuDevice(copy_threads=4)
    with pytest.raises(ValueError, match="read-only"):
        device.scatter([memoryview(bytes(layout.nbytes))], layout, engine.pages, [0])
    device.close()


@pytest.mark.parametrize("amd", [True, False])
@pytest.mark.parametrize("odd_nbytes", [0, 4])
@pytest.mark.parametrize("kind", [flat, inner_view, unaligned])
def test_large_runs_of_neighbours_are_copied_whole_by_words_and_by_bytes(
    monkeypatch: pytest.MonkeyPatch, amd: bool, odd_nbytes: int, kind: Callable[[int], Any]
) -> None:
    monkeypatch.setattr(lmcache_core.devices.cpu, "_is_amd", lambda: amd)
    monkeypatch.setattr(lmcache_core.devices.cpu, "_WORDS_NBYTES", 256)
    layout = Layout(chunk_tokens=16, regions=(region("kv", 3, 72 + odd_nbytes),))
    engine = Engine.of(layout, (kind,))
    engine.fill(1)
    ids = [*range(4, 8), *range(12, 16)]
    for start in (0, 1):  # at addresses of words, and between them
        out = [memoryview(bytearray([POISON]) * (layout.nbytes + 16))[start : start + layout.nbytes] for _ in range(2)]
        DEVICE.gather(engine.pages, ids, layout, out)
        assert [bytes(buffer) for buffer in out] == [engine.chunk(ids[:4]), engine.chunk(ids[4:])]
        target = Engine.of(layout, (kind,))
        untouched = target.chunk([0])
        DEVICE.scatter(out, layout, target.pages, ids, skip_blocks=1)
        assert target.chunk([0]) == target.chunk([4]) == untouched
        assert [target.block(0, layer, block) for layer in range(3) for block in ids[1:]] == [
            engine.block(0, layer, block) for layer in range(3) for block in ids[1:]
        ]
