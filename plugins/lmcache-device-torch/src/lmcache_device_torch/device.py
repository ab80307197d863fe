"""A device whose pages are torch tensors: the base of the packages for CUDA, ROCm, MACA and Ascend."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lmcache_core import CpuDevice, Device, DeviceError, DeviceRecord, Fence, Layout, Pages, check_targets

from .fences import EventFence
from .pages import as_arrays, checked, host_bytes, widest
from .pinning import Pins, Runtime
from .plan import Piece, Segment, segments
from .queues import LANES, STAGING_NBYTES, Lane, Queue, StreamQueue
from .records import TorchRecord

if TYPE_CHECKING:
    import torch

_Copy = Callable[["torch.Tensor", "torch.Tensor"], None]


class TorchDevice(Device):
    """Copies on side streams, through a staging buffer on the device; a subclass says what the hardware is.

    Blocks are brought together on the device by one kernel for each layer, and cross the link in one large copy for
    each segment.  Pages in the CPU's memory are copied directly, by core's own device.
    """

    direct = True
    """Whether pages in the CPU's memory are copied without a queue; tests of the staged path say no."""

    def __init__(self, *, staging_nbytes: int = STAGING_NBYTES) -> None:
        self._staging_nbytes = staging_nbytes
        self._cpu = CpuDevice()
        self._pins = Pins(type(self).__name__, self.runtime())
        self._locks = {"gather": threading.Lock(), "scatter": threading.Lock()}
        self._lanes: dict[tuple[str, torch.device], list[Lane]] = {}

    # What a subclass may say.

    def runtime(self) -> Runtime | None:
        """How memory is pinned; None where there is nothing to pin."""
        return None

    def new_queue(self, device: torch.device) -> Queue:
        import torch

        return StreamQueue(getattr(torch, device.type), device)

    # The contract.

    def register(self, address: int, nbytes: int) -> None:
        self._pins.note(address, nbytes)

    def unregister(self, address: int, nbytes: int) -> None:
        self._pins.forget(address)

    def close(self) -> None:
        for lock in self._locks.values():
            lock.acquire()
        try:
            lanes, self._lanes = self._lanes, {}
            for each in lanes.values():
                for lane in each:
                    lane.queue.record().synchronize()
        finally:
            for lock in self._locks.values():
                lock.release()
        self._pins.close()
        self._cpu.close()

    def staging(self, nbytes: int, pages: Pages) -> DeviceRecord:
        if self._is_direct(pages):
            return self._cpu.staging(nbytes, pages)
        return TorchRecord(nbytes, pages[0][0].device)

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
        ids = checked(pages, block_ids, layout, out, layers)
        if self._is_direct(pages):
            return self._cpu.gather(as_arrays(pages), ids, layout, out, layers=layers, after=after)  # type: ignore[arg-type]
        parts = segments(layout, len(out), layers=layers, limit_nbytes=self._staging_nbytes)
        return self._queue("gather", pages, ids, out, parts, after)

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
        ids = checked(pages, block_ids, layout, src, layers)
        check_targets(ids, layout, skip_blocks)
        if self._is_direct(pages):
            return self._cpu.scatter(
                src, layout, as_arrays(pages), ids, layers=layers, skip_blocks=skip_blocks, after=after  # type: ignore[arg-type]
            )  # fmt: skip
        parts = segments(layout, len(src), layers=layers, skip_blocks=skip_blocks, limit_nbytes=self._staging_nbytes)
        return self._queue("scatter", pages, ids, src, parts, after)

    def scatter_layers(
        self,
        src: Sequence[memoryview],
        layout: Layout,
        pages: Pages,
        block_ids: Sequence[int],
        *,
        skip_blocks: int = 0,
        after: Fence | None = None,
    ) -> list[Fence]:
        """Scatter the first layer, then the second, ...: one fence for each, so that an engine computes meanwhile."""
        return [
            self.scatter(
                src, layout, pages, block_ids, layers=range(layer, layer + 1), skip_blocks=skip_blocks, after=after
            )
            for layer in range(max(region.layers for region in layout.regions))
        ]

    # How.

    def _is_direct(self, pages: Pages) -> bool:
        return self.direct and all(page.device.type == "cpu" for planes in pages for page in planes)

    def _queue(
        self, what: str, pages: Pages, ids: Any, buffers: Sequence[memoryview], parts: Any, after: Fence | None
    ) -> Fence:
        import torch

        device = pages[0][0].device
        self._pins.pin_noted(device)
        rows = torch.from_numpy(ids)
        hosts = [host_bytes(buffer) for buffer in buffers]
        copy = _gather if what == "gather" else _scatter
        uploaded: dict[Lane, torch.Tensor] = {}
        with self._locks[what]:
            lanes = self._lanes.get((what, device))
            if lanes is None:
                lanes = [Lane(self.new_queue(device), device) for _ in range(LANES)]
                self._lanes[what, device] = lanes
            try:
                for number, part in enumerate(parts):
                    lane = lanes[number % len(lanes)]
                    if lane not in uploaded:
                        lane.wait_for(after)
                        uploaded[lane] = lane.queue.upload(rows)
                    lane.queue.run(
                        _work(copy, lane, part, pages, uploaded[lane], hosts[part.buffer], self._staging_nbytes)
                    )
                if not uploaded and after is not None:  # nothing to copy, and yet not done before that is
                    lanes[0].wait_for(after)
                    uploaded[lanes[0]] = rows
            except RuntimeError as error:  # torch's, such as no memory left on the device
                for lane in uploaded:  # what was queued uses the caller's memory
                    lane.queue.record().synchronize()
                raise DeviceError(f"{what}: {error}") from error
            return EventFence([lane.queue.record() for lane in uploaded])


def _work(
    copy: Callable[..., None],
    lane: Lane,
    part: Segment,
    pages: Pages,
    ids: torch.Tensor,
    host: torch.Tensor,
    staging_nbytes: int,
) -> Callable[[], None]:
    import torch

    def work() -> None:
        nbytes = part.stop - part.start
        # Engines make their pages in this mode; whether a view of them may be written outside of it is up to torch.
        with torch.inference_mode():
            staging = lane.staging(max(nbytes, staging_nbytes))[:nbytes]
            copy(part.pieces, pages, ids, staging, host[part.start : part.stop])

    return work


def _gather(
    pieces: Sequence[Piece], pages: Pages, ids: torch.Tensor, staging: torch.Tensor, host: torch.Tensor
) -> None:
    import torch

    for piece in pieces:
        page, staged = _matched(piece, pages, staging)
        torch.index_select(page, 0, ids[piece.first : piece.first + piece.count], out=staged)
    host.copy_(staging, non_blocking=True)


def _scatter(
    pieces: Sequence[Piece], pages: Pages, ids: torch.Tensor, staging: torch.Tensor, host: torch.Tensor
) -> None:
    staging.copy_(host, non_blocking=True)
    for piece in pieces:
        page, staged = _matched(piece, pages, staging)
        page.index_copy_(0, ids[piece.first : piece.first + piece.count], staged)


def _matched(piece: Piece, pages: Pages, staging: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The pages of one piece, and its place in the staging buffer as the same kind of blocks."""
    page = widest(pages[piece.region][piece.layer])
    shape = (piece.count, *page.shape[1:])
    nbytes = page.element_size()
    for size in shape:
        nbytes *= size
    return page, staging[piece.start : piece.start + nbytes].view(page.dtype).view(shape)
