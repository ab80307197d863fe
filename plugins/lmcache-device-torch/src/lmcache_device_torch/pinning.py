"""Host memory that the device may read and write by itself: noted when it is registered, pinned at its first use."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from lmcache_core import DeviceError

from .library import RuntimeLibrary

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
_PORTABLE_AND_MAPPED: Final = 1 | 2
"""Pinned for every device of the process, and within reach of its kernels; the same numbers in CUDA and HIP."""


class Runtime(Protocol):
    """The platform's own way to pin memory; raises DeviceError with the reason where it refuses."""

    def pin(self, device: torch.device, address: int, nbytes: int) -> int | None:
        """The address by which the device's kernels reach it, where that is known."""
        ...

    def unpin(self, device: torch.device, address: int) -> None: ...


class CudartRuntime:
    """What torch binds of the CUDA runtime; in builds for ROCm the same names are HIP's."""

    def __init__(self, library: RuntimeLibrary | None = None) -> None:
        self._library = library

    def pin(self, device: torch.device, address: int, nbytes: int) -> int | None:
        import torch

        self._call(device, "cudaHostRegister", address, nbytes, _PORTABLE_AND_MAPPED)
        if self._library is None:
            return None
        try:
            with torch.cuda.device(device):
                return self._library.mapped(address)
        except DeviceError as error:
            log.info("kernels do not reach pinned memory: %s", error)
            return None

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


@dataclass(frozen=True, slots=True)
class Pinned:
    nbytes: int
    device: torch.device
    mapped: int | None
    """See `Runtime.pin`."""


class Pins:
    """The ranges of one device object.  Which device they are for is known only when pages are seen."""

    def __init__(self, name: str, runtime: Runtime | None) -> None:
        self._name = name
        self._runtime = runtime
        self._lock = threading.Lock()
        self._noted: dict[int, int] = {}
        self._pinned: dict[int, Pinned] = {}
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
                    mapped = self._runtime.pin(device, address, nbytes)
                except DeviceError as error:
                    self._say(f"{nbytes >> 20} MiB of host memory stay unpinned, copies are slower: {error}", error)
                else:
                    self._pinned[address] = Pinned(nbytes, device, mapped)

    def mapped(self, address: int, nbytes: int) -> int | None:
        """Where kernels find this part of pinned memory."""
        with self._lock:
            for start, pinned in self._pinned.items():
                if start <= address and address + nbytes <= start + pinned.nbytes:
                    return pinned.mapped + address - start if pinned.mapped is not None else None
        return None

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
        pinned = self._pinned.pop(address, None)
        if pinned is None or self._runtime is None:
            return
        try:
            self._runtime.unpin(pinned.device, address)
        except DeviceError as error:
            self._say(f"host memory could not be unpinned: {error}", error)

    def _say(self, what: str, error: DeviceError) -> None:
        """Each reason once: there may be hundreds of extents."""
        if str(error) not in self._said:
            self._said.add(str(error))
            log.warning("device %s: %s", self._name, what)
