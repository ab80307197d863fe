"""The kept choice of paths: used for the device that it was measured on, and never in anybody's way."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from device_mutants import Full, Model

from lmcache_core import choice
from lmcache_core.choice import Choice
from lmcache_core.errors import ConfigError

HERE = Choice(gather="fast", scatter="slow", measured_on="2026-11-30", identity={"card": "model"})


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lmcache"


def opened(caplog: pytest.LogCaptureFixture) -> tuple[Full, str]:
    """A device as the cache opens it, and the one line that is said."""
    device = Full()
    caplog.clear()
    with caplog.at_level(logging.INFO):
        choice.apply("acme", device)
    (line,) = [record.getMessage() for record in caplog.records]
    return device, line


def test_a_device_copies_by_what_was_measured_on_it(caplog: pytest.LogCaptureFixture) -> None:
    device, line = opened(caplog)
    assert (device.gathers, device.scatters) == ("slow", "slow")
    assert line == "device acme: copies by slow; `lmc bench device` measures the others"
    choice.keep("acme", HERE)
    device, line = opened(caplog)
    assert (device.gathers, device.scatters) == ("fast", "slow")
    assert line == "device acme: gather by fast, scatter by slow, as measured on 2026-11-30"


def test_what_is_kept_is_for_its_user_alone_and_replaced_at_once(folder: Path) -> None:
    mask = os.umask(0)
    try:
        first = choice.keep("acme", HERE)
        again = choice.keep("acme@some-distribution", HERE)
    finally:
        os.umask(mask)
    assert first == again == folder / "device-acme.json"
    assert stat.S_IMODE(first.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert os.listdir(folder) == ["device-acme.json"]


def test_a_choice_that_could_not_be_written_leaves_the_old_one_and_no_crumbs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = choice.keep("acme", HERE)
    before = path.read_bytes()

    def full(source: str, target: Path) -> None:
        raise OSError(28, "no space")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        choice.keep("acme", Choice(gather="slow", scatter="slow", measured_on="x", identity={}))
    assert path.read_bytes() == before
    assert os.listdir(folder) == ["device-acme.json"]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff\x00", b'{"gather": 1}', b'{"gather": "fast", "scatter": "fast"}', b"[" * 70_000],
)
def test_a_broken_file_is_said_and_not_used(folder: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    choice.keep("acme", HERE).write_bytes(content)
    device, line = opened(caplog)
    assert (device.gathers, device.scatters) == ("slow", "slow")
    assert f"{folder / 'device-acme.json'} is broken; `lmc bench device`" in line


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        ({"identity": {"card": "another"}}, "was measured with another card"),
        ({"identity": {}}, "was measured with another card"),
        ({"identity": {"card": "model", "driver": "1"}}, "was measured with another driver"),
        ({"gather": "gone"}, "names a path that there is not: gone"),
    ],
)
def test_the_choice_of_another_device_or_version_is_said_and_not_used(
    kept: Mapping[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    given: dict[str, Any] = {"gather": "fast", "scatter": "fast", "measured_on": "x", "identity": {"card": "model"}}
    choice.keep("acme", Choice(**{**given, **kept}))
    device, line = opened(caplog)
    assert (device.gathers, device.scatters) == ("slow", "slow")
    assert said in line


def test_a_file_that_may_not_be_read_is_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "device-acme.json").mkdir(parents=True)
    assert "cannot be read: Is a directory" in opened(caplog)[1]


def test_a_device_with_one_path_is_not_spoken_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        choice.apply("acme", Model())
    assert not caplog.records


def test_without_a_folder_nothing_is_found_and_nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("simulated: no home")

    monkeypatch.setenv("XDG_CACHE_HOME", "relative/paths/do/not/count")
    monkeypatch.setattr(Path, "home", nowhere)
    assert choice.find("acme", Full) is None
    with pytest.raises(ConfigError, match="set XDG_CACHE_HOME"):
        choice.keep("acme", HERE)


@pytest.mark.parametrize("name", ["inline:Acme", "../acme", "", "a/b"])
def test_a_name_that_is_no_file_name_keeps_nothing(name: str) -> None:
    assert choice.find(name, Full) is None
    with pytest.raises(ConfigError, match="no choice is kept"):
        choice.keep(name, HERE)
