"""The path of accelerators, on a simulated one: order, memory, what goes wrong, and the GIL."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lagging import LaggingEvent, LaggingQueue, StagedDevice

from lmcache_core import DeviceError, Layout, Region
from lmcache_device_torch import EventFence
from lmcache_device_torch.plan import segments
from lmcache_device_torch.queues import LANES, StreamQueue

NBYTES = 1 << 10
LAYOUT = Layout(
    chunk_tokens=64,
    regions=(Region(name="kv", layers=3, block_tokens=16, block_nbytes=NBYTES, dtype="uint8", packing="test"),),
)


def pages(fill: int = 0) -> list[list[torch.Tensor]]:
    return [[torch.full((16, NBYTES), fill, dtype=torch.uint8) for _ in range(3)]]


def buffers(count: int, fill: int = 0) -> list[memoryview]:
    return [memoryview(bytearray([fill]) * LAYOUT.nbytes) for _ in range(count)]


@pytest.fixture
def device() -> Iterator[StagedDevice]:
    opened = StagedDevice(staging_nbytes=4 * NBYTES)
    yield opened
    opened.close()


@pytest.fixture
def compute() -> Iterator[LaggingQueue]:
    """The stream of a simulated engine."""
    stream = LaggingQueue()
    yield stream
    stream.end()


def test_a_store_waits_for_the_engines_stream_and_the_caller_for_nothing(
    device: StagedDevice, compute: LaggingQueue
) -> None:
    kv = pages()
    go = threading.Event()
    compute.run(lambda: go.wait(60) and None)
    compute.run(lambda: [page.fill_(7) for page in kv[0]] and None)
    out = buffers(1)
    fence = device.gather(kv, range(4), LAYOUT, out, after=EventFence([compute.record()]))
    assert not fence.done()
    assert not fence.wait(0.0)
    go.set()
    assert fence.wait(60)
    assert fence.wait(None)
    assert bytes(out[0]) == b"\x07" * LAYOUT.nbytes


def test_an_engine_that_waits_for_one_layer_computes_with_it(device: StagedDevice, compute: LaggingQueue) -> None:
    kv = pages()
    seen: list[int] = []
    fences = device.scatter_layers(buffers(2, fill=9), LAYOUT, kv, range(8))
    for layer, fence in enumerate(fences):
        fence.make_stream_wait(compute)
        compute.run(lambda layer=layer: seen.append(int(kv[0][layer][:8].sum())))  # type: ignore[misc]
    assert EventFence([compute.record()]).wait(60)
    assert seen == [9 * 8 * NBYTES] * 3


def test_loads_do_not_queue_behind_stores(device: StagedDevice, compute: LaggingQueue) -> None:
    go = threading.Event()
    compute.run(lambda: go.wait(60) and None)
    late = device.gather(pages(), range(4), LAYOUT, buffers(1), after=EventFence([compute.record()]))
    kv = pages()
    assert device.scatter(buffers(1, fill=5), LAYOUT, kv, range(4)).wait(60)
    assert kv[0][2][3].unique().tolist() == [5]
    assert not late.done()
    go.set()
    assert late.wait(60)


def test_nothing_to_copy_is_done_when_what_it_waits_for_is(device: StagedDevice, compute: LaggingQueue) -> None:
    go = threading.Event()
    compute.run(lambda: go.wait(60) and None)
    fence = device.gather(pages(), [], LAYOUT, [], after=EventFence([compute.record()]))
    assert not fence.done()
    go.set()
    assert fence.wait(60)


def test_staging_memory_is_bounded_whatever_is_copied(device: StagedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    empty = torch.empty

    def counted(*shape: Any, **more: Any) -> torch.Tensor:
        made.append(shape[0])
        return empty(*shape, **more)

    monkeypatch.setattr(torch, "empty", counted)
    for _ in range(5):
        assert device.gather(pages(), range(16), LAYOUT, buffers(4)).wait(60)
        assert device.scatter(buffers(4), LAYOUT, pages(), range(16)).wait(60)
    assert made == [4 * NBYTES] * 2 * LANES


def test_what_the_device_refuses_is_a_device_error_after_all_that_was_queued(
    device: StagedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = buffers(1)
    assert device.gather(pages(), range(4), LAYOUT, out).wait(60)
    runs: list[Callable[[], None]] = []
    events: list[LaggingEvent] = []
    run, record = LaggingQueue.run, LaggingQueue.record

    def refuses(self: LaggingQueue, work: Callable[[], None]) -> None:
        runs.append(work)
        if len(runs) == 3:
            raise torch.OutOfMemoryError("simulated: no memory left")
        run(self, work)

    def recorded(self: LaggingQueue) -> LaggingEvent:
        monkeypatch.setattr(LaggingQueue, "run", run)
        events.append(record(self))
        return events[-1]

    monkeypatch.setattr(LaggingQueue, "run", refuses)
    monkeypatch.setattr(LaggingQueue, "record", recorded)
    with pytest.raises(DeviceError, match="gather: simulated: no memory left"):
        device.gather(pages(3), range(4), LAYOUT, out)
    assert [event.query() for event in events] == [True, True]


def test_a_plan_has_every_byte_once_in_segments_that_fit() -> None:
    uneven = Layout(
        chunk_tokens=64,
        regions=(
            Region(name="a", layers=2, block_tokens=16, block_nbytes=7, dtype="x", packing="x"),
            Region(name="b", layers=3, block_tokens=16, block_nbytes=24, dtype="x", packing="x"),
        ),
    )
    for limit in (1, 24, 50, 100, 1000):
        for skip in range(5):
            seen = [bytearray(uneven.nbytes) for _ in range(2)]
            for part in segments(uneven, 2, skip_blocks=skip, limit_nbytes=limit):
                assert part.stop - part.start <= max(limit, 24)
                for piece in part.pieces:
                    nbytes = piece.count * uneven.regions[piece.region].block_nbytes
                    assert piece.start % 8 == 0
                    for place in range(part.start + piece.start, part.start + piece.start + nbytes):
                        seen[part.buffer][place] += 1
            assert sum(map(sum, seen)) == 2 * uneven.nbytes - skip * (2 * 7 + 3 * 24)
            assert max(map(max, seen)) == 1


class SimulatedModule:
    """SIMULATED `torch.cuda` or `torch.npu`: which streams were made, entered, and recorded."""

    def __init__(self) -> None:
        self.happened: list[object] = []

    def Stream(self, device: torch.device) -> str:
        self.happened.append(("made", str(device)))
        return "side stream"

    @contextlib.contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        self.happened.append(("entered", stream))
        yield
        self.happened.append(("left", stream))

    def Event(self) -> SimulatedModule:
        return self

    def record(self, stream: str) -> None:
        self.happened.append(("recorded", stream))


def test_work_and_events_of_an_accelerator_are_on_its_side_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimulatedModule()
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    queue = StreamQueue(module, torch.device("cpu", 0))
    queue.run(lambda: module.happened.append("worked"))
    assert queue.upload(torch.arange(3)).tolist() == [0, 1, 2]
    assert queue.record() is module
    entered, left = ("entered", "side stream"), ("left", "side stream")
    assert module.happened == [
        ("made", "cpu:0"), entered, "worked", left, entered, left, ("recorded", "side stream"),
    ]  # fmt: skip


class AtOnce(LaggingQueue):
    """A queue that works in the caller, so that it is seen whether the work holds the GIL."""

    def run(self, work: Callable[[], None]) -> None:
        work()


class AtOnceDevice(StagedDevice):
    def new_queue(self, device: torch.device) -> LaggingQueue:
        self.queues.append(AtOnce())
        return self.queues[-1]

    def close(self) -> None:
        for queue in self.queues:
            queue.run = lambda work, queue=queue: LaggingQueue.run(queue, work)  # type: ignore[method-assign, misc]
        super().close()


def test_other_threads_run_during_a_copy() -> None:
    device = AtOnceDevice(staging_nbytes=1 << 20)
    kv, out = pages(), buffers(4)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # nobody takes the GIL: another thread runs only when it is given up
    try:
        for copy in (
            lambda: device.gather(kv, range(16), LAYOUT, out),
            lambda: device.scatter(out, LAYOUT, kv, range(16)),
        ):
            assert any(_another_thread_ran(copy) for _ in range(200))
    finally:
        sys.setswitchinterval(interval)
        device.close()


def _another_thread_ran(copy: Callable[[], object]) -> bool:
    ran: list[bool] = []
    waits, go = threading.Event(), threading.Lock()
    go.acquire()

    def other() -> None:
        waits.set()
        go.acquire()
        ran.append(True)

    thread = threading.Thread(target=other)
    thread.start()
    waits.wait()
    go.release()
    copy()
    seen = bool(ran)
    thread.join()
    return seen


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"block_ids": [0, 1, 2, 2]}, "occurs twice"),
        ({"skip_blocks": 5}, "skip_blocks 5"),
        ({"skip_blocks": -1}, "skip_blocks -1"),
        ({"layers": range(2, 4)}, "layers 2 to 3 of a layout that has 3"),
        ({"block_ids": [0.0, 1.0, 2.0, 3.0]}, "whole numbers"),
        ({"src": [memoryview(bytearray(5))]}, "buffer 0 has 5 bytes"),
        ({"pages": []}, "0 regions of pages"),
        ({"pages": [pages()[0][:2]]}, "2 layers of pages"),
        ({"pages": [[torch.zeros(16, NBYTES, dtype=torch.int16)] * 3]}, "blocks of 2048 bytes"),
        ({"pages": [[*pages()[0][:2], torch.zeros(16, NBYTES, device="meta")]]}, "several devices: cpu, meta"),
        ({"pages": [[torch.zeros(16, NBYTES // 16, dtype=torch.complex128)] * 3]}, "elements of 16 bytes"),
    ],
)
@pytest.mark.parametrize("direct", [True, False])
def test_what_cannot_be_right_is_refused(
    device: StagedDevice, direct: bool, change: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "direct", direct)
    right: dict[str, Any] = {"src": buffers(1), "layout": LAYOUT, "pages": pages(), "block_ids": range(4)}
    with pytest.raises(DeviceError, match=reason):
        device.scatter(**{**right, **change})


def test_the_same_block_may_be_read_twice(device: StagedDevice) -> None:
    out = buffers(2)
    assert device.gather(pages(6), [1, 1, 2, 3, 3, 3, 1, 0], LAYOUT, out).wait(60)
    assert bytes(out[1]) == b"\x06" * LAYOUT.nbytes
