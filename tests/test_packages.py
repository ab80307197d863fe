"""The rules of the house for every package, found by glob as the sessions find them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = [ROOT / "core", *sorted(p.parent for p in ROOT.glob("plugins/*/pyproject.toml"))]
VERSION = re.compile(r"\d+\.\d+\.\d+((a|b|rc|\.dev)\d+)?")
GROUP = re.compile(r"lmcache_core\.(backends|devices|codecs|policies|hooks|commands)")

each_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)


def project(package: Path) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    return table


def requirements(package: Path) -> list[str]:
    """What `package` needs, its extras included."""
    table = project(package)
    return [
        *table.get("dependencies", []),
        *(r for extra in table.get("optional-dependencies", {}).values() for r in extra),
    ]


def forbidden(requirement: str) -> bool:
    """Whether it ties the user's torch to a version, or pulls in CUDA."""
    name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower().replace("_", "-")
    tied = name in {"torch", "torchvision", "torchaudio", "triton"} and requirement.lower() != name
    return tied or name.startswith(("nvidia-", "cuda-", "cupy"))


def test_every_folder_of_plugins_is_a_package() -> None:
    folders = {path for path in ROOT.glob("plugins/*") if path.is_dir()}
    assert folders == set(PACKAGES[1:])


@each_package
def test_a_package_has_its_files_and_one_import_name(package: Path) -> None:
    for name in ("README.md", "CHANGELOG.md", "src", "tests"):
        assert (package / name).exists(), f"{package.name} has no {name}"
    assert (package / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    distribution = project(package)["name"]
    assert distribution == ("lmcache-core" if package.name == "core" else package.name)
    inside = {path.name for path in (package / "src").iterdir() if not path.name.endswith((".egg-info", "__pycache__"))}
    assert inside == {distribution.replace("-", "_")}
    assert (package / "src" / distribution.replace("-", "_") / "py.typed").exists()
    assert list((package / "tests").glob("test_*.py"))


@each_package
def test_a_package_states_a_version_of_its_own_and_its_changes(package: Path) -> None:
    table = project(package)
    assert "dynamic" not in table
    assert VERSION.fullmatch(table["version"])
    assert f"## {table['version']}" in (package / "CHANGELOG.md").read_text()


@each_package
def test_a_package_says_how_it_may_be_used(package: Path) -> None:
    table = project(package)
    assert table["license"] == "Apache-2.0"
    assert table["requires-python"] == ">=3.11"
    assert table["description"]
    assert table["readme"] == "README.md"


@each_package
def test_a_package_leaves_the_users_torch_alone(package: Path) -> None:
    assert not [requirement for requirement in requirements(package) if forbidden(requirement)]


@pytest.mark.parametrize(
    "requirement", ["torch==2.13.0", "torch>=2", "Torch ~= 2.0", "torch[opt]", "nvidia-cudnn-cu12", "cupy_cuda12x>=13"]
)
def test_a_requirement_on_one_torch_or_on_cuda_is_seen(requirement: str) -> None:
    assert forbidden(requirement)
    assert not forbidden("torch")
    assert not forbidden("torchmetrics>=1")


@pytest.mark.parametrize("package", PACKAGES[1:], ids=lambda package: package.name)
def test_a_plugin_needs_core_and_offers_only_names_that_core_reads(package: Path) -> None:
    table = project(package)
    assert any(requirement.startswith("lmcache-core") for requirement in table["dependencies"])
    mine = [group for group in table.get("entry-points", {}) if group.startswith("lmcache")]
    assert [group for group in mine if not GROUP.fullmatch(group)] == []


def test_the_readme_names_every_plugin() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [package.name for package in PACKAGES if project(package)["name"] not in readme] == []


def test_the_license_is_the_whole_apache_license() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert text.split()[:4] == ["Apache", "License", "Version", "2.0,"]
    assert "END OF TERMS AND CONDITIONS" in text
    assert len(text) == 11358
