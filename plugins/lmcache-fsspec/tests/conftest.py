"""What all tests of this package share."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import fsspec.asyn
import pytest

HELPERS = 2


@pytest.fixture(scope="session", autouse=True)
def _loop_of_the_process() -> None:
    """fsspec keeps one event loop, with helper threads, for the life of the process: no test has left it behind."""
    loop = fsspec.asyn.get_loop()
    helpers = ThreadPoolExecutor(HELPERS, thread_name_prefix="loop")
    all_there = threading.Barrier(HELPERS)
    list(helpers.map(lambda _: all_there.wait(30), range(HELPERS)))

    async def adopt() -> None:
        loop.set_default_executor(helpers)

    asyncio.run_coroutine_threadsafe(adopt(), loop).result(30)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what takes minutes; its test class says which."""
    left_out = [item for item in items if isinstance(item, pytest.Function) and _is_left_out(item)]
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


def _is_left_out(item: pytest.Function) -> bool:
    """`slow_to_open`: the law over histories, which opens a store eighty times."""
    return "history" in item.name and getattr(item.cls, "slow_to_open", False)
