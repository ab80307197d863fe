"""Who may import whom, read from the sources: layers within core, one door for plugins, no heavy import unasked."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE = ROOT / "core" / "src" / "lmcache_core"
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))

LAYERS = (
    {"errors", "unhandled", "forks", "diagnosis"},
    {"keys", "layout", "buffers"},
    {"frame", "backend", "device", "codec", "policy", "chain", "groups", "cache", "hookspecs"},
    {"blocks"},
    {"backends", "devices", "policies", "hooks_log", "choice"},
    {"units", "spelling", "nodes", "options"},
    {"endpoints", "trace"},
    {"plugins", "config", "settings"},
    {"index", "transfer", "breaker", "costs", "events", "history", "metrics", "shares", "manifest"},
    {"sealing", "staged", "ledger"},
    {"tier"},
    {"leases"},
    {"pool"},
    {"direct"},
    {"worth", "requests", "prompts", "logs"},
    {"wire", "late", "pooled", "gauges", "scrape"},
    {"local"},
    {"client"},
    {"opening", "audit"},
    {"server"},
    {"testing"},
    {"cli"},
)
"""Core's modules, lowest first: a module imports from its own layer and those below.  A new module is added here."""

DECLARED_IN_CORE = {"numpy", "pluggy", "yaml", "msgspec", "xxhash", "prometheus_client", "click"}
MORE_IN_CORE = {"cli": {"rich"}, "testing": {"pytest", "hypothesis"}}
ONLY_WHEN_USED = {"rich", "hypothesis", "pytest"}
"""Imported inside the function that needs them, since they need not be installed."""


@dataclass(frozen=True)
class Import:
    """One imported module: `name` is absolute; `lazy` inside a function, `typing` under TYPE_CHECKING."""

    name: str
    line: int
    lazy: bool = False
    typing: bool = False

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]


def imports(source: str, package: str) -> Iterator[Import]:
    """Every import of a module that lies in `package` ("lmcache_core.backends"), wherever it stands."""
    yield from _walk(ast.parse(source), package.split("."), lazy=False, typing=False)


def _walk(node: ast.AST, package: list[str], lazy: bool, typing: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, lazy, typing)
        elif isinstance(child, ast.ImportFrom):
            base = package[: len(package) - child.level + 1] if child.level else []
            module = ".".join([*base, *([child.module] if child.module else [])])
            for alias in child.names:  # `from . import tier` imports the module tier
                yield Import(f"{module}.{alias.name}" if not child.module else module, child.lineno, lazy, typing)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for part in child.body:
                yield from _walk(ast.Module([part], []), package, lazy, True)
            for part in child.orelse:
                yield from _walk(ast.Module([part], []), package, lazy, typing)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _walk(child, package, lazy or inside, typing)


def modules(package: Path) -> Iterator[tuple[str, Path]]:
    """(name within the package, file) of each module; `__init__` of the package itself is ""."""
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        yield ".".join(part for part in parts if part != "__init__"), path


def imports_of(package: Path, name: str, path: Path) -> list[Import]:
    inside = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return list(imports(path.read_text(), ".".join(part for part in (package.name, inside) if part)))


def layer(module: str) -> int:
    head = module.partition(".")[0]
    return next((rank for rank, names in enumerate(LAYERS) if head in names), -1)


def upward(module: str, found: list[Import]) -> list[str]:
    """The imports of core's `module` that point to a higher layer than its own."""
    return [
        f"{module}:{i.line} imports {i.name}"
        for i in found
        if i.top == "lmcache_core" and not i.typing and layer(i.name.partition(".")[2]) > layer(module)
    ]


def foreign(module: str, found: list[Import], allowed: set[str]) -> list[str]:
    """The imports that are neither the standard library, nor core, nor allowed."""
    return [
        f"{module}:{i.line} imports {i.name}"
        for i in found
        if i.top not in sys.stdlib_module_names | allowed | {"lmcache_core"}
        or (i.top in ONLY_WHEN_USED and module.partition(".")[0] == "cli" and not i.lazy and not i.typing)
    ]


def around_the_door(own: str, module: str, found: list[Import], others: set[str], door: set[str]) -> list[str]:
    """The imports of a plugin that reach into core, or into another plugin."""
    return [
        f"{own}.{module}:{i.line} imports {i.name}"
        for i in found
        if (i.top == "lmcache_core" and i.name not in door) or i.top in others - {own}
    ]


def declared(plugin: Path) -> set[str]:
    """What a plugin depends on, as names to import."""
    dependencies = tomllib.loads((plugin / "pyproject.toml").read_text())["project"]["dependencies"]
    return {re.split(r"[^A-Za-z0-9._-]", each, maxsplit=1)[0].replace("-", "_") for each in dependencies}


CORE_MODULES = [pytest.param(name, path, id=name or "__init__") for name, path in modules(CORE)]


@pytest.mark.parametrize(("name", "path"), [p for p in CORE_MODULES if p.id != "__init__"])
def test_a_module_of_core_imports_only_its_own_layer_and_those_below(name: str, path: Path) -> None:
    assert layer(name) >= 0, f"{name} is in none of the LAYERS: say where it belongs"
    assert not upward(name, imports_of(CORE, name, path))


@pytest.mark.parametrize(("name", "path"), CORE_MODULES)
def test_core_imports_the_standard_library_and_what_it_declares(name: str, path: Path) -> None:
    allowed = DECLARED_IN_CORE | MORE_IN_CORE.get(name.partition(".")[0], set())
    assert not foreign(name, imports_of(CORE, name, path), allowed)


def test_keys_need_the_standard_library_and_the_errors_only() -> None:
    found = imports((CORE / "keys.py").read_text(), "lmcache_core")
    assert {i.name for i in found if i.top not in sys.stdlib_module_names} == {"lmcache_core.errors"}


def test_the_modules_of_core_import_each_other_without_cycles() -> None:
    graph = {
        name: {
            target
            for i in imports_of(CORE, name, path)
            if i.top == "lmcache_core" and not i.lazy and not i.typing and (target := i.name.partition(".")[2]) != name
        }
        for name, path in modules(CORE)
        if name
    }
    while leaves := [name for name, targets in graph.items() if not targets & graph.keys()]:
        for name in leaves:
            del graph[name]
    assert not graph, f"these import each other: {graph}"


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.name)
def test_a_plugin_imports_core_by_its_public_names_and_no_other_plugin_but_what_it_declares(plugin: Path) -> None:
    own = plugin.name.replace("-", "_")
    others = {other.name.replace("-", "_") for other in PLUGINS} - declared(plugin)
    wrong: list[str] = []
    for folder, door in (
        (plugin / "src" / own, {"lmcache_core"}),
        (plugin / "tests", {"lmcache_core", "lmcache_core.testing"}),
    ):
        for name, path in modules(folder):
            wrong += around_the_door(own, name, imports_of(folder, name, path), others, door)
    assert not wrong


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.name)
def test_a_plugin_imports_from_core_only_names_that_are_public(plugin: Path) -> None:
    init = ast.parse((CORE / "__init__.py").read_text())
    (public,) = [
        ast.literal_eval(node.value)
        for node in init.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    used = {
        alias.name
        for path in (plugin / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "lmcache_core"
        for alias in node.names
    }
    assert used <= set(public)


def test_what_core_may_import_is_what_its_metadata_declares() -> None:
    declared = tomllib.loads((ROOT / "core" / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {requirement.partition(">=")[0].lower().replace("-", "_") for requirement in declared}
    assert {"yaml" if name == "pyyaml" else name for name in names} == DECLARED_IN_CORE


# The rules themselves, on imports that break them.


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("tier", "from .pool import Pool"),
        ("keys", "from . import layout, backend"),
        ("backends.disk", "from ..local import LocalCache"),
        ("config", "def load():\n    from lmcache_core.tier import Tier"),
        ("pool", "if True:\n    import lmcache_core.cli"),
    ],
)
def test_an_import_upward_is_seen(module: str, source: str) -> None:
    package = ".".join(["lmcache_core", *module.split(".")[:-1]])
    assert upward(module, list(imports(source, package)))


def test_an_import_for_types_alone_may_point_upward() -> None:
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .pool import Pool\n"
    assert not upward("tier", list(imports(source, "lmcache_core")))


@pytest.mark.parametrize(
    "source", ["import torch", "def f():\n    import redis.asyncio", "try:\n    from boto3 import client\nfinally: ..."]
)
def test_a_foreign_import_is_seen_wherever_it_stands(source: str) -> None:
    assert foreign("tier", list(imports(source, "lmcache_core")), DECLARED_IN_CORE)


def test_rich_at_the_top_of_the_command_is_seen() -> None:
    assert foreign("cli.main", list(imports("import rich", "lmcache_core.cli")), {"rich"})
    assert not foreign("cli.main", list(imports("def f():\n    import rich", "lmcache_core.cli")), {"rich"})


@pytest.mark.parametrize(
    "source", ["from lmcache_core.keys import ChunkKey", "import lmcache_core.testing", "from lmcache_b import thing"]
)
def test_a_plugin_that_goes_around_the_door_is_seen(source: str) -> None:
    found = list(imports(source, "lmcache_a"))
    assert around_the_door("lmcache_a", "x", found, {"lmcache_a", "lmcache_b"}, {"lmcache_core"})
    assert not around_the_door("lmcache_a", "x", list(imports("import lmcache_core", "")), set(), {"lmcache_core"})
