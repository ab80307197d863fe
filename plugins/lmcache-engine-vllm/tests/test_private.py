"""The daemon of an engine's own: there when asked for, again when it dies, gone with its engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_core import connect
from lmcache_engine_vllm.private import PrivateDaemon, private_socket

TIMEOUT_S = 60.0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "lmcache.yaml"
    path.write_text("tiers: [{name: host, backend: memory, capacity: 1MiB}]\n")
    return str(path)


def test_it_serves_until_it_is_closed(tmp_path: Path, config: str) -> None:
    daemon = PrivateDaemon(tmp_path / "s", config)
    with connect(tmp_path / "s", connect_timeout_s=TIMEOUT_S) as cache:
        assert cache.connected
    daemon.close()
    daemon.close()
    assert not alive(daemon.pid)
    assert not (tmp_path / "s").exists()


def test_one_that_is_killed_is_started_again(tmp_path: Path, config: str) -> None:
    daemon = PrivateDaemon(tmp_path / "s", config)
    with connect(tmp_path / "s", connect_timeout_s=TIMEOUT_S) as cache:
        first = daemon.pid
        os.kill(first, signal.SIGKILL)
        until(lambda: daemon.pid != first and cache.connected)
    daemon.close()


def test_it_ends_with_an_engine_that_is_killed(tmp_path: Path, config: str) -> None:
    code = f"""
import sys, time
from pathlib import Path
from lmcache_engine_vllm.private import PrivateDaemon
print(PrivateDaemon(Path({str(tmp_path / "s")!r}), {config!r}).pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        pid = int(engine.stdout.readline())
        with connect(tmp_path / "s", connect_timeout_s=TIMEOUT_S) as cache:
            assert cache.connected
        engine.kill()
    until(lambda: not alive(pid))


def test_each_engine_has_a_socket_of_its_own_with_a_short_name() -> None:
    assert private_socket("a") != private_socket("b")
    assert private_socket("a") == private_socket("a")
    assert len(str(private_socket("x" * 500 + "/../"))) < 100
