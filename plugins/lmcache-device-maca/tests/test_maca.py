"""The device `maca` on simulated machines: what its probe finds, and what it says."""

from __future__ import annotations

from pathlib import Path

from lmcache_device_maca import VENDOR, MacaDevice
from lmcache_device_torch.probe_laws import ProbeLaws
from lmcache_device_torch.simulation import SimulatedMachine


class TestProbe(ProbeLaws):
    vendor = VENDOR
    card = "metax"
    build = "maca_torch"


def test_a_torch_built_at_home_is_known_by_its_extension_builder(tmp_path: Path) -> None:
    machine = SimulatedMachine(tmp_path).metax().torch("2.8.0a0+git", cuda="11.6", maca=True)
    assert VENDOR.probe(machine.host).count == 1


def test_an_sdk_beside_nvidias_torch_is_no_maca(tmp_path: Path) -> None:
    machine = SimulatedMachine(tmp_path).nvidia().cuda_torch().maca_runtime().tool("mx-smi").tool("nvcc")
    assert VENDOR.probe(machine.host).count == 0


def test_doctor_hears_of_an_sdk_that_is_not_where_it_should_be(tmp_path: Path) -> None:
    def told(machine: SimulatedMachine) -> str:
        return "\n".join(finding.text for finding in VENDOR.diagnose(machine.host))

    machine = SimulatedMachine(tmp_path).metax().maca_torch()
    assert "MACA_PATH is not set" in told(machine)
    assert "has no lib/libmcruntime" in told(machine.variable("MACA_PATH", str(tmp_path / "nowhere")))
    assert not told(machine.maca_runtime())
    assert "cu-bridge" in told(machine.tool("nvcc"))


def test_torch_calls_it_cuda() -> None:
    assert MacaDevice.torch_type == "cuda"


def test_a_torch_of_metax_is_known_by_its_version_alone(tmp_path: Path) -> None:
    machine = SimulatedMachine(tmp_path).metax().torch("2.8.0+metax3.5.3.9", cuda="11.6")
    assert VENDOR.probe(machine.host).count == 1
