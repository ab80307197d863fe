"""`plugins: {inline: FILE}`: plugins of every kind in one file, by the names of their classes; and `disable`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from lmcache_core import plugins
from lmcache_core.chain import Group, GroupKind, Model, Shard
from lmcache_core.cli import main
from lmcache_core.config import CacheConfig, parse_config
from lmcache_core.errors import CacheError, ConfigError, PluginImportFailed, PluginIncompatible, PluginNotFound
from lmcache_core.keys import Family
from lmcache_core.layout import Layout, Region
from lmcache_core.opening import open_cache
from lmcache_core.plugins import BACKENDS, CODECS, DEVICES, POLICIES

MINE = """
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lmcache_core import Codec, Probe, Traits, copy_bytes
from lmcache_core.backends.disk import DiskBackend, DiskOptions
from lmcache_core.devices.cpu import CpuDevice
from lmcache_core.policies.lru import LRU

@dataclass(frozen=True, kw_only=True)
class ShelfOptions(DiskOptions):
    label: str = "mine"

class Shelf(DiskBackend):
    api_version = (1, 0)
    Options: ClassVar[type] = ShelfOptions

class Reversed(Codec):
    api_version = (1, 0)
    def max_nbytes(self, layout): return layout.nbytes
    def encode(self, raw, layout, out):
        copy_bytes(bytes(raw)[::-1], out[: layout.nbytes])
        return layout.nbytes
    def decode(self, data, layout, out): copy_bytes(bytes(data)[::-1], out)

class Oldest(LRU):
    api_version = (1, 0)

class Slate(CpuDevice):
    api_version = (1, 0)

class NoVersion(LRU):
    pass

class Half(Codec):
    api_version = (1, 0)

thing = 3
"""
CONFIG = """
chunk_tokens: 16
device: "inline:Slate"
tiers:
  - {{name: host, backend: memory, capacity: 1MiB, policy: "inline:Oldest"}}
  - {{backend: "inline:Shelf", capacity: 1MiB, policy: "inline:Oldest", codec: "inline:Reversed",
      options: {{path: {folder}/store, label: try}}}}
plugins: {{inline: {folder}/mine.py}}
"""

DISK = """
tiers:
  - {name: host, backend: memory, capacity: 1MiB}
  - {backend: disk, options: {path: /nowhere/at/all}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def config(file: Path) -> CacheConfig:
    return parse_config(CONFIG.format(folder=file.parent), environ={})


def test_a_cache_of_inline_plugins_alone_stores_and_finds_after_a_restart(file: Path) -> None:
    region = Region(name="kv", layers=1, block_tokens=16, block_nbytes=64, dtype="uint8", packing="test")
    family = Family(model="inline", weights="1", kv_dtype="uint8", chunk_tokens=16)
    shard = Shard.of(family, Layout(chunk_tokens=16, regions=(region,)), layers=(0, 1))
    model = Model(family, (Group(GroupKind.FULL, (shard,)),))
    pages = [[np.arange(128, dtype=np.uint8).reshape(2, 64)]]
    with open_cache(config(file)) as cache:
        assert [(tier.name, tier.backend) for tier in cache.status().tiers] == [("inline", "inline:Shelf")]
        chain = cache.chain(range(16), model)
        stored = cache.store(chain, shard, range(1), pages, [0]).wait(30)
        assert stored is not None
        assert stored.ok_chunks == 1
        assert cache.drain(30)
    records = [path.read_bytes() for path in (file.parent / "store").rglob("*") if path.is_file()]
    assert any(record[4096 : 4096 + 64] == bytes(range(63, -1, -1)) for record in records)
    with open_cache(config(file)) as cache:
        hit = cache.lookup_answered(chain, "r", timeout_s=30)
        loaded = cache.retrieve(hit, shard, range(1), pages, [1]).wait(30)
        assert loaded is not None
        assert loaded.ok_chunks == 1
    assert np.array_equal(pages[0][0][0], pages[0][0][1])


def test_check_and_show_know_the_options_of_an_inline_backend(file: Path) -> None:
    path = file.parent / "lmcache.yaml"
    path.write_text(CONFIG.format(folder=file.parent))
    run = CliRunner().invoke(main, ["config", "check", "--config", str(path)])
    assert run.exit_code == 0, run.output
    run = CliRunner().invoke(main, ["config", "show", "--config", str(path)])
    assert "tiers.inline.options.label: try" in run.output
    path.write_text(path.read_text().replace("label", "lable").replace("Slate", "Slat"))
    run = CliRunner().invoke(main, ["config", "check", "--config", str(path)])
    assert run.exit_code == 2
    assert "unknown key; did you mean 'label'?" in run.output
    assert "mine.py has no Slat; did you mean 'Slate'?" in run.output


def test_all_names_of_a_file_are_of_one_module_which_is_read_again_when_it_has_changed(file: Path) -> None:
    before = set(sys.modules)
    shelf = plugins.load(BACKENDS, "inline:Shelf", inline=file)
    assert plugins.load(BACKENDS, "inline:Shelf", inline=str(file)) is shelf
    assert plugins.load(CODECS, "inline:Reversed", inline=file).__module__ == shelf.__module__
    assert len(set(sys.modules) - before) == 1
    file.write_text(MINE + "\n# changed\n")
    assert plugins.load(BACKENDS, "inline:Shelf", inline=file) is not shelf


@pytest.mark.parametrize(
    ("group", "name", "error", "says"),
    [
        (BACKENDS, "inline:Shelve", PluginNotFound, "mine.py has no Shelve; did you mean 'Shelf'?"),
        (
            BACKENDS,
            "inline:Reversed",
            PluginIncompatible,
            "is the class Reversed, not a subclass of ",
        ),
        (DEVICES, "inline:thing", PluginIncompatible, "is a int, not a subclass"),
        (
            POLICIES,
            "inline:NoVersion",
            PluginIncompatible,
            "'NoVersion' of inline plugin .* declares no api_v",
        ),
        (CODECS, "inline:Half", PluginIncompatible, "does not implement decode, encode, max_nbytes"),
    ],
)
def test_a_class_that_cannot_be_used_is_named(
    file: Path, group: str, name: str, error: type[CacheError], says: str
) -> None:
    with pytest.raises(error, match=says):
        plugins.load(group, name, inline=file)


def test_without_a_file_the_error_says_what_must_name_it() -> None:
    with pytest.raises(PluginNotFound, match="the codec 'inline:Mine' stands in a file that plugins.inline must name"):
        plugins.load(CODECS, "inline:Mine")


def test_a_file_that_fails_leaves_no_module_behind(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import nothing_of_that_name")
    before = set(sys.modules)
    for _ in range(2):
        with pytest.raises(PluginImportFailed, match=r"No module named 'nothing_of_that_name' \(.*mine\.py:1\)"):
            plugins.load(CODECS, "inline:Mine", inline=file)
    assert set(sys.modules) == before


@pytest.mark.parametrize("name", ["inline:", "inline:my-codec", "inline:a.b", "inline:" + "x" * 26, "other:Mine"])
def test_a_name_that_no_inline_class_can_have_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a plugin name"):
        parse_config(f'tiers: [{{name: host, backend: memory, capacity: 1MiB, codec: "{name}"}}]', environ={})


@pytest.mark.parametrize("key", ["disable", "hooks"])
def test_inline_names_are_no_hooks_and_cannot_be_disabled(key: str) -> None:
    with pytest.raises(ConfigError, match="is not a plugin name"):
        parse_config(f'plugins: {{{key}: ["inline:Mine"]}}', environ={})


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("device: cpu\nplugins: {disable: [cpu]}", "device 'cpu'"),
        ("plugins: {disable: [s3fifo]}", "policy 's3fifo'"),
        ("plugins: {disable: [log], hooks: [log]}", "hook 'log'"),
        ("plugins: {disable: [lmcache-core]}", "'cpu'|'s3fifo'"),
        (DISK + "plugins: {disable: [disk@lmcache-core]}", "backend 'disk'"),
        (DISK + "plugins: {disable: [identity]}", "codec 'identity'"),
    ],
)
def test_whatever_is_disabled_is_not_used_by_a_cache(text: str, what: str) -> None:
    with pytest.raises(PluginNotFound, match=f"({what}).* is disabled by plugins.disable"):
        open_cache(parse_config(text, environ={}))
