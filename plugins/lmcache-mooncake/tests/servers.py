"""A real master and real storage nodes, each a process of its own on the loopback, started and ended by handle."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 60.0
_NODE = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
answer = store.setup(sys.argv[4], sys.argv[2], int(sys.argv[3]), 0, "tcp", "", sys.argv[1])
if answer:
    sys.exit(f"setup: {answer}")
print("READY", flush=True)
sys.stdin.read()
store.close()
"""


def until(condition: Callable[[], Any], what: str, timeout_s: float = START_TIMEOUT_S) -> Any:
    """What `condition` returns once that is true; an error after the timeout."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.01)  # a poll of another process, bounded by the deadline
    raise AssertionError(f"{what}: not within {timeout_s} s")


def free_port() -> int:
    """A port of the range that Mooncake does not choose from by itself."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class Process:
    """One process that may be killed, stopped for a while, and started again."""

    def __init__(self, folder: Path, name: str) -> None:
        self._log = folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def spawn(self, *command: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "MC_LOG_LEVEL": "ERROR"}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment
            )
        return self._process

    def said(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait(10)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        """It accepts connections and bytes, and answers nothing."""
        process = self._process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        try:
            until(lambda: _is_stopped(process.pid), "every thread of it stops")
            yield
        finally:
            process.send_signal(signal.SIGCONT)


def _is_stopped(pid: int) -> bool:
    states = [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in Path(f"/proc/{pid}/task").iterdir()]
    return set(states) == {"T"}


class Master(Process):
    """The master, which knows where everything is.  `start` of one that was killed uses the same port."""

    def __init__(self, folder: Path, *, lease_ms: int = 5000, metadata_server: bool = False, **flags: Any) -> None:
        self.port, metrics, metadata = free_port(), free_port(), free_port()
        super().__init__(folder, f"master-{self.port}")
        self.address = f"127.0.0.1:{self.port}"
        self.metadata = f"http://127.0.0.1:{metadata}/metadata" if metadata_server else "P2PHANDSHAKE"
        self._flags = {
            "rpc_address": "127.0.0.1",
            "rpc_port": self.port,
            "metrics_host": "127.0.0.1",
            "metrics_port": metrics,
            "rpc_thread_num": 2,
            "default_kv_lease_ttl": lease_ms,
            "client_ttl": 3,
            **flags,
        }
        if metadata_server:
            self._flags |= {"enable_http_metadata_server": "true", "http_metadata_server_port": metadata}
        self.start()

    def start(self) -> None:
        if self.runs:
            return
        spec = importlib.util.find_spec("mooncake")
        assert spec is not None, "the test group of this package has Mooncake"
        assert spec.submodule_search_locations
        binary = str(Path(spec.submodule_search_locations[0]) / "mooncake_master")
        self.spawn(binary, *(f"--{name}={value}" for name, value in self._flags.items()))
        until(lambda: not self.runs or self._answers(), "the master answers")
        assert self.runs, self.said()

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1.0).close()
        except OSError:
            return False
        return True


class Node(Process):
    """A process whose memory is part of the store."""

    def __init__(self, folder: Path, master: Master, nbytes: int, hostname: str) -> None:
        super().__init__(folder, f"node-{free_port()}")
        self._master = master
        self._nbytes = nbytes
        self._hostname = hostname
        self.start()

    def start(self) -> None:
        if self.runs:
            return
        master = self._master
        process = self.spawn(
            sys.executable, "-c", _NODE, master.address, master.metadata, str(self._nbytes), self._hostname
        )
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() == b"READY":
                return
        self.kill()
        raise AssertionError(f"the node ended: {self.said()}")


@contextlib.contextmanager
def running(
    folder: Path, nodes: int = 1, nbytes: int = 256 << 20, hostname: str = "127.0.0.1", **more: Any
) -> Iterator[Store]:
    """A master and storage nodes."""
    store = Store(Master(folder, **more), [])
    try:
        for _ in range(nodes):
            store.nodes.append(Node(folder, store.master, nbytes, hostname))
        yield store
    finally:
        for process in (*store.nodes, store.master):
            process.kill()


class Store:
    """What `running` started."""

    def __init__(self, master: Master, nodes: list[Node]) -> None:
        self.master = master
        self.nodes = nodes

    def start(self) -> None:
        """Whatever of it is down; with a new master also the nodes, which would take a while to find it."""
        if not self.master.runs:
            for node in self.nodes:
                node.kill()
        self.master.start()
        for node in self.nodes:
            node.start()
