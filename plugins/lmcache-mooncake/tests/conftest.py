"""A network of the tests' own, and a store that those of a module share."""

from __future__ import annotations

from collections.abc import Iterator

import isolation
import pytest
from records import open_backend, round_trip
from servers import Store, running


@pytest.fixture(scope="session", autouse=True)
def _own_network() -> None:
    if isolation.PROBLEM:
        pytest.skip(f"cannot run here: {isolation.PROBLEM}, and Mooncake would listen on all interfaces")


@pytest.fixture(scope="session", autouse=True)
def _library(_own_network: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Mooncake's client, used once: what the library opens for the whole process is open before any test."""
    with running(tmp_path_factory.mktemp("first")) as first, open_backend(first) as backend:
        round_trip(backend)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with running(tmp_path_factory.mktemp("mooncake")) as started:
        yield started
