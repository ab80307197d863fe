"""Installing our packages beside any torch leaves that torch as it is, and brings no library of one vendor.

Fresh environments, no index: our wheels are built from the working tree, everything else is a stand-in that has a
name, a version and its requirements.  A newer torch that requires CUDA is on offer: who asked for it would get it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = [ROOT / "core", *sorted(p.parent for p in ROOT.glob("plugins/*/pyproject.toml"))]
DEVICES = [package.name for package in PACKAGES if package.name.startswith("lmcache-device-")]
TORCHES = ("2.8.0+metax3.5.3.9", "2.9.0+rocm6.4", "2.7.1")
NEWER = "2.99.0"
TIMEOUT_S = 240.0
ENVIRON = {**os.environ, "PIP_CONFIG_FILE": os.devnull}
"""What this machine has pip do otherwise, such as constraints of its own, is no part of the test."""


def project(package: Path) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    return table


NAMES = [project(package)["name"] for package in PACKAGES]


def stand_in(folder: Path, name: str, version: str, requires: Iterable[str] = ()) -> Path:
    """A wheel with nothing in it but metadata."""
    stem = f"{re.sub(r'[-.]+', '_', name)}-{version}"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {each}\n" for each in requires)
    files = {
        f"{stem}.dist-info/METADATA": metadata,
        f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{stem}.dist-info/RECORD"] = "".join(f"{file},,\n" for file in (*files, f"{stem}.dist-info/RECORD"))
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in files.items():
            wheel.writestr(file, text)
    return path


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with our wheels, stand-ins of what they need, and the torch that nobody may get."""
    folder = tmp_path_factory.mktemp("wheels")
    build = "import os, sys\nfrom hatchling.build import build_wheel\nfor p in sys.argv[2:]:\n    os.chdir(p)\n"
    build += "    build_wheel(sys.argv[1])\n"
    command = [sys.executable, "-c", build, str(folder), *map(str, PACKAGES)]
    subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S)
    lowest = {"torch": ""}
    for package in PACKAGES:
        for requirement in project(package)["dependencies"]:
            name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
            bound = re.search(r">=\s*([0-9.]+)", requirement)
            lowest.setdefault(name, bound[1] if bound else "1.0")
    for name, version in lowest.items():
        if name not in NAMES and name != "torch":
            stand_in(folder, name, version)
    stand_in(folder, "torch", NEWER, ["nvidia-cudnn"])
    stand_in(folder, "nvidia-cudnn", "9.0")
    return folder


class Environment:
    """A fresh environment, and what pip does in it without an index."""

    def __init__(self, folder: Path, wheels: Path) -> None:
        venv.create(folder, with_pip=False)
        (self.site,) = folder.glob("lib/python*/site-packages")
        self._python = folder / "bin" / "python"
        self._wheels = wheels

    def install(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "pip", "--python", str(self._python), "--isolated", "install", "-q"]
        command += ["--no-index", "--find-links", str(self._wheels), *arguments]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT_S, env=ENVIRON)
        assert done.returncode == 0, done.stderr

    def installed(self) -> dict[str, str]:
        return {each.name: each.version for each in distributions(path=[str(self.site)])}


def environment(tmp_path: Path, wheels: Path, torch: str) -> Environment:
    fresh = Environment(tmp_path / "venv", wheels)
    with zipfile.ZipFile(stand_in(tmp_path, "torch", torch)) as wheel:
        wheel.extractall(fresh.site)
    return fresh


def nvidia(installed: dict[str, str]) -> list[str]:
    return [name for name in installed if name.startswith("nvidia")]


@pytest.mark.parametrize("torch", TORCHES)
def test_every_package_leaves_the_torch_that_is_there(tmp_path: Path, wheels: Path, torch: str) -> None:
    fresh = environment(tmp_path, wheels, torch)
    fresh.install(*NAMES)
    found = fresh.installed()
    assert {name for name in NAMES if name in found} == set(NAMES)
    assert found["torch"] == torch
    assert not nvidia(found)


def test_device_packages_do_not_even_upgrade_it_when_all_that_is_needed_is_upgraded(
    tmp_path: Path, wheels: Path
) -> None:
    fresh = environment(tmp_path, wheels, TORCHES[0])
    fresh.install("--upgrade", "--upgrade-strategy", "eager", *DEVICES)
    assert fresh.installed()["torch"] == TORCHES[0]


def test_device_packages_bring_no_torch_where_there_is_none(tmp_path: Path, wheels: Path) -> None:
    fresh = Environment(tmp_path / "venv", wheels)
    fresh.install(*DEVICES)
    assert "torch" not in fresh.installed()


def test_a_package_that_asked_for_a_torch_would_be_seen(tmp_path: Path, wheels: Path) -> None:
    fresh = environment(tmp_path, wheels, TORCHES[1])
    fresh.install(str(stand_in(tmp_path, "asks", "1.0", ["torch>=2.10"])))
    found = fresh.installed()
    assert found["torch"] == NEWER
    assert nvidia(found)
