"""The torch device under the laws, on tensors of the CPU: copied directly, and staged as on an accelerator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lagging import StagedDevice

from lmcache_core import Chain, Family, Group, GroupKind, Layout, Model, Probe, Region, Shard, open_cache
from lmcache_core.testing import DeviceLaws
from lmcache_device_torch import TorchDevice


class DirectDevice(TorchDevice):
    api_version = (1, 0)
    torch_type = "cpu"

    @classmethod
    def probe(cls) -> Probe:
        return Probe(1)


class TensorLaws(DeviceLaws):
    """The laws, with pages that are tensors of the CPU."""

    def to_device(self, array: Any) -> Any:
        return torch.from_numpy(array.copy())

    def to_host(self, placed: Any) -> Any:
        return placed.numpy()

    def overwrite(self, placed: Any, array: Any) -> None:
        placed.copy_(torch.from_numpy(array))

    def engine_stream(self) -> Any:
        return ThisThread()


class ThisThread:
    """The stream of an engine that computes in the thread of the law."""

    def run(self, work: Callable[[], None]) -> None:
        work()


class TestDirect(TensorLaws):
    device_class = DirectDevice


class TestStaged(TensorLaws):
    device_class = StagedDevice


class TestStagedThroughALittleMemory(TensorLaws):
    """A staging buffer that hardly any layer fits into."""

    device_class = StagedDevice

    def new_device(self) -> StagedDevice:
        return StagedDevice(staging_nbytes=1500)


CONFIG = """
chunk_tokens: 64
device: inline:StagedDevice
tiers: [{{name: host, backend: memory, capacity: 16MiB}}]
plugins: {{inline: {inline}}}
"""


def test_a_cache_stores_and_loads_through_it(tmp_path: Path) -> None:
    layout = Layout(
        chunk_tokens=64,
        regions=(Region(name="kv", layers=3, block_tokens=16, block_nbytes=2048, dtype="bfloat16", packing="test"),),
    )
    family = Family(model="m", weights="w", kv_dtype="bfloat16", chunk_tokens=64)
    shard = Shard.of(family, layout, layers=(0, 3))
    model = Model(family, (Group(GroupKind.FULL, (shard,)),))
    (tmp_path / "lmcache.yaml").write_text(CONFIG.format(inline=Path(__file__).with_name("lagging.py")))
    bits = torch.randint(0, 256, (3, 16, 2048), dtype=torch.uint8)
    there = [list(bits.clone().view(torch.bfloat16))]
    back = [[torch.zeros_like(page) for page in there[0]]]
    cache = open_cache(tmp_path / "lmcache.yaml")
    try:
        chain = Chain.of(model, range(128))
        stored = cache.store(chain, shard, range(2), there, [3, 1, 4, 15, 9, 2, 6, 5]).wait(60)
        assert stored is not None
        assert stored.ok_chunks == 2
        hit = cache.lookup(chain, "r")
        loaded = cache.retrieve(hit, shard, range(2), back, [8, 9, 10, 11, 0, 1, 2, 3], skip_tokens=16).wait(60)
        assert loaded is not None
        assert loaded.ok_chunks == 2
        cache.release("r")
    finally:
        cache.close()
    for page, source in zip(back[0], there[0], strict=True):
        wanted = torch.zeros_like(page)
        wanted[[9, 10, 11, 0, 1, 2, 3]] = source[[1, 4, 15, 9, 2, 6, 5]]
        assert torch.equal(page.view(torch.int16), wanted.view(torch.int16))
