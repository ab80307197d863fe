"""What is seen of a machine: this one's torch as it is, and simulated ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lmcache_device_torch import Host
from lmcache_device_torch.identity import identities
from lmcache_device_torch.simulation import NVIDIA, SimulatedMachine


def test_the_torch_that_is_installed_is_read_as_it_says_of_itself() -> None:
    build = Host().torch()
    assert build is not None
    assert (build.version, build.cuda, build.hip) == (torch.__version__, torch.version.cuda, torch.version.hip)
    assert not build.knows_maca


def test_looking_does_not_import_torch() -> None:
    looks = (
        "import sys, lmcache_device_torch as ours\n"
        "assert ours.Host().torch() is not None\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", looks], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    ("build", "kind", "described"),
    [
        ("cpu_torch", "cpu", "torch 2.13.0+cpu, built for the CPU"),
        ("cuda_torch", "cuda", "torch 2.9.0+cu128, built for CUDA 12.8"),
        ("rocm_torch", "rocm", "torch 2.9.0+rocm6.4, built for ROCm 6.4.43482"),
        ("maca_torch", "maca", "torch 2.8.0+metax3.5.3.9, built for MACA, CUDA 11.6 by its own account"),
    ],
)
def test_the_kinds_of_torch_are_told_apart(tmp_path: Path, build: str, kind: str, described: str) -> None:
    found = getattr(SimulatedMachine(tmp_path), build)().host.torch()
    assert (found.kind, found.described) == (kind, described)


@pytest.mark.parametrize("content", ["", "\x00\xff", "__version__ = compute()\ncuda: Optional[str] = (\n"])
def test_a_torch_that_says_nothing_of_itself_breaks_nothing(tmp_path: Path, content: str) -> None:
    machine = SimulatedMachine(tmp_path).cuda_torch()
    (tmp_path / "site-packages/torch/version.py").write_text(content)
    found = machine.host.torch()
    assert found is not None
    assert (found.kind, found.version) == ("cpu", "of unknown version")


def test_a_card_has_the_name_that_its_driver_gives_it(tmp_path: Path) -> None:
    machine = SimulatedMachine(tmp_path).nvidia(2)
    driver = machine.host.path("proc/driver/nvidia/gpus/0000:1b:00.0")
    driver.mkdir(parents=True)
    (driver / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 4\n")
    assert [each.name for each in identities(machine.host, NVIDIA)] == ["NVIDIA H200", ""]
    assert "10de:2335), NVIDIA H200, driver nvidia" in str(identities(machine.host, NVIDIA)[0])


def test_a_version_is_read_without_importing(tmp_path: Path) -> None:
    machine = SimulatedMachine(tmp_path)
    assert machine.host.version("triton") == "none"
    info = tmp_path / "site-packages" / "triton-3.5.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: triton\nVersion: 3.5.0\n")
    assert machine.host.version("triton") == "3.5.0"
    assert Host().version("torch").partition("+")[0] == torch.__version__.partition("+")[0]


def test_a_folder_that_is_called_torch_is_no_torch(tmp_path: Path) -> None:
    machine = SimulatedMachine(tmp_path)
    (tmp_path / "site-packages/torch").mkdir()
    assert machine.host.torch() is None
