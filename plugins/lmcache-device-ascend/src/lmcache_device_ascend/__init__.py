"""LMCache Core on Ascend NPUs, with torch and torch_npu."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lmcache_core import Diagnosis
from lmcache_device_torch import Host, Queue, Vendor, VendorDevice

from .acl import AclRuntime

if TYPE_CHECKING:
    import torch

__version__: Final = "0.1.0"


def _nodes(host: Host) -> list[Path]:
    return host.nodes(r"dev/davinci\d+")


def _own(host: Host) -> Iterator[Diagnosis]:
    if not host.environ.get("ASCEND_HOME_PATH"):
        yield Diagnosis(
            "warning", "ASCEND_HOME_PATH is not set", "source set_env.sh of the CANN toolkit before the engine"
        )
    if host.tool("npu-smi") is None:
        yield Diagnosis("note", "npu-smi is not on PATH", "add its folder to see the state of the cards")
    if "CUDA_VISIBLE_DEVICES" in host.environ and "ASCEND_RT_VISIBLE_DEVICES" not in host.environ:
        yield Diagnosis("note", "CUDA_VISIBLE_DEVICES hides no NPU", "use ASCEND_RT_VISIBLE_DEVICES")


VENDOR: Final = Vendor(
    kind="ascend",
    hardware="Ascend NPU",
    nodes=_nodes,
    control="dev/davinci_manager",
    visible=("ASCEND_RT_VISIBLE_DEVICES",),
    driver="load the Ascend driver, and give the container /dev/davinci* and /dev/davinci_manager",
    get_torch="install torch_npu for it",
    pci_vendor=0x19E5,
    bridge="torch_npu",
    own=_own,
)


class AscendDevice(VendorDevice):
    """Streams and events are torch_npu's; memory is registered by ACL."""

    api_version = (1, 0)
    torch_type = "npu"
    vendor = VENDOR

    def runtime(self) -> AclRuntime:
        return AclRuntime()

    def new_queue(self, device: torch.device) -> Queue:
        import_bridge()
        return super().new_queue(device)


def import_bridge() -> Any:
    """Torch has `torch.npu` once this has been imported; the engine has done so long before."""
    import importlib

    return importlib.import_module("torch_npu")
