"""A name is not put while it is replaced, and not replaced while it is put or replaced."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import pytest
from records import empty, keys, open_backend, record
from servers import Store

from lmcache_core import BackendUnavailable
from lmcache_core.testing import in_threads
from lmcache_mooncake import MooncakeBackend
from lmcache_mooncake.turns import Turns

Enter = Callable[[Turns, str, float], AbstractContextManager[None]]


def put(turns: Turns, name: str, deadline: float) -> AbstractContextManager[None]:
    return turns.putting([name, "another"], deadline)


def replace(turns: Turns, name: str, deadline: float) -> AbstractContextManager[None]:
    return turns.replacing(name, deadline)


@pytest.mark.parametrize(("first", "second"), [(put, replace), (replace, put), (replace, replace)])
def test_one_waits_for_the_other_of_the_same_name_only(first: Enter, second: Enter) -> None:
    turns = Turns()
    entered = threading.Event()

    def wait() -> None:
        with second(turns, "a", time.monotonic() + 30):
            entered.set()

    waiter = threading.Thread(target=wait)
    with first(turns, "a", 0):
        waiter.start()
        with (
            second(turns, "b", 0),
            pytest.raises(BackendUnavailable, match="until the deadline"),
            second(turns, "a", 0),
        ):
            pass
        assert not entered.is_set()
    assert entered.wait(30)
    waiter.join(30)


def test_puts_of_one_name_do_not_wait_for_each_other() -> None:
    turns = Turns()
    with put(turns, "a", 0), put(turns, "a", 0):
        pass
    with replace(turns, "a", 0):
        pass


@pytest.mark.parametrize("clients", [1, 2])
def test_removals_and_stores_of_the_same_keys_beside_readers_show_whole_records_only(
    store: Store, clients: int
) -> None:
    names = keys(2)
    nbytes = {key: 200_000 + 100_000 * number for number, key in enumerate(names)}
    # The master refuses the end of a put that another client has taken over: then it is not stored.
    refused = contextlib.suppress(BackendUnavailable) if clients > 1 else contextlib.nullcontext()
    with open_backend(store) as one, open_backend(store, threads=2) as other:
        backends = [one, other][:clients]
        done = threading.Event()
        wrong: list[object] = []

        def write(backend: MooncakeBackend) -> None:
            for _ in range(100):
                for key in names:
                    with refused:
                        backend.put(key, record(key, nbytes[key]))
                    backend.contains(key)  # now it has a lease
                    backend.remove(key)

        def read() -> None:
            while not done.is_set():
                for key in names:
                    into = empty(nbytes[key])
                    found = one.get(key, into)
                    if found is not None and (found != nbytes[key] or into != record(key, nbytes[key])):
                        wrong.append(found)

        reader = threading.Thread(target=read)
        reader.start()
        try:
            in_threads(*(partial(write, backends[number % clients]) for number in range(4)))
        finally:
            done.set()
            reader.join(30)
        assert not wrong
