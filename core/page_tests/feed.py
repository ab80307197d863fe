"""A daemon with three tiers and engines that talk to it, so that its page has something to show."""

from __future__ import annotations

import itertools
import json
import random
import sys
import threading
from pathlib import Path
from typing import Any, Final

import numpy as np

from lmcache_core import Chain, Family, Group, GroupKind, Layout, Model, Region, Shard
from lmcache_core.client.cache import RemoteCache, connect
from lmcache_core.keys import salt_id

CHUNK: Final = 256
BLOCKS: Final = 16
LAYERS: Final = 4
BLOCK_NBYTES: Final = 2048
MAX_CHUNKS: Final = 24
LAYOUT: Final = Layout(
    chunk_tokens=CHUNK,
    regions=(
        Region(
            name="kv",
            layers=LAYERS,
            block_tokens=CHUNK // BLOCKS,
            block_nbytes=BLOCK_NBYTES,
            dtype="bfloat16",
            packing="test",
        ),
    ),
)
MODELS: Final = ("org/assistant-8b", "org/coder-32b")

INLINE: Final = '''
import threading
from pathlib import Path
from lmcache_core import BackendUnavailable, hookimpl
from lmcache_core.testing import DictBackend

class Far(DictBackend):
    """A store that is far away, and gone while the file `down` is there."""

    api_version = (1, 0)
    wait = threading.Event().wait

    def _ask(self):
        if Path(__file__).with_name("down").exists():
            raise BackendUnavailable("redis://cache:hunter2@cache.internal:6379 refuses connections")

    def get_many(self, keys, into, *, timeout_s):
        self._ask()
        self.wait(0.012 * len(keys))
        return super().get_many(keys, into, timeout_s=timeout_s)

    def put_many(self, keys, data, *, timeout_s):
        self._ask()
        self.wait(0.006 * len(keys))
        return super().put_many(keys, data, timeout_s=timeout_s)

@hookimpl
def lmcache_request_ended(report):
    pass
'''


def write_config(folder: Path, **server: Any) -> Path:
    """A configuration of three tiers, the last of which is slow and can be made to fail by a file `down`."""
    inline = folder / "far.py"
    inline.write_text(INLINE)
    disk = {"path": str(folder / "store")}
    config = {
        "socket": str(folder / "s"),
        "socket_timeout": "10s",
        "tiers": [
            {"name": "host", "backend": "memory", "capacity": "32MiB"},
            {"name": "disk", "backend": "disk", "capacity": "96MiB", "tenant_quota": "24MiB", "options": disk},
            {"name": "pool", "backend": "inline:Far", "capacity": "256MiB"},
        ],
        "server": {"page": "127.0.0.1:0", **server},
        "plugins": {"inline": str(inline), "hooks": ["log"]},
    }
    path = folder / "lmcache.yaml"
    path.write_text(json.dumps(config))
    return path


def chain_of(name: str, seed: int, chunks: int, tenant: str = "") -> Chain:
    """The prompt of a conversation, which grows with its turns."""
    salt = salt_id(tenant) if tenant else b""
    family = Family(model=name, weights="main", kv_dtype="bfloat16", chunk_tokens=CHUNK, salt_id=salt)
    model = Model(family, (Group(GroupKind.FULL, (Shard.of(family, LAYOUT, layers=(0, LAYERS)),)),))
    shared = np.random.default_rng(1).integers(0, 50_000, 4 * CHUNK if seed < 10_000 else 0)
    own = np.random.default_rng(seed).integers(0, 50_000, MAX_CHUNKS * CHUNK)
    return Chain.of(model, np.concatenate([shared, own])[: chunks * CHUNK + 37])


class Engine:
    """Answers requests as an engine does: looks up, loads what is there, computes and stores the rest."""

    def __init__(self, cache: RemoteCache) -> None:
        self._cache = cache
        self._pages = [[np.zeros((MAX_CHUNKS * BLOCKS, BLOCK_NBYTES), np.uint8) for _ in range(LAYERS)]]
        self.served = 0

    def serve(self, chain: Chain, request: str) -> None:
        shard = chain.model.shards[0]
        hit = self._cache.lookup_answered(chain, request, timeout_s=5)
        ids = list(range(hit.chunks * BLOCKS))
        self._cache.retrieve(hit, shard, range(hit.chunks), self._pages, ids).wait(5)
        rest = range(hit.chunks, len(chain))
        if rest:
            self._cache.computed(chain.model, len(rest) * CHUNK, 0.12 * len(rest), context_tokens=hit.chunks * CHUNK)
            ids = list(range(len(rest) * BLOCKS))
            self._cache.store(chain, shard, rest, self._pages, ids, request=request).wait(5)
        self._cache.release(request)
        self.served += 1


def converse(cache: RemoteCache, stop: threading.Event, every_s: float, sessions: int = 30) -> None:
    """Conversations whose turns grow, of two models and three tenants, and now and then a new one."""
    rng = random.Random(7)
    engine = Engine(cache)
    turns: dict[int, int] = {}
    tenants = ("", "", "blue", "green", "red")
    for number in itertools.count():
        if stop.wait(every_s):
            return
        if number % 9 == 4:  # a document that nobody asked about before
            engine.serve(chain_of(MODELS[0], 10_000 + number, rng.randrange(14, MAX_CHUNKS)), f"document-{number}")
            continue
        session = min(int(rng.expovariate(3 / sessions)), sessions) + number // 60
        turns[session] = turns.get(session, 0) + 1
        chunks = min(MAX_CHUNKS, 4 + 2 * turns[session])
        chain = chain_of(MODELS[session % 5 == 0], session, chunks, tenants[session % len(tenants)])
        engine.serve(chain, f"chat-{session}-{turns[session]}")


def main() -> None:
    """`feed.py SOCKET SECONDS`: converse, a request each so many seconds, until standard input ends."""
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    with connect(sys.argv[1], connect_timeout_s=30.0, call_timeout_s=10.0) as cache:
        sys.stdout.write("connected\n")
        sys.stdout.flush()
        converse(cache, stop, float(sys.argv[2]))


if __name__ == "__main__":
    main()
