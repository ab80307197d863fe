"""Where tests put records, what with, and how they look from the other side."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import boto3
import seaweed

from lmcache_core import ChunkKey
from lmcache_s3 import S3Backend, S3Options

BUCKET = "records"
Open = Callable[..., S3Backend]


def boto(url: str) -> Any:
    """Amazon's own client, to look from the other side."""
    key, secret = seaweed.ADMIN
    return boto3.client(
        "s3", endpoint_url=url, aws_access_key_id=key, aws_secret_access_key=secret, region_name="us-east-1"
    )


def options(url: str, prefix: str = "", **more: Any) -> S3Options:
    key, secret = seaweed.ADMIN
    given = {"bucket": BUCKET, "endpoint": url, "access_key_id": key, "secret_access_key": secret, "prefix": prefix}
    return S3Options(**(given | more))


def new_key(shard: bytes | None = None) -> ChunkKey:
    return ChunkKey((shard or os.urandom(16)) + os.urandom(32))


def record(nbytes: int) -> memoryview:
    return memoryview(os.urandom(nbytes))


def held(backend: S3Backend, key: ChunkKey, nbytes: int) -> bytes | None:
    """The record as `get` gives it."""
    into = bytearray(nbytes)
    count = backend.get(key, memoryview(into))
    return None if count is None else bytes(into[:count])
