"""A tier over a store, and the slots that its records leave from and come back to: for benchmarks of stores."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Final, Self

import numpy as np

from lmcache_core import ChunkKey, frame
from lmcache_core.buffers import Slab
from lmcache_core.config import parse_config
from lmcache_core.events import Events
from lmcache_core.frame import Frame
from lmcache_core.layout import PAGE_NBYTES, Layout, Region
from lmcache_core.metrics import Metrics
from lmcache_core.opening import open_tier
from lmcache_core.tier import LoadItem, StoreItem, Tier

from .measure import check_equal, random_bytes

TIMEOUT_S: Final = 60.0


class TierSlots:
    """`sources` hold records with payloads from seeds, `targets` take them; both are known to the tier's backend."""

    def __init__(self, tier: str, nbytes: int, records: int, *, max_queued_nbytes: int, shard_id: bytes = b"") -> None:
        """`tier` is one of a configuration, as YAML; `nbytes` are those of a payload."""
        self._nbytes = nbytes
        self._shard_id = shard_id or os.urandom(16)
        region = Region(name="kv", layers=1, block_tokens=256, block_nbytes=nbytes, dtype="u1", packing="bench")
        self._layout = Layout(chunk_tokens=256, regions=(region,))
        config = parse_config(f"tiers: [{tier}]", "benchmark", environ={})
        self._events = Events(None)
        self.tier: Tier = open_tier(
            config.tiers[0], config.plugins, Metrics(), self._events, max_queued_nbytes=max_queued_nbytes
        )
        self.tier.start()
        record_nbytes = frame.record_nbytes(nbytes)
        self.slab = Slab(2 * records * record_nbytes, 2 * records * record_nbytes, shared=False)
        self.slab.on_map = lambda extent: self.tier.register(extent.address, extent.nbytes)
        self.slab.on_unmap = lambda extent: self.tier.unregister(extent.address, extent.nbytes)
        self.sources = [self._slot(record_nbytes) for _ in range(records)]
        self.targets = [self._slot(record_nbytes) for _ in range(records)]
        for number, source in enumerate(self.sources):
            _payload(source)[:] = random_bytes(nbytes, seed=number)

    def new_key(self) -> ChunkKey:
        return ChunkKey(self._shard_id + os.urandom(32))

    def new_keys(self) -> list[ChunkKey]:
        """One for each source."""
        return [self.new_key() for _ in self.sources]

    def pack(self, keys: list[ChunkKey]) -> None:
        """Make the sources the records of these keys."""
        for key, source in zip(keys, self.sources, strict=True):
            head = Frame(key, 0, self._layout.fingerprint, self._nbytes, self._nbytes, 0)
            frame.pack(head, source[:PAGE_NBYTES])

    def clear(self) -> None:
        """Leave nothing in the targets."""
        for target in self.targets:
            np.frombuffer(target, np.uint8).fill(0)

    def check(self, whose: str) -> None:
        """The targets hold what the sources do."""
        for number, (source, target) in enumerate(zip(self.sources, self.targets, strict=True)):
            check_equal(_payload(target), _payload(source), f"{whose} record {number}")

    def store(self, keys: list[ChunkKey]) -> None:
        """The sources, through the tier; any failure ends the benchmark."""
        self._all(
            "stored",
            lambda done: self.tier.store(
                [
                    StoreItem(key, source, self._layout, lambda item, reason, in_use: done(reason), lambda item: None)
                    for key, source in zip(keys, self.sources, strict=True)
                ]
            ),
        )

    def load(self, keys: list[ChunkKey]) -> None:
        """To the targets, as `store`."""
        self._all(
            "loaded",
            lambda done: self.tier.load(
                [
                    LoadItem(key, to, self._layout, lambda item, found, reason, in_use: done(reason), lambda item: None)
                    for key, to in zip(keys, self.targets, strict=True)
                ]
            ),
        )

    def remove(self, keys: list[ChunkKey]) -> None:
        self.tier.remove(keys, "removed")
        assert self.tier.drain(TIMEOUT_S), "the removal did not end"

    def close(self) -> None:
        self.tier.close()
        self._events.close()
        self.sources, self.targets = [], []
        self.slab.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _slot(self, nbytes: int) -> memoryview:
        slot = self.slab.take(nbytes)
        assert slot is not None, "the slab is too small"
        view = self.slab.view(slot)
        np.frombuffer(view, np.uint8).fill(1)
        return view

    def _all(self, what: str, start: Callable[[Callable[[str], None]], None]) -> None:
        """Start a batch and wait until each record has been answered."""
        lock, ended = threading.Lock(), threading.Event()
        reasons: list[str] = []

        def done(reason: str) -> None:
            with lock:
                reasons.append(reason)
                if len(reasons) == len(self.sources):
                    ended.set()

        start(done)
        assert ended.wait(TIMEOUT_S), f"{len(reasons)} of {len(self.sources)} records {what}"
        assert not any(reasons), f"not {what}: {[reason for reason in reasons if reason][:3]}"


def _payload(record: memoryview) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(record, np.uint8)[PAGE_NBYTES:]
