"""One real server for all tests, a proxy that breaks things between it and a test, and backends on both."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import seaweed
from places import BUCKET, Open, boto, options
from proxy import Proxy

from lmcache_core import Context
from lmcache_s3 import S3Backend


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[seaweed.Seaweed]:
    with seaweed.running(tmp_path_factory.mktemp("seaweed")) as started:
        boto(started.url).create_bucket(Bucket=BUCKET)
        yield started


@pytest.fixture
def proxy(server: seaweed.Seaweed) -> Iterator[Proxy]:
    with Proxy(server.port) as started:
        yield started


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    """Names of this test's objects begin with it: the tests share a bucket."""
    return f"test-{os.urandom(6).hex()}"


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
