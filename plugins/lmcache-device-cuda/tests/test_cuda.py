"""The device `cuda` on simulated machines: what its probe finds, and what it says."""

from __future__ import annotations

from pathlib import Path

from lmcache_device_cuda import VENDOR
from lmcache_device_torch.probe_laws import ProbeLaws
from lmcache_device_torch.simulation import SimulatedMachine


class TestProbe(ProbeLaws):
    vendor = VENDOR
    card = "nvidia"
    build = "cuda_torch"


def test_a_windows_host_shows_its_card_by_another_node(tmp_path: Path) -> None:
    machine = SimulatedMachine(tmp_path).cuda_torch()
    (machine.host.path("dev") / "dxg").touch()
    assert VENDOR.probe(machine.host).count == 1


def test_doctor_hears_where_the_card_is_and_of_a_missing_node(tmp_path: Path) -> None:
    machine = SimulatedMachine(tmp_path).nvidia(2).cuda_torch()
    assert [(finding.level, finding.text) for finding in VENDOR.diagnose(machine.host)] == [
        ("ok", "0000:1b:00.0 (10de:2335), driver nvidia 570.86.15, NUMA node 0, PCIe 32.0 GT/s x16"),
        ("ok", "0000:2b:00.0 (10de:2335), driver nvidia 570.86.15, NUMA node 1, PCIe 32.0 GT/s x16"),
    ]
    (machine.host.path("dev") / "nvidia-uvm").unlink()
    assert [finding.level for finding in VENDOR.diagnose(machine.host)] == ["ok", "ok", "warning"]
