"""`lmc new`: what it writes is a whole package whose tests pass, and nothing that is there is touched."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lmcache_core.cli import main
from lmcache_core.cli.new import KINDS, write_package

PACKAGES = {"backend": "lmcache-acme", "codec": "lmcache-codec-acme", "device": "lmcache-device-acme",
            "policy": "lmcache-policy-acme"}  # fmt: skip


def lmc(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["new", *arguments])


@pytest.mark.parametrize("kind", KINDS)
def test_the_tests_of_a_new_package_pass(kind: str, tmp_path: Path) -> None:
    package = write_package(kind, "acme", tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    environ = {**os.environ, "PYTHONPATH": str(package / "src")}
    ran = subprocess.run(command, cwd=package, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "passed" in ran.stdout
    assert "failed" not in ran.stdout


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["acme", "import", "two-words", "x"])
def test_a_new_package_is_complete_and_names_itself(kind: str, name: str, tmp_path: Path) -> None:
    result = lmc(kind, name, "--dir", str(tmp_path / "made" / "for it"))
    assert result.exit_code == 0, result.output
    (package,) = (tmp_path / "made" / "for it").iterdir()
    assert package.name == PACKAGES[kind].replace("acme", name)
    assert str(package) in result.output
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    assert project["name"] == package.name
    ((group, offers),) = project["entry-points"].items()
    assert group == KINDS[kind]
    module, _, attribute = offers[name].partition(":")
    source = (package / "src" / module / "__init__.py").read_text()
    assert f"class {attribute}(" in source
    assert (package / "src" / module / "py.typed").exists()
    for file in package.rglob("*"):
        if file.is_file():
            assert "{{" not in file.read_text(), file
            if file.suffix == ".py":
                compile(file.read_text(), str(file), "exec")
    assert project["version"] in (package / "CHANGELOG.md").read_text()
    assert f"lmc conform {kind}:{name}" in (package / "README.md").read_text()


@pytest.mark.parametrize(
    "name", ["", "Acme", "1acme", "acme_store", "-acme", "acme-", "ac--me", "a/b", "../acme", "acme\n", "ä", "a" * 33]
)
def test_a_name_that_no_plugin_can_have_is_refused(name: str, tmp_path: Path) -> None:
    result = lmc("backend", "--dir", str(tmp_path), "--", name)
    assert result.exit_code == 2
    assert "is no name for a plugin" in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "name", "says"),
    [
        ("backend", "disk", "built-in's name stays the built-in's"),
        ("backend", "memory", "built-in's name stays the built-in's"),
        ("device", "cpu", "built-in's name stays the built-in's"),
        ("codec", "identity", "built-in's name stays the built-in's"),
        ("policy", "lru", "built-in's name stays the built-in's"),
        ("backend", "core", "would be taken for another package"),
        ("backend", "device-acme", "would be taken for another package"),
    ],
)
def test_a_name_that_is_taken_is_refused(kind: str, name: str, says: str, tmp_path: Path) -> None:
    result = lmc(kind, name, "--dir", str(tmp_path))
    assert result.exit_code == 2
    assert says in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_left_as_it_is(tmp_path: Path) -> None:
    write_package("backend", "acme", tmp_path)
    source = tmp_path / "lmcache-acme" / "src" / "lmcache_acme" / "__init__.py"
    source.write_text("mine = 1\n")
    result = lmc("backend", "acme", "--dir", str(tmp_path))
    assert result.exit_code == 2
    assert "lmcache-acme: is there already; nothing was written" in result.output
    assert source.read_text() == "mine = 1\n"


def test_an_empty_folder_or_a_file_of_that_name_is_left_too(tmp_path: Path) -> None:
    (tmp_path / "lmcache-acme").mkdir()
    assert lmc("backend", "acme", "--dir", str(tmp_path)).exit_code == 2
    assert list((tmp_path / "lmcache-acme").iterdir()) == []
    (tmp_path / "lmcache-codec-acme").write_text("mine")
    assert lmc("codec", "acme", "--dir", str(tmp_path)).exit_code == 2
    (tmp_path / "file").write_text("mine")
    result = lmc("codec", "acme", "--dir", str(tmp_path / "file"))
    assert result.exit_code == 2
    assert f"{tmp_path}/file" in result.output
