"""One kind of accelerator: how it shows on a machine, and why there is none where there is none."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from lmcache_core import Diagnosis, Probe
from lmcache_core import __version__ as core_version

from .device import TorchDevice
from .host import Host
from .identity import Identity, identities
from .version import VERSION

NOT_VISIBLE: Final = ("", "-1", "none", "void", "NoDevFiles")
"""What hides all."""


@dataclass(frozen=True, slots=True)
class Vendor:
    """What a device package knows of its hardware, as data."""

    kind: str
    """The `TorchBuild.kind` that drives it."""
    hardware: str
    """E.g. "AMD GPU"."""
    nodes: Callable[[Host], list[Path]]
    """One for each accelerator that the system shows."""
    control: str
    """The node that every process opens, e.g. "dev/kfd"."""
    visible: tuple[str, ...]
    """Variables that hide accelerators from a process."""
    driver: str
    """What to do where the driver is not there."""
    get_torch: str
    """What to do where torch is another one."""
    pci_vendor: int | None = None
    bridge: str | None = None
    """A package that brings the platform to a torch that is built without it, e.g. "torch_npu"."""
    own: Callable[[Host], Iterator[Diagnosis]] = lambda host: iter(())
    """What else to look at, where there is hardware."""

    def probe(self, host: Host) -> Probe:
        """Files and variables only: nothing is imported, no context is made."""
        count = len(self.nodes(host))
        build = host.torch()
        if build is None:
            there = f"{count} x {self.hardware}" if count else f"no {self.hardware}"
            return Probe(0, f"{there}, and torch is not installed: {self.get_torch}" if count else f"{there}, no torch")
        bridged = self.bridge is None or host.package(self.bridge) is not None
        mine = build.kind == self.kind if self.bridge is None else bridged
        drives = build.described if self.bridge is None else f"{build.described}, with {self.bridge}"
        lacks = build.described if bridged else f"{build.described}, without {self.bridge}"
        if not mine:
            if not count:
                return Probe(0, f"no {self.hardware} ({lacks})")
            return Probe(0, f"{count} x {self.hardware}, but {lacks}: {self.get_torch}")
        if not count:
            return Probe(0, f"{drives}, but no {self.hardware} shows (/{self.control}): {self.driver}")
        control = host.path(self.control)
        if os.path.exists(control) and not host.may_use(control):
            return Probe(
                0, f"{count} x {self.hardware}, no permission for /{self.control}: join the group that owns it"
            )
        visible = count
        for name in self.visible:
            value = host.environ.get(name)
            if value is None:
                continue
            if value.strip() in NOT_VISIBLE:
                return Probe(0, f"{count} x {self.hardware}, hidden from this process by {name}={value!r}")
            visible = min(visible, len([one for one in value.split(",") if one.strip()]))
        return Probe(visible, drives)

    def identities(self, host: Host) -> list[Identity]:
        return identities(host, self.pci_vendor) if self.pci_vendor is not None else []

    def described(self, host: Host) -> dict[str, str]:
        """Hardware and versions, as what a measurement of copies is good for."""
        found = self.identities(host)
        kinds = Counter(f"{each.vendor:04x}:{each.device:04x} {each.name}".strip() for each in found)
        cards = ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items()))
        build = host.torch()
        return {
            "vendor": self.hardware,
            "hardware": cards or f"{len(self.nodes(host))} of unknown kind",
            "driver": ", ".join(sorted({each.driver for each in found if each.driver})) or "unknown",
            "torch": build.described if build is not None else "none",
            "kernel compiler": host.version("triton"),
            "lmcache-core": core_version,
            "lmcache-device-torch": VERSION,
        }

    def diagnose(self, host: Host) -> Iterator[Diagnosis]:
        """For `lmc doctor`.  Where there is none, the probe's one line says all."""
        if not self.nodes(host):
            return
        for identity in self.identities(host):
            yield Diagnosis("ok", str(identity))
        probe = self.probe(host)
        if not probe.count:
            yield Diagnosis("warning", f"there is one, and this Python cannot use it: {probe.reason}")
        yield from self.own(host)


class VendorDevice(TorchDevice):
    """A torch device that finds its hardware by its `vendor`."""

    vendor: ClassVar[Vendor]

    @classmethod
    def probe(cls) -> Probe:
        return cls.vendor.probe(Host())

    @classmethod
    def identity(cls) -> Mapping[str, str]:
        return cls.vendor.described(Host())

    @classmethod
    def diagnose(cls) -> Iterator[Diagnosis]:
        """What `lmc doctor` shows besides the probe."""
        return cls.vendor.diagnose(Host())
