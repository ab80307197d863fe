"""The vendor's runtime library: a SIMULATED one, whose functions are called as C calls them and copy for real."""

from __future__ import annotations

import ctypes
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lmcache_core import DeviceError
from lmcache_device_torch import CUDA, HIP, MACA, RuntimeLibrary
from lmcache_device_torch.library import Names

_ADDRESS, _SIZE = ctypes.c_void_p, ctypes.c_size_t


def _at(address: int, kind: Any) -> Any:
    return ctypes.cast(address, ctypes.POINTER(kind))


class SimulatedLibrary(SimpleNamespace):
    """SIMULATED: the signatures are those of the headers of CUDA 12.8 and 13 and of HIP."""

    def __init__(self, names: Names, version: int = 12080, *, batches: bool = True, result: int = 0) -> None:
        super().__init__()
        self.calls: deque[tuple[int, int, int]] = deque(maxlen=10)
        self.result = result
        fails = () if names is CUDA and version >= 13000 else (_ADDRESS,)
        batch = ctypes.CFUNCTYPE(
            ctypes.c_int, *(_ADDRESS,) * 3, _SIZE, _ADDRESS, _ADDRESS, _SIZE, *fails, _ADDRESS
        )  # fmt: skip

        def copy(targets: Any, sources: Any, sizes: Any, count: int, attributes: Any, *rest: Any) -> int:
            attributed = rest[1]
            if names is CUDA:
                order, first = _at(attributes, ctypes.c_int)[0], _at(rest[0], _SIZE)[0]
                assert (order, first, attributed) == (1, 0, 1), "in the stream's order, for all copies"
            else:
                assert (attributes, rest[0], attributed) == (None, None, 0), "HIP takes no attributes"
            for index in reversed(range(count)):  # in any order
                ends = _at(targets, _ADDRESS)[index], _at(sources, _ADDRESS)[index]
                ctypes.memmove(*ends, _at(sizes, _SIZE)[index])
            self.calls.append((count, attributed, rest[-1] or 0))
            return self.result

        def mapped(found: Any, address: int, flags: int) -> int:
            _at(found, _ADDRESS)[0] = address + 1
            return self.result

        def runtime_version(found: Any) -> int:
            _at(found, ctypes.c_int)[0] = version
            return 0

        kept = {
            "HostGetDevicePointer": ctypes.CFUNCTYPE(ctypes.c_int, _ADDRESS, _ADDRESS, ctypes.c_uint)(mapped),
            "RuntimeGetVersion": ctypes.CFUNCTYPE(ctypes.c_int, _ADDRESS)(runtime_version),
        }
        if batches:
            kept["MemcpyBatchAsync"] = batch(copy)
        for name, function in kept.items():
            setattr(self, names.prefix + name, function)


@pytest.mark.parametrize(("names", "version"), [(CUDA, 12080), (CUDA, 12090), (CUDA, 13010), (HIP, 0)])
@pytest.mark.parametrize("count", [1, 5, 10_000])
def test_every_copy_of_a_batch_is_done_in_the_stream_that_was_named(names: Names, version: int, count: int) -> None:
    simulated = SimulatedLibrary(names, version)
    source = np.random.default_rng(0).integers(0, 256, 8 * count, np.uint8)
    target = np.zeros(8 * count, np.uint8)
    places = np.random.default_rng(1).permutation(count).astype(np.uint64) * 8
    starts = np.arange(count, dtype=np.uint64) * 8
    sizes = np.full(count, 7, np.uint64)
    library = RuntimeLibrary(names, simulated)
    library.copy_batch(starts + target.ctypes.data, places + source.ctypes.data, sizes, 0xBEEF)
    wanted = source.reshape(-1, 8)[places.astype(int) // 8].copy()
    wanted[:, 7] = 0
    assert np.array_equal(target.reshape(-1, 8), wanted)
    assert sum(done for done, _, _ in simulated.calls) == count
    assert max(done for done, _, _ in simulated.calls) <= 4096
    assert {stream for _, _, stream in simulated.calls} == {0xBEEF}


@pytest.mark.parametrize(
    ("names", "simulated", "reason"),
    [
        (CUDA, SimulatedLibrary(CUDA), ""),
        (CUDA, SimulatedLibrary(CUDA, 13000), ""),
        (CUDA, SimulatedLibrary(CUDA, 12060), "cudaMemcpyBatchAsync came with CUDA 12.8, this is 12.6"),
        (CUDA, SimulatedLibrary(CUDA, 12060, batches=False), "this runtime has no cudaMemcpyBatchAsync"),
        (HIP, SimulatedLibrary(HIP), ""),
        (HIP, SimulatedLibrary(HIP, batches=False), "this runtime has no hipMemcpyBatchAsync"),
        (MACA, SimulatedLibrary(MACA), "no batched copy is known of this runtime"),
    ],
)
def test_a_runtime_without_batched_copies_says_why(names: Names, simulated: SimulatedLibrary, reason: str) -> None:
    assert RuntimeLibrary(names, simulated).without_batches() == reason


@pytest.mark.parametrize("names", [CUDA, HIP, MACA])
def test_the_address_for_kernels_is_that_of_the_runtime(names: Names) -> None:
    assert RuntimeLibrary(names, SimulatedLibrary(names)).mapped(4096) == 4097


def test_an_error_of_the_runtime_names_the_call() -> None:
    library = RuntimeLibrary(CUDA, SimulatedLibrary(CUDA, result=801))
    with pytest.raises(DeviceError, match="cudaHostGetDevicePointer: error 801"):
        library.mapped(4096)
    one = np.array([np.zeros(1).ctypes.data], np.uint64)
    with pytest.raises(DeviceError, match="cudaMemcpyBatchAsync: error 801"):
        library.copy_batch(one, one, np.array([0], np.uint64), 1)


def test_the_library_is_the_one_that_this_process_has_mapped(tmp_path: Path) -> None:
    mapped = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libc.so" in line)
    name = Path(mapped).name
    maps = tmp_path / "maps"
    maps.write_text(f"7f00-7f01 r-xp 0 fe:00 1  /x/libother.so\n7f02-7f03 r-xp 0 fe:00 1                {mapped}\n")
    found = RuntimeLibrary(Names(name.replace(".", r"\."), "me", True), maps=maps)
    assert found.without_batches() == "this runtime has no meMemcpyBatchAsync"
    with pytest.raises(DeviceError, match="no library like libcudart.* is loaded"):
        RuntimeLibrary(CUDA, maps=maps).mapped(4096)
    assert "no library like libcudart" in RuntimeLibrary(CUDA, maps=maps).without_batches()
    maps.unlink()
    assert "cannot be found" in RuntimeLibrary(CUDA, maps=maps).without_batches()


@pytest.mark.parametrize(
    ("names", "file", "fits"),
    [
        (CUDA, "libcudart.so.12", True),
        (CUDA, "libcudart-d0da41ae.so.11.0", True),
        (CUDA, "libcudart.so.13.0.48", True),
        (CUDA, "libcudartx.so", False),
        (HIP, "libamdhip64.so.7", True),
        (HIP, "libamdhip64.so", True),
        (MACA, "libmcruntime.so", True),
    ],
)
def test_a_library_is_known_by_its_name(names: Names, file: str, fits: bool, tmp_path: Path) -> None:
    (tmp_path / file).write_bytes(b"no library")
    maps = tmp_path / "maps"
    maps.write_text(f"7f00-7f01 r-xp 0 fe:00 1 {tmp_path / file}\n")
    with pytest.raises(DeviceError, match="invalid ELF|file too short" if fits else "no library like"):
        RuntimeLibrary(names, maps=maps).mapped(1)
