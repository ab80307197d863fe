"""All device packages installed together, on simulated machines: exactly one is chosen, or an error lists them."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import pytest
from click.testing import CliRunner

import lmcache_device_cuda
import lmcache_device_torch.vendor
from lmcache_core import ConfigError, DeviceError, choice
from lmcache_core.cli import main
from lmcache_core.cli.doctor import command
from lmcache_core.config import PluginsConfig
from lmcache_core.opening import open_device
from lmcache_device_torch.simulation import SimulatedMachine

OURS = ("ascend", "cuda", "maca", "rocm")
USE = PluginsConfig()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedMachine:
    """The machine that every probe sees; what a test adds to it shows at once."""
    simulated = SimulatedMachine(tmp_path)
    monkeypatch.setattr(lmcache_device_torch.vendor, "Host", lambda: simulated.host)
    return simulated


def chosen(name: str = "auto") -> str:
    found, device = open_device(name, USE)
    device.close()
    return found


@pytest.mark.parametrize(
    ("card", "build", "name"),
    [
        ("nvidia", "cuda_torch", "cuda"),
        ("amd", "rocm_torch", "rocm"),
        ("metax", "maca_torch", "maca"),
        ("ascend", "ascend_torch", "ascend"),
    ],
)
def test_auto_means_the_accelerator_that_is_there(machine: SimulatedMachine, card: str, build: str, name: str) -> None:
    getattr(machine, card)()
    getattr(machine, build)()
    assert chosen() == name
    assert chosen(name) == name


def test_without_an_accelerator_auto_means_the_cpu_and_the_log_says_why(
    machine: SimulatedMachine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.cpu_torch()
    with caplog.at_level(logging.INFO, "lmcache_core.opening"):
        assert chosen() == "cpu"
    (line,) = [record.getMessage() for record in caplog.records if record.name == "lmcache_core.opening"]
    assert "\n" not in line
    for name, hardware in zip(OURS, ("Ascend NPU", "NVIDIA GPU", "MetaX GPU", "AMD GPU"), strict=True):
        assert f"{name}: no {hardware} (torch 2.13.0+cpu, built for the CPU" in line


def test_two_kinds_of_cards_and_one_torch_are_the_card_of_that_torch(machine: SimulatedMachine) -> None:
    machine.nvidia().amd().rocm_torch()
    assert chosen() == "rocm"
    machine.cuda_torch()
    assert chosen() == "cuda"


def test_two_accelerators_that_could_both_be_used_are_listed(machine: SimulatedMachine) -> None:
    machine.nvidia().ascend().ascend_torch().cuda_torch()
    with pytest.raises(ConfigError, match="more than one device here .ascend, cuda.; name the one"):
        chosen()
    assert chosen("ascend") == "ascend"


def test_a_cuda_torch_on_a_box_with_amd_cards_says_so_when_the_device_is_named(machine: SimulatedMachine) -> None:
    machine.amd(8).cuda_torch()
    with pytest.raises(DeviceError, match="8 x AMD GPU, but torch 2.9.0.cu128, built for CUDA 12.8: install the torch"):
        chosen("rocm")
    with pytest.raises(DeviceError, match="no NVIDIA GPU shows ./dev/nvidiactl.: load NVIDIA's driver"):
        chosen("cuda")


def test_a_vendors_torch_without_its_driver_says_so(machine: SimulatedMachine) -> None:
    machine.maca_torch()
    with pytest.raises(DeviceError, match=r"2.8.0\+metax3.5.3.9, built for MACA.*/dev/mxcd.: load MetaX's driver"):
        chosen("maca")


def doctor(tmp_path: Path) -> list[dict[str, str]]:
    """What `lmc doctor` says of devices."""
    config = tmp_path / "lmcache.yaml"
    config.write_text("tiers: [{name: host, backend: memory, capacity: 16MiB}]\n")
    said = CliRunner().invoke(command, ["--config", str(config), "--json"])
    lines: list[dict[str, str]] = json.loads(said.stdout)["sections"]["devices"]
    return lines


def test_doctor_explains_each_absence_in_one_line(machine: SimulatedMachine, tmp_path: Path) -> None:
    machine.cpu_torch()
    lines = [line for line in doctor(tmp_path) if line["text"].partition(":")[0] in OURS]
    assert sorted(line["text"].partition(":")[0] for line in lines) == list(OURS)
    assert {line["level"] for line in lines} == {"note"}
    assert all("none here: no " in line["text"] for line in lines)


def test_the_start_and_doctor_say_by_which_path_a_device_copies(
    machine: SimulatedMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine.nvidia(2).cuda_torch()

    def said() -> tuple[str, str]:
        caplog.clear()
        with caplog.at_level(logging.INFO):
            chosen()
        (start,) = [record.getMessage() for record in caplog.records if "copies by" in record.getMessage()
                    or "measured on" in record.getMessage()]  # fmt: skip
        lines = [line["text"] for line in doctor(tmp_path)]
        (found,) = [line for line in lines if line.startswith("cuda: copies by") or "as measured on" in line]
        return start, found

    assert said() == (
        "device cuda: copies by staged; `lmc bench device` measures the others",
        "cuda: copies by staged, none was measured here",
    )
    kind = lmcache_device_cuda.CudaDevice
    identity = dict(kind.identity())
    assert identity["hardware"] == "2 x 10de:2335"
    assert identity["driver"] == "nvidia 570.86.15"
    assert identity["torch"] == "torch 2.9.0+cu128, built for CUDA 12.8"
    mine = choice.Choice(gather="kernel", scatter="batch", measured_on="2026-11-30", identity=identity)
    choice.keep("cuda", mine)
    line = "gather by kernel, scatter by batch, as measured on 2026-11-30"
    assert said() == (f"device cuda: {line}", f"cuda: {line}")
    choice.keep("cuda", dataclasses.replace(mine, identity={**identity, "driver": "nvidia 1"}))
    start, found = said()
    assert "was measured with another driver; `lmc bench device`" in start
    assert "was measured with another driver" in found


def test_the_copies_of_an_accelerators_package_are_measured_on_the_cpu_without_it(tmp_path: Path) -> None:
    asked = ["bench", "device", "cuda", "--on", "cpu", "--chunks", "1", "--rounds", "1", "--json"]
    said = CliRunner().invoke(main, asked, env={"XDG_CACHE_HOME": str(tmp_path)})
    assert said.exit_code == 0, said.output
    found = json.loads(said.stdout)
    assert found["pages"] == "torch tensors in the CPU's memory"
    assert {figure["path"] for figure in found["figures"]} == {"direct"}
    assert (found["choice"], found["kept"]) == (None, None)
    assert not list(tmp_path.iterdir())


def test_doctor_warns_of_cards_that_this_torch_cannot_use(machine: SimulatedMachine, tmp_path: Path) -> None:
    machine.amd(8).cuda_torch()
    warned = [line["text"] for line in doctor(tmp_path) if line["level"] == "warning"]
    assert len(warned) == 1
    assert "8 x AMD GPU, but torch 2.9.0+cu128, built for CUDA 12.8" in warned[0]
