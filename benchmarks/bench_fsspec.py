"""Get and put of 32 MiB records in local files through fsspec, beside plain `readinto` and `write`.

Ours is the backend of lmcache-fsspec on one thread: it asks for the file's kind and length, opens it through fsspec and
reads it into the caller's memory; a put goes under a temporary name, which becomes the record's.  The limit is `open`
and one `readinto` of files of the same size in the same folder; `open`, `write`, `rename` for a put.  On every side
files come from the page cache.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from harness.measure import MiB, Options, Timings, check_equal, gibps, paired, private_buffer, random_bytes, seconds
from harness.report import Must, Row

from lmcache_core import ChunkKey, Context

TIMEOUT_S = 60.0


def rows(options: Options) -> Iterator[Row]:
    from lmcache_fsspec import FsspecBackend, FsspecOptions

    records, nbytes = (2 if options.quick else 4), 32 * MiB
    folder = options.directory / "plain"
    folder.mkdir()
    data = [random_bytes(nbytes, seed) for seed in range(records)]
    into = private_buffer(nbytes, huge=False)
    numbers = count()
    url = f"file://{options.directory}/fsspec"
    with FsspecBackend(FsspecOptions(url=url), Context(timeout_s=TIMEOUT_S)) as backend:

        def ours() -> Timings:
            keys = [ChunkKey(os.urandom(48)) for _ in data]
            write = sum(seconds(lambda k=k, d=d: backend.put(k, d.data)) for k, d in zip(keys, data, strict=True))
            read = 0.0
            for key, wanted in zip(keys, data, strict=True):
                into.fill(0)
                read += seconds(lambda k=key: backend.get(k, into.data))
                check_equal(into, wanted, "get")
            for key in keys:
                backend.remove(key)
            return {"put": write, "get": read}

        def limit() -> Timings:
            paths = [folder / str(next(numbers)) for _ in data]
            write = sum(seconds(lambda p=p, d=d: _write(p, d.data)) for p, d in zip(paths, data, strict=True))
            read = 0.0
            for path, wanted in zip(paths, data, strict=True):
                into.fill(0)
                read += seconds(lambda p=path: _read(p, into.data))
                check_equal(into, wanted, "readinto")
                path.unlink()
            return {"put": write, "get": read}

        measured = paired(options, {"ours": ours, "limit": limit})
    speed = gibps(records * nbytes)
    note = f"{records} files of 32 MiB, through the page cache"
    for what, must in (("get", Must(ratio_limit=0.8)), ("put", None)):
        yield measured.row("fsspec", f"{what}, 32 MiB, local", "GiB/s", what, speed, peer="none", must=must, note=note)


def _write(path: Path, data: memoryview) -> None:
    temporary = path.with_suffix(".tmp")
    with open(temporary, "xb") as file:
        file.write(data)
    temporary.rename(path)


def _read(path: Path, into: memoryview) -> None:
    with open(path, "rb", buffering=0) as file:
        file.readinto(into)
