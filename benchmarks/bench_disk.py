"""The disk tier with 32 MiB and with 256 KiB chunks, O_DIRECT, checksums computed and verified.

Ours is a tier over the disk backend: checksum, temporary file, rename and accounting on the way down; open, read and
verification on the way up; from and into slots of a slab.  The limit is fio: 4 jobs, O_DIRECT, as many new files of
the same size, one call per file, read back in the same round.  The peer is its C++ adapter `fs_native` with O_DIRECT
and 4 workers, which has no checksum.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from harness.caches import huge_share
from harness.fio import find_fio, fio_round
from harness.measure import MiB, Options, Timings, gibps, paired, seconds
from harness.report import Must, Row
from harness.tiers import TierSlots

from lmcache_core import ChunkKey, frame

WORKERS = 4


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
        huge = huge_share(store.slab) > 0.5

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


class Store(TierSlots):
    """A tier over an empty disk store."""

    def __init__(
        self, folder: Path, chunk_nbytes: int, chunks: int, backend: str = "disk", more: str = "", shard_id: bytes = b""
    ) -> None:
        self._backend = backend
        capacity_nbytes = 2 * chunks * frame.record_nbytes(chunk_nbytes)
        options = f"{{path: {folder}{more}}}"
        tier = f"{{name: disk, backend: {backend}, capacity: {capacity_nbytes}, timeout: 60s, options: {options}}}"
        super().__init__(tier, chunk_nbytes, chunks, max_queued_nbytes=capacity_nbytes, shard_id=shard_id)

    @property
    def direct(self) -> bool:
        """Whether the store bypasses the page cache."""
        return self.tier.status().description.startswith("direct")

    def round(self) -> Timings:
        keys = self.new_keys()
        figures = {"write": self.write(keys), "read": self.read(keys)}
        self.remove(keys)
        return figures

    def write(self, keys: list[ChunkKey]) -> float:
        self.pack(keys)
        return seconds(lambda: self.store(keys))

    def read(self, keys: list[ChunkKey]) -> float:
        """Seconds; what was read is compared with what this store, or another with the same payloads, wrote."""
        self.clear()
        taken = seconds(lambda: self.load(keys))
        self.check(self._backend)
        return taken
