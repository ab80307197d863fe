"""Which accelerators a machine has: what the PCI bus tells, without a driver's library."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from .host import Host

_CLASSES: Final = (0x03, 0x12)
"""PCI base classes: display controllers, processing accelerators."""


@dataclass(frozen=True, slots=True)
class Identity:
    """One accelerator; an empty field is not known without initialising it."""

    pci: str
    vendor: int
    device: int
    driver: str
    numa_node: int
    """-1: the machine does not say."""
    link: str
    memory_nbytes: int = 0
    name: str = ""

    def __str__(self) -> str:
        parts = [f"{self.pci} ({self.vendor:04x}:{self.device:04x})", self.name]
        parts += [f"driver {self.driver}" if self.driver else ""]
        parts += [f"NUMA node {self.numa_node}" if self.numa_node >= 0 else "", self.link]
        parts += [f"{self.memory_nbytes / 2**30:.0f} GiB" if self.memory_nbytes else ""]
        return ", ".join(part for part in parts if part)


def identities(host: Host, vendor: int) -> list[Identity]:
    """Every accelerator of one PCI vendor, by its place on the bus."""
    return list(_found(host, vendor))


def _found(host: Host, vendor: int) -> Iterator[Identity]:
    for folder in host.nodes("sys/bus/pci/devices/.*"):

        def says(name: str, folder: str = str(folder)) -> str:
            return host.text(f"{folder}/{name}")

        if _number(says("vendor")) != vendor or _number(says("class")) >> 16 not in _CLASSES:
            continue
        driver = folder / "driver"
        module = driver.resolve().name if driver.exists() else ""
        version = host.text(f"sys/module/{module}/version") if module else ""
        speed, width = says("current_link_speed"), says("current_link_width")
        yield Identity(
            pci=folder.name,
            vendor=vendor,
            device=_number(says("device")),
            driver=f"{module} {version}".strip(),
            numa_node=_number(says("numa_node"), -1),
            link=f"PCIe {speed.removesuffix(' PCIe')} x{width}" if speed and width else "",
            memory_nbytes=_number(says("mem_info_vram_total")),  # amdgpu alone has it, and the next
            name=says("product_name") or _nvidia_name(host, folder.name),
        )


def _nvidia_name(host: Host, pci: str) -> str:
    for line in host.text(f"proc/driver/nvidia/gpus/{pci}/information").splitlines():
        key, _, value = line.partition(":")
        if key == "Model":
            return value.strip()
    return ""


def _number(text: str, otherwise: int = 0) -> int:
    try:
        return int(text, 0)
    except ValueError:
        return otherwise
