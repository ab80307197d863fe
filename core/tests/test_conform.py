"""`lmc conform`: every kind of plugin by its name, and each mistake named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lmcache_core.backends.disk import DiskBackend
from lmcache_core.cli import main
from lmcache_core.plugins import PluginInfo
from lmcache_core.testing import PolicyLaws


def lmc(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["conform", *arguments])


def test_conform_prints_each_law_and_a_summary(tmp_path: Path) -> None:
    result = lmc("disk", "-o", f"path={tmp_path}/store", "--only", "put_copies", "--only",
                 "a_record_comes_back_exactly")  # fmt: skip
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[:2] == ["ok    a record comes back exactly", "ok    put copies"]
    assert lines[2].startswith("backend disk: 2 laws in ")
    assert "2 passed, 0 failed" in lines[2]
    found = json.loads(lmc("disk", "-o", f"path={tmp_path}/s", "--only", "put_copies", "--json").output)
    assert (found["kind"], found["name"]) == ("backend", "disk")
    assert found["laws"] == [{"law": "put_copies", "outcome": "passed", "detail": ""}]


def test_conform_ends_with_status_1_when_a_law_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiskBackend, "contains", lambda self, key: True)
    result = lmc("disk", "-o", f"path={tmp_path}/store", "--only", "contains_follows_put_and_remove")
    assert result.exit_code == 1
    assert "FAIL  contains follows put and remove: " in result.output
    assert "0 passed, 1 failed" in result.output


@pytest.mark.parametrize("plugin", ["lru", "policy:lru", "policy:lru@lmcache-core"])
def test_a_policy_is_checked_by_its_name_alone_or_with_its_kind(plugin: str) -> None:
    result = lmc(plugin, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["kind"] == "policy"
    assert {law["law"] for law in found["laws"]} == {each.name.removeprefix("test_") for each in PolicyLaws.laws()}


def test_a_codec_is_checked() -> None:
    result = lmc("identity")
    assert result.exit_code == 0, result.output
    assert "codec identity: " in result.output


def test_a_device_is_checked() -> None:
    result = lmc("cpu", "--only", "nothing_to_copy_is_fine", "--only", "the_torch_type_is_a_word")
    assert result.exit_code == 0, result.output
    assert "device cpu: 2 laws" in result.output


def test_a_name_of_two_kinds_must_be_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    real = PluginInfo.__init__

    def renamed(self: PluginInfo, group: str, name: str, *rest: object) -> None:
        real(self, group, "twin" if name in ("cpu", "lru") else name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(PluginInfo, "__init__", renamed)
    result = lmc("twin")
    assert result.exit_code == 2
    assert "twin is more than one plugin; write device:twin or policy:twin" in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("dsk",), "no backend, codec, device or policy 'dsk' is installed; did you mean 'disk'?"),
        (("backend:dsk",), "no backend 'dsk' is installed; did you mean 'disk'?"),
        (("policy:disk",), "no policy 'disk' is installed"),
        (("polcy:lru",), "'polcy' is none of backend, "),
        (("memory",), "which is no backend"),
        (("backend:memory",), "which is no backend"),
        (("disk",), "options.path: is required and missing"),
        (("disk", "-o", "pahth=/x"), "-o pahth: options.pahth: unknown key; did you mean 'path'?"),
        (("disk", "-o", "path"), "write -o key=value"),
        (("disk", "-o", "path=/x", "-o", "path=/y"), "-o path: given twice"),
        (("disk", "-o", "path=relative"), "path must be absolute"),
        (("disk", "-o", "path=/dev/null/x"), "/dev/null/x"),
        (("disk", "-o", "path=/x", "--only", "put_copys"), "did you mean 'put_copies'?"),
        (("lru", "-o", "size=3"), "-o: a policy takes no options"),
        (("lru", "--only", "put_copies"), "--only: no law is called 'put_copies'"),
    ],
)
def test_a_wrong_argument_of_conform_is_named(arguments: tuple[str, ...], says: str) -> None:
    result = lmc(*arguments)
    assert result.exit_code == 2
    assert says in result.output
    assert isinstance(result.exception, SystemExit)
