"""The laws of the kit on a real server: as configured by default, in ranges, and with signed payloads."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, ClassVar

import pytest
from places import options
from proxy import Proxy
from seaweed import Seaweed

from lmcache_core import Context
from lmcache_core.testing import BackendLaws
from lmcache_s3 import S3Backend


class S3Laws(BackendLaws):
    more: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def place(self, request: pytest.FixtureRequest, server: Seaweed, proxy: Proxy, prefix: str) -> None:
        self.proxy, self.prefix = proxy, prefix
        # Only these need the proxy, whose threads and sockets are in this process, where another law counts them.
        through = request.node.name.endswith(("_a_broken_store_is_a_backend_error", "_beyond_the_deadline"))
        self.url = proxy.url if through else server.url

    def open_backend(self, context: Context) -> S3Backend:
        return S3Backend(options(self.url, self.prefix, **self.more), context)

    def break_store(self) -> None:
        self.proxy.close()

    def stall_store(self) -> AbstractContextManager[None]:
        return self.proxy.stalled()


class TestLaws(S3Laws):
    pass


class TestLawsInRanges(S3Laws):
    more: ClassVar[dict[str, Any]] = {"range_nbytes": 1 << 20, "connections": 4}


class TestLawsWithSignedPayloads(S3Laws):
    more: ClassVar[dict[str, Any]] = {"sign_payload": True, "skip_existing": False, "parallel": 1}
