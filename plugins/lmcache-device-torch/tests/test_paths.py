"""The paths beside the staged one: the kernel in Triton's interpreter, the batches by a SIMULATED runtime.

Both copy for real, so this proves which bytes go where.  It proves nothing of speed, of how a device orders its memory,
nor of the compiled kernel but that it compiles.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lagging import StagedDevice
from test_device import TensorLaws
from test_library import SimulatedLibrary

from lmcache_core import DeviceError, Layout, Region, SupportsPaths
from lmcache_core.testing import DeviceLaws
from lmcache_device_torch import CUDA, RuntimeLibrary
from lmcache_device_torch.device import STAGED
from lmcache_device_torch.geometry import geometry_of
from lmcache_device_torch.paths import Batch, CopyPath, Kernel, Plan, Staged

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="cannot run here: no triton")


@pytest.fixture(scope="module", autouse=True)
def interpreted() -> Iterator[None]:
    """The kernel's module asks once, when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield


class InterpretedKernel(Kernel):
    """The interpreter is for one thread at a time, and slow for each program."""

    lock = threading.Lock()

    def __init__(self) -> None:
        super().__init__(RuntimeLibrary(CUDA, SimulatedLibrary(CUDA)), block=1 << 17, programs=3)
        self.launches = 0

    def launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        with self.lock:
            self.launches += 1
            super().launch(grid, *arguments, **constants)


class KernelDevice(StagedDevice):
    """Has no other path, so that nothing goes another way unseen."""

    path_names = (STAGED,)

    def new_paths(self, staging_nbytes: int) -> dict[str, CopyPath]:
        return {STAGED: InterpretedKernel()}

    def reach(self, address: int, nbytes: int) -> int | None:
        return address


class BatchDevice(KernelDevice):
    def new_paths(self, staging_nbytes: int) -> dict[str, CopyPath]:
        return {STAGED: Batch(RuntimeLibrary(CUDA, SimulatedLibrary(CUDA)), fewest_nbytes=1)}


class TestBatch(TensorLaws):
    device_class = BatchDevice


class KernelLaws(TensorLaws):
    device_class = KernelDevice


INTERPRETERS_OWN = "test_many_copies_leave_no_memory_threads_or_descriptors"
"""A law that would weigh the interpreter's memory, for a minute."""


@needs_triton
@pytest.mark.parametrize("name", [each.name for each in DeviceLaws.laws() if each.name != INTERPRETERS_OWN])
def test_the_interpreted_kernel_keeps_the_law(name: str) -> None:
    (result,) = KernelLaws().results([name])
    assert result.outcome == "passed", result.detail


COMPILES = """
import itertools, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lmcache_device_torch.kernel import TYPES, copy_blocks

names = copy_blocks.arg_names
backend, arch, lanes = sys.argv[1:]
target = GPUTarget(backend, int(arch) if arch.isdigit() else arch, int(lanes))
for (width, kind), axes, unit in itertools.product(TYPES.items(), (1, 2, 4), (True, False)):
    to_host = bool(axes % 2) == unit  # both directions, in half of the cases each
    constants = {"TO_HOST": to_host, "UNIT": unit, "AXES": axes, "TYPE": kind, "BLOCK": 1024}
    signature = {name: "constexpr" if name in constants else "*i64" if name == "table" else "i32" for name in names}
    signature["block_stride"] = signature["s0"] = "i64"
    source = ASTSource(copy_blocks, signature, {(names.index(name),): value for name, value in constants.items()})
    assert {"cuda": "cubin", "hip": "hsaco"}[backend] in triton.compile(source, target=target).asm
"""


@needs_triton
@pytest.mark.parametrize("target", [("cuda", "80", "32"), ("cuda", "90", "32"), ("hip", "gfx942", "64")])
def test_the_kernel_compiles_without_the_hardware(target: tuple[str, ...], tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", COMPILES, *target], env=environment, timeout=600, check=False, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("page", "sizes", "runs"),
    [
        (torch.zeros(4, 3, 5, dtype=torch.int16), (15,), 1),
        (torch.zeros(2, 4, 8, dtype=torch.int16).swapaxes(0, 1), (2, 8), 2),
        (torch.zeros(4, 2, 3, 5, 7).transpose(2, 3), (2, 5, 3, 7), 30),
        (torch.zeros(4, 8, 3, dtype=torch.uint8).swapaxes(1, 2), (3, 8), 24),
        (torch.zeros(4, dtype=torch.int64), (1,), 1),
        (torch.zeros(4, 1, 6, 1), (6,), 1),
        (torch.zeros(4, 12)[:, :6], (6,), 1),
        (torch.zeros(4, 12)[:, ::2], (6,), 6),
    ],
)
def test_the_pieces_of_a_block_are_where_torch_finds_them(
    page: torch.Tensor, sizes: tuple[int, ...], runs: int
) -> None:
    nbytes = page.element_size()
    memory = page.untyped_storage().nbytes() // nbytes
    numbered = torch.arange(memory).as_strided(page.shape, page.stride(), page.storage_offset())
    found = geometry_of(page)
    assert found.sizes == sizes
    assert len(found.runs) == runs
    for block in range(page.shape[0]):
        start = page.storage_offset() + block * found.block_stride // nbytes
        pieces = [range(start + at // nbytes, start + (at + found.run_nbytes) // nbytes) for at in found.runs]
        assert [place for piece in pieces for place in piece] == numbered[block].reshape(-1).tolist()


@pytest.mark.parametrize(
    ("page", "places", "width"),
    [
        (torch.zeros(4, 24, dtype=torch.uint8), (4096, 8), 8),
        (torch.zeros(4, 24, dtype=torch.uint8), (4096, 4), 4),
        (torch.zeros(4, 24, dtype=torch.uint8), (4097, 8), 1),
        (torch.zeros(4, 6, dtype=torch.int16), (4096,), 4),
        (torch.zeros(4, 2, 12, dtype=torch.int16)[:, :, :8], (4096,), 8),
        (torch.zeros(4, 2, 10, dtype=torch.int16)[:, :, :8], (4096,), 4),
        (torch.zeros(4, 8, 4, dtype=torch.int16).swapaxes(1, 2), (4096,), 2),
        (torch.zeros(4, 8, 4, dtype=torch.int16).swapaxes(1, 2), (4097,), 1),
    ],
)
def test_integers_are_as_wide_as_every_place_allows(page: torch.Tensor, places: tuple[int, ...], width: int) -> None:
    found = geometry_of(page)
    assert found.width(*places) == width
    sizes, strides = found.as_integers(width)
    assert math.prod(sizes) * width == page[0].numel() * page.element_size()
    reach = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) * width + width
    of_torch = sum((size - 1) * stride for size, stride in zip(page.shape[1:], page.stride()[1:], strict=True)) + 1
    assert reach == of_torch * page.element_size()


LAYOUT = Layout(
    chunk_tokens=64,
    regions=(Region(name="kv", layers=2, block_tokens=16, block_nbytes=64, dtype="uint8", packing="test"),),
)


class Recording(Staged):
    """A path that says which copies took it, and may refuse or fail."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.taken: list[bool] = []
        self.reason = ""
        self.error: Exception | None = None

    def plan(self, copy: Any) -> Any:
        if self.reason:
            return self.reason
        self.taken.append(copy.to_host)
        plan = super().plan(copy)
        return Plan(plan.table, self._failing(plan.steps)) if self.error else plan

    def _failing(self, steps: Any) -> Iterator[Any]:
        yield next(iter(steps))
        assert self.error is not None
        raise self.error


class RecordingDevice(StagedDevice):
    def new_paths(self, staging_nbytes: int) -> dict[str, CopyPath]:
        self.recorded = {name: Recording() for name in self.path_names}
        return dict(self.recorded)

    def copies(self) -> None:
        """A gather, a scatter."""
        pages = [[torch.full((8, 64), 7, dtype=torch.uint8) for _ in range(2)]]
        out = [memoryview(bytearray(LAYOUT.nbytes))]
        assert self.gather(pages, [4, 2, 7, 1], LAYOUT, out).wait(60)
        assert bytes(out[0]) == b"\x07" * LAYOUT.nbytes
        assert self.scatter(out, LAYOUT, pages, [4, 2, 7, 1]).wait(60)

    def counts(self) -> list[tuple[int, int]]:
        """(gathers, scatters) by each path."""
        return [(sum(path.taken), len(path.taken) - sum(path.taken)) for path in self.recorded.values()]


@pytest.fixture
def device() -> Iterator[RecordingDevice]:
    opened = RecordingDevice()
    yield opened
    opened.close()


def test_each_direction_goes_by_the_path_that_it_was_told(device: RecordingDevice) -> None:
    assert isinstance(device, SupportsPaths)
    device.copies()
    assert device.counts() == [(1, 1), (0, 0), (0, 0)]
    device.use(gather="batch", scatter="kernel")
    device.copies()
    assert device.counts() == [(1, 1), (0, 1), (1, 0)]
    with pytest.raises(DeviceError, match="no path 'fast', there are staged, kernel, batch"):
        device.use(gather="fast", scatter="kernel")
    device.copies()
    assert device.counts() == [(1, 1), (0, 2), (2, 0)]


def test_what_a_path_cannot_take_goes_by_the_first_and_is_said_once(
    device: RecordingDevice, caplog: pytest.LogCaptureFixture
) -> None:
    device.use(gather="kernel", scatter="kernel")
    device.recorded["kernel"].reason = "host memory that is not pinned"
    with caplog.at_level(logging.INFO):
        device.copies()
        device.copies()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "gather by staged instead of kernel: host memory that is not pinned"
    assert device.unusable() == {"kernel": "host memory that is not pinned"}
    assert device.counts() == [(2, 2), (0, 0), (0, 0)]
    device.recorded["kernel"].reason = ""
    device.copies()
    assert device.counts()[1] == (1, 1)
    device.use(gather="kernel", scatter="kernel")
    assert device.unusable() == {}


def test_a_path_that_fails_is_left_and_the_copy_is_done_by_the_first(
    device: RecordingDevice, caplog: pytest.LogCaptureFixture
) -> None:
    device.use(gather="kernel", scatter="staged")
    device.recorded["kernel"].error = ValueError("simulated: no such instruction")
    device.copies()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("gather by the path kernel failed, from now on by staged: ")
    assert "no such instruction" in line
    assert "no such instruction" in device.unusable()["kernel"]
    device.copies()
    assert device.counts() == [(2, 2), (1, 0), (0, 0)]


def test_without_the_vendors_library_there_is_the_staged_path_alone() -> None:
    device = StagedDevice()
    assert set(device.unusable()) == {"kernel", "batch"}
    device.close()


def test_memory_that_is_not_pinned_is_not_for_kernels_and_batches() -> None:
    class Paged(StagedDevice):
        def library(self) -> RuntimeLibrary:
            return RuntimeLibrary(CUDA, SimulatedLibrary(CUDA))

    device = Paged()
    pages = [[torch.zeros(8, 64, dtype=torch.uint8) for _ in range(2)]]
    out = [memoryview(bytearray(LAYOUT.nbytes))]
    for name in ("kernel", "batch"):
        device.use(gather=name, scatter=name)
        assert device.gather(pages, [4, 2, 7, 1], LAYOUT, out).wait(60)
        if name not in ("kernel",) or importlib.util.find_spec("triton"):
            assert device.unusable()[name] == "host memory that is not pinned"
    device.close()


def test_batches_join_neighbours_and_refuse_crumbs() -> None:
    simulated = SimulatedLibrary(CUDA)

    class Batched(StagedDevice):
        def new_paths(self, staging_nbytes: int) -> dict[str, CopyPath]:
            batch = Batch(RuntimeLibrary(CUDA, simulated), fewest_nbytes=64)
            return {STAGED: Staged(staging_nbytes), "batch": batch}

        def reach(self, address: int, nbytes: int) -> int | None:
            return address

    device = Batched()
    device.use(gather="batch", scatter="batch")
    packed = torch.zeros(8, 64, dtype=torch.uint8)
    out = [memoryview(bytearray(LAYOUT.nbytes))]
    assert device.gather([[packed, packed]], [4, 5, 6, 1], LAYOUT, out).wait(60)
    assert [count for count, _, _ in simulated.calls] == [4]
    assert device.scatter(out, LAYOUT, [[packed, packed.clone()]], [4, 5, 6, 1], skip_blocks=3).wait(60)
    assert [count for count, _, _ in simulated.calls] == [4, 2]
    crumbs = torch.zeros(8, 2, 32, dtype=torch.uint8).swapaxes(0, 1).reshape(8, 2, 32)
    apart = torch.zeros(2, 8, 32, dtype=torch.uint8).swapaxes(0, 1)
    assert device.gather([[crumbs, apart]], [4, 5, 6, 1], LAYOUT, out).wait(60)
    assert device.unusable() == {"batch": "blocks in pieces of 32 bytes"}
    device.close()
