"""Devices: gather and scatter of 16 KiB blocks in random order, beside one plain copy of the same bytes.

`cpu` is core's device on numpy pages, `torch` is lmcache-device-torch on tensors of the CPU; their limit is np.copyto.
An accelerator that is here has rows of its own, whose limit is one large copy between its memory and pinned memory.
Chunks are those of a model with 8 billion parameters (128 KiB for each token): 32 layers of 64 blocks.  Besides, how
long another thread waits for the GIL meanwhile, at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from harness.caches import layout_of
from harness.gil import longest_without
from harness.measure import (
    Bytes,
    MiB,
    Options,
    Timings,
    check_equal,
    gibps,
    milliseconds,
    paired,
    private_buffer,
    random_bytes,
    seconds,
)
from harness.report import Must, Row

from lmcache_core import plugins
from lmcache_core.device import Device, Probe, SupportsPaths
from lmcache_core.devices.cpu import CpuDevice

LAYERS, BLOCKS, BLOCK_NBYTES = 32, 64, 16 << 10
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Subject:
    """A device, how an array becomes pages of it, and the plain copy that bounds it, in both directions."""

    name: str
    device: Device
    to_page: Callable[[Bytes], Any]
    out: Callable[[], object]
    back: Callable[[], object]
    must: float
    limit: str


def rows(options: Options) -> Iterator[Row]:
    chunks = 2 if options.quick else 8
    layout = layout_of(layers=LAYERS, blocks=BLOCKS, block_nbytes=BLOCK_NBYTES)
    nbytes = chunks * layout.nbytes
    ids = np.random.default_rng(0).permutation(2 * chunks * BLOCKS)[: chunks * BLOCKS].tolist()
    engine = private_buffer(2 * nbytes, huge=True)
    engine[:] = random_bytes(2 * nbytes, seed=0)
    slots, plain = private_buffer(nbytes, huge=True), private_buffer(nbytes, huge=True)
    arrays = list(engine.reshape(LAYERS, -1, BLOCK_NBYTES))
    wanted = np.concatenate([page[own] for own in np.reshape(ids, (chunks, -1)) for page in arrays]).reshape(-1)
    records = [memoryview(slots)[start : start + layout.nbytes] for start in range(0, nbytes, layout.nbytes)]
    for subject in _subjects(plain, wanted):
        device = subject.device
        pages = [[subject.to_page(array) for array in arrays]]
        device.register(slots.ctypes.data, nbytes)

        def ours(device: Device = device, pages: Any = pages) -> Timings:
            slots.fill(0)

            def gather() -> None:
                _wait(device.gather(pages, ids, layout, records))

            def scatter() -> None:
                _wait(device.scatter(records, layout, pages, ids))

            found = {"gather": seconds(gather)}
            check_equal(slots, wanted, "gather")
            found["scatter"] = seconds(scatter)
            return found | {"gather, GIL": longest_without(gather), "scatter, GIL": longest_without(scatter)}

        def limit(subject: Subject = subject) -> Timings:
            found = {"gather": seconds(subject.out), "scatter": seconds(subject.back)}
            gil = {"gather, GIL": longest_without(subject.out), "scatter, GIL": longest_without(subject.back)}
            return found | gil

        try:
            measured = paired(options, {"ours": ours, "limit": limit})
        finally:
            device.unregister(slots.ctypes.data, nbytes)
            device.close()
        for what in ("gather", "scatter"):
            yield measured.row(
                "device", f"{what}, {subject.name}", "GiB/s", what, gibps(nbytes), must=Must(ratio_limit=subject.must),
                note=f"{chunks} chunks of {layout.nbytes // MiB} MiB, blocks of 16 KiB; limit: {subject.limit}",
            )  # fmt: skip
            yield measured.row(
                "device", f"longest wait for the GIL, {what}, {subject.name}", "ms", f"{what}, GIL", milliseconds,
                must=Must(at_most=1.0), note=f"of another thread while that is copied; limit: {subject.limit}",
            )  # fmt: skip


def _subjects(plain: Bytes, data: Bytes) -> Iterator[Subject]:
    def copy() -> None:
        np.copyto(plain, data)

    yield Subject("cpu", CpuDevice(), lambda array: array, copy, copy, 0.75, "np.copyto")
    try:
        import torch

        from lmcache_device_torch import TorchDevice
    except ImportError:
        return

    class OnTheCpu(TorchDevice):
        api_version = (1, 0)
        torch_type = "cpu"

        @classmethod
        def probe(cls) -> Probe:
            return Probe(1)

    yield Subject("torch", OnTheCpu(), torch.from_numpy, copy, copy, 0.75, "np.copyto")
    for offer in plugins.discover(plugins.DEVICES):
        kind: type[Device] = plugins.load_offer(offer)
        if kind.torch_type != "cpu" and kind.probe().count:
            yield from _accelerators(offer.name, kind, data)


def _accelerators(name: str, kind: type[Device], data: Bytes) -> Iterator[Subject]:
    """One for each of its paths that can be used here."""
    first = kind()
    paths = [""]
    if isinstance(first, SupportsPaths):
        paths = [path for path in first.path_names if path not in first.unusable()]
    first.close()
    for path in paths:
        device = kind()
        if isinstance(device, SupportsPaths):
            device.use(gather=path, scatter=path)
        yield _accelerator(f"{name}, {path}" if path else name, device, data)


def _accelerator(name: str, device: Device, data: Bytes) -> Subject:
    import torch

    where: Any = getattr(torch, device.torch_type)
    host = torch.from_numpy(data).pin_memory()
    there = host.to(device.torch_type)

    def copied(source: Any, target: Any) -> Callable[[], None]:
        def copy() -> None:
            target.copy_(source, non_blocking=True)
            where.synchronize()

        return copy

    return Subject(
        name,
        device,
        lambda array: torch.from_numpy(array).to(device.torch_type),
        copied(there, host),
        copied(host, there),
        0.9,
        "one large copy of pinned memory",
    )


def _wait(fence: Any) -> None:
    assert fence.wait(TIMEOUT_S), "a copy did not end"
