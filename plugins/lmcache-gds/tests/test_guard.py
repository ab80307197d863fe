"""Calls that outlast their deadline: who asked goes on, what they hold is bounded, and late answers are kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from lmcache_core import BackendError, BackendUnavailable
from lmcache_gds.guard import Guard

LONG_S = 60.0


@pytest.fixture
def guard() -> Iterator[Guard]:
    made = Guard("test", 2)
    yield made
    made.close()


def test_an_answer_and_an_error_come_back(guard: Guard) -> None:
    assert guard.call(lambda: 7, LONG_S) == 7
    with pytest.raises(ZeroDivisionError):
        guard.call(lambda: 1 // 0, LONG_S)


def test_who_asks_is_unavailable_at_the_deadline_and_the_late_answer_goes_where_it_was_told(guard: Guard) -> None:
    go, late = threading.Event(), threading.Event()
    answers: list[str] = []

    def work() -> str:
        go.wait(LONG_S)
        return "late"

    def on_late(answer: str) -> None:
        answers.append(answer)
        late.set()

    with pytest.raises(BackendUnavailable, match="did not answer"):
        guard.call(work, 0.01, on_late)
    go.set()
    assert late.wait(LONG_S)
    assert answers == ["late"]
    assert guard.call(lambda: 1, LONG_S) == 1


def test_calls_that_hang_take_no_more_threads_than_were_allowed(guard: Guard) -> None:
    go = threading.Event()
    before = threading.active_count()
    for _ in range(5):
        with pytest.raises(BackendUnavailable):
            guard.call(lambda: go.wait(LONG_S), 0.01)
    assert threading.active_count() - before == 2
    go.set()
    assert guard.call(lambda: 1, LONG_S) == 1  # they serve again


def test_threads_are_used_again(guard: Guard) -> None:
    names = {guard.call(lambda: threading.current_thread().ident, LONG_S) for _ in range(20)}
    assert len(names) <= 2


def test_close_does_not_wait_for_what_hangs_and_refuses_what_comes(guard: Guard) -> None:
    go = threading.Event()
    with pytest.raises(BackendUnavailable):
        guard.call(lambda: go.wait(LONG_S), 0.01)
    began = time.monotonic()
    guard.close()
    guard.close()
    assert time.monotonic() - began < LONG_S / 2
    with pytest.raises(BackendError, match="closed"):
        guard.call(lambda: 1, LONG_S)
    go.set()


def test_without_a_thread_to_be_had_the_call_is_unavailable_and_the_next_one_works(
    guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", none_left)
            with pytest.raises(BackendUnavailable, match="can't start new thread"):
                guard.call(lambda: 1, LONG_S)
    assert guard.call(lambda: 1, LONG_S) == 1
