"""`lmc bench device`: what it measures, checks and keeps, on the CPU and on a device with two paths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from device_mutants import Full

from lmcache_core import choice
from lmcache_core.cli import bench_device, device_speed, main
from lmcache_core.cli.device_speed import Figure, Speeds, measure, subject_of
from lmcache_core.errors import DeviceError
from lmcache_core.layout import Layout, Region


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 32 bytes."""
    region = Region(name="kv", layers=2, block_tokens=16, block_nbytes=32, dtype="raw", packing="bench")
    monkeypatch.setattr(device_speed, "KV", region)
    monkeypatch.setattr(device_speed, "LAYERS", 2)
    monkeypatch.setattr(device_speed, "LAYOUT", Layout(chunk_tokens=256, regions=(region,)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def lmc(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", "device", *arguments, "--chunks", "2", "--rounds", "2"])


def test_the_cpu_has_one_path_and_nothing_to_choose(tmp_path: Path) -> None:
    said = lmc("cpu")
    assert said.exit_code == 0, said.output
    lines = said.output.splitlines()
    assert lines[0].startswith("cpu, pages in the CPU's memory; one large copy: ")
    assert [line.split()[:2] for line in lines[2:4]] == [["direct", "in"], ["direct", "scattered"]]
    assert lines[4] == "one path, direct: there is nothing to choose"
    found = json.loads(lmc("cpu", "--json").stdout)
    assert (found["choice"], found["kept"], found["unusable"]) == (None, None, {})
    assert [figure["blocks"] for figure in found["figures"]] == ["in order", "scattered"]
    assert all(figure["gather_gib_s"] > 0 and figure["scatter_ratio"] > 0 for figure in found["figures"])
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_measured_is_one_clear_error() -> None:
    assert "name the device" in lmc("--on", "cpu").output
    assert "no device 'nonsense'" in lmc("nonsense").output


class Fast(Full):
    """A device whose second path is the faster one; it is told by what it was asked, not by a clock."""


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_device, "open_device", lambda name, use: (name, Fast()))


@pytest.mark.usefixtures("two")
def test_the_choice_is_kept_for_the_next_start(tmp_path: Path) -> None:
    said = lmc("acme")
    assert said.exit_code == 0, said.output
    kept = choice.find("acme", Fast)
    assert isinstance(kept, choice.Choice)
    assert f"from now on: gather by {kept.gather}, scatter by {kept.scatter}" in said.output
    assert f"kept in {tmp_path / 'lmcache' / 'device-acme.json'}" in said.output
    assert [line.split()[0] for line in said.output.splitlines()[2:6]] == ["slow", "slow", "fast", "fast"]


@pytest.mark.usefixtures("two")
def test_only_measuring_keeps_nothing(tmp_path: Path) -> None:
    found = json.loads(lmc("acme", "--no-keep", "--json").stdout)
    assert found["kept"] is None
    assert found["choice"]["identity"] == found["identity"] == {"card": "model"}
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("two")
def test_a_folder_that_cannot_be_written_loses_no_figures(tmp_path: Path) -> None:
    (tmp_path / "lmcache").write_text("no folder")
    said = lmc("acme")
    assert said.exit_code == 0, said.output
    assert "not kept: " in said.output
    assert "would be: gather by " in said.output


def test_another_path_is_chosen_only_where_it_is_clearly_faster() -> None:
    def speeds(slow: float, fast: float) -> Speeds:
        figures = [Figure("slow", "scattered", slow, 1.0, 1.0, 1.0), Figure("fast", "scattered", fast, 1.0, 9.0, 1.0)]
        return Speeds(1.0, 1.0, [Figure("fast", "in order", 99.0, 1.0, 0.1, 1.0), *figures], {})

    assert speeds(10.0, 10.4).fastest("gather", "slow", 1.05) == "slow"
    assert speeds(10.0, 10.6).fastest("gather", "slow", 1.05) == "fast"
    assert speeds(10.0, 1.0).fastest("scatter", "slow", 1.05) == "fast"


def test_a_path_that_brings_other_bytes_ends_the_measuring() -> None:
    class Wrong(Full):
        def copy_out(self, pages: Any, ids: Any, layout: Layout, out: Any, layers: range | None) -> None:
            super().copy_out(pages, list(ids)[::-1] if self.gathers == "fast" else ids, layout, out, layers)

    class WrongBothWays(Wrong):
        def copy_in(self, src: Any, layout: Layout, pages: Any, ids: Any, layers: range | None, skip: int) -> None:
            super().copy_in(src, layout, pages, list(ids)[::-1] if self.scatters == "fast" else ids, layers, skip)

    for kind in (Wrong, WrongBothWays):
        with pytest.raises(DeviceError, match="path fast, blocks in order: other bytes came back"):
            measure(subject_of(kind(), on_cpu=False), 2, 1)


def test_a_path_that_could_not_be_taken_has_no_figures_and_a_reason() -> None:
    class Refuses(Full):
        tried: str = ""

        def use(self, *, gather: str, scatter: str) -> None:
            super().use(gather=gather, scatter=scatter)
            self.tried = "it does not compile" if "fast" in (gather, scatter) else self.tried

        def unusable(self) -> dict[str, str]:
            return {"fast": self.tried} if self.tried else {}

    found = measure(subject_of(Refuses(), on_cpu=False), 2, 2)
    assert {figure.path for figure in found.figures} == {"slow"}
    assert found.unusable == {"fast": "it does not compile"}
