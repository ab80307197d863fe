"""Hands for the tests of the disk backend."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from lmcache_core.backend import Context
from lmcache_core.backends._files import Writer, parse_temp
from lmcache_core.backends.disk import DiskBackend, DiskOptions
from lmcache_core.keys import ChunkKey
from lmcache_core.testing.memory import buffer, filled, payload

NBYTES = 16_384


def open_disk(root: Path, capacity_nbytes: int | None = None, timeout_s: float = 10.0, **options: Any) -> DiskBackend:
    return DiskBackend(
        DiskOptions(path=str(root), **options), Context(capacity_nbytes=capacity_nbytes, timeout_s=timeout_s)
    )


def new_key() -> ChunkKey:
    return ChunkKey(os.urandom(48))


def record(key: ChunkKey, nbytes: int = NBYTES) -> memoryview:
    return filled(key, nbytes, 4096)


def put(backend: DiskBackend, count: int = 1, nbytes: int = NBYTES) -> list[ChunkKey]:
    keys = [new_key() for _ in range(count)]
    for key in keys:
        backend.put(key, record(key, nbytes))
    return keys


def holds(backend: DiskBackend, key: ChunkKey, nbytes: int = NBYTES) -> bool:
    into = buffer(nbytes, 4096)
    got = backend.get(key, into)
    assert got is None or (got == nbytes and bytes(into) == payload(key, nbytes))
    return got is not None


def file_of(root: Path, key: ChunkKey) -> Path:
    return root / "v1" / key.text[:32] / key.text[32:34] / key.text[32:]


def temp_files(root: Path) -> list[str]:
    return [path.name for path in (root / "v1").rglob("*") if parse_temp(path.name)]


def leave_temp(root: Path, writer: Writer, nbytes: int = NBYTES) -> str:
    """What a writer that had the store open was writing when it ended."""
    name = writer.temp_name(nbytes)
    folder = root / "v1" / ("0" * 32) / "00"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"half")
    with (root / "v1" / "usage").open("a") as usage:
        usage.write(f"{writer.temp_name(0)}\n")
    return name


def record_files(root: Path) -> list[Path]:
    found = (path for path in root.glob("v1/*/*/*") if not parse_temp(path.name))
    return [path for path in found if path.is_file() and not path.is_symlink()]


def assert_counted(backend: DiskBackend, root: Path) -> None:
    assert backend.used_nbytes == sum(path.stat().st_size for path in record_files(root))


def dead_writer() -> Writer:
    """The writer that a process was which has ended."""
    code = "from lmcache_core.backends._files import Writer; w = Writer.current(); print(w.host, w.pid, w.start)"
    host, pid, start = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True
    ).stdout.split()
    return Writer(host, int(pid), int(start))
