"""LMCache Core on NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from lmcache_core import Diagnosis
from lmcache_device_torch import CUDA, CudartRuntime, Host, RuntimeLibrary, Vendor, VendorDevice

__version__: Final = "0.1.0"


def _nodes(host: Host) -> list[Path]:
    return host.nodes(r"dev/nvidia\d+") or host.nodes("dev/dxg")  # the second is a Windows host's


def _own(host: Host) -> Iterator[Diagnosis]:
    if not host.nodes("dev/nvidia-uvm") and not host.nodes("dev/dxg"):
        yield Diagnosis(
            "warning", "/dev/nvidia-uvm is missing, and without it no process gets a context", "nvidia-modprobe -u -c=0"
        )


VENDOR: Final = Vendor(
    kind="cuda",
    hardware="NVIDIA GPU",
    nodes=_nodes,
    control="dev/nvidiactl",
    visible=("CUDA_VISIBLE_DEVICES",),
    driver="load NVIDIA's driver, and give the container its GPUs (--gpus all)",
    get_torch="install the torch that is built for CUDA",
    pci_vendor=0x10DE,
    own=_own,
)


class CudaDevice(VendorDevice):
    """Streams and events are torch's, memory is pinned by the CUDA runtime that torch has loaded."""

    api_version = (1, 0)
    torch_type = "cuda"
    vendor = VENDOR

    def runtime(self) -> CudartRuntime:
        return CudartRuntime(self.library())

    def library(self) -> RuntimeLibrary:
        return RuntimeLibrary(CUDA)
