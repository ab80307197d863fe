"""Host memory that the device may read and write by itself: noted when it is registered, pinned at its first use."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, Final, Protocol

from lmcache_core import DeviceError

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
_PORTABLE: Final = 1
"""Pinned for every device of the process: cudaHostRegisterPortable, and hipHostRegisterPortable too."""


class Runtime(Protocol):
    """The platform's own way to pin memory; raises DeviceError with the reason where it refuses."""

    def pin(self, device: torch.device, address: int, nbytes: int) -> None: ...
    def unpin(self, device: torch.device, address: int) -> None: ...


class CudartRuntime:
    """What torch binds of the CUDA runtime; in builds for ROCm the same names are HIP's."""

    def pin(self, device: torch.device, address: int, nbytes: int) -> None:
        self._call(device, "cudaHostRegister", address, nbytes, _PORTABLE)

    def unpin(self, device: torch.device, address: int) -> None:
        self._call(device, "cudaHostUnregister", address)

    def _call(self, device: torch.device, name: str, *arguments: int) -> None:
        import torch

        cuda: Any = torch.cuda
        try:
            with cuda.device(device):  # a thread's current device is the first one, which need not be ours
                result = getattr(cuda.cudart(), name)(*arguments)
        except (RuntimeError, AttributeError) as error:
            raise DeviceError(f"{name}: {error}") from error
        if int(result):
            raise DeviceError(f"{name}: error {int(result)} ({result})")


class Pins:
    """The ranges of one device object.  Which device they are for is known only when pages are seen."""

    def __init__(self, name: str, runtime: Runtime | None) -> None:
        self._name = name
        self._runtime = runtime
        self._lock = threading.Lock()
        self._noted: dict[int, int] = {}
        self._pinned: dict[int, torch.device] = {}
        self._said: set[str] = set()

    def note(self, address: int, nbytes: int) -> None:
        with self._lock:
            self._noted[address] = nbytes

    def pin_noted(self, device: torch.device) -> None:
        """Pin what was noted since.  Memory that cannot be pinned is used as it is, more slowly, and said aloud."""
        if not self._noted:
            return
        with self._lock:
            while self._noted:
                address, nbytes = self._noted.popitem()
                if self._runtime is None:
                    continue
                try:
                    self._runtime.pin(device, address, nbytes)
                except DeviceError as error:
                    self._say(f"{nbytes >> 20} MiB of host memory stay unpinned, copies are slower: {error}", error)
                else:
                    self._pinned[address] = device

    def forget(self, address: int) -> None:
        with self._lock:
            self._noted.pop(address, None)
            self._unpin(address)

    def close(self) -> None:
        with self._lock:
            self._noted.clear()
            for address in list(self._pinned):
                self._unpin(address)

    def _unpin(self, address: int) -> None:
        device = self._pinned.pop(address, None)
        if device is None or self._runtime is None:
            return
        try:
            self._runtime.unpin(device, address)
        except DeviceError as error:
            self._say(f"host memory could not be unpinned: {error}", error)

    def _say(self, what: str, error: DeviceError) -> None:
        """Each reason once: there may be hundreds of extents."""
        if str(error) not in self._said:
            self._said.add(str(error))
            log.warning("device %s: %s", self._name, what)
