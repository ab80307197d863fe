"""LMCache Core on AMD GPUs, with the torch that is built for ROCm.  Torch calls them "cuda"."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from lmcache_core import Diagnosis
from lmcache_device_torch import HIP, CudartRuntime, Host, RuntimeLibrary, Vendor, VendorDevice

__version__: Final = "0.1.0"

_TOPOLOGY: Final = "sys/class/kfd/kfd/topology/nodes"


def _nodes(host: Host) -> list[Path]:
    """The nodes of the compute driver that have SIMD units; its other nodes are CPUs."""
    if not host.nodes("dev/kfd"):
        return []
    nodes = host.nodes(rf"{_TOPOLOGY}/\d+")
    return [node for node in nodes if re.search(r"^simd_count [1-9]", host.text(node / "properties"), re.MULTILINE)]


def _own(host: Host) -> Iterator[Diagnosis]:
    seen = [name for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if name in host.environ]
    if len(seen) == 2 and host.environ[seen[0]] != host.environ[seen[1]]:
        yield Diagnosis("warning", "HIP_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES differ", "set only the first")
    if host.environ.get("HSA_OVERRIDE_GFX_VERSION"):
        yield Diagnosis("note", f"HSA_OVERRIDE_GFX_VERSION={host.environ['HSA_OVERRIDE_GFX_VERSION']} is set")


VENDOR: Final = Vendor(
    kind="rocm",
    hardware="AMD GPU",
    nodes=_nodes,
    control="dev/kfd",
    visible=("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    driver="load the driver amdgpu, and give the container /dev/kfd and /dev/dri",
    get_torch="install the torch that is built for ROCm",
    pci_vendor=0x1002,
    own=_own,
)


class RocmDevice(VendorDevice):
    """Streams and events are torch's; what torch calls cudart is the HIP runtime here."""

    api_version = (1, 0)
    torch_type = "cuda"
    vendor = VENDOR

    def runtime(self) -> CudartRuntime:
        return CudartRuntime(self.library())

    def library(self) -> RuntimeLibrary:
        return RuntimeLibrary(HIP)
