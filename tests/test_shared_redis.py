"""Nodes with host and disk tiers of their own over one Redis: what one stores, every other hits."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_core import open_cache

HERE = Path(__file__).parent


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"shared_redis_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


servers = _module(HERE.parent / "plugins" / "lmcache-redis" / "tests" / "servers.py")
node = _module(HERE / "shared_node.py")

CONFIG = """
chunk_tokens: 64
device: cpu
tiers:
  - {{name: host, backend: memory, capacity: 4MiB}}
  - {{name: disk, backend: disk, capacity: 16MiB, options: {{path: {path}}}}}
  - {{name: pool, backend: {backend}, timeout: 2s, options: {{url: "redis://127.0.0.1:{port}/0", ttl: 1h}}}}
"""


def config(folder: Path, name: str, port: int, backend: str = "redis") -> Path:
    """The configuration of a node: only its disk is its own."""
    path = folder / f"{name}.yaml"
    path.write_text(CONFIG.format(path=folder / name, port=port, backend=backend))
    return path


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Any]:
    server = servers.redis_server(tmp_path)
    with servers.ended(server):
        yield server


@contextlib.contextmanager
def running(config: Path, what: str) -> Iterator[dict[str, Any]]:
    """A node that has done it and is still there."""
    command = [sys.executable, str(HERE / "shared_node.py"), str(config), what]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        watch = threading.Timer(60, process.kill)
        watch.start()
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.stdin.close()
            process.wait(30)
            watch.cancel()
            watch.join()


def test_what_one_node_stores_another_hits_while_both_run(tmp_path: Path, redis: Any) -> None:
    with running(config(tmp_path, "a", redis.port), "store") as a:
        assert a["stored"] == node.CHUNKS
        with running(config(tmp_path, "b", redis.port, backend="valkey"), "load") as b:
            assert (b["hit"], b["loaded"], b["right"]) == (node.CHUNKS, node.CHUNKS, True)
            assert b["reads"] == {"disk": 0, "pool": node.CHUNKS}


def test_what_came_from_redis_is_promoted_and_outlives_it(tmp_path: Path, redis: Any) -> None:
    with running(config(tmp_path, "a", redis.port), "store"):
        pass
    with running(config(tmp_path, "b", redis.port), "load") as first:
        assert first["reads"]["pool"] == node.CHUNKS
    redis.stop()
    with running(config(tmp_path, "b", redis.port), "load") as second:
        assert (second["hit"], second["right"]) == (node.CHUNKS, True)
        assert second["reads"] == {"disk": node.CHUNKS, "pool": 0}


def test_a_record_damaged_in_redis_is_a_miss_and_mended_by_the_next_store(tmp_path: Path, redis: Any) -> None:
    with running(config(tmp_path, "a", redis.port), "store"):
        pass
    with open_cache(config(tmp_path, "c", redis.port)) as cache:
        key = cache.chain(node.PROMPT, node.MODEL).keys(node.SHARD)[2]
        redis.ask("SETRANGE", f"lmcache:{key.text}", "5000", "damaged")
        assert node.load(cache)["right"]
        assert cache.metrics.count("corruptions", tier="pool") == 1
        assert node.store(cache)["drained"]
    with running(config(tmp_path, "d", redis.port), "load") as d:
        assert (d["loaded"], d["right"]) == (node.CHUNKS, True)


def test_a_server_that_is_down_at_start_is_used_once_it_is_up_and_left_alone_when_it_dies(tmp_path: Path) -> None:
    server = servers.redis_server(tmp_path)
    server.stop()
    started = time.monotonic()
    with servers.ended(server), open_cache(config(tmp_path, "a", server.port)) as cache:
        assert time.monotonic() - started < 10.0

        def breaker() -> str:
            (found,) = [tier.breaker for tier in cache.status().tiers if tier.name == "pool"]
            return found

        def prompt(number: int) -> Any:
            return node.PROMPT + number + 1

        for number in range(5):
            node.store(cache, prompt(number))
        assert breaker() == "open"
        assert "127.0.0.1" in next(tier.reason for tier in cache.status().tiers if tier.name == "pool")
        asked = time.monotonic()
        assert node.load(cache)["hit"] == 0
        assert time.monotonic() - asked < 0.5
        server.start()
        numbers = iter(range(5, 1000))

        def is_after_a_store(wanted: str) -> bool:
            node.store(cache, prompt(next(numbers)))
            return breaker() == wanted

        servers.until(lambda: is_after_a_store("closed"), "the server is used again", 10.0)
        assert server.ask("DBSIZE") != ":0"
        server.kill()
        servers.until(lambda: is_after_a_store("open"), "it is left alone", 10.0)
        server.start()
        servers.until(lambda: is_after_a_store("closed"), "it is used again", 10.0)
