"""Where a bucket is: host, port, the path of an object, and how we call the place in messages."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, urlsplit

from lmcache_core import ChunkKey

from .identity import region_of
from .options import S3Options

LAYOUT: Final = "v1"
_SAFE: Final = "/-_.~"
_SUFFIXES: Final = {"cn-": "amazonaws.com.cn", "eusc-": "amazonaws.eu"}
"""What host names end with in regions that are apart from the rest."""


@dataclass(frozen=True, slots=True)
class Target:
    """One bucket on one server."""

    host: str
    port: int
    tls: bool
    bucket: str
    region: str
    root: str
    """Path of the bucket: "/bucket", or "" where the host name holds it."""
    prefix: str
    """What every object's name begins with, e.g. "kv/v1/"."""

    @classmethod
    def of(cls, options: S3Options) -> Target:
        region = region_of(options)
        suffix = next((s for start, s in _SUFFIXES.items() if region.startswith(start)), "amazonaws.com")
        url = urlsplit(options.endpoint or f"https://s3.{region}.{suffix}")
        tls = url.scheme == "https"
        host, port = url.hostname or "", url.port or (443 if tls else 80)
        in_path = options.addressing == "path" or (
            options.addressing == "auto" and (options.endpoint is not None or "." in options.bucket)
        )
        root = f"/{options.bucket}" if in_path else ""
        if not in_path:
            host = f"{options.bucket}.{host}"
        above = options.prefix.rstrip("/")
        return cls(host, port, tls, options.bucket, region, root, f"{above}/{LAYOUT}/" if above else f"{LAYOUT}/")

    @property
    def authority(self) -> str:
        """The Host header: the port only where it is not the scheme's own."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.authority}"

    @property
    def loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost" or self.host.endswith(".localhost")

    @property
    def bucket_path(self) -> str:
        return self.root or "/"

    def path(self, key: ChunkKey) -> str:
        """Path of a record's object, as it stands in a request."""
        return quote(f"{self.root}/{self.name(key)}", safe=_SAFE)

    def name(self, key: ChunkKey) -> str:
        """Name of a record's object within the bucket."""
        text = key.text
        return f"{self.prefix}{text[:32]}/{text[32:]}"

    def key(self, name: str) -> ChunkKey | None:
        """Inverse of `name`; None for an object that is no record of ours."""
        if not name.startswith(self.prefix):
            return None
        shard, slash, digest = name[len(self.prefix) :].partition("/")
        if not slash or len(shard) != 32:
            return None
        try:
            return ChunkKey.from_text(shard + digest)
        except ValueError:
            return None

    def __str__(self) -> str:
        return f"bucket {self.bucket!r}, region {self.region!r}, endpoint {self.url}"
