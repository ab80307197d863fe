"""The daemon as a user starts it, `lmc serve`, for engines to share."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from engine import environment

END_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Daemon:
    """One that listens; `config` is the file of an engine that uses it."""

    config: Path
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """SIGKILL; `daemon` of the same folder starts its successor."""
        self.process.kill()
        self.process.wait()


@contextmanager
def daemon(
    folder: Path, *, capacity_nbytes: int = 256 << 20, chunk_tokens: int = 64, disk_nbytes: int = 0
) -> Iterator[Daemon]:
    """With memory of that size, below it a disk tier in `folder` if it is given one, until the block ends."""
    tiers: list[dict[str, Any]] = [{"name": "host", "backend": "memory", "capacity": capacity_nbytes}]
    if disk_nbytes:
        place = {"path": str(folder / "store")}
        tiers.append({"name": "disk", "backend": "disk", "capacity": disk_nbytes, "options": place})
    config = folder / "lmcache.yaml"
    config.write_text(json.dumps({"chunk_tokens": chunk_tokens, "socket": str(folder / "s"), "tiers": tiers}))
    command = [sys.executable, "-m", "lmcache_core.cli", "serve", "--config", str(config)]
    log = folder / "daemon.log"
    with log.open("ab") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE, env=environment()) as run:
        try:
            assert run.stderr is not None
            for line in run.stderr:
                out.write(line)
                if b"serving on" in line:
                    break
            else:
                raise RuntimeError(f"lmc serve ended: {log.read_text()[-2000:]}")
            yield Daemon(config, run)
        finally:
            run.terminate()
            run.wait(END_TIMEOUT_S)  # what else it says, a few lines, fits into the pipe
