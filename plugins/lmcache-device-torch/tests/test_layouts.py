"""Every layout in which engines keep their KV, of every element type, copied directly and as on an accelerator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from lagging import StagedDevice

from lmcache_core import Layout, Probe, Region
from lmcache_device_torch import TorchDevice

LAYERS, BLOCKS, TOKENS, HEADS, DIM = 3, 12, 4, 2, 8
CHUNK_TOKENS = 16
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8)
Make = Callable[..., torch.Tensor]


class DirectDevice(TorchDevice):
    api_version = (1, 0)
    torch_type = "cpu"

    @classmethod
    def probe(cls) -> Probe:
        return Probe(1)


@dataclass(frozen=True, slots=True)
class Kept:
    """How an engine keeps its KV: its tensors as pages, region by region."""

    name: str
    pages: Callable[[Make], list[list[torch.Tensor]]]
    block_tokens: int = TOKENS


def _whole(make: Make, *shape: int) -> list[torch.Tensor]:
    return [make(*shape) for _ in range(LAYERS)]


KEPT = (
    Kept("(blocks, 2, block, heads, dim)", lambda m: [_whole(m, BLOCKS, 2, TOKENS, HEADS, DIM)]),
    Kept(
        "(2, blocks, block, heads, dim)",
        lambda m: [[t.transpose(0, 1) for t in _whole(m, 2, BLOCKS, TOKENS, HEADS, DIM)]],
    ),
    Kept("heads before tokens", lambda m: [[t.transpose(2, 3) for t in _whole(m, BLOCKS, 2, HEADS, TOKENS, DIM)]]),
    Kept("layers, blocks, heads, tokens in one storage", lambda m: [list(m(LAYERS, BLOCKS, 2, HEADS, TOKENS, DIM))]),
    Kept(
        "layers, 2, blocks, tokens, heads in one storage",
        lambda m: [[t.transpose(0, 1) for t in m(LAYERS, 2, BLOCKS, TOKENS, HEADS, DIM)]],
    ),
    Kept("blocks, layers, ... in one storage", lambda m: [list(m(BLOCKS, LAYERS, 2, TOKENS, HEADS, DIM).unbind(1))]),
    Kept("all layers of a block in one page", lambda m: [[m(BLOCKS, LAYERS * 2 * TOKENS * HEADS * DIM)]]),
    Kept("keys and values packed in one row", lambda m: [_whole(m, BLOCKS, TOKENS, HEADS, 2 * DIM)]),
    Kept("latents of MLA", lambda m: [_whole(m, BLOCKS, TOKENS, 36)]),
    Kept("pools of tokens", lambda m: [_whole(m, 4 * CHUNK_TOKENS, HEADS, DIM) for _ in range(2)], block_tokens=1),
    Kept(
        "pools of pages", lambda m: [[t.view(BLOCKS, -1) for t in _whole(m, BLOCKS * TOKENS, HEADS, DIM)] for _ in "kv"]
    ),
    Kept("keys wider than values", lambda m: [_whole(m, BLOCKS, TOKENS, 24), _whole(m, BLOCKS, TOKENS, 16)]),
    Kept("beside other tensors", lambda m: [[t[:, 3:-2] for t in _whole(m, BLOCKS, 2 * TOKENS + 5, DIM)]]),
    Kept("blocks of three bytes or numbers", lambda m: [_whole(m, BLOCKS, 3), _whole(m, BLOCKS, 5)]),
)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


class Rig:
    """One engine's pages full of random bits, and the chunks that must come of them."""

    def __init__(self, kept: Kept, dtype: torch.dtype, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed)
        self._dtype = dtype
        self.pages = kept.pages(self._make)
        regions = tuple(
            Region(
                name=str(number),
                layers=len(planes),
                block_tokens=kept.block_tokens,
                block_nbytes=planes[0][0].numel() * planes[0].element_size(),
                dtype=str(dtype),
                packing=kept.name,
            )
            for number, planes in enumerate(self.pages)
        )
        self.layout = Layout(chunk_tokens=CHUNK_TOKENS, regions=regions)
        self.per_chunk = CHUNK_TOKENS // kept.block_tokens
        order = torch.randperm(len(self.pages[0][0]), generator=self._random).tolist()
        self.ids = order[: 2 * self.per_chunk]

    def _make(self, *shape: int) -> torch.Tensor:
        size = torch.empty(0, dtype=self._dtype).element_size()
        numbers = torch.randint(0, 256, (int(np.prod(shape)) * size,), generator=self._random, dtype=torch.uint8)
        return numbers.view(self._dtype).view(shape)

    def chunks(self) -> list[bytes]:
        runs = [self.ids[: self.per_chunk], self.ids[self.per_chunk :]]
        return [
            b"".join(bits(page[block]) for planes in self.pages for page in planes for block in run) for run in runs
        ]

    def others(self) -> list[bytes]:
        """The blocks that no copy may touch."""
        left = [block for block in range(len(self.pages[0][0])) if block not in self.ids]
        return [bits(page[block]) for planes in self.pages for page in planes for block in left]


@pytest.fixture(params=["direct", "staged", "staged through a little memory"])
def device(request: pytest.FixtureRequest) -> Iterator[TorchDevice]:
    kinds: dict[str, Callable[[], TorchDevice]] = {
        "direct": DirectDevice,
        "staged": StagedDevice,
        "staged through a little memory": lambda: StagedDevice(staging_nbytes=100),
    }
    opened = kinds[request.param]()
    yield opened
    opened.close()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("kept", KEPT, ids=lambda kept: kept.name)
def test_blocks_go_out_and_come_back_to_others_bit_by_bit(device: TorchDevice, kept: Kept, dtype: torch.dtype) -> None:
    source, target = Rig(kept, dtype, seed=1), Rig(kept, dtype, seed=2)
    buffers = [memoryview(bytearray(b"\xa5" * source.layout.nbytes)) for _ in range(2)]
    assert device.gather(source.pages, source.ids, source.layout, buffers).wait(60)
    assert [bytes(each) for each in buffers] == source.chunks()
    untouched = target.others()
    assert device.scatter(buffers, target.layout, target.pages, target.ids).wait(60)
    assert target.chunks() == source.chunks()
    assert target.others() == untouched


def test_a_layer_has_its_own_fence_when_layers_are_scattered_one_by_one(device: TorchDevice) -> None:
    source, target = Rig(KEPT[0], torch.float16, seed=3), Rig(KEPT[0], torch.float16, seed=4)
    buffers = [memoryview(bytearray(source.layout.nbytes)) for _ in range(2)]
    assert device.gather(source.pages, source.ids, source.layout, buffers).wait(60)
    fences = device.scatter_layers(buffers, target.layout, target.pages, target.ids)
    assert len(fences) == LAYERS
    for layer, fence in enumerate(fences):
        assert fence.wait(60)
        for there, here in zip(target.ids, source.ids, strict=True):
            assert bits(target.pages[0][layer][there]) == bits(source.pages[0][layer][here])


def test_the_first_blocks_can_be_left_as_they_are(device: TorchDevice) -> None:
    source, target = Rig(KEPT[1], torch.bfloat16, seed=5), Rig(KEPT[1], torch.bfloat16, seed=6)
    buffers = [memoryview(bytearray(source.layout.nbytes)) for _ in range(2)]
    assert device.gather(source.pages, source.ids, source.layout, buffers).wait(60)
    before = [bits(target.pages[0][1][block]) for block in target.ids]
    assert device.scatter(buffers, target.layout, target.pages, target.ids, skip_blocks=3).wait(60)
    after = [bits(target.pages[0][1][block]) for block in target.ids]
    wanted = [bits(source.pages[0][1][block]) for block in source.ids]
    assert after == before[:3] + wanted[3:]


def test_records_that_may_only_be_read_can_be_scattered(device: TorchDevice) -> None:
    source, target = Rig(KEPT[0], torch.float16, seed=7), Rig(KEPT[0], torch.float16, seed=8)
    records = [memoryview(chunk) for chunk in source.chunks()]
    assert device.scatter(records, target.layout, target.pages, target.ids).wait(60)
    assert target.chunks() == source.chunks()


def test_pages_that_an_engine_made_in_inference_mode_can_be_written(device: TorchDevice) -> None:
    with torch.inference_mode():
        source, target = Rig(KEPT[-1], torch.uint8, seed=9), Rig(KEPT[-1], torch.uint8, seed=10)
    assert target.pages[0][0].is_inference()
    buffers = [memoryview(bytearray(source.layout.nbytes)) for _ in range(2)]
    for _ in range(2):
        assert device.gather(source.pages, source.ids, source.layout, buffers).wait(60)
        assert device.scatter(buffers, target.layout, target.pages, target.ids).wait(60)
    assert target.chunks() == source.chunks()
    mixed = Rig(KEPT[-1], torch.uint8, seed=11)  # and ordinary ones through the same staging buffer
    assert device.scatter(buffers, mixed.layout, mixed.pages, mixed.ids).wait(60)
    assert mixed.chunks() == source.chunks()
