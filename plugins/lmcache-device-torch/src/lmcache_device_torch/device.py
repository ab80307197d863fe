"""A device whose pages are torch tensors: the base of the packages for CUDA, ROCm, MACA and Ascend."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Final

from lmcache_core import CpuDevice, Device, DeviceError, DeviceRecord, Fence, Layout, Pages, check_targets

from .fences import EventFence
from .library import RuntimeLibrary
from .pages import as_arrays, checked
from .paths import Batch, CopyPath, Kernel, Plan, Staged, Step, Transfer
from .pinning import Pins, Runtime
from .queues import LANES, STAGING_NBYTES, Lane, Queue, StreamQueue
from .records import TorchRecord

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
STAGED: Final = "staged"


class TorchDevice(Device):
    """Copies on side streams, by one of several paths; a subclass says what the hardware is.

    Pages in the CPU's memory are copied directly, by core's own device.
    """

    path_names: ClassVar[tuple[str, ...]] = (STAGED, "kernel", "batch")

    direct = True
    """Whether pages in the CPU's memory are copied without a queue; tests of the staged path say no."""

    def __init__(self, *, staging_nbytes: int = STAGING_NBYTES) -> None:
        self._paths = self.new_paths(staging_nbytes)
        self._use = {"gather": STAGED, "scatter": STAGED}
        self._refused: dict[str, str] = {}
        """What the paths in use could not take, the latest of each."""
        self._cpu = CpuDevice()
        self._pins = Pins(type(self).__name__, self.runtime())
        self._locks = {"gather": threading.Lock(), "scatter": threading.Lock()}
        self._lanes: dict[tuple[str, torch.device], list[Lane]] = {}

    # What a subclass may say.

    def runtime(self) -> Runtime | None:
        """How memory is pinned; None where there is nothing to pin."""
        return None

    def library(self) -> RuntimeLibrary | None:
        """The vendor's runtime library; without one there is only the staged path."""
        return None

    def new_paths(self, staging_nbytes: int) -> dict[str, CopyPath]:
        library = self.library()
        return {STAGED: Staged(staging_nbytes), "kernel": Kernel(library), "batch": Batch(library)}

    def new_queue(self, device: torch.device) -> Queue:
        import torch

        return StreamQueue(getattr(torch, device.type), device)

    # Its paths: lmcache_core.SupportsPaths.

    @classmethod
    def identity(cls) -> Mapping[str, str]:
        return {}

    def unusable(self) -> Mapping[str, str]:
        return self._refused | {name: why for name, path in self._paths.items() if (why := path.missing())}

    def use(self, *, gather: str, scatter: str) -> None:
        for name in (gather, scatter):
            if name not in self._paths:
                raise DeviceError(f"no path {name!r}, there are {', '.join(self._paths)}")
        self._use = {"gather": gather, "scatter": scatter}
        self._refused = {}

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
        return self._queue("gather", Transfer(True, pages, ids, layout, out, layers, 0, self.reach), after)

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
        copy = Transfer(False, pages, ids, layout, src, layers, skip_blocks, self.reach)
        return self._queue("scatter", copy, after)

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

    def reach(self, address: int, nbytes: int) -> int | None:
        """Host memory as the device's kernels see it; None where it is not pinned."""
        return self._pins.mapped(address, nbytes)

    def _is_direct(self, pages: Pages) -> bool:
        return self.direct and all(page.device.type == "cpu" for planes in pages for page in planes)

    def _queue(self, what: str, copy: Transfer, after: Fence | None) -> Fence:
        self._pins.pin_noted(copy.pages[0][0].device)
        name = self._use[what]
        if name != STAGED:
            path = self._paths[name]
            plan = path.missing() or path.plan(copy)
            if isinstance(plan, Plan):
                try:
                    return self._run(what, copy, plan, after)
                except Exception as error:  # of a compiler, a library: whatever it is, there is the other path
                    self._use = {**self._use, what: STAGED}
                    self._refused = {**self._refused, name: repr(error)}
                    log.warning("%s by the path %s failed, from now on by %s: %r", what, name, STAGED, error)
            elif self._refused.get(name) != plan:
                self._refused = {**self._refused, name: plan}
                log.info("%s by %s instead of %s: %s", what, STAGED, name, plan)
        return self._run(what, copy, self._paths[STAGED].plan(copy), after)

    def _run(self, what: str, copy: Transfer, plan: Plan | str, after: Fence | None) -> Fence:
        import torch

        assert isinstance(plan, Plan), plan
        device = copy.pages[0][0].device
        table = torch.from_numpy(plan.table)
        uploaded: dict[Lane, torch.Tensor] = {}
        with self._locks[what]:
            lanes = self._lanes.get((what, device))
            if lanes is None:
                lanes = [Lane(self.new_queue(device), device) for _ in range(LANES)]
                self._lanes[what, device] = lanes
            try:
                for number, step in enumerate(plan.steps):
                    lane = lanes[number % len(lanes)]
                    if lane not in uploaded:
                        lane.wait_for(after)
                        uploaded[lane] = lane.queue.upload(table) if len(table) else table
                    lane.queue.run(_work(step, lane, uploaded[lane]))
                if not uploaded and after is not None:  # nothing to copy, and yet not done before that is
                    lanes[0].wait_for(after)
                    uploaded[lanes[0]] = table
            except BaseException as error:
                for lane in uploaded:  # what was queued uses the caller's memory
                    lane.queue.record().synchronize()
                if isinstance(error, RuntimeError):  # torch's, such as no memory left on the device
                    raise DeviceError(f"{what}: {error}") from error
                raise
            return EventFence([lane.queue.record() for lane in uploaded])


def _work(step: Step, lane: Lane, table: torch.Tensor) -> Callable[[], None]:
    import torch

    def work() -> None:
        # Engines make their pages in this mode; whether a view of them may be written outside of it is up to torch.
        with torch.inference_mode():
            step(lane, table)

    return work
