"""The gds backend without a GPU: direct I/O into host memory, and the disk backend's own files read by it.

Ours is a tier over the gds backend, from and into slots of a slab, checksums computed and verified.  The limit is fio,
with 4 jobs, O_DIRECT, as many new files of the same size, one call per file, read back in the same round.  For files
that the disk backend wrote it is the disk backend, which reads them in the same round.  "Guarded" is as on mounts that
may hang, where every record is copied once more.  Device I/O needs a GPU, and so does the peer's gds backend.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from bench_disk import Store
from harness.caches import huge_share
from harness.fio import find_fio, fio_round
from harness.measure import MiB, Options, Timings, gibps, paired
from harness.report import Must, Row

NO_PEER = "no peer: its gds backend needs CUDA and the package cufile"


def rows(options: Options) -> Iterator[Row]:
    for chunk_nbytes, chunks in ((32 * MiB, 8 if options.quick else 16), (2 * MiB, 16 if options.quick else 128)):
        yield from _beside_fio(options, chunk_nbytes, chunks)
        yield from _beside_disk(options, chunk_nbytes, chunks)


def _beside_fio(options: Options, chunk_nbytes: int, chunks: int) -> Iterator[Row]:
    folders = {name: options.directory / f"{name}-{chunk_nbytes}" for name in ("ours", "guarded", "limit")}
    for folder in folders.values():
        folder.mkdir()
    with (
        Store(folders["ours"], chunk_nbytes, chunks, "gds", ", guard: off") as store,
        Store(folders["guarded"], chunk_nbytes, chunks, "gds", ", guard: on") as guarded,
    ):

        def ours() -> Timings:
            beside = guarded.round()
            return {**store.round(), **{f"guarded {what}": value for what, value in beside.items()}}

        def limit() -> Timings:
            huge = huge_share(store.slab) > 0.5
            return fio_round(folders["limit"], file_nbytes=chunk_nbytes, files=chunks, huge=huge)

        measured = paired(options, {"ours": ours, "limit": find_fio() or limit})
        cache = "page cache bypassed" if store.direct else "OURS WENT THROUGH THE PAGE CACHE"
    note = f"{chunks} files; {cache}; {NO_PEER}"
    speed = gibps(chunks * chunk_nbytes)
    size = f"{chunk_nbytes // MiB} MiB"
    for what in ("read", "write"):
        must = Must(ratio_limit=0.9)
        yield measured.row("gds", f"{what}, {size}", "GiB/s", what, speed, must=must, note=note)
        guarded_note = "limit: the same fio; every call on a thread of its own, one more copy"
        row = f"{what}, {size}, guarded"
        yield measured.row("gds", row, "GiB/s", f"guarded {what}", speed, limit=what, note=guarded_note)


def _beside_disk(options: Options, chunk_nbytes: int, chunks: int) -> Iterator[Row]:
    """One folder under both backends: what the disk backend wrote is read by each."""
    folder = options.directory / f"both-{chunk_nbytes}"
    shard_id = os.urandom(16)
    with (
        Store(folder, chunk_nbytes, chunks, "disk", shard_id=shard_id) as disk,
        Store(folder, chunk_nbytes, chunks, "gds", ", guard: off", shard_id=shard_id) as gds,
    ):
        keys = disk.new_keys()
        disk.write(keys)
        measured = paired(
            options, {"ours": lambda: {"read": gds.read(keys)}, "limit": lambda: {"read": disk.read(keys)}}
        )
        disk.remove(keys)
    note = f"{chunks} files that the disk backend wrote; limit: the disk backend reading them; {NO_PEER}"
    row = f"read the disk backend's, {chunk_nbytes // MiB} MiB"
    speed = gibps(chunks * chunk_nbytes)
    yield measured.row("gds", row, "GiB/s", "read", speed, must=Must(ratio_limit=0.9), note=note)
