"""The laws of a backend, on a real master and a real storage node in processes of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from records import new_key
from servers import Store, until

from lmcache_core import BackendUnavailable, Context
from lmcache_core.testing import BackendLaws
from lmcache_mooncake import MooncakeBackend, MooncakeOptions


class OnStore(BackendLaws):
    """A law that breaks the store leaves it to the next one to start it again.

    One handle stays open: the others share its client, whose end takes a second each time.
    """

    pytestmark = pytest.mark.keeps_running  # that client's connections; test_session.py sees it go
    more: ClassVar[dict[str, Any]] = {}
    store: Store
    kept: MooncakeBackend

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _kept(cls, store: Store) -> Iterator[None]:
        cls.store = store
        store.start()
        cls.kept = cls().open_backend(Context())
        cls.kept.contains(new_key())
        yield
        cls.kept.close()

    @pytest.fixture(autouse=True)
    def _alone(self, request: pytest.FixtureRequest) -> Iterator[None]:
        """The law that counts descriptors has the client to itself: one that stays makes connections when it likes."""
        is_alone = request.node.name.endswith("_leaves_nothing")
        if is_alone:
            self.kept.close()
        yield
        if is_alone:
            type(self).kept = self.open_backend(Context())

    def setup_law(self) -> None:
        self.store.start()
        until(self._is_connected, "the client has found the new master")
        super().setup_law()

    def _is_connected(self) -> bool:
        try:
            with self.open_backend(Context()) as backend:
                return not backend.contains(new_key())
        except BackendUnavailable:
            return False

    def open_backend(self, context: Context) -> MooncakeBackend:
        return MooncakeBackend(MooncakeOptions(master=self.store.master.address, **self.more), context)

    def break_store(self) -> None:
        self.store.master.kill()

    def stall_store(self) -> contextlib.AbstractContextManager[None]:
        return self.store.master.stalled()


class TestLaws(OnStore):
    pass


class TestLawsWithASegmentOfOurOwn(OnStore):
    more: ClassVar[dict[str, Any]] = {"segment_nbytes": 64 << 20, "prefer_local": True, "threads": 2}
