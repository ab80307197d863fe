"""Pinning, with a simulated runtime: when, for which device, and what happens where it is refused."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import pytest
import torch
from test_library import SimulatedLibrary

from lmcache_core import DeviceError
from lmcache_device_torch import CUDA, CudartRuntime, RuntimeLibrary
from lmcache_device_torch.pinning import Pins

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


class SimulatedRuntime:
    """SIMULATED: keeps what is pinned as the real one would."""

    def __init__(self, refusal: str = "") -> None:
        self.pinned: dict[int, torch.device] = {}
        self.refusal = refusal

    def pin(self, device: torch.device, address: int, nbytes: int) -> int | None:
        if self.refusal:
            raise DeviceError(self.refusal)
        self.pinned[address] = device
        return None

    def unpin(self, device: torch.device, address: int) -> None:
        if self.pinned.pop(address, None) != device:
            raise DeviceError("not pinned for that device")


def test_memory_is_pinned_at_its_first_copy_for_the_device_of_the_pages() -> None:
    runtime = SimulatedRuntime()
    pins = Pins("cuda", runtime)
    pins.note(4096, 100)
    assert not runtime.pinned
    pins.pin_noted(SECOND)
    assert runtime.pinned == {4096: SECOND}
    pins.note(8192, 100)
    pins.pin_noted(FIRST)
    assert runtime.pinned == {4096: SECOND, 8192: FIRST}
    pins.forget(4096)
    assert runtime.pinned == {8192: FIRST}
    pins.forget(4096)
    pins.close()
    assert not runtime.pinned


def test_kernels_find_every_part_of_pinned_memory_and_no_other() -> None:
    class Mapping(SimulatedRuntime):
        def pin(self, device: torch.device, address: int, nbytes: int) -> int | None:
            super().pin(device, address, nbytes)
            return address + (1 << 20) if address < 8192 else None

    pins = Pins("cuda", Mapping())
    pins.note(4096, 100)
    assert pins.mapped(4096, 100) is None
    pins.pin_noted(FIRST)
    moved = 1 << 20
    assert pins.mapped(4096, 100) == 4096 + moved
    assert pins.mapped(4100, 96) == 4100 + moved
    assert pins.mapped(4100, 97) is None
    assert pins.mapped(4095, 10) is None
    pins.note(8192, 100)
    pins.pin_noted(FIRST)
    assert pins.mapped(8192, 100) is None
    pins.forget(4096)
    assert pins.mapped(4096, 100) is None
    pins.close()


def test_the_runtime_is_asked_where_kernels_find_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", SimulatedCudart())
    assert CudartRuntime(RuntimeLibrary(CUDA, SimulatedLibrary(CUDA))).pin(FIRST, 4096, 100) == 4097
    assert CudartRuntime(RuntimeLibrary(CUDA, SimulatedLibrary(CUDA, result=1))).pin(FIRST, 4096, 100) is None
    assert CudartRuntime().pin(FIRST, 4096, 100) is None


def test_memory_that_was_let_go_before_its_first_copy_is_never_pinned() -> None:
    runtime = SimulatedRuntime()
    pins = Pins("cuda", runtime)
    pins.note(4096, 100)
    pins.forget(4096)
    pins.pin_noted(FIRST)
    assert not runtime.pinned


def test_a_refusal_is_said_once_and_nothing_is_unpinned(caplog: pytest.LogCaptureFixture) -> None:
    pins = Pins("cuda", SimulatedRuntime("the limit of locked memory is 8 MiB"))
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            pins.note(4096 * (1 + number), 1 << 30)
            pins.pin_noted(FIRST)
        pins.close()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        "device cuda: 1024 MiB of host memory stay unpinned, copies are slower: the limit of locked memory is 8 MiB"
    )


def test_where_there_is_nothing_to_pin_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    pins = Pins("cpu", None)
    pins.note(4096, 1)
    pins.pin_noted(torch.device("cpu"))
    pins.close()
    assert not caplog.records


class SimulatedCudart:
    """SIMULATED `torch.cuda`: its runtime, and the device that was current when it was called."""

    def __init__(self, result: int = 0) -> None:
        self.called: list[tuple[object, ...]] = []
        self._result = result
        self._current: torch.device | None = None

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self._current = device
        yield
        self._current = None

    def cudart(self) -> SimulatedCudart:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.called.append(("register", address, nbytes, flags, self._current))
        return self._result

    def cudaHostUnregister(self, address: int) -> int:
        self.called.append(("unregister", address, self._current))
        return self._result


def test_the_cuda_runtime_is_called_with_the_pages_device_current(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = SimulatedCudart()
    monkeypatch.setattr(torch, "cuda", simulated)
    CudartRuntime().pin(SECOND, 4096, 100)
    CudartRuntime().unpin(SECOND, 4096)
    assert simulated.called == [("register", 4096, 100, 3, SECOND), ("unregister", 4096, SECOND)]


def test_an_error_of_the_cuda_runtime_is_a_device_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", SimulatedCudart(result=712))
    with pytest.raises(DeviceError, match="cudaHostRegister: error 712"):
        CudartRuntime().pin(FIRST, 4096, 100)


def test_a_torch_without_the_binding_is_a_device_error() -> None:
    if torch.version.cuda or torch.version.hip:
        pytest.skip("cannot run here: this torch has a device")
    with pytest.raises(DeviceError, match="cudaHostRegister: "):
        CudartRuntime().pin(FIRST, 4096, 100)
