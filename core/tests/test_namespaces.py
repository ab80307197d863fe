"""Containers that share nothing but the folder of the socket: mount, PID, IPC and network namespaces of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from serve import Serve, joined, write_config
from tiny import chain, load, store, until

SHARED = Path("/mnt")
"""Where each container has the folder."""
HERE = Path(__file__).parent
SETUP = (
    'mount --make-rprivate / && mount --bind "$1" /mnt && mount -t tmpfs none "$2" && mount -t tmpfs none /dev/shm '
    '&& mount -t proc none /proc && shift 2 && exec "$@"'
)
CLIENT = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from serve import joined
from tiny import LAYOUT, chain, load, store
import os
assert os.getpid() == 1, "not in a namespace of its own"
assert not list(Path(sys.argv[2]).iterdir()) and not list(Path("/dev/shm").iterdir())
with joined(Path("/mnt/s")) as cache:
    assert cache.connected
    {body}
"""


def inside(folder: Path) -> list[str]:
    """Runs what follows in a container that has `folder` at SHARED, and nothing where the folder is outside."""
    unshare = ["unshare", "--mount", "--pid", "--ipc", "--net", "--fork", "--kill-child"]
    return [*unshare, "sh", "-c", SETUP, "sh", str(folder), str(folder.parent)]


@contextmanager
def client(folder: Path, body: str) -> Iterator[subprocess.Popen[str]]:
    """A process in a container that runs `body` with a `cache`; its output ends when it does."""
    command = [*inside(folder), sys.executable, "-c", CLIENT.format(body=body), str(HERE), str(folder.parent)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()  # and its child with it
        process.communicate()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """The one folder that containers share."""
    probe = subprocess.run([*inside(tmp_path), "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"cannot run here: no namespaces: {probe.stderr.strip()}")
    return tmp_path


@pytest.fixture
def daemon(shared: Path) -> Iterator[Serve]:
    """A daemon in a container of its own."""
    config = write_config(shared, disk=False)
    config.write_text(config.read_text().replace(str(shared), str(SHARED)))
    with Serve(config, wrapper=inside(shared), seen_as=SHARED / config.name) as served:
        served.ready()
        yield served
        assert served.stop() == 0


def test_what_one_container_stores_another_and_the_host_load(daemon: Serve, shared: Path) -> None:
    with client(shared, "print(store(cache, chain(5)).ok_chunks)") as writer:
        assert said(writer) == "5"
        assert writer.wait(30) == 0
    with client(shared, "print(load(cache, chain(7))[1].ok_chunks)") as reader:
        assert said(reader) == "5"
        assert reader.wait(30) == 0
    with joined(shared / "s") as cache:
        assert load(cache, chain(5))[1].ok_chunks == 5
        assert store(cache, chain(8)).ok_chunks == 3
    assert sorted(path.name for path in shared.iterdir()) == ["lmcache.yaml", "s"]


def test_slots_of_a_client_killed_in_another_container_come_back_after_its_death(daemon: Serve, shared: Path) -> None:
    body = "held = cache._pool.reserve(chain(6), chain(6).model.shards[0], range(6)); print(len(held.new)); input()"
    with joined(shared / "s") as cache:

        def quarantined() -> int:
            status = cache.daemon_status()
            return -1 if status is None else int(str(status["quarantined_slots"]))

        with client(shared, body) as writer:
            assert said(writer) == "6"
            child = int(Path(f"/proc/{writer.pid}/task/{writer.pid}/children").read_text())
            os.kill(child, signal.SIGKILL)
            assert until(lambda: quarantined() == 6)
        assert until(lambda: quarantined() == 0, 20)
        assert store(cache, chain(6)).ok_chunks == 6
        assert load(cache, chain(6))[1].ok_chunks == 6
