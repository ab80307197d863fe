"""What the device packages of LMCache Core share: KV copied between torch tensors and host memory.

Nothing here imports torch before a copy needs it: `device: auto` asks every device package, on every machine.
"""

from __future__ import annotations

from typing import Final

from .device import TorchDevice
from .fences import EventFence
from .host import Host, TorchBuild
from .identity import Identity
from .library import CUDA, HIP, MACA, RuntimeLibrary
from .pinning import CudartRuntime, Runtime
from .queues import Queue
from .vendor import Vendor, VendorDevice

__version__: Final = "0.1.0"

__all__ = [
    "CUDA",
    "HIP",
    "MACA",
    "CudartRuntime",
    "EventFence",
    "Host",
    "Identity",
    "Queue",
    "Runtime",
    "RuntimeLibrary",
    "TorchBuild",
    "TorchDevice",
    "Vendor",
    "VendorDevice",
    "__version__",
]
