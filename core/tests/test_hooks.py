"""Hooks through a whole cache: what they hear, and that none of them can cost a request."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmcache_core import hookspecs, plugins
from lmcache_core.chain import Group, GroupKind, Model, Shard
from lmcache_core.config import parse_config
from lmcache_core.events import MAX_QUEUED
from lmcache_core.keys import ChunkKey, Family
from lmcache_core.layout import Layout, Region
from lmcache_core.local import LocalCache
from lmcache_core.opening import open_cache

WAIT_S = 30.0
PAGE = Path(__file__).parents[2] / "docs" / "hooks.md"
LAYOUT = Layout(
    chunk_tokens=16,
    regions=(Region(name="kv", layers=1, block_tokens=16, block_nbytes=64, dtype="uint8", packing="test"),),
)
FAMILY = Family(model="hooks", weights="1", kv_dtype="uint8", chunk_tokens=16)
SHARD = Shard.of(FAMILY, LAYOUT, layers=(0, 1))
MODEL = Model(FAMILY, (Group(GroupKind.FULL, (SHARD,)),))
HOOKS = [name for name in vars(hookspecs) if name.startswith("lmcache_")]
CONFIG = """
chunk_tokens: 16
device: cpu
tiers:
  - {{name: host, backend: memory, capacity: 1MiB}}
  - {{name: store, backend: "inline:Store", capacity: 1MiB}}
plugins: {{inline: "{file}"}}
"""
STORE = """
import threading
from lmcache_core import BackendUnavailable, hookimpl
from lmcache_core.testing import DictBackend

class Store(DictBackend):
    api_version = (1, 0)
    away = False

    def put(self, key, data):
        if Store.away:
            raise BackendUnavailable("away")
        super().put(key, data)
"""
LISTEN = (
    STORE
    + """
heard = []
"""
    + "".join(
        f"""
@hookimpl
def {name}({arguments}):
    heard.append(("{name}", dict({", ".join(f"{each}={each}" for each in arguments.split(", "))})))
"""
        for name in HOOKS
        for arguments in [", ".join(getattr(hookspecs, name).__code__.co_varnames)]
    )
)


def hooks(body: str) -> str:
    """Every hook, without arguments, doing the same."""
    return STORE + "".join(f"\n@hookimpl\ndef {name}():\n    {body}\n" for name in HOOKS)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[str], tuple[LocalCache, Any]]]:
    """`opened(source)` opens a cache with that inline file, and gives the file's module too."""
    caches: list[LocalCache] = []

    def open_with(source: str) -> tuple[LocalCache, Any]:
        file = tmp_path / "mine.py"
        file.write_text(source)
        caches.append(open_cache(parse_config(CONFIG.format(file=file), environ={})))
        return caches[-1], plugins._import_file(file)

    yield open_with
    for cache in caches:
        cache.close()


def serve(cache: LocalCache, number: int) -> None:
    """One request: a chunk is stored and comes back exactly."""
    pages = [[np.random.default_rng(number).integers(0, 255, (2, 64), np.uint8)]]
    chain = cache.chain(range(number * 16, number * 16 + 16), MODEL)
    stored = cache.store(chain, SHARD, range(1), pages, [0]).wait(WAIT_S)
    assert stored is not None
    assert stored.ok_chunks == 1
    hit = cache.lookup(chain, f"r{number}")
    loaded = cache.retrieve(hit, SHARD, range(1), pages, [1]).wait(WAIT_S)
    assert loaded is not None
    assert loaded.ok_chunks == 1
    cache.release(f"r{number}")
    assert np.array_equal(pages[0][0][0], pages[0][0][1])


def test_every_hook_is_heard_with_what_its_specification_says(
    opened: Callable[[str], tuple[LocalCache, Any]],
) -> None:
    cache, module = opened(LISTEN)
    serve(cache, 0)
    assert cache.drain(WAIT_S)
    cache.evict(cache.chain(range(16), MODEL))
    cache._pool.clear(b"")
    module.Store.away = True
    for number in range(1, 40):
        serve(cache, number)
    cache.drain(WAIT_S)
    cache.close()
    heard: dict[str, list[dict[str, Any]]] = {name: [] for name in HOOKS}
    for name, arguments in module.heard:
        heard[name].append(arguments)
    assert [name for name in HOOKS if not heard[name]] == []
    assert module.heard[0] == ("lmcache_cache_started", {"cache": cache})
    assert [each["cache"] for each in heard["lmcache_cache_stopping"]] == [cache]
    stored = heard["lmcache_chunks_stored"][0]
    assert (stored["tier"], len(stored["keys"])) == ("store", 1)
    assert isinstance(stored["keys"][0], ChunkKey)
    assert stored["nbytes"] > 64
    assert stored["seconds"] >= 0
    loaded = heard["lmcache_chunks_retrieved"][0]
    assert (loaded["request"], loaded["hit_chunks"], loaded["failed_chunks"]) == ("r0", 1, 0)
    report = heard["lmcache_request_ended"][0]["report"]
    assert (report.request, report.tokens, report.hit_tokens, report.loaded_chunks) == ("r0", 16, 16, 1)
    assert [(part.tier, part.chunks) for part in report.parts] == [("host", 1)]
    saved = heard["lmcache_prompt_stored"][0]
    assert (saved["span"], list(saved["tokens"]), saved["result"].ok_chunks) == (range(1), list(range(16)), 1)
    assert heard["lmcache_cleared"] == [{"shard_id": b""}]
    gone = heard["lmcache_chunks_evicted"]
    assert {each["reason"] for each in gone} <= {"capacity", "removed", "corrupt", "lost"}
    assert {"host", "store"} <= {each["tier"] for each in gone if each["reason"] == "removed"}
    health = heard["lmcache_tier_health"][0]
    assert (health["tier"], health["healthy"]) == ("store", False)
    assert "away" in health["error"]


@pytest.mark.parametrize("body", ["raise RuntimeError('mine')", "raise SystemExit(3)", "assert False"])
def test_a_hook_that_raises_costs_no_request(
    opened: Callable[[str], tuple[LocalCache, Any]], body: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache, _ = opened(hooks(body))
    for number in range(20):
        serve(cache, number)
    assert cache.drain(WAIT_S)
    cache.close()
    assert "hook plugin 'inline': lmcache_chunks_retrieved failed" in caplog.text
    assert caplog.text.count("lmcache_chunks_retrieved failed") == 1


def test_a_hook_that_hangs_costs_no_request_and_what_it_misses_is_counted(
    opened: Callable[[str], tuple[LocalCache, Any]],
) -> None:
    events = "\nentered, go_on = threading.Event(), threading.Event()\n"
    cache, module = opened(hooks("entered.set(); go_on.wait(60)") + events)
    try:
        assert module.entered.wait(WAIT_S)
        for number in range(MAX_QUEUED // 2 + 20):  # each has a load and a store to tell of
            serve(cache, number)
            if number % 50 == 49:
                assert cache.drain(WAIT_S)
        assert cache.drain(WAIT_S)
        assert cache.metrics.count("hook_drops") > 0
    finally:
        module.go_on.set()


def test_a_slow_hook_is_served_after_the_request_and_not_before(
    opened: Callable[[str], tuple[LocalCache, Any]],
) -> None:
    # The hook goes on only when the request has been answered: were it called in between, nothing would ever end.
    cache, module = opened(hooks("answered.acquire(timeout=60)") + "\nanswered = threading.Semaphore(0)\n")
    try:
        for number in range(10):
            serve(cache, number)
            module.answered.release(8)
    finally:
        module.answered.release(1000)
    assert cache.drain(WAIT_S)


def test_the_page_lists_every_hook_and_its_example_works(capsys: pytest.CaptureFixture[str]) -> None:
    text = PAGE.read_text()
    assert sorted(re.findall(r"^\| `(lmcache_\w+)` \|", text, re.MULTILINE)) == sorted(HOOKS)
    (source,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": "example"}
    exec(source, names)
    manager = plugins.load_hooks([])
    manager.register(names["Reasons"](), "reasons")
    plugins.call_hooks(manager, "lmcache_chunks_evicted", tier="host", keys=[ChunkKey(bytes(48))], reason="capacity")
    plugins.call_hooks(manager, "lmcache_cache_stopping", cache=manager)
    assert capsys.readouterr().out == "Counter({'capacity': 1})\n"
