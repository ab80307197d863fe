"""The peer in a Python environment and a process of its own, which measures itself when it is told to."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

BENCHMARKS: Final = Path(__file__).resolve().parent.parent
PEER_VENV_VARIABLE: Final = "LMCACHE_PEER_VENV"
ANSWER_TIMEOUT_S: Final = 180.0
ENVIRONMENT: Final = {
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_LOG_LEVEL": "ERROR",
    "LMCACHE_DISABLE_BANNER": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONWARNINGS": "ignore",
}


@dataclass(frozen=True, slots=True)
class Missing:
    """A side that cannot be measured here, and why."""

    reason: str


class PeerFailed(Exception):
    """The peer could not do what it was asked; the row goes on without it."""


def peer_venv() -> Path:
    """Where the peer is, or is to be installed."""
    chosen = os.environ.get(PEER_VENV_VARIABLE)
    return Path(chosen) if chosen else BENCHMARKS.parent / ".nox" / "peer"


def peer_environment() -> dict[str, str]:
    """What its processes see: no telemetry, a fixed hash seed, nothing of our Python path."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LMCACHE"))}
    return inherited | ENVIRONMENT


def find_peer() -> Peer | Missing:
    """The peer, started, or why there is none."""
    python = peer_venv() / "bin" / "python"
    if not python.exists():
        return Missing(f"no peer in {peer_venv()}: run `python benchmarks/run.py peer-setup`")
    return Peer(python)


class Peer:
    """One process that answers JSON lines, started at the first call.  A case is set up once, then goes by rounds."""

    def __init__(self, python: Path) -> None:
        self.python = python
        self._process: subprocess.Popen[bytes] | None = None

    def setup(self, case: str, **arguments: Any) -> Missing | None:
        """Make `case` ready; the reason when the peer cannot."""
        try:
            self._ask({"verb": "setup", "case": case, "arguments": arguments})
        except PeerFailed as error:
            return Missing(str(error))
        return None

    def round(self, case: str) -> dict[str, float]:
        """Figures of one round of `case`."""
        answer = self._ask({"verb": "round", "case": case})
        return {str(name): float(value) for name, value in answer.items()}

    def end(self, case: str) -> None:
        """Give back what `case` holds."""
        self._ask({"verb": "end", "case": case})

    def close(self) -> None:
        """End the process.  Twice is fine."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._process is None:
            self._process = subprocess.Popen(
                [str(self.python), str(BENCHMARKS / "peer" / "server.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=peer_environment(),
                cwd=BENCHMARKS / "peer",
            )
        process = self._process
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            line = self._read_line(process)
        except OSError as error:
            self.close()
            raise PeerFailed(f"the peer's process ended: {error}") from error
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerFailed(str(answer["error"]))
        return answer

    def _read_line(self, process: subprocess.Popen[bytes]) -> bytes:
        assert process.stdout is not None
        descriptor = process.stdout.fileno()
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                process.kill()
                raise ConnectionError(f"no answer in {ANSWER_TIMEOUT_S:.0f} s")
            part = os.read(descriptor, 65536)
            if not part:
                raise ConnectionError("it closed its output")
            line += part
        return line


def install_peer() -> int:
    """Create the peer's environment; the exit status of the script that does it."""
    return subprocess.call([sys.executable, str(BENCHMARKS / "peer" / "setup.py"), str(peer_venv())])
