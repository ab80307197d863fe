"""LMCache Core on MetaX GPUs, with the torch that MetaX ships.  Torch calls them "cuda", and a CUDA version too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from lmcache_core import Diagnosis
from lmcache_device_torch import MACA, CudartRuntime, Host, RuntimeLibrary, Vendor, VendorDevice

__version__: Final = "0.1.0"


def _nodes(host: Host) -> list[Path]:
    """Render nodes, of which a display adapter may be one: whether there is any card is told by /dev/mxcd."""
    control = host.nodes("dev/mxcd")
    return (host.nodes(r"dev/dri/renderD\d+") or control) if control else []


def _own(host: Host) -> Iterator[Diagnosis]:
    homes = {name: host.environ[name] for name in ("MACA_PATH", "MACA_HOME") if host.environ.get(name)}
    if not homes:
        yield Diagnosis("note", "MACA_PATH is not set", "set it to the root of the SDK that this torch was built with")
    for name, home in homes.items():
        if not list(Path(home, "lib").glob("libmcruntime*")):
            yield Diagnosis("warning", f"{name}={home} has no lib/libmcruntime", "let it name the root of the SDK")
    if host.tool("mx-smi") is None:
        yield Diagnosis(
            "note", "mx-smi is not on PATH", "add the folder of MetaX's tools to see the state of the cards"
        )
    if host.tool("nvcc") is not None:
        yield Diagnosis("note", "nvcc on PATH may be cu-bridge's, which answers to that name: nothing here needs it")


VENDOR: Final = Vendor(
    kind="maca",
    hardware="MetaX GPU",
    nodes=_nodes,
    control="dev/mxcd",
    visible=("CUDA_VISIBLE_DEVICES",),
    driver="load MetaX's driver, and give the container /dev/mxcd and /dev/dri",
    get_torch="install the torch that MetaX ships (its version has +metax)",
    own=_own,
)


class MacaDevice(VendorDevice):
    """Streams, events and pinning as on CUDA, which MetaX's torch speaks; nothing here is compiled."""

    api_version = (1, 0)
    torch_type = "cuda"
    vendor = VENDOR

    def runtime(self) -> CudartRuntime:
        return CudartRuntime(self.library())

    def library(self) -> RuntimeLibrary:
        return RuntimeLibrary(MACA)
