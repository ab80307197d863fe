"""One network file system for all tests of it; where nothing can be mounted, they are skipped, and say why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fuse
import pytest


@pytest.fixture(scope="session")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[fuse.Network]:
    reason = fuse.why_not()
    if reason:
        pytest.skip(f"cannot run here: {reason}")
    manager = fuse.mounted(tmp_path_factory.mktemp("network"))
    try:
        network = manager.__enter__()
    except fuse.NotMounted as error:
        pytest.skip(f"cannot run here: {error}")
    try:
        yield network
    finally:
        manager.__exit__(None, None, None)


@pytest.fixture
def folder(network: fuse.Network, request: pytest.FixtureRequest) -> Path:
    """A store's place on it that no other test uses."""
    return network.path / f"store-{abs(hash(request.node.nodeid))}"
