"""S3 below host memory and disk: a process with an empty disk hits what another process stored."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "plugins" / "lmcache-s3" / "tests"))

import seaweed  # noqa: E402

BUCKET = "shared"
PROGRAM = """
import json, sys
import numpy as np
from lmcache_core import Chain, Family, Group, GroupKind, Layout, Model, Region, Shard, load_config, open_cache

what, path = sys.argv[1:]
region = Region(name="kv", layers=2, block_tokens=4, block_nbytes=100_000, dtype="float16", packing="test")
layout = Layout(chunk_tokens=16, regions=(region,))
family = Family(model="org/tiny", weights="w1", kv_dtype="float16", chunk_tokens=16)
shard = Shard.of(family, layout, layers=(0, 2))
model = Model(family, (Group(GroupKind.FULL, (shard,)),))
chain = Chain.of(model, np.arange(6 * 16, dtype=np.uint32))
wanted = [np.random.default_rng(layer).integers(0, 256, (24, 100_000), np.uint8) for layer in range(2)]
with open_cache(load_config(path)) as cache:
    if what == "store":
        job = cache.store(chain, shard, range(6), [wanted], list(range(24)))
        result = job.wait(20)
        assert cache.drain(20)
        print(json.dumps({"ok": result.ok_chunks}))
    else:
        hit = cache.lookup_answered(chain, "r", timeout_s=20)
        pages = [np.zeros_like(page) for page in wanted]
        job = cache.retrieve(hit, shard, range(hit.chunks), [pages], list(range(4 * hit.chunks)))
        result = job.wait(20)
        cache.release("r")
        cache.drain(20)
        tiers = {tier.name: [tier.records, tier.breaker] for tier in cache.status().tiers}
        same = all(np.array_equal(a, b) for a, b in zip(pages, wanted))
        print(json.dumps({"ok": result.ok_chunks, "same": same, "tiers": tiers}))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[seaweed.Seaweed]:
    with seaweed.running(tmp_path_factory.mktemp("seaweed")) as started:
        seaweed.create_bucket(started, BUCKET)
        yield started


def node(folder: Path, url: str, what: str) -> dict[str, Any]:
    """What a process says that has `folder` as its disk and the bucket below it."""
    folder.mkdir(exist_ok=True)
    config = folder / "lmcache.yaml"
    config.write_text(f"""
chunk_tokens: 16
device: cpu
tiers:
  - {{name: host, backend: memory, capacity: 64MiB}}
  - {{name: disk, backend: disk, capacity: 64MiB, options: {{path: {folder / "store"}}}}}
  - name: bucket
    backend: s3
    timeout: 5s
    options:
      {{bucket: {BUCKET}, endpoint: "{url}", prefix: kv,
      access_key_id: "${{S3_KEY}}", secret_access_key: "${{S3_SECRET}}"}}
""")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, what, str(config)],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"S3_KEY": seaweed.ADMIN[0], "S3_SECRET": seaweed.ADMIN[1]},
    )
    assert done.returncode == 0, done.stderr
    assert seaweed.ADMIN[1] not in done.stderr + done.stdout
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_a_second_process_with_an_empty_disk_hits_from_s3(server: seaweed.Seaweed, tmp_path: Path) -> None:
    assert node(tmp_path / "a", server.url, "store") == {"ok": 6}
    found = node(tmp_path / "b", server.url, "load")
    assert (found["ok"], found["same"]) == (6, True)
    # What was used is on the disk of this node too, by now.
    assert found["tiers"] == {"disk": [6, "closed"], "bucket": [6, "closed"]}
    assert node(tmp_path / "b", "http://127.0.0.1:1", "load")["same"]


def test_without_its_bucket_a_node_works_and_finds_nothing(tmp_path: Path) -> None:
    found = node(tmp_path / "c", "http://127.0.0.1:1", "load")
    assert found["ok"] == 0
    assert found["tiers"]["bucket"][0] == 0
