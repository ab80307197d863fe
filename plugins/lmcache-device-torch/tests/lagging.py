"""A simulated accelerator on the CPU: queues that do their work in threads, some time after it was queued."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

from lmcache_core import Probe
from lmcache_device_torch import TorchDevice

TIMEOUT_S = 60.0


class LaggingEvent:
    """Complete when its queue has come to it."""

    def __init__(self) -> None:
        self._reached = threading.Event()

    def reached(self) -> None:
        self._reached.set()

    def query(self) -> bool:
        return self._reached.is_set()

    def synchronize(self) -> None:
        if not self._reached.wait(TIMEOUT_S):
            raise TimeoutError("a queue did not come to an event")

    def wait(self, stream: LaggingQueue) -> None:
        stream.run(self.synchronize)


class LaggingQueue:
    """In order, in a thread that lets others go first; what goes wrong in it is kept."""

    def __init__(self) -> None:
        self.native = self
        self.handle = 0
        self.failed: list[BaseException] = []
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="lagging")
        self._thread.start()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except BaseException as error:
                self.failed.append(error)
            del work  # and what it holds

    def run(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def record(self) -> LaggingEvent:
        event = LaggingEvent()
        self.run(event.reached)
        return event

    def upload(self, ids: torch.Tensor) -> torch.Tensor:
        return ids.clone()

    def end(self) -> None:
        self._work.put(None)
        self._thread.join()


class StagedDevice(TorchDevice):
    """The path that accelerators take, on tensors of the CPU."""

    api_version = (1, 0)
    torch_type = "cpu"
    direct = False

    def __init__(self, *, staging_nbytes: int = 1 << 20) -> None:
        super().__init__(staging_nbytes=staging_nbytes)
        self.queues: list[LaggingQueue] = []

    @classmethod
    def probe(cls) -> Probe:
        return Probe(1)

    def new_queue(self, device: torch.device) -> LaggingQueue:
        self.queues.append(LaggingQueue())
        return self.queues[-1]

    def close(self) -> None:
        super().close()
        failed = []
        while self.queues:
            ended = self.queues.pop()
            ended.end()
            failed += ended.failed
        if failed:
            raise failed[0]
