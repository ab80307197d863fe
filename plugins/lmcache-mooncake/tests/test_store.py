"""A cache on the store, and what others see there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from records import comes_back, keys, new_key, open_backend, record, round_trip
from servers import Store

from lmcache_mooncake import MooncakeBackend

HERE = Path(__file__).parent


@pytest.fixture
def backend(store: Store) -> Iterator[MooncakeBackend]:
    with open_backend(store) as opened:
        yield opened


def _node(config: Path, what: str) -> dict[str, Any]:
    command = [sys.executable, str(HERE / "cache_node.py"), str(config), what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("codec", ["identity", "inline:Flipped"])
def test_what_one_process_stores_another_loads(tmp_path: Path, store: Store, codec: str) -> None:
    config = tmp_path / "lmcache.yaml"
    prefix = os.urandom(4).hex() + ":"
    options = json.dumps({"master": store.master.address, "prefix": prefix})
    config.write_text(
        "chunk_tokens: 64\ndevice: cpu\nadmission: always\n"
        "tiers:\n  - {name: host, backend: memory, capacity: 16MiB}\n"
        f"  - {{name: pool, backend: mooncake, timeout: 5s, codec: '{codec}', options: {options}}}\n"
        f"plugins: {{inline: {json.dumps(str(HERE / 'cache_node.py'))}}}\n"
    )
    first = _node(config, "store")
    assert first["stored"] == first["chunks"]
    assert first["registered"]
    second = _node(config, "load")
    assert (second["loaded"], second["right"]) == (second["chunks"], True)
    assert second["reads"] == second["chunks"]


def test_a_damaged_record_is_a_miss_and_mended_by_the_next_store(store: Store) -> None:
    """A second put of a key changes nothing in this store, so what is damaged has to go, lease or not."""
    with open_backend(store) as backend:
        key = new_key()
        backend.put(key, record(new_key(), 5000))
        backend.put(key, record(key, 5000))
        assert not comes_back(backend, key, 5000), "the second put is silent and changes nothing"
        assert backend.remove(key)
        backend.put(key, record(key, 5000))
        assert comes_back(backend, key, 5000)


def test_the_names_in_the_store_are_the_prefix_and_the_key(store: Store) -> None:
    with open_backend(store, prefix="kv/") as backend:
        key = round_trip(backend)
        assert backend._session._store.is_exist(f"kv/{key.text}") == 1


def test_a_thousand_keys_are_asked_for_at_once(backend: MooncakeBackend) -> None:
    names = keys(1000)
    views = [record(key, 100) for key in names]
    assert backend.put_many(names, views, timeout_s=30.0) == [None] * 1000
    began = time.monotonic()
    assert backend.contains_prefix(names, timeout_s=10.0) == 1000
    assert time.monotonic() - began < 5.0
    backend.remove(names[700])
    assert backend.contains_prefix(names, timeout_s=10.0) == 700
