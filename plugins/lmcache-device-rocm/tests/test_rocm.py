"""The device `rocm` on simulated machines: what its probe finds, and what it says."""

from __future__ import annotations

from pathlib import Path

from lmcache_device_rocm import VENDOR, RocmDevice
from lmcache_device_torch.probe_laws import ProbeLaws
from lmcache_device_torch.simulation import SimulatedMachine


class TestProbe(ProbeLaws):
    vendor = VENDOR
    card = "amd"
    build = "rocm_torch"


def test_a_node_of_the_compute_driver_that_is_a_cpu_is_no_card(tmp_path: Path) -> None:
    machine = SimulatedMachine(tmp_path).amd(0).rocm_torch()
    assert VENDOR.probe(machine.host).count == 0


def test_doctor_hears_of_memory_and_of_variables_that_disagree(tmp_path: Path) -> None:
    machine = SimulatedMachine(tmp_path).amd().rocm_torch()
    (finding,) = VENDOR.diagnose(machine.host)
    assert finding.text.endswith("driver amdgpu 6.10.5, NUMA node 0, PCIe 32.0 GT/s x16, 192 GiB")
    machine.variable("HIP_VISIBLE_DEVICES", "0").variable("CUDA_VISIBLE_DEVICES", "1")
    machine.variable("HSA_OVERRIDE_GFX_VERSION", "11.0.0")
    assert [finding.level for finding in VENDOR.diagnose(machine.host)] == ["ok", "warning", "note"]


def test_torch_calls_it_cuda() -> None:
    assert RocmDevice.torch_type == "cuda"
