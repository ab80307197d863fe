"""What device laws work with: an engine whose pages lie on the device, poisoned host buffers, a fence that is late."""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np

from ..backend import ApiVersion
from ..device import Device, Fence
from ..layout import PAGE_NBYTES, Layout, Region
from . import memory
from .laws import LawBroken, Laws, expect, skip

Array = Any
"""A numpy array; its element type is known only when a law runs."""
TIMEOUT_S: Final = 30.0
BLOCKS: Final = 24
"""Blocks that the engine of a law has."""
CHUNK_TOKENS: Final = 64
_BITS: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True)
class Plane:
    """How an engine lays out the pages of one region and layer: a base array, and the view of it that are the pages."""

    name: str
    shape: Callable[[int, int], tuple[int, ...]]
    """Of the base array, from the number of blocks and of elements in a block."""
    view: Callable[[Any], Any]
    """Plain slicing and `swapaxes`, which numpy and torch spell alike."""


PACKED: Final = Plane("packed", lambda blocks, n: (blocks, n), lambda base: base)
APART: Final = Plane("keys and values apart", lambda blocks, n: (2, blocks, n // 2), lambda base: base.swapaxes(0, 1))
PADDED: Final = Plane("padded blocks", lambda blocks, n: (blocks, n + 5), lambda base: base[:, : base.shape[1] - 5])
SPREAD: Final = Plane("every second block", lambda blocks, n: (2 * blocks, n), lambda base: base[::2])
HEADS_FIRST: Final = Plane(
    "tokens and heads swapped", lambda blocks, n: (blocks, 4, n // 4), lambda base: base.swapaxes(1, 2)
)
ALL_LAYERS: Final = Plane("all layers in one storage", lambda blocks, n: (blocks, 3, n), lambda base: base[:, 1])
STRIDED: Final = (APART, PADDED, SPREAD, HEADS_FIRST, ALL_LAYERS)


@dataclass(frozen=True, slots=True)
class Shape:
    """One shape of KV: a layout, the element type of its pages, and how they lie."""

    name: str
    layout: Layout
    dtype: str
    plane: Plane = PACKED

    def __str__(self) -> str:
        return f"{self.name}, {self.dtype}, {self.plane.name}"


def _layout(*regions: tuple[str, int, int], block_tokens: int = 16) -> Layout:
    return Layout(
        chunk_tokens=CHUNK_TOKENS,
        regions=tuple(
            Region(name=name, layers=layers, block_tokens=block_tokens, block_nbytes=nbytes, dtype="raw", packing="law")
            for name, layers, nbytes in regions
        ),
    )


SHAPES: Final = (
    Shape("keys and values in one region", _layout(("kv", 3, 1024)), "float16"),
    Shape("keys and values in two regions", _layout(("k", 2, 512), ("v", 2, 768)), "float32"),
    Shape("latents", _layout(("latent", 3, 16 * 18)), "int16"),
    Shape("one block for each token", _layout(("k", 2, 96), ("v", 2, 96), block_tokens=1), "int16"),
    Shape("odd bytes", _layout(("state", 2, 7)), "uint8"),
    Shape("one block in a chunk", _layout(("kv", 2, 2048), block_tokens=CHUNK_TOKENS), "int32"),
    Shape("eight-byte elements", _layout(("kv", 1, 64)), "float64"),
    Shape("large", _layout(("kv", 2, 1 << 20)), "float16"),
)
KV: Final = SHAPES[0]


class Engine:
    """Pages on the device, and the bytes that they must hold by now.  Every byte of a base array is compared."""

    def __init__(self, subject: DeviceSubject, shape: Shape, seed: int = 1, patterns: Sequence[int] = ()) -> None:
        self.subject = subject
        self.shape = shape
        self.layout = shape.layout
        # As many as four chunks need, where blocks are large.
        enough = 4 * shape.layout.blocks(shape.layout.regions[0])
        self.blocks = BLOCKS if shape.layout.nbytes < 1 << 20 and enough <= BLOCKS else enough
        self._patterns = patterns
        self._random = np.random.default_rng(seed)
        self.expected = [[self._content(region) for _ in range(region.layers)] for region in self.layout.regions]
        self._placed = [[subject.to_device(self._typed(base)) for base in layer] for layer in self.expected]
        self.pages = [[shape.plane.view(base) for base in layer] for layer in self._placed]

    def _content(self, region: Region) -> Array:
        itemsize = np.dtype(self.shape.dtype).itemsize
        shape = self.shape.plane.shape(self.blocks, region.block_nbytes // itemsize)
        if self._patterns:
            return np.resize(np.array(self._patterns, _BITS[itemsize]), shape)
        return np.frombuffer(self._random.bytes(int(np.prod(shape)) * itemsize), _BITS[itemsize]).reshape(shape).copy()

    def _typed(self, base: Array) -> Array:
        return base.view(self.shape.dtype).copy()

    def compute(self) -> None:
        """New content everywhere, as after a step of the engine."""
        for region, layers, placed in zip(self.layout.regions, self.expected, self._placed, strict=True):
            for layer, base in enumerate(layers):
                base[...] = self._content(region)
                self.subject.overwrite(placed[layer], self._typed(base))

    def some_ids(self, chunks: int) -> list[int]:
        """Distinct block ids for as many chunks, in no order."""
        return [int(i) for i in self._random.permutation(self.blocks)[: chunks * self.layout.blocks(self.first)]]

    @property
    def first(self) -> Region:
        return self.layout.regions[0]

    def block(self, region: int, layer: int, block: int) -> Array:
        """The bits of one block, to be read or assigned."""
        return self.shape.plane.view(self.expected[region][layer])[block]

    def chunks(self, ids: Sequence[int], layers: range | None = None) -> list[bytes]:
        """What `gather` of `ids` must leave in poisoned buffers."""
        per_chunk = self.layout.blocks(self.first)
        found = []
        for start in range(0, len(ids), per_chunk):
            parts = []
            for number, region in enumerate(self.layout.regions):
                for layer in range(region.layers):
                    wanted = layers is None or layer in layers
                    for block in ids[start : start + per_chunk]:
                        left = memory.poison(region.block_nbytes)
                        parts.append(self.block(number, layer, block).tobytes() if wanted else left)
            found.append(b"".join(parts))
        return found

    def store(self, chunks: Sequence[bytes], ids: Sequence[int], layers: range | None = None, skip: int = 0) -> None:
        """Note in `expected` what `scatter` must do."""
        per_chunk = self.layout.blocks(self.first)
        for index, chunk in enumerate(chunks):
            offset = 0
            for number, region in enumerate(self.layout.regions):
                for layer in range(region.layers):
                    for place in range(per_chunk):
                        if (layers is None or layer in layers) and index * per_chunk + place >= skip:
                            block = self.block(number, layer, ids[index * per_chunk + place])
                            bits = np.frombuffer(chunk, block.dtype, block.size, offset)
                            block[...] = bits.reshape(block.shape)
                        offset += region.block_nbytes

    def check(self, when: str) -> None:
        """Every byte on the device is as expected, the padding between blocks too."""
        for region, layers, placed in zip(self.layout.regions, self.expected, self._placed, strict=True):
            for layer, base in enumerate(layers):
                found = np.ascontiguousarray(self.subject.to_host(placed[layer])).view(base.dtype)
                if not np.array_equal(found, base):
                    blocks = np.argwhere((found != base).reshape(base.shape))[0]
                    raise LawBroken(
                        f"{when} ({self.shape}): the pages of region {region.name!r}, layer {layer} are not what they "
                        f"must be, first at {tuple(int(i) for i in blocks)} of the shape {base.shape}"
                    )


class Buffers:
    """Poisoned host memory for chunks: each begins at a page, with a guard page before and behind it."""

    def __init__(self, layout: Layout, count: int) -> None:
        self._step = memory.round_up(layout.nbytes, PAGE_NBYTES) + PAGE_NBYTES
        self._all = memory.buffer(PAGE_NBYTES + count * self._step, PAGE_NBYTES)
        self._nbytes = layout.nbytes
        self.address = np.frombuffer(self._all, np.uint8).ctypes.data
        self.nbytes = self._all.nbytes
        starts = [PAGE_NBYTES + index * self._step for index in range(count)]
        self.views = [self._all[start : start + layout.nbytes] for start in starts]

    def fill(self, chunks: Sequence[bytes]) -> Buffers:
        for view, chunk in zip(self.views, chunks, strict=True):
            view[:] = chunk
        return self

    def check(self, chunks: Sequence[bytes], when: str) -> None:
        """The buffers hold `chunks`, and nothing around them was written to."""
        for index, (view, chunk) in enumerate(zip(self.views, chunks, strict=True)):
            found, wanted = np.frombuffer(view, np.uint8), np.frombuffer(chunk, np.uint8)
            if not np.array_equal(found, wanted):
                first = int(np.argmax(found != wanted))
                raise LawBroken(f"{when}: buffer {index} is wrong from byte {first} of {len(wanted)} on")
        ends = [0, *(PAGE_NBYTES + index * self._step + self._nbytes for index in range(len(self.views)))]
        for index, end in enumerate(ends):
            guard = self._all[end : PAGE_NBYTES + index * self._step]
            expect(memory.is_poison(guard), f"{when}: bytes around the buffers were written to")


class Late:
    """The fence of work that has not been done: it is done when somebody waits for it, in whatever way."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._asked = False
        self.finished = False

    def done(self) -> bool:
        if self._asked:
            self.wait()
        self._asked = True
        return self.finished

    def wait(self, timeout_s: float | None = None) -> bool:
        with self._lock:
            if not self.finished:
                self._work()
                self.finished = True
        return True

    def make_stream_wait(self, stream: Any) -> None:
        self.wait()


class DeviceSubject(Laws):
    """The device that laws are checked on; a test-suite supplies `device_class`."""

    device_class: ClassVar[type[Device]]
    _device: Device | None = None

    def new_device(self) -> Device:
        """Optional: a device, freshly made.  Called only where its class finds the hardware."""
        return self.device_class()

    # How an engine puts its pages on this device.  The defaults are numpy for the CPU, else torch.

    def to_device(self, array: Array) -> Any:
        """An array on the device with this content, shape and element type."""
        if self.device.torch_type == "cpu":
            return array.copy()
        return _torch().from_numpy(array).to(self.device.torch_type)

    def to_host(self, placed: Any) -> Array:
        """The content of what `to_device` returned."""
        return placed if isinstance(placed, np.ndarray) else placed.cpu().numpy()

    def overwrite(self, placed: Any, array: Array) -> None:
        """Replace the content of what `to_device` returned; complete on return."""
        if isinstance(placed, np.ndarray):
            np.copyto(placed, array)
        else:
            placed.copy_(_torch().from_numpy(array))

    def engine_work(self, work: Callable[[], None]) -> Fence:
        """The fence of `work`, which the engine has yet to do.  Optional: queue it on a stream of the device."""
        return Late(work)

    def engine_stream(self) -> Any:
        """The stream that `to_host` reads on; what `Fence.make_stream_wait` is given."""
        if self.device.torch_type == "cpu":
            return None
        return getattr(_torch(), self.device.torch_type).current_stream()

    def device_nbytes(self) -> int:
        """Memory of the device in use, so that growth is seen; by default what torch counts."""
        if self.device.torch_type == "cpu":
            return 0
        module = getattr(_torch(), self.device.torch_type)
        return int(module.memory_allocated()) if hasattr(module, "memory_allocated") else 0

    @property
    def device(self) -> Device:
        if self._device is None:
            probe = self.device_class.probe()
            if not probe.count:
                skip(f"the device is not there: {probe.reason}")
            self._device = self.new_device()
        return self._device

    def api_version(self) -> ApiVersion:
        version = getattr(self.device_class, "api_version", None)
        return version if isinstance(version, tuple) else (1, 0)  # that it is none is for a law to say

    def setup_law(self) -> None:
        self._device = None

    def teardown_law(self) -> None:
        device, self._device = self._device, None
        if device is not None:
            device.close()

    def gather(
        self,
        engine: Engine,
        ids: Sequence[int],
        *,
        layers: range | None = None,
        after: Fence | None = None,
    ) -> Buffers:
        """The chunks of `ids` in fresh buffers, complete."""
        buffers = Buffers(engine.layout, len(ids) // engine.layout.blocks(engine.first))
        complete(
            self.device.gather(engine.pages, ids, engine.layout, buffers.views, layers=layers, after=after), "gather"
        )
        return buffers

    def scatter(
        self,
        engine: Engine,
        buffers: Buffers,
        ids: Sequence[int],
        *,
        layers: range | None = None,
        skip_blocks: int = 0,
        after: Fence | None = None,
    ) -> None:
        fence = self.device.scatter(
            buffers.views, engine.layout, engine.pages, ids, layers=layers, skip_blocks=skip_blocks, after=after
        )
        complete(fence, "scatter")


def complete(fence: Fence, what: str) -> None:
    expect(fence.wait(TIMEOUT_S) is True, f"the fence of {what} is not complete after {TIMEOUT_S} s")


def poll(fence: Fence, what: str) -> None:
    """Until it is done, without ever waiting for it."""
    deadline = time.monotonic() + TIMEOUT_S
    while not fence.done():
        expect(time.monotonic() < deadline, f"the fence of {what} is not done after {TIMEOUT_S} s")
        os.sched_yield()


def random_chunks(layout: Layout, count: int, seed: int) -> list[bytes]:
    random = np.random.default_rng(seed)
    return [random.bytes(layout.nbytes) for _ in range(count)]


def resources() -> tuple[set[threading.Thread], set[str]]:
    """Threads and open descriptors of this process, where the system tells."""
    descriptors: set[str] = set()
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                descriptors.add(f"{name} ({os.readlink(f'/proc/self/fd/{name}')})")
    return {thread for thread in threading.enumerate() if thread.is_alive()}, descriptors


def _torch() -> Any:
    """Torch belongs to the device's package; core and its kit do not depend on it."""
    return importlib.import_module("torch")
