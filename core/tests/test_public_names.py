"""The public names of core, and what importing them costs."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import lmcache_core

HEAVY = ("numpy", "torch", "yaml", "msgspec", "click", "rich", "asyncio")


def imported_by(code: str) -> set[str]:
    """The modules that a fresh interpreter has after running `code`."""
    script = f"import sys\nbefore = set(sys.modules)\n{code}\nprint(*(set(sys.modules) - before), file=sys.stderr)"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    return set(ran.stderr.split())


@pytest.mark.parametrize("name", lmcache_core.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(lmcache_core, name) is not None


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="no_such_thing"):
        lmcache_core.no_such_thing  # noqa: B018


def test_the_list_the_table_and_the_imports_for_type_checkers_agree() -> None:
    tree = ast.parse(Path(lmcache_core.__file__).read_text())
    typed = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == lmcache_core._HOME
    assert set(lmcache_core.__all__) == {*typed, "__version__"}
    assert set(dir(lmcache_core)) >= set(lmcache_core.__all__)


def test_the_version_is_the_packages() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    assert lmcache_core.__version__ == project["version"]


def test_importing_core_imports_nothing_heavy() -> None:
    found = imported_by("import lmcache_core")
    assert "lmcache_core" in found
    assert found.isdisjoint(HEAVY)


def test_a_public_name_of_the_keys_needs_no_numpy() -> None:
    found = imported_by("from lmcache_core import ChunkKey, Family, Layout, ConfigError")
    assert "lmcache_core.keys" in found
    assert "numpy" not in found


def test_all_public_names_together_need_no_torch() -> None:
    found = imported_by("from lmcache_core import *")
    assert "lmcache_core.local" in found
    assert "torch" not in found


def test_the_commands_help_needs_no_numpy() -> None:
    found = imported_by(
        "import sys\nfrom lmcache_core.cli import main\nsys.argv = ['lmc', '--help']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code"
    )
    assert "lmcache_core.cli" in found
    assert found.isdisjoint({"numpy", "torch", "rich"})
