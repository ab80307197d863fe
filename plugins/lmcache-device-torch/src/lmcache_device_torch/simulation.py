"""SIMULATED machines for the tests of device packages: made-up files below a folder, no hardware and no real driver.

What they show is what people with the hardware have reported; only the hardware proves that it is so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .host import Host

_TORCH_VERSION: Final = """from typing import Optional

__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip']
__version__ = {version!r}
debug = False
cuda: Optional[str] = {cuda!r}
git_version = 'simulated'
hip: Optional[str] = {hip!r}
"""

NVIDIA, AMD, HUAWEI = 0x10DE, 0x1002, 0x19E5


@dataclass(frozen=True, slots=True)
class SimulatedHost(Host):
    closed: frozenset[Path] = frozenset()

    def may_use(self, node: Path) -> bool:
        return node not in self.closed


class SimulatedMachine:
    """Empty at first: no torch, no accelerator.  Each method adds something and gives the machine back."""

    def __init__(self, folder: Path) -> None:
        self._root = folder / "root"
        self._packages = folder / "site-packages"
        self._bin = folder / "bin"
        for each in (self._root / "dev", self._packages, self._bin):
            each.mkdir(parents=True, exist_ok=True)
        self._environ = {"PATH": str(self._bin)}
        self._closed: set[Path] = set()

    @property
    def host(self) -> Host:
        return SimulatedHost(self._root, dict(self._environ), [str(self._packages)], frozenset(self._closed))

    # Which torch.

    def torch(
        self, version: str, *, cuda: str | None = None, hip: str | None = None, maca: bool = False
    ) -> SimulatedMachine:
        """Another call is another torch installed over it."""
        folder = self._packages / "torch"
        self._write(folder / "__init__.py", 'raise RuntimeError("a probe must not import torch")\n')
        self._write(folder / "version.py", _TORCH_VERSION.format(version=version, cuda=cuda, hip=hip))
        self._write(folder / "utils" / "cpp_extension.py", "MACA_HOME = None\n" if maca else "CUDA_HOME = None\n")
        return self

    def cpu_torch(self) -> SimulatedMachine:
        return self.torch("2.13.0+cpu")

    def cuda_torch(self) -> SimulatedMachine:
        return self.torch("2.9.0+cu128", cuda="12.8")

    def rocm_torch(self) -> SimulatedMachine:
        return self.torch("2.9.0+rocm6.4", hip="6.4.43482")

    def maca_torch(self) -> SimulatedMachine:
        return self.torch("2.8.0+metax3.5.3.9", cuda="11.6", maca=True)

    def ascend_torch(self) -> SimulatedMachine:
        self._write(self._packages / "torch_npu" / "__init__.py", 'raise RuntimeError("a probe must not import it")\n')
        return self.torch("2.9.0+cpu")

    # Which hardware.

    def nvidia(self, count: int = 1) -> SimulatedMachine:
        self._nodes("nvidiactl", "nvidia-uvm", *(f"nvidia{index}" for index in range(count)))
        self.tool("nvidia-smi")
        return self._pci(NVIDIA, 0x2335, 0x0302, count, "nvidia", "570.86.15", {})

    def amd(self, count: int = 1) -> SimulatedMachine:
        self._nodes("kfd")
        topology = self._root / "sys/class/kfd/kfd/topology/nodes"
        self._write(topology / "0/properties", "cpu_cores_count 64\nsimd_count 0\n")
        for index in range(count):
            self._write(topology / f"{index + 1}/properties", "cpu_cores_count 0\nsimd_count 1216\n")
        self.tool("rocm-smi")
        return self._pci(AMD, 0x74A1, 0x1200, count, "amdgpu", "6.10.5", {"mem_info_vram_total": str(192 << 30)})

    def metax(self, count: int = 1) -> SimulatedMachine:
        self._nodes("mxcd", *(f"dri/renderD{128 + index}" for index in range(count)))
        self.tool("mx-smi")
        return self

    def maca_runtime(self, *, at: str = "opt/maca") -> SimulatedMachine:
        """The SDK, and MACA_PATH that names it."""
        self._write(self._root / at / "lib/libmcruntime.so", "simulated")
        return self.variable("MACA_PATH", str(self._root / at))

    def ascend(self, count: int = 1) -> SimulatedMachine:
        self._nodes("davinci_manager", "devmm_svm", "hisi_hdc", *(f"davinci{index}" for index in range(count)))
        self.tool("npu-smi")
        return self._pci(HUAWEI, 0xD802, 0x1200, count, "devdrv_device_driver", "", {})

    # What else.

    def variable(self, name: str, value: str) -> SimulatedMachine:
        self._environ[name] = value
        return self

    def tool(self, name: str) -> SimulatedMachine:
        """A management tool on PATH; it says nothing."""
        self._write(self._bin / name, "#!/bin/sh\n")
        (self._bin / name).chmod(0o755)
        return self

    def closed(self, node: str) -> SimulatedMachine:
        """The process may not open this node."""
        self._closed.add(self._root / node)
        return self

    def _nodes(self, *names: str) -> None:
        for name in names:
            self._write(self._root / "dev" / name, "")

    def _pci(
        self, vendor: int, device: int, kind: int, count: int, driver: str, version: str, more: Mapping[str, str]
    ) -> SimulatedMachine:
        module = self._root / "sys/module" / driver
        drivers = self._root / "sys/bus/pci/drivers" / driver
        drivers.mkdir(parents=True, exist_ok=True)
        if version:
            self._write(module / "version", version + "\n")
        for index in range(count):
            folder = self._root / "sys/bus/pci/devices" / f"0000:{0x1B + 0x10 * index:02x}:00.0"
            content = {
                "vendor": f"{vendor:#06x}",
                "device": f"{device:#06x}",
                "class": f"{kind << 8:#08x}",
                "numa_node": str(index % 2),
                "current_link_speed": "32.0 GT/s PCIe",
                "current_link_width": "16",
                **more,
            }
            for name, value in content.items():
                self._write(folder / name, value + "\n")
            if not (folder / "driver").exists():
                (folder / "driver").symlink_to(drivers)
        return self

    def _write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
