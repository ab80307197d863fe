"""The disk tier with 32 MiB and with 256 KiB chunks, O_DIRECT, checksums computed and verified.

Ours is a tier over the disk backend: checksum, temporary file, rename and accounting on the way down; open, read and
verification on the way up; from and into slots of a slab.  The limit is fio: 4 jobs, O_DIRECT, as many new files of
the same size, one call per file, read back in the same round.  The peer is its C++ adapter `fs_native` with O_DIRECT
and 4 workers, which has no checksum.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import numpy as np
from harness.caches import huge_share
from harness.fio import find_fio, fio_round
from harness.measure import MiB, Options, Timings, check_equal, gibps, paired, random_bytes, seconds
from harness.report import Must, Row

from lmcache_core import frame
from lmcache_core.buffers import Slab
from lmcache_core.config import parse_config
from lmcache_core.events import Events
from lmcache_core.frame import Frame
from lmcache_core.keys import ChunkKey
from lmcache_core.layout import PAGE_NBYTES, Layout, Region
from lmcache_core.metrics import Metrics
from lmcache_core.opening import open_tier
from lmcache_core.tier import LoadItem, StoreItem

WORKERS = 4
TIMEOUT_S = 60.0


def rows(options: Options) -> Iterator[Row]:
    big, small = (8, 64) if options.quick else (16, 1024)
    yield from _rows_of(options, 32 * MiB, big, Must(ratio_limit=0.9), Must(ratio_limit=0.85))
    both = Must(ratio_limit=0.85, ratio_peer=1.0)
    yield from _rows_of(options, MiB // 4, small, both, both)


def _rows_of(options: Options, chunk_nbytes: int, chunks: int, read: Must, write: Must) -> Iterator[Row]:
    folders = {name: options.directory / f"{name}-{chunk_nbytes}" for name in ("ours", "limit", "peer")}
    for folder in folders.values():
        folder.mkdir()
    with Store(folders["ours"], chunk_nbytes, chunks) as store:
        huge = huge_share() > 0.5

        def limit() -> Timings:
            size = {"file_nbytes": chunk_nbytes, "files": chunks}
            figures = fio_round(folders["limit"], **size, huge=huge)
            beside = fio_round(folders["limit"], **size, huge=True)
            return {**figures, **{f"huge {what}": value for what, value in beside.items()}}

        measured = paired(
            options,
            {"ours": store.round, "limit": find_fio() or limit},
            "disk",
            directory=str(folders["peer"]),
            chunk_nbytes=chunk_nbytes,
            chunks=chunks,
            workers=WORKERS,
            odirect=True,
        )
        direct = store.direct
    size = f"{chunk_nbytes // MiB} MiB" if chunk_nbytes >= MiB else f"{chunk_nbytes // 1024} KiB"
    cache = "page cache bypassed" if direct else "OURS WENT THROUGH THE PAGE CACHE"
    pages = "huge pages" if huge else "4 KiB pages"
    note = f"{chunks} files of {size}; {cache}; slab and fio's buffers in {pages}"
    speed = gibps(chunks * chunk_nbytes)
    for what, must in (("read", read), ("write", write)):
        yield measured.row("disk", f"{what}, {size}", "GiB/s", what, speed, must=must, note=note)
        beside = "limit: fio with buffers in huge pages, whatever the slab has; peer: the row above"
        row = f"{what}, {size}, beside huge pages"
        yield measured.row("disk", row, "GiB/s", what, speed, limit=f"huge {what}", peer="none", note=beside)


class Store:
    """A tier over an empty disk store, and the slots that its records leave from and come back to."""

    def __init__(
        self, folder: Path, chunk_nbytes: int, chunks: int, backend: str = "disk", more: str = "", shard_id: bytes = b""
    ) -> None:
        self._chunk_nbytes = chunk_nbytes
        self._backend = backend
        self._shard_id = shard_id or os.urandom(16)
        region = Region(name="kv", layers=1, block_tokens=256, block_nbytes=chunk_nbytes, dtype="u1", packing="bench")
        self._layout = Layout(chunk_tokens=256, regions=(region,))
        record_nbytes = frame.record_nbytes(chunk_nbytes)
        capacity_nbytes = 2 * chunks * record_nbytes
        options = f"{{path: {folder}{more}}}"
        text = f"{{name: disk, backend: {backend}, capacity: {capacity_nbytes}, timeout: 60s, options: {options}}}"
        config = parse_config(f"tiers: [{text}]", "benchmark", environ={})
        self._events = Events(None)
        self._tier = open_tier(
            config.tiers[0], config.plugins, Metrics(), self._events, max_queued_nbytes=capacity_nbytes
        )
        self._tier.start()
        self._slab = Slab(2 * chunks * record_nbytes)
        self._sources = [self._slot(record_nbytes) for _ in range(chunks)]
        self._targets = [self._slot(record_nbytes) for _ in range(chunks)]
        for number, source in enumerate(self._sources):
            _payload(source)[:] = random_bytes(chunk_nbytes, seed=number)
        self._numbers = count()

    @property
    def direct(self) -> bool:
        """Whether the store bypasses the page cache."""
        return self._tier.status().description.startswith("direct")

    def _slot(self, nbytes: int) -> memoryview:
        slot = self._slab.take(nbytes)
        assert slot is not None, "the slab is too small"
        view = self._slab.view(slot)
        np.frombuffer(view, np.uint8).fill(1)
        return view

    def round(self) -> Timings:
        keys = self.new_keys()
        figures = {"write": self.write(keys), "read": self.read(keys)}
        self.remove(keys)
        return figures

    def new_keys(self) -> list[ChunkKey]:
        return [ChunkKey(self._shard_id + os.urandom(32)) for _ in self._sources]

    def write(self, keys: list[ChunkKey]) -> float:
        for key, source in zip(keys, self._sources, strict=True):
            nbytes = self._chunk_nbytes
            frame.pack(Frame(key, 0, self._layout.fingerprint, nbytes, nbytes, 0), source[:PAGE_NBYTES])
        return seconds(lambda: self._all("stored", lambda done: self._tier.store(self._stores(keys, done))))

    def read(self, keys: list[ChunkKey]) -> float:
        """Seconds; what was read is compared with what this store, or another with the same payloads, wrote."""
        for target in self._targets:
            np.frombuffer(target, np.uint8).fill(0)
        taken = seconds(lambda: self._all("loaded", lambda done: self._tier.load(self._loads(keys, done))))
        for number, (source, target) in enumerate(zip(self._sources, self._targets, strict=True)):
            check_equal(_payload(target), _payload(source), f"{self._backend} record {number}")
        return taken

    def remove(self, keys: list[ChunkKey]) -> None:
        self._tier.remove(keys, "removed")
        assert self._tier.drain(TIMEOUT_S), "the removal did not end"

    def _stores(self, keys: list[ChunkKey], done: Callable[[str], None]) -> list[StoreItem]:
        return [
            StoreItem(key, source, self._layout, lambda item, reason, in_use: done(reason), lambda item: None)
            for key, source in zip(keys, self._sources, strict=True)
        ]

    def _loads(self, keys: list[ChunkKey], done: Callable[[str], None]) -> list[LoadItem]:
        return [
            LoadItem(key, target, self._layout, lambda item, found, reason, in_use: done(reason), lambda item: None)
            for key, target in zip(keys, self._targets, strict=True)
        ]

    def _all(self, what: str, start: Callable[[Callable[[str], None]], None]) -> None:
        """Start a batch and wait until each record has been answered; any failure ends the benchmark."""
        lock, ended = threading.Lock(), threading.Event()
        reasons: list[str] = []

        def done(reason: str) -> None:
            with lock:
                reasons.append(reason)
                if len(reasons) == len(self._sources):
                    ended.set()

        start(done)
        assert ended.wait(TIMEOUT_S), f"{len(reasons)} of {len(self._sources)} records {what}"
        assert not any(reasons), f"not {what}: {[reason for reason in reasons if reason][:3]}"

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self._tier.close()
        self._events.close()
        self._sources, self._targets = [], []
        self._slab.close()


def _payload(record: memoryview) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(record, np.uint8)[PAGE_NBYTES:]
