"""The laws of a backend, on real servers, on every way to reach them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from records import open_backend
from servers import Server

from lmcache_core import Context
from lmcache_core.testing import BackendLaws
from lmcache_redis import RedisBackend, RedisOptions, ValkeyBackend


class OnServer(BackendLaws):
    """A law that breaks the server leaves it to the next one to start it again."""

    server: Server
    kind: type[RedisBackend]

    def options(self) -> dict[str, Any]:
        return {"url": self.server.url}

    def setup_law(self) -> None:
        self.server.start()
        super().setup_law()

    def open_backend(self, context: Context) -> RedisBackend:
        return self.kind(self.kind.Options(**self.options()), context)

    def break_store(self) -> None:
        self.server.kill()

    def stall_store(self) -> contextlib.AbstractContextManager[None]:
        return self.server.stalled()


class TestRedis(OnServer):
    kind = RedisBackend

    @pytest.fixture(autouse=True)
    def _server(self, redis: Server) -> None:
        self.server = redis


class TestRedisByItsUnixSocket(TestRedis):
    def options(self) -> dict[str, Any]:
        return {"url": f"unix://{self.server.socket_path}?db=3", "protocol": 3, "ttl_s": 3600.0}


class TestRedisWithSmallValues(TestRedis):
    def options(self) -> dict[str, Any]:
        return {"url": self.server.url, "max_value_nbytes": 1 << 20, "connections": 1}


class TestRedisInSmallPieces(TestRedis):
    def options(self) -> dict[str, Any]:
        return {"url": self.server.url, "read_slice_nbytes": 4096}


class TestValkey(OnServer):
    kind = ValkeyBackend

    @pytest.fixture(autouse=True)
    def _server(self, valkey: Server) -> None:
        self.server = valkey


class TestValkeyWithProtocol3InSmallPieces(TestValkey):
    def options(self) -> dict[str, Any]:
        return {"url": self.server.url.replace("redis:", "valkey:"), "protocol": 3, "read_slice_nbytes": 4096}


@pytest.fixture(scope="module")
def tls_server(tmp_path_factory: pytest.TempPathFactory, certificates: Any) -> Iterator[Server]:
    from servers import ended, redis_server

    server = redis_server(
        tmp_path_factory.mktemp("tls"),
        *("--tls-cert-file", str(certificates.server), "--tls-key-file", str(certificates.server_key)),
        *("--tls-ca-cert-file", str(certificates.ca)),
        tls=True,
    )
    with ended(server):
        yield server


class TestRedisWithTls(OnServer):
    kind = RedisBackend

    @pytest.fixture(autouse=True)
    def _server(self, tls_server: Server, certificates: Any) -> None:
        self.server = tls_server
        self.certificates = certificates

    def options(self) -> dict[str, Any]:
        return {
            "url": self.server.url,
            "ca_file": self.certificates.ca,
            "cert_file": self.certificates.client,
            "key_file": self.certificates.client_key,
        }


def test_the_store_bounds_itself_so_a_capacity_is_not_kept(redis: Server) -> None:
    with open_backend(redis.url) as backend:
        assert backend.context.capacity_nbytes is None
    with RedisBackend(RedisOptions(url=redis.url), Context(capacity_nbytes=1 << 20)) as backend:
        assert backend.context.capacity_nbytes is None
