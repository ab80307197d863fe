"""The device laws: the cpu device and two models keep them all, and for each law there is a mutant that it catches."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from device_mutants import LEFT, MUTANTS, Full, InThreads, KeepsHistory, Model

from lmcache_core.device import Probe
from lmcache_core.devices.cpu import CpuDevice
from lmcache_core.testing import DeviceLaws, run_device_laws


@pytest.fixture(autouse=True)
def clear_away() -> Iterator[None]:
    yield
    KeepsHistory.history.clear()
    while LEFT:
        event, thread = LEFT.pop()
        event.set()
        thread.join()


class TestCpuDevice(DeviceLaws):
    device_class = CpuDevice


class TestCpuDeviceOnSeveralThreads(DeviceLaws):
    device_class = CpuDevice

    def new_device(self) -> CpuDevice:
        return CpuDevice(copy_threads=3)


class TestModel(DeviceLaws):
    device_class = Model


class TestFullModel(DeviceLaws):
    device_class = Full


class TestModelThatCopiesLater(DeviceLaws):
    device_class = InThreads


def test_no_law_is_skipped_for_the_full_model() -> None:
    assert {r.name: r.outcome for r in run_device_laws(Full)} == {each.name: "passed" for each in DeviceLaws.laws()}


def test_every_law_has_a_mutant() -> None:
    assert {name for name, _ in MUTANTS} == {each.name for each in DeviceLaws.laws()}


@pytest.mark.parametrize(("name", "mutant"), MUTANTS, ids=[mutant.__name__ for _, mutant in MUTANTS])
def test_the_law_catches_its_mutant(
    name: str, mutant: type[Model], record_property: Callable[[str, object], None]
) -> None:
    record_property("mutant", f"device {name}")
    (result,) = run_device_laws(mutant, only=[name])
    assert result.outcome == "failed", result
    assert result.detail


def test_a_device_that_is_not_there_is_held_to_what_its_class_says_and_skipped_for_the_rest() -> None:
    class Absent(Model):
        def __init__(self) -> None:
            raise OSError("no driver")

        @classmethod
        def probe(cls) -> Probe:
            return Probe(0, "no /dev/acme0")

    results = run_device_laws(Absent)
    passed = [result.name for result in results if result.outcome == "passed"]
    assert len(passed) == 3
    assert {r.detail for r in results if r.name not in passed} == {"the device is not there: no /dev/acme0"}
