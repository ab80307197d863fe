"""A broken plugin breaks nothing that does not name it; one that is named says why at once."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from lmcache_core import plugins
from lmcache_core.errors import PluginConflict, PluginError, PluginImportFailed, PluginIncompatible, PluginNotFound

FIXTURES = sorted(path.parent.name for path in Path(__file__).parent.glob("fixtures/*/pyproject.toml"))
IMPORTED = "sorted(name for name in sys.modules if name.startswith('lmcache_fixture_'))"
OPEN = f"""
import sys
from lmcache_core import open_cache
with open_cache(sys.argv[1]) as cache:
    print(type(cache).__name__, {IMPORTED})
"""
HOST = "tiers:\n  - {name: host, backend: memory, capacity: 4MiB}\n"


@pytest.fixture(autouse=True)
def _installed() -> None:
    for name in FIXTURES:
        try:
            version(name)
        except PackageNotFoundError:
            pytest.skip(f"{name} is not installed: pip install tests/fixtures/*, or nox -s integration")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "lmcache.yaml"
    path.write_text(f"{HOST}  - {{name: disk, backend: disk, capacity: 8MiB, options: {{path: {tmp_path}/store}}}}\n")
    return path


def lmc(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lmcache_core.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def python(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def with_backend(tmp_path: Path, name: str) -> Path:
    path = tmp_path / "named.yaml"
    path.write_text(f"{HOST}  - {{name: lower, backend: {name}, capacity: 8MiB}}\n")
    return path


def test_a_cache_whose_configuration_names_none_of_them_opens_and_imports_none(config: Path) -> None:
    child = python(OPEN, config)
    assert child.stdout == "LocalCache []\n", child.stderr


def test_the_list_shows_each_as_not_loaded_and_imports_none() -> None:
    child = python(
        f"import sys, json; from lmcache_core.cli.plugins import rows; print(json.dumps([[r.name, r.distribution, "
        f"r.version, r.state] for r in rows()])); print({IMPORTED})"
    )
    table, imported = child.stdout.splitlines()
    offered = json.loads(table)
    assert imported == "[]"
    assert {row[1] for row in offered} >= {"lmcache-core", *FIXTURES}
    for name, distribution, number in (
        ("raises-importerror", "lmcache-fixture-raises", "1.2.3"),
        ("slow", "lmcache-fixture-slow", "0.5"),
        ("prints", "lmcache-fixture-prints", "0.1"),
        ("future", "lmcache-fixture-future", "99.0"),
    ):
        assert [name, distribution, number, "not loaded"] in offered


NAMED_AND_BROKEN = [
    ("raises-importerror", "lmcache-fixture-raises 1.2.3", r"ImportError: libfixture\.so\.0.*import_error\.py:3"),
    ("raises-syntaxerror", "lmcache-fixture-raises 1.2.3", r"SyntaxError: .*syntax_error\.py"),
    ("raises-systemexit", "lmcache-fixture-raises 1.2.3", r"SystemExit: 3 .*system_exit\.py:5"),
    ("future", "lmcache-fixture-future 99.0", r"needs plugin API 99\.0, this lmcache-core speaks 1\.0: upgrade"),
]


@pytest.mark.parametrize(("name", "package", "cause"), NAMED_AND_BROKEN)
def test_one_that_is_named_stops_the_start_with_package_version_file_and_cause(
    tmp_path: Path, name: str, package: str, cause: str
) -> None:
    path = with_backend(tmp_path, name)
    check = lmc("config", "check", "--config", path)
    assert check.returncode == 2
    assert "Traceback" not in check.stderr
    for text in (f"{path}:3: tiers.lower.backend: ", name, package):
        assert text in check.stderr
    assert re.search(cause, check.stderr), check.stderr
    start = python(OPEN, path)
    assert start.returncode != 0
    assert package in start.stderr
    assert re.search(cause, start.stderr), start.stderr
    assert start.stdout == ""


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("raises-importerror", PluginImportFailed, "libfixture"),
        ("raises-syntaxerror", PluginImportFailed, "SyntaxError"),
        ("raises-systemexit", PluginImportFailed, "SystemExit: 3"),
        ("future", PluginIncompatible, "upgrade lmcache-core"),
        ("newer-minor", PluginIncompatible, "needs plugin API 1.99"),
        ("undeclared", PluginIncompatible, "declares no api_version"),
        ("not-a-backend", PluginIncompatible, "is a function, not a subclass of lmcache_core.backend.Backend"),
        ("clash", PluginConflict, "write clash@lmcache-fixture-clash-a or clash@lmcache-fixture-clash-b"),
        ("clahs", PluginNotFound, "did you mean 'clash'?"),
        ("clash@lmcache-fixture-clash-c", PluginNotFound, "clash from lmcache-fixture-clash-a 1.0"),
    ],
)
def test_loading_fails_with_the_error_of_its_kind(name: str, error: type[PluginError], says: str) -> None:
    with pytest.raises(error) as caught:
        plugins.load(plugins.BACKENDS, name)
    assert says in str(caught.value)
    if error is PluginImportFailed:
        assert caught.value.__cause__ is not None


def test_failing_to_load_one_leaves_the_others_loadable() -> None:
    for name in ("raises-importerror", "raises-systemexit", "future"):
        with pytest.raises(PluginError):
            plugins.load(plugins.BACKENDS, name)
    assert plugins.load(plugins.BACKENDS, "disk").__name__ == "DiskBackend"


def test_a_squatter_does_not_get_a_built_in_name() -> None:
    for group, name in ((plugins.BACKENDS, "disk"), (plugins.POLICIES, "s3fifo")):
        assert plugins.resolve(group, name).dist == "lmcache-core"
        assert plugins.load(group, f"{name}@lmcache-core") is plugins.load(group, name)
    with pytest.raises(PluginImportFailed, match=r"lmcache-fixture-squatter 6\.6\.6.*the squatter was imported"):
        plugins.load(plugins.BACKENDS, "disk@lmcache-fixture-squatter")
    with pytest.raises(PluginIncompatible, match=r"needs plugin API 2\.0"):
        plugins.load(plugins.POLICIES, "s3fifo@lmcache-fixture-squatter")


def test_a_clash_is_settled_by_naming_the_distribution_or_disabling_one() -> None:
    chosen = plugins.load(plugins.BACKENDS, "clash@lmcache-fixture-clash-b")
    assert chosen.__module__ == "lmcache_fixture_clash_b"
    assert plugins.load(plugins.BACKENDS, "clash", ["lmcache-fixture-clash-a"]) is chosen


def test_one_that_prints_while_it_is_imported_works_and_spoils_no_output(tmp_path: Path) -> None:
    listing = lmc("plugins", "--json", "--load")
    rows = {row["name"]: row for row in json.loads(listing.stdout) if row["group"] == "backends"}
    assert (rows["prints"]["state"], rows["prints"]["api"]) == ("loaded", "1.0")
    assert "Welcome to the fixture" in listing.stderr
    assert listing.returncode == 1
    assert rows["raises-systemexit"]["state"] == "failed"
    assert "SystemExit: 3" in rows["raises-systemexit"]["detail"]
    assert {row["state"] for row in json.loads(listing.stdout) if row["name"] == "clash"} == {"conflict"}
    check = lmc("config", "check", "--config", with_backend(tmp_path, "prints"))
    assert check.returncode == 0, check.stderr
    assert "Welcome" not in check.stdout


def test_one_that_is_slow_to_import_is_named_in_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "lmcache_fixture_slow", raising=False)
    slept: list[float] = []
    real = time.monotonic
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(time, "monotonic", lambda: real() + sum(slept))
    with caplog.at_level(logging.WARNING):
        plugins.load(plugins.BACKENDS, "slow")
    assert slept == [5.0]
    assert re.search(r"lmcache-fixture-slow 0\.5 .* took 5\.\d s to import", caplog.text)


def test_a_disabled_one_is_as_if_not_installed_and_the_error_says_so(tmp_path: Path) -> None:
    path = with_backend(tmp_path, "prints")
    path.write_text(path.read_text() + "plugins: {disable: [lmcache_fixture_prints]}\n")
    check = lmc("config", "check", "--config", path)
    assert check.returncode == 2
    assert "'prints' (lmcache-fixture-prints 0.1) is disabled by plugins.disable" in check.stderr
    listing = json.loads(lmc("plugins", "--json", "--config", path).stdout)
    assert [row["state"] for row in listing if row["name"] == "prints"] == ["disabled"]


def test_stale_metadata_of_an_older_install_is_no_second_offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = tmp_path / "lmcache_fixture_prints.egg-info"
    stale.mkdir()
    (stale / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: lmcache-fixture-prints\nVersion: 0.0.1\n")
    (stale / "entry_points.txt").write_text("[lmcache_core.backends]\nprints = gone:Gone\nold = gone:Gone\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    offer = plugins.resolve(plugins.BACKENDS, "prints")
    assert (offer.version, offer.target) == ("0.1", "lmcache_fixture_prints:Forgetful")
    assert not any(other.name == "old" for other in plugins.discover(plugins.BACKENDS))


def test_a_hook_that_fails_is_logged_once_and_the_others_hear(caplog: pytest.LogCaptureFixture) -> None:
    manager = plugins.load_hooks(["raises-when-called", "log"])
    with caplog.at_level(logging.INFO):
        for request in ("r1", "r2", "r3"):
            plugins.call_hooks(
                manager, "lmcache_chunks_retrieved",
                request=request, hit_chunks=4, failed_chunks=0, nbytes=1 << 20, seconds=0.01,
            )  # fmt: skip
        plugins.call_hooks(manager, "lmcache_tier_health", tier="pool", healthy=False, error="refused")
    failures = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(failures) == 2
    assert "'raises-when-called': lmcache_chunks_retrieved failed (RuntimeError)" in failures[0]
    assert "'raises-when-called': lmcache_tier_health failed (SystemExit)" in failures[1]
    assert caplog.text.count("prefix hit") == 3
    assert "tier pool is unhealthy: refused" in caplog.text


def test_a_hook_plugin_that_would_not_import_is_fatal_when_it_is_named(tmp_path: Path) -> None:
    path = tmp_path / "hooks.yaml"
    path.write_text(f"{HOST}plugins: {{hooks: [log, raises-importerror]}}\n")
    check = lmc("config", "check", "--config", path)
    assert check.returncode == 2
    assert "hook 'raises-importerror' of lmcache-fixture-raises 1.2.3" in check.stderr
    start = python(OPEN, path)
    assert start.returncode != 0
    assert "libfixture.so.0" in start.stderr
