"""Plugins written for API 1.0 load, keep the laws of their time and serve a cache, in every core that speaks 1.x."""

from __future__ import annotations

import hashlib
import importlib
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from lmcache_core import (
    CacheConfig,
    Codec,
    Context,
    Device,
    EvictionPolicy,
    Family,
    Group,
    GroupKind,
    Layout,
    Model,
    RawOptions,
    Region,
    Shard,
    TierConfig,
    open_cache,
    plugins,
)
from lmcache_core.config import PluginsConfig
from lmcache_core.testing import BackendLaws, CodecLaws, DeviceLaws, PolicyLaws

FROZEN = Path(__file__).parent / "frozen"
NAME = "frozen-1-0"
DIGESTS = {"lmcache-frozen-1-0": "6959e8ff5d57453efd2aaced99cb779a77faa2ba0d41d7cde733d923bc3fe15e"}
"""Of each package in `frozen/`; a change of one is a change of what was promised to others."""


def digest(package: Path) -> str:
    state = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if path.is_file() and path.suffix in (".py", ".toml", ".typed"):
            text = path.read_bytes()
            state.update(f"{path.relative_to(package).as_posix()} {len(text)}\n".encode() + text)
    return state.hexdigest()


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMCACHE_TEST_FROZEN_DEVICE", "1")


def test_nothing_frozen_was_edited() -> None:
    assert {package.parent.name: digest(package.parent) for package in FROZEN.glob("*/pyproject.toml")} == DIGESTS


@pytest.mark.parametrize("group", [group for group in plugins.GROUPS if group not in (plugins.HOOKS, plugins.COMMANDS)])
def test_each_kind_loads(group: str) -> None:
    assert plugins.load(group, NAME).api_version == (1, 0)


class TestFrozenBackend(BackendLaws):
    @pytest.fixture(autouse=True)
    def file(self, tmp_path: Path) -> None:
        self.path = tmp_path / "frozen.db"

    def open_backend(self, context: Context) -> Any:
        kind = plugins.load(plugins.BACKENDS, NAME)
        return kind(RawOptions.of({"path": str(self.path)}).into(kind.Options), context)


class TestFrozenCodec(CodecLaws):
    def open_codec(self) -> Codec:
        codec: Codec = plugins.load(plugins.CODECS, NAME)()
        return codec


class TestFrozenPolicy(PolicyLaws):
    def new_policy(self) -> EvictionPolicy:
        policy: EvictionPolicy = plugins.load(plugins.POLICIES, NAME)()
        return policy


class TestFrozenDevice(DeviceLaws):
    device_class: ClassVar[type[Device]]

    @pytest.fixture(autouse=True)
    def load(self) -> None:
        type(self).device_class = plugins.load(plugins.DEVICES, NAME)


def test_all_of_them_serve_one_cache_and_its_next_process(tmp_path: Path) -> None:
    heard: Any = importlib.import_module("lmcache_frozen_1_0.observer").heard
    heard.clear()
    region = Region(name="kv", layers=2, block_tokens=16, block_nbytes=512, dtype="float16", packing="NHD")
    layout = Layout(chunk_tokens=64, regions=(region,))
    family = Family(model="frozen", weights="1", kv_dtype="float16", chunk_tokens=64)
    shard = Shard.of(family, layout, layers=(0, 2))
    model = Model(family, (Group(GroupKind.FULL, (shard,)),))
    config = CacheConfig(
        chunk_tokens=64,
        device=NAME,
        tiers=(
            TierConfig("host", "memory", capacity_nbytes=1 << 20, policy=NAME),
            TierConfig("store", NAME, capacity_nbytes=1 << 20, policy=NAME, codec=NAME,
                       options=RawOptions.of({"path": str(tmp_path / "store.db")})),
        ),
        plugins=PluginsConfig(hooks=(NAME,)),
    )  # fmt: skip
    pages = [[np.random.default_rng(layer).integers(0, 9, (8, 256), np.uint16) for layer in range(2)]]
    empty = [[np.zeros_like(page) for page in region] for region in pages]
    with open_cache(config) as cache:
        chain = cache.chain(range(128), model)
        stored = cache.store(chain, shard, range(2), pages, list(range(8))).wait(10)
        assert stored is not None
        assert cache.drain(10)
    with open_cache(config) as cache:
        hit = cache.lookup_answered(chain, "r", timeout_s=5)
        assert hit.chunks == 2
        assert cache.retrieve(hit, shard, range(2), empty, list(range(8))).wait(10) is not None
        cache.release("r")
    assert all(np.array_equal(a, b) for a, b in zip(pages[0], empty[0], strict=True))
    assert heard["started"] == heard["stopping"] == 2
    assert heard["retrieved"] == 2
    assert heard["stored in store"] >= 2
