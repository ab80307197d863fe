"""Servers that the tests start: each on loopback and a free port, and ended by its own handle."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

READY_S = 60.0


class Server:
    """One process that listens on `port`; it can be killed, started again, and stopped in its tracks.

    `leaves` is a pattern of the files that it makes in /tmp for each of its `ports`, and leaves when it is killed.
    """

    def __init__(
        self, command: Callable[[int], Sequence[str]], folder: Path, *, ports: int = 1, leaves: str = ""
    ) -> None:
        self.port = free_port(ports)
        self._leaves = [leaves.format(self.port + number) for number in range(ports)] if leaves else []
        self._command = [str(part) for part in command(self.port)]
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it unless it runs, and wait until it takes connections."""
        if self.running:
            return
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._folder
            )
        deadline = time.monotonic() + READY_S
        while not listens(self.port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                pytest.fail(f"{self._command[0]} did not start: {(self._folder / 'log').read_text()[-2000:]}")
            time.sleep(0.02)  # waits for a condition, with a deadline

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            for left in (path for pattern in self._leaves for path in Path("/tmp").glob(pattern)):
                left.unlink(missing_ok=True)

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        """The system still takes connections for it, and nobody answers them."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)


def free_port(count: int = 1) -> int:
    """The first of `count` free ports in a row, below those that the system gives to outgoing connections."""
    for _ in range(100):
        first = random.randrange(12_000, 32_000)
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(_bound(port))
            return first
    raise OSError("no free ports")


def _bound(port: int) -> socket.socket:
    bound = socket.socket()
    try:
        bound.bind(("127.0.0.1", port))
    except OSError:
        bound.close()
        raise
    return bound


def listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def tool(name: str) -> str:
    """A program that a package of the test environment brings, or one on the path."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"cannot run here: {name} is not installed")
    return found


def ftp(folder: Path) -> Server:
    root = folder / "root"
    root.mkdir()
    script = Path(__file__).parent / "ftp_server.py"
    return Server(lambda port: [sys.executable, str(script), str(port), str(root)], folder)


def webdav(folder: Path) -> Server:
    root = folder / "root"
    root.mkdir()
    script = Path(__file__).parent / "webdav_server.py"
    return Server(lambda port: [sys.executable, str(script), str(port), str(root)], folder)


def gcs(folder: Path) -> Server:
    script = Path(__file__).parent / "gcs_server.py"
    return Server(lambda port: [sys.executable, str(script), str(port)], folder)


def azure(folder: Path) -> Server:
    options = [
        "--blobHost",
        "127.0.0.1",
        "--skipApiVersionCheck",
        "--disableTelemetry",
        "--silent",
        "--inMemoryPersistence",
    ]
    return Server(lambda port: [tool("azurite-blob"), "--blobPort", str(port), *options], folder)


S3_KEY, S3_SECRET = "lmcache", "lmcache-secret-7"


def s3(folder: Path) -> Server:
    identity = {"name": "t", "credentials": [{"accessKey": S3_KEY, "secretKey": S3_SECRET}], "actions": ["Admin"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))

    def command(port: int) -> list[str]:
        names = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc")
        ports = [f"-{name}={port + 1 + index}" for index, name in enumerate((*names, "s3.port.grpc"))]
        fixed = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false", "-master.volumeSizeLimitMB=64"]
        more = ["-volume.max=0", "-volume.preStopSeconds=0", "-filer", f"-filer.localSocket={folder}/f.sock", "-s3"]
        s3_own = [f"-s3.port={port}", "-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.localSocket={folder}/s.sock"]
        last = ["-s3.config=s3.json", f"-dir={folder}"]
        return [tool("weed"), "server", *fixed, *ports, *more, *s3_own, *last]

    return Server(command, folder, ports=8, leaves="seaweedfs-*-grpc-{}.sock")


def make_s3_bucket(port: int) -> None:
    """Retried: the gateway listens before its filer has found the volumes."""
    import s3fs

    fs = s3fs.S3FileSystem(
        key=S3_KEY, secret=S3_SECRET, endpoint_url=f"http://127.0.0.1:{port}", skip_instance_cache=True
    )
    _until_done(lambda: fs.makedirs("bucket", exist_ok=True))
    _until_done(lambda: fs.pipe_file("bucket/ready", b"1"))
    close(fs)


def make_gcs_bucket(port: int) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/storage/v1/b?project=p",
        data=b'{"name": "bucket"}',
        headers={"Content-Type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=READY_S).close()


AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The key that every Azurite has, published in its documentation."""


def azure_connection(port: int) -> str:
    endpoint = f"BlobEndpoint=http://127.0.0.1:{port}/devstoreaccount1;"
    return f"DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey={AZURE_KEY};{endpoint}"


def make_azure_container(port: int) -> None:
    from azure.storage.blob import BlobServiceClient

    with BlobServiceClient.from_connection_string(azure_connection(port)) as client:
        client.create_container("container")


def close(fs: Any) -> None:
    """Close a filesystem's connections as the backend does."""
    from lmcache_fsspec.running import OnLoop

    runner = OnLoop(lambda: fs, 1)
    runner._fs = fs
    runner.close()


def _until_done(work: Callable[[], object]) -> None:
    deadline = time.monotonic() + READY_S
    while True:
        try:
            work()
        except Exception:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)  # waits for a condition, with a deadline
        else:
            return
