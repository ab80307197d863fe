"""`lmc serve` as a process, started by handle, and `lmc` asked beside it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tiny
from click.testing import CliRunner, Result

from lmcache_core import RemoteCache, connect
from lmcache_core.cli import main

READY_S = 30.0


def write_config(folder: Path, *, disk: bool = True, host_nbytes: int = 64 * tiny.RECORD, **server: Any) -> Path:
    """A configuration for tiny chunks whose daemon listens in `folder`."""
    tiers: list[dict[str, Any]] = [{"name": "host", "backend": "memory", "capacity": host_nbytes}]
    if disk:
        tiers.append({"name": "disk", "backend": "disk", "options": {"path": str(folder / "store")}})
    config = {"chunk_tokens": tiny.CHUNK, "socket": str(folder / "s"), "tiers": tiers, "server": server}
    config["socket_timeout"] = "10s"  # the machine may be busy
    path = folder / "lmcache.yaml"
    path.write_text(json.dumps(config))
    return path


class Serve:
    """A daemon of its own; its log lines are collected as they come."""

    def __init__(
        self,
        config: Path,
        *arguments: str,
        environ: dict[str, str] | None = None,
        wrapper: Sequence[str] = (),
        seen_as: Path | None = None,
    ) -> None:
        """With a `wrapper`, a command that runs what follows it as its child, for which the file is `seen_as`."""
        self.config = config
        self.socket = config.parent / "s"
        self.lines: list[str] = []
        self._come = threading.Condition()
        self._wrapped = bool(wrapper)
        command = [
            *wrapper,
            sys.executable,
            "-m",
            "lmcache_core.cli",
            "serve",
            "--config",
            str(seen_as or config),
            *arguments,
        ]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("LMCACHE", "NOTIFY_"))}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=kept | (environ or {}))
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._come:
                self.lines.append(line.rstrip("\n"))
                self._come.notify_all()

    def said(self, text: str, timeout_s: float = READY_S) -> re.Match[str]:
        """The first log line that has `text`, a pattern, when it comes."""
        found: list[re.Match[str]] = []

        def look() -> bool:
            found.extend(match for line in self.lines if (match := re.search(text, line)))
            return bool(found)

        with self._come:
            assert self._come.wait_for(look, timeout_s), f"{text!r} is not in {self.lines}"
        return found[0]

    def ready(self) -> Serve:
        self.said("serving on")
        return self

    def stop(self, timeout_s: float = 30.0) -> int:
        """SIGTERM, and the exit status."""
        os.kill(self.pid, signal.SIGTERM)
        return self.process.wait(timeout_s)

    @property
    def pid(self) -> int:
        """The daemon's, as we see it."""
        if not self._wrapped:
            return self.process.pid
        return int(Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text())

    def __enter__(self) -> Serve:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()


def joined(path: Path) -> RemoteCache:
    """A client with patience: the machine may be busy."""
    return connect(path, connect_timeout_s=READY_S, call_timeout_s=10.0)


def lmc(*arguments: object, **environ: str) -> Result:
    """Run `lmc` in this process; what an exception would hide is raised."""
    result = CliRunner(env=environ).invoke(main, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def prompt_arguments(of: Any, tokens: list[int]) -> list[str]:
    """The options that describe the prompt of `tokens` in the tiny model, for `lmc key`, `pin` and the like."""
    family, (region,) = of.family, of.shards[0].layout.regions
    return [
        *("--model", family.model, "--weights", family.weights, "--kv-dtype", family.kv_dtype),
        *("--chunk-tokens", str(family.chunk_tokens), "--layers", f"0:{region.layers}"),
        *("--block-tokens", str(region.block_tokens), "--block-nbytes", str(region.block_nbytes)),
        *("--region", region.name, "--packing", region.packing, "--tokens", ",".join(map(str, tokens))),
    ]
