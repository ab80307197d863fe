"""The daemon as a user starts it, `lmc serve`, for a benchmark to connect to."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lmcache_core.frame import record_nbytes
from lmcache_core.layout import Layout

START_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Served:
    """A daemon that answers."""

    socket: Path
    pid: int
    ready_s: float
    """From the start of the process to its READY."""
    page: str = ""
    """Where its page is, if it has one."""

    def own_nbytes(self) -> int:
        """Resident memory beside the slab, which is the only shared memory that it maps."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return sum(int(kib) << 10 for kib in re.findall(r"Rss(?:Anon|File):\s+(\d+) kB", status))


@contextmanager
def serve(
    folder: Path,
    capacity_nbytes: int,
    *,
    disk: tuple[Path, int] | None = None,
    chunk_tokens: int | None = None,
    page: bool = False,
    policy: str = "s3fifo",
) -> Iterator[Served]:
    """A daemon with a host tier of that size and policy, below it `disk` (path, capacity) if given.

    Its files lie in `folder`.
    """
    folder.mkdir(exist_ok=True)
    socket, config = folder / "s", folder / "lmcache.yaml"
    host = {"name": "host", "backend": "memory", "capacity": capacity_nbytes, "policy": policy}
    tiers: list[dict[str, Any]] = [host]
    if disk is not None:
        path, capacity = disk
        tiers.append({"name": "disk", "backend": "disk", "capacity": capacity, "options": {"path": str(path)}})
    chunks = {} if chunk_tokens is None else {"chunk_tokens": chunk_tokens}
    server = {"server": {"page": "127.0.0.1:0"}} if page else {}
    config.write_text(json.dumps({"socket": str(socket), "tiers": tiers, **chunks, **server}))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LMCACHE")}
    command = [sys.executable, "-m", "lmcache_core.cli", "serve", "--config", str(config)]
    began = time.perf_counter()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if "serving on" in line:
                    break
            else:
                raise RuntimeError(f"lmc serve ended with {process.wait(START_TIMEOUT_S)}")
            where = re.search("page ([^ ,]+)", line)
            yield Served(socket, process.pid, time.perf_counter() - began, where[1] if where else "")
        finally:
            process.terminate()
            # What else it says, a few lines, fits into the pipe.
            process.wait(START_TIMEOUT_S)


def slots(count: int, layout: Layout) -> int:
    """Bytes that hold exactly `count` records of `layout`."""
    return count * record_nbytes(layout.nbytes)
