"""The laws of the kit on a local file system: as probed, buffered, and with every call held to its deadline."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, ClassVar

import pytest
from stores import open_gds

from lmcache_core import Context
from lmcache_core.testing import BackendLaws
from lmcache_gds import GdsBackend


class GdsLaws(BackendLaws):
    more: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def root(self, tmp_path: Path) -> None:
        self.path = tmp_path / "store"

    def open_backend(self, context: Context) -> GdsBackend:
        return open_gds(self.path, context.timeout_s, context.capacity_nbytes, **self.more)

    def break_store(self) -> None:
        shutil.rmtree(self.path)


class TestLawsAsProbed(GdsLaws):
    pass


class TestLawsBuffered(GdsLaws):
    more: ClassVar[dict[str, Any]] = {"io": "buffered"}


class TestLawsGuarded(GdsLaws):  # as on a mount that may hang
    more: ClassVar[dict[str, Any]] = {"guard": "on", "io_threads": 2}
