"""One real server for all tests, a proxy that breaks things between it and a test, and backends on both."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import seaweed
from proxy import Proxy

from lmcache_core import ChunkKey, Context
from lmcache_s3 import S3Backend, S3Options

BUCKET = "records"
Open = Callable[..., S3Backend]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[seaweed.Seaweed]:
    with seaweed.running(tmp_path_factory.mktemp("seaweed")) as started:
        boto(started.url).create_bucket(Bucket=BUCKET)
        yield started


def boto(url: str) -> Any:
    """Amazon's own client, to look from the other side."""
    key, secret = seaweed.ADMIN
    return boto3.client(
        "s3", endpoint_url=url, aws_access_key_id=key, aws_secret_access_key=secret, region_name="us-east-1"
    )


@pytest.fixture
def proxy(server: seaweed.Seaweed) -> Iterator[Proxy]:
    with Proxy(server.port) as started:
        yield started


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    """Names of this test's objects begin with it: the tests share a bucket."""
    return f"test-{os.urandom(6).hex()}"


def options(url: str, prefix: str = "", **more: Any) -> S3Options:
    key, secret = seaweed.ADMIN
    given = {"bucket": BUCKET, "endpoint": url, "access_key_id": key, "secret_access_key": secret, "prefix": prefix}
    return S3Options(**(given | more))


@pytest.fixture
def open_s3(proxy: Proxy, prefix: str) -> Iterator[Open]:
    """`open_s3(timeout_s=..., **options)`: a backend that talks through the proxy."""
    opened: list[S3Backend] = []

    def open_(timeout_s: float = 20.0, **more: Any) -> S3Backend:
        given = options(more.pop("endpoint", proxy.url), more.pop("prefix", prefix), **more)
        opened.append(S3Backend(given, Context(timeout_s=timeout_s)))
        return opened[-1]

    yield open_
    for backend in opened:
        backend.close()


@pytest.fixture
def s3(open_s3: Open) -> S3Backend:
    return open_s3()


@pytest.fixture
def no_aws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder for AWS configuration files, and nothing of the user's own."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return tmp_path


def new_key(shard: bytes | None = None) -> ChunkKey:
    return ChunkKey((shard or os.urandom(16)) + os.urandom(32))


def record(nbytes: int) -> memoryview:
    return memoryview(os.urandom(nbytes))


def held(backend: S3Backend, key: ChunkKey, nbytes: int) -> bytes | None:
    """The record as `get` gives it."""
    into = bytearray(nbytes)
    count = backend.get(key, memoryview(into))
    return None if count is None else bytes(into[:count])
