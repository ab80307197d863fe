"""Daemons for tests: on a thread of this process over given backends, or as a process to stop and kill."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import tiny
from tiny import until

from lmcache_core import Backend, CacheConfig, TierConfig
from lmcache_core.cache import Cache
from lmcache_core.client.cache import RemoteCache, connect
from lmcache_core.config import ServerConfig
from lmcache_core.devices.cpu import CpuDevice
from lmcache_core.events import Events
from lmcache_core.pool import Pool
from lmcache_core.server import daemon as daemon_module
from lmcache_core.server.daemon import Daemon

POOLS: WeakKeyDictionary[Cache, Pool] = WeakKeyDictionary()
"""Where a cache's records are, when they are in a daemon of this process."""
METRICS: WeakKeyDictionary[Cache, Any] = WeakKeyDictionary()


def config(chunks: int = 64, **server: Any) -> CacheConfig:
    tiers = (TierConfig("host", "memory", chunks * tiny.RECORD),)
    return CacheConfig(chunk_tokens=tiny.CHUNK, tiers=tiers, server=ServerConfig(**server))


@contextmanager
def serving(
    path: Path, backends: Sequence[Backend[Any]] = (), *, server: dict[str, Any] | None = None, **settings: Any
) -> Iterator[Daemon]:
    """A daemon on a thread of this process, over `tiny.open_pool(backends, **settings)`."""
    grace_s = settings.pop("grace_s", 0.0)
    events = settings.pop("events", None) or Events(None)

    def opened(config: CacheConfig, metrics: Any, *, shared: bool) -> tuple[Pool, Events]:
        assert shared
        return tiny.open_pool(backends, metrics=metrics, events=events, **settings), events

    with patch.object(daemon_module, "open_pool", opened):
        daemon = Daemon(config(**server or {}), socket_path=path, grace_s=grace_s)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(daemon.run(handle_signals=False),))
    thread.start()
    assert until(daemon.ready.is_set)
    try:
        yield daemon
    finally:
        loop.call_soon_threadsafe(daemon.stop)
        thread.join()
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


@contextmanager
def open_remote(backends: Sequence[Backend[Any]] = (), **settings: Any) -> Iterator[RemoteCache]:
    """What `tiny.open_local` opens, in a daemon."""
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder) / "s", backends, **settings) as daemon,
        connect(Path(folder) / "s", call_timeout_s=5.0) as cache,
    ):
        POOLS[cache] = daemon._pool
        METRICS[cache] = daemon.metrics
        yield cache


def pool_of(cache: Any) -> Pool:
    """Where a cache's records are: its own pool, or that of the daemon it was opened in."""
    return POOLS.get(cache) or cache._pool


def counted(cache: Any, name: str, **labels: str) -> int:
    """A counter, whichever side of the socket counts it; where both do, they agree or one is not done."""
    behind = METRICS[cache].count(name, **labels) if cache in METRICS else 0
    return int(max(cache.metrics.count(name, **labels), behind))


def held(cache: Any) -> int:
    """Records that something holds, when no message is under way any more."""
    if isinstance(cache, RemoteCache):
        assert cache._pool.status() is not None  # answered after whatever was told before
    return pool_of(cache).usage()[1]


PROCESS = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import daemons
from lmcache_core.server.daemon import Daemon
daemon = Daemon(daemons.config(chunks=int(sys.argv[3])), socket_path=Path(sys.argv[1]), grace_s=float(sys.argv[4]))
asyncio.run(daemon.run())
"""


class DaemonProcess:
    """A daemon that can be stopped, continued and killed; started again, it has another boot id."""

    def __init__(self, path: Path, chunks: int = 64, grace_s: float = 1.0) -> None:
        self.path = path
        self.settings = [str(chunks), str(grace_s)]
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        here = str(Path(__file__).parent)
        command = [sys.executable, "-c", PROCESS, str(self.path), here, *self.settings]
        self.process = subprocess.Popen(command)
        assert until(lambda: answers(self.path), 20), "the daemon did not start"

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> DaemonProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        try:
            assert self.process.wait(20) in (0, -signal.SIGKILL)
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise


def answers(path: Path) -> bool:
    """Whether somebody accepts connections there."""
    import socket

    with socket.socket(socket.AF_UNIX) as sock:
        return sock.connect_ex(str(path)) == 0


def descriptors(pid: int | None = None) -> dict[str, int]:
    """How many descriptors of each kind a process has open."""
    kinds: dict[str, int] = {}
    folder = Path(f"/proc/{pid or os.getpid()}/fd")
    for fd in folder.iterdir():
        try:
            kind = os.readlink(fd).partition(":")[0].partition("-")[0]
        except OSError:
            continue
        kinds[kind] = kinds.get(kind, 0) + 1
    return kinds


def threads(pid: int | None = None) -> int:
    return len(list(Path(f"/proc/{pid or os.getpid()}/task").iterdir()))


class Gate(CpuDevice):
    """A device whose copies wait for the test: `entered` when one is about to begin, `go` lets it."""

    api_version = (1, 0)

    def __init__(self, *verbs: str) -> None:
        super().__init__()
        self.verbs = verbs
        self.entered = threading.Event()
        self.go = threading.Event()

    def gather(self, *args: Any, **settings: Any) -> Any:
        self._wait("gather")
        return super().gather(*args, **settings)

    def scatter(self, *args: Any, **settings: Any) -> Any:
        self._wait("scatter")
        return super().scatter(*args, **settings)

    def _wait(self, verb: str) -> None:
        if verb in self.verbs:
            self.entered.set()
            assert self.go.wait(20)


CLIENT = """
import sys
sys.path.insert(0, sys.argv[2])
import tiny
from tiny import *
from lmcache_core.client.cache import connect
cache = connect(sys.argv[1], call_timeout_s=5.0)
pool = cache._pool
def say(what):
    print(what, flush=True)
"""


class ClientProcess:
    """A process with a `cache` in the daemon, that runs `code`; what it says comes out of `heard`."""

    def __init__(self, path: Path, code: str) -> None:
        command = [sys.executable, "-c", CLIENT + code, str(path), str(Path(__file__).parent)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def heard(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> int:
        self.process.kill()
        return self.process.wait()

    def __enter__(self) -> ClientProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
