"""What every probe keeps, on simulated machines: a test-suite inherits it and says which hardware is its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar

from .simulation import SimulatedMachine
from .vendor import Vendor


class ProbeLaws:
    """A subclass supplies `vendor`, and which methods of SimulatedMachine add its card and its torch."""

    vendor: ClassVar[Vendor]
    card: ClassVar[str]
    build: ClassVar[str]

    def machine(self, folder: Path, *parts: str) -> SimulatedMachine:
        machine = SimulatedMachine(folder)
        for part in parts:
            getattr(machine, part)()
        return machine

    def others(self, own: str, among: tuple[str, ...]) -> list[str]:
        return [each for each in among if each != own]

    def test_a_card_and_its_torch_are_found_without_importing_torch(self, tmp_path: Path) -> None:
        loaded = set(sys.modules)
        probe = self.vendor.probe(self.machine(tmp_path, self.card, self.build).host)
        assert probe.count == 1, probe.reason
        assert not {name for name in set(sys.modules) - loaded if name.partition(".")[0] in ("torch", "torch_npu")}

    def test_absence_is_one_line(self, tmp_path: Path) -> None:
        for number, parts in enumerate(([], ["cpu_torch"])):
            probe = self.vendor.probe(self.machine(tmp_path / str(number), *parts).host)
            assert probe.count == 0
            assert probe.reason.startswith(f"no {self.vendor.hardware}")
            assert "\n" not in probe.reason
            assert not list(self.vendor.diagnose(self.machine(tmp_path / str(number)).host))

    def test_the_torch_of_another_is_no_card_of_ours(self, tmp_path: Path) -> None:
        for other in self.others(self.build, BUILDS):
            probe = self.vendor.probe(self.machine(tmp_path / other, self.card, other).host)
            assert probe.count == 0, other
            assert self.vendor.hardware in probe.reason
            assert self.vendor.get_torch in probe.reason
            warned = [f for f in self.vendor.diagnose(self.machine(tmp_path / other).host) if f.level == "warning"]
            assert any(probe.reason in finding.text for finding in warned)

    def test_a_card_of_another_is_no_card_of_ours(self, tmp_path: Path) -> None:
        for other in self.others(self.card, CARDS):
            probe = self.vendor.probe(self.machine(tmp_path / other, other, self.build).host)
            assert probe.count == 0, other
            assert self.vendor.driver in probe.reason

    def test_the_last_torch_that_was_installed_counts(self, tmp_path: Path) -> None:
        for other in self.others(self.build, tuple(each for each in BUILDS if each != "ascend_torch")):
            if self.build == "ascend_torch":
                continue  # a package of its own beside torch, whichever came first
            machine = self.machine(tmp_path / other, self.card, other, self.build)
            assert self.vendor.probe(machine.host).count == 1, other
            assert self.vendor.probe(getattr(machine, other)().host).count == 0, other

    def test_a_card_without_torch_says_what_to_install(self, tmp_path: Path) -> None:
        probe = self.vendor.probe(self.machine(tmp_path, self.card).host)
        assert probe.count == 0
        assert self.vendor.get_torch in probe.reason

    def test_every_card_counts_and_variables_hide_them(self, tmp_path: Path) -> None:
        machine = SimulatedMachine(tmp_path)
        getattr(machine, self.build)()
        getattr(machine, self.card)(4)
        assert self.vendor.probe(machine.host).count == 4
        for name in self.vendor.visible:
            assert self.vendor.probe(machine.variable(name, "2,3").host).count == 2
            hidden = self.vendor.probe(machine.variable(name, "-1").host)
            assert hidden.count == 0
            assert name in hidden.reason
            machine.variable(name, "0,1,2,3")

    def test_a_node_that_may_not_be_opened_is_named(self, tmp_path: Path) -> None:
        machine = self.machine(tmp_path, self.card, self.build).closed(self.vendor.control)
        probe = self.vendor.probe(machine.host)
        assert probe.count == 0
        assert f"no permission for /{self.vendor.control}" in probe.reason

    def test_what_doctor_is_told_is_plain(self, tmp_path: Path) -> None:
        for finding in self.vendor.diagnose(self.machine(tmp_path, self.card, self.build).host):
            assert finding.level in ("ok", "note", "warning", "error")
            assert finding.text
            assert "\n" not in finding.text


CARDS = ("nvidia", "amd", "metax", "ascend")
BUILDS = ("cuda_torch", "rocm_torch", "maca_torch", "ascend_torch", "cpu_torch")
