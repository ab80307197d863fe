"""The laws of the kit on a network file system, whose FUSE process is stopped for those about deadlines."""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from fuse import Network
from stores import open_gds

from lmcache_core import Context
from lmcache_core.testing import BackendLaws
from lmcache_gds import GdsBackend


class TestLawsOnANetworkFileSystem(BackendLaws):
    @pytest.fixture(autouse=True)
    def place(self, network: Network, folder: Path) -> None:
        self.network, self.path = network, folder

    def open_backend(self, context: Context) -> GdsBackend:
        return open_gds(self.path, context.timeout_s, context.capacity_nbytes)

    def break_store(self) -> None:
        shutil.rmtree(self.path)

    def stall_store(self) -> AbstractContextManager[None]:
        return self.network.stopped()
