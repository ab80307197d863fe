"""How fast a device copies chunks of an 8B-class model, by each of its paths, beside one large copy."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from lmcache_core.buffers import Extent, check_host_memory
from lmcache_core.device import Device, Fence, SupportsPaths
from lmcache_core.errors import DeviceError
from lmcache_core.layout import Layout, Region

LAYERS: Final = 32
BLOCK_TOKENS: Final = 16
KV: Final = Region(
    name="kv", layers=LAYERS, block_tokens=BLOCK_TOKENS, block_nbytes=64 << 10, dtype="raw", packing="bench"
)
"""Keys and values of 8 heads of 128 numbers of 2 bytes: 128 KiB for each token."""
LAYOUT: Final = Layout(chunk_tokens=256, regions=(KV,))
PATTERNS: Final = ("in order", "scattered")
DIRECT: Final = "direct"
"""What the one path of a device without several is called."""
TIMEOUT_S: Final = 60.0

Copy = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Subject:
    """A device, where its pages lie, and one large copy of as many bytes: out of there, and into there."""

    device: Device
    where: str
    place: Callable[[Any], Any]
    large: Callable[[Any], tuple[Copy, Copy]]
    several: bool
    """Whether copies of these pages have several paths."""

    @property
    def paths(self) -> Sequence[str]:
        return self.device.path_names if self.several and isinstance(self.device, SupportsPaths) else (DIRECT,)

    def unusable(self) -> dict[str, str]:
        return dict(self.device.unusable()) if self.several and isinstance(self.device, SupportsPaths) else {}

    def use(self, path: str) -> None:
        if self.several and isinstance(self.device, SupportsPaths):
            self.device.use(gather=path, scatter=path)


@dataclass(frozen=True, slots=True)
class Figure:
    """One path with one pattern of blocks, medians over the rounds; ratios are of one large copy in the same round."""

    path: str
    blocks: str
    gather_gib_s: float
    gather_ratio: float
    scatter_gib_s: float
    scatter_ratio: float


@dataclass(frozen=True, slots=True)
class Speeds:
    large_gather_gib_s: float
    large_scatter_gib_s: float
    figures: list[Figure]
    unusable: dict[str, str]

    def fastest(self, direction: str, first: str, by: float) -> str:
        """With scattered blocks, which engines have; another than the first only if it is `by` times as fast."""
        speeds = {f.path: getattr(f, f"{direction}_gib_s") for f in self.figures if f.blocks == PATTERNS[1]}
        best = max(speeds, key=speeds.__getitem__)
        return best if first not in speeds or speeds[best] > by * speeds[first] else first


def subject_of(device: Device, *, on_cpu: bool) -> Subject:
    """The device with pages in its own memory, or in the CPU's."""
    if device.torch_type == "cpu":
        return Subject(device, "the CPU's memory", lambda array: array, _plain, isinstance(device, SupportsPaths))
    torch: Any = importlib.import_module("torch")
    if on_cpu:
        return Subject(device, "torch tensors in the CPU's memory", torch.from_numpy, _plain, False)
    kind = device.torch_type
    accelerator = getattr(torch, kind)

    def large(data: Any) -> tuple[Copy, Copy]:
        host = torch.from_numpy(data).pin_memory()
        there = host.to(kind)

        def copy(source: Any, target: Any) -> None:
            target.copy_(source, non_blocking=True)
            accelerator.synchronize()

        return lambda: copy(there, host), lambda: copy(host, there)

    return Subject(device, f"memory of {kind}", lambda array: torch.from_numpy(array).to(kind), large, True)


def _plain(data: Any) -> tuple[Copy, Copy]:
    other = np.zeros_like(data)
    return lambda: np.copyto(other, data), lambda: np.copyto(data, other)


def measure(subject: Subject, chunks: int, rounds: int) -> Speeds:
    """Every path takes its turn in every round, after one that checks the bytes and does not count."""
    nbytes = chunks * LAYOUT.nbytes
    check_host_memory(5 * nbytes)
    extent = Extent(0, nbytes)
    try:
        extent.prefault()
        return _measure(subject, extent, chunks, rounds)
    finally:
        extent.close()


def _measure(subject: Subject, extent: Extent, chunks: int, rounds: int) -> Speeds:
    random = np.random.default_rng(0)
    blocks = chunks * LAYOUT.blocks(KV)
    ids = {"in order": list(range(blocks)), "scattered": random.permutation(2 * blocks)[:blocks].tolist()}
    pages = [[subject.place(np.ones((2 * blocks, KV.block_nbytes), np.uint8)) for _ in range(LAYERS)]]
    slab = np.frombuffer(extent.view, np.uint8)
    data = random.integers(0, 256, extent.nbytes, np.uint8)
    outward, inward = subject.large(data.copy())
    views = [extent.view[start : start + LAYOUT.nbytes] for start in range(0, extent.nbytes, LAYOUT.nbytes)]
    device = subject.device

    def gather(pattern: str) -> None:
        _complete(device.gather(pages, ids[pattern], LAYOUT, views))

    def scatter(pattern: str) -> None:
        _complete(device.scatter(views, LAYOUT, pages, ids[pattern]))

    def check(path: str, pattern: str, mark: int) -> None:
        np.bitwise_xor(data, np.uint8(mark), out=slab)
        scatter(pattern)
        for reader in (subject.paths[0], path):
            subject.use(reader)
            slab.fill(mark)
            gather(pattern)
            if not np.array_equal(slab ^ np.uint8(mark), data):
                raise DeviceError(f"path {path}, blocks {pattern}: other bytes came back than went in")

    unusable = subject.unusable()
    cases = [(path, pattern) for path in subject.paths if path not in unusable for pattern in PATTERNS]
    taken: dict[tuple[str, str], list[float]] = {}
    device.register(extent.address, extent.nbytes)
    try:
        for number in range(rounds + 1):
            taken.setdefault(("large", "gather"), []).append(_seconds(outward))
            taken.setdefault(("large", "scatter"), []).append(_seconds(inward))
            for mark, (path, pattern) in enumerate(cases, 1):
                if path in unusable:
                    continue
                subject.use(path)
                if not number:
                    check(path, pattern, mark)
                for name, work in (("gather", gather), ("scatter", scatter)):
                    spent = _seconds(lambda work=work, pattern=pattern: work(pattern))  # type: ignore[misc]
                    taken.setdefault((f"{path} {pattern}", name), []).append(spent)
                unusable |= subject.unusable()  # found out by trying
    finally:
        device.unregister(extent.address, extent.nbytes)
    counted = {key: np.array(values[1:]) for key, values in taken.items()}

    def speed(of: str, direction: str) -> float:
        return float(extent.nbytes / np.median(counted[of, direction]) / 2**30)

    def ratio(of: str, direction: str) -> float:
        return float(np.median(counted["large", direction] / counted[of, direction]))

    figures = [
        Figure(
            path, pattern, *(of(f"{path} {pattern}", name) for name in ("gather", "scatter") for of in (speed, ratio))
        )
        for path, pattern in cases
        if path not in unusable
    ]
    return Speeds(speed("large", "gather"), speed("large", "scatter"), figures, unusable)


def _complete(fence: Fence) -> None:
    if not fence.wait(TIMEOUT_S):
        raise DeviceError(f"a copy did not end in {TIMEOUT_S:.0f} s")


def _seconds(work: Copy) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
