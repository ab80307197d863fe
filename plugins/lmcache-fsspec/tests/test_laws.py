"""The conformance laws on every kind of filesystem, each against a real one or the server that stands in for it."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import servers

from lmcache_core import Context, RawOptions
from lmcache_core.testing import BackendLaws
from lmcache_fsspec import FsspecBackend, FsspecOptions

BIG_BODY = "ignore:Sending a large body directly with raw bytes:ResourceWarning"
"""What aiohttp says of every upload over 1 MiB by clients that hand it bytes."""


def open_url(
    url: str, context: Context | None = None, storage: Mapping[str, Any] | None = None, **secrets: str
) -> FsspecBackend:
    options = FsspecOptions(url=url, storage=RawOptions.of(storage or {}), secrets=RawOptions.of(secrets))
    return FsspecBackend(options, context or Context())


class TestLocal(BackendLaws):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "store"

    def open_backend(self, context: Context) -> FsspecBackend:
        return open_url(f"file://{self.folder}", context)

    def break_store(self) -> None:
        shutil.rmtree(self.folder)
        self.folder.write_text("in the way")


class TestMemory(BackendLaws):
    def open_backend(self, context: Context) -> FsspecBackend:
        return open_url(f"memory://{uuid.uuid4().hex}", context)


FEW_HISTORIES = ((20, 8), (7, 40))
"""For servers in Python, of which a step takes a hundredth of a second."""


class ServerLaws(BackendLaws):
    """The laws on a server, which is started again after a law that killed it."""

    slow_to_open: ClassVar[bool] = False
    """Its client takes a second to make: see conftest.py."""
    new_server: ClassVar[Callable[[Path], servers.Server]]
    server: ClassVar[servers.Server]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        cls.server = cls.new_server(tmp_path_factory.mktemp("server"))
        cls.server.start()
        try:
            cls.prepare()
            yield
        finally:
            cls.server.kill()

    @classmethod
    def prepare(cls) -> None:
        """Make what the server begins with, such as a bucket."""

    def setup_law(self) -> None:
        if not self.server.running:
            self.server.start()
            self.prepare()
        super().setup_law()

    def break_store(self) -> None:
        self.server.kill()
        self.bench.backend.context = self.in_time(self.bench.backend.context)

    def in_time(self, context: Context) -> Context:
        """Clients try a server that is gone again and again, for as long as they may."""
        return context if self.server.running else dataclasses.replace(context, timeout_s=0.3)

    def stall_store(self) -> contextlib.AbstractContextManager[None]:
        return self.server.stalled()


class TestFtp(ServerLaws):
    new_server = staticmethod(servers.ftp)
    histories = FEW_HISTORIES

    def open_backend(self, context: Context) -> FsspecBackend:
        return open_url(f"ftp://kv@127.0.0.1:{self.server.port}/store", self.in_time(context), password="kv-secret-5")


class TestWebdav(ServerLaws):
    new_server = staticmethod(servers.webdav)
    histories = FEW_HISTORIES

    def open_backend(self, context: Context) -> FsspecBackend:
        return open_url("webdav://store", self.in_time(context), {"base_url": f"http://127.0.0.1:{self.server.port}"})


@pytest.mark.filterwarnings(BIG_BODY)
class TestS3(ServerLaws):
    slow_to_open = True
    new_server = staticmethod(servers.s3)

    def open_backend(self, context: Context) -> FsspecBackend:
        storage = {"endpoint_url": f"http://127.0.0.1:{self.server.port}", "key": servers.S3_KEY}
        return open_url("s3://bucket/store", self.in_time(context), storage, secret=servers.S3_SECRET)

    @classmethod
    def prepare(cls) -> None:
        servers.make_s3_bucket(cls.server.port)


@pytest.mark.filterwarnings(BIG_BODY)
class TestGcs(ServerLaws):
    slow_to_open = True
    new_server = staticmethod(servers.gcs)

    def open_backend(self, context: Context) -> FsspecBackend:
        storage = {"endpoint_url": f"http://127.0.0.1:{self.server.port}", "token": "anon", "project": "p"}
        return open_url("gcs://bucket/store", self.in_time(context), storage)

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _plain_buckets(cls) -> Iterator[None]:
        """The stand-in has no hierarchical buckets, and the client waits a minute for it to say so."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
            yield

    @classmethod
    def prepare(cls) -> None:
        servers.make_gcs_bucket(cls.server.port)


@pytest.mark.filterwarnings(BIG_BODY)
class TestAzure(ServerLaws):
    slow_to_open = True
    new_server = staticmethod(servers.azure)

    def open_backend(self, context: Context) -> FsspecBackend:
        return open_url(
            "abfs://container/store",
            self.in_time(context),
            connection_string=servers.azure_connection(self.server.port),
        )

    @classmethod
    def prepare(cls) -> None:
        servers.make_azure_container(cls.server.port)
