"""A daemon of the engine's own, where the node has none: started with the engine, restarted if it dies, ended with it.

Run as a program it is that daemon: `lmc serve` with standard input watched, since an engine that is killed says nothing
but closes its end.
"""

from __future__ import annotations

import hashlib
import logging
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

log = logging.getLogger("vllm.lmcache.daemon")

_END_TIMEOUT_S: Final = 70.0
"""The daemon may write what is not written yet for a minute."""
_RESTART_S: Final = (0.1, 1.0, 5.0, 30.0)
_CALM_S: Final = 60.0


def private_socket(engine_id: str) -> Path:
    """Where the daemon of that engine listens: the same in all of the engine's processes, short enough for a socket."""
    name = hashlib.blake2b(engine_id.encode(), digest_size=8).hexdigest()
    folder = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(folder) / f"lmcache-vllm-{os.getuid()}" / f"{name}.sock"


def wait_for_socket(path: Path, timeout_s: float = 10.0) -> None:
    """Until a daemon that has just been started listens; whoever connects goes on looking after that."""
    deadline = time.monotonic() + timeout_s
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


class PrivateDaemon:
    """The child process.  `close` ends it; so does the end of this process, however it comes."""

    def __init__(self, socket: Path, config: str | None) -> None:
        self._command = [sys.executable, "-P", __file__, "serve", "--socket", str(socket)]
        self._command += ["--config", config] if config is not None else []
        self._closing = threading.Event()
        self._child = self._start()
        self._watch = threading.Thread(target=self._restart, name="lmcache-vllm-daemon", daemon=True)
        self._watch.start()

    @property
    def pid(self) -> int:
        return self._child.pid

    def close(self) -> None:
        """Let it write what it has to, and end.  Twice is fine."""
        self._closing.set()
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._watch.join()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, stdin=subprocess.PIPE)

    def _restart(self) -> None:
        """Wait for the child; one that ends unasked is started again, less and less soon."""
        attempt = 0
        while True:
            began = time.monotonic()
            code = self._wait()
            if self._closing.is_set():
                return
            if time.monotonic() - began > _CALM_S:
                attempt = 0
            log.warning("the daemon ended with status %d; starting it again", code)
            if self._closing.wait(_RESTART_S[min(attempt, len(_RESTART_S) - 1)]):
                return
            attempt += 1
            assert self._child.stdin is not None
            self._child.stdin.close()
            self._child = self._start()
            if self._closing.is_set():  # closed while it started
                assert self._child.stdin is not None
                self._child.stdin.close()

    def _wait(self) -> int:
        while True:
            try:
                return self._child.wait(None if not self._closing.is_set() else _END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                log.warning("the daemon did not end in %.0f s", _END_TIMEOUT_S)
                self._child.kill()


def _end_with_parent() -> None:
    """Read standard input to its end, then stop as on SIGTERM."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the engine's terminal: the engine ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    runpy.run_module("lmcache_core.cli", run_name="__main__", alter_sys=True)
