"""Where copies wait their turn: a stream of the device with a staging buffer of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

from lmcache_core import Fence

if TYPE_CHECKING:
    import torch

STAGING_NBYTES: Final = 16 << 20
LANES: Final = 2
"""For each direction.  While one lane's bytes are on the link, the other's blocks are brought together."""


class Queue(Protocol):
    """Work that is done in the order in which it was given, after the call has returned or before."""

    native: Any
    """What `Fence.make_stream_wait` is given."""

    @property
    def handle(self) -> int:
        """The stream as the vendor's runtime library knows it."""
        ...

    def run(self, work: Callable[[], None]) -> None: ...
    def record(self) -> Any:
        """An event that is complete when all work so far is."""
        ...

    def upload(self, ids: torch.Tensor) -> torch.Tensor:
        """A copy of `ids` on the device, for work of this queue."""
        ...


class StreamQueue:
    """A side stream, by the interface that `torch.cuda`, `torch.npu` and their like share."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module = module
        self._device = device
        self.native = module.Stream(device=device)

    @property
    def handle(self) -> int:
        return int(self.native.cuda_stream)

    def run(self, work: Callable[[], None]) -> None:
        with self._module.stream(self.native):
            work()

    def record(self) -> Any:
        event = self._module.Event()
        event.record(self.native)
        return event

    def upload(self, ids: torch.Tensor) -> torch.Tensor:
        with self._module.stream(self.native):
            return ids.pin_memory().to(self._device, non_blocking=True)  # from pageable memory it would wait


class Lane:
    """A queue and the device memory that its copies pass through, one after the other."""

    __slots__ = ("_device", "_staging", "queue")

    def __init__(self, queue: Queue, device: torch.device) -> None:
        self.queue = queue
        self._device = device
        self._staging: torch.Tensor | None = None

    def wait_for(self, after: Fence | None) -> None:
        if after is not None:
            after.make_stream_wait(self.queue.native)

    def staging(self, nbytes: int) -> torch.Tensor:
        """At least `nbytes`; called by work of the queue, so that the memory belongs to its stream."""
        import torch

        if self._staging is None or self._staging.numel() < nbytes:
            self._staging = None  # the old goes before the new comes
            self._staging = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return self._staging[:nbytes]
