"""The event thread: hooks cost themselves their events, and nobody else any time."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from lmcache_core import events
from lmcache_core.events import MAX_QUEUED, Events

WAIT_S = 60.0


class SlowHook:
    """Blocks in its first call until it is let go; remembers what it was told."""

    def __init__(self) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.heard: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, hook: str, arguments: dict[str, Any]) -> None:
        self.entered.set()
        assert self.go_on.wait(WAIT_S)
        self.heard.append((hook, arguments))


def event_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "lmcache-events"]


def test_events_are_delivered_in_their_order_with_their_arguments() -> None:
    heard: list[tuple[str, dict[str, Any]]] = []
    bus = Events(lambda hook, arguments: heard.append((hook, arguments)))
    assert bus.wanted
    for number in range(100):
        bus.emit("lmcache_something", number=number)
    bus.close()
    assert heard == [("lmcache_something", {"number": number}) for number in range(100)]


def test_hooks_run_on_a_thread_of_their_own() -> None:
    threads: list[str] = []
    bus = Events(lambda hook, arguments: threads.append(threading.current_thread().name))
    bus.emit("hook")
    bus.close()
    assert threads == ["lmcache-events"]


def test_without_hooks_there_is_no_thread_and_nothing_is_kept() -> None:
    dropped: list[int] = []
    bus = Events(None, lambda: dropped.append(1))
    assert not bus.wanted
    for _ in range(2 * MAX_QUEUED):
        bus.emit("hook", payload=bytes(10))
    assert not event_threads()
    assert bus._queue.empty()
    assert not dropped
    bus.close()


def test_a_slow_hook_loses_events_that_are_counted_and_never_blocks_who_emits() -> None:
    hook = SlowHook()
    dropped: list[str] = []
    bus = Events(hook, lambda: dropped.append(threading.current_thread().name))
    bus.emit("first")
    assert hook.entered.wait(WAIT_S)
    for number in range(MAX_QUEUED + 50):
        bus.emit("hook", number=number)  # returns although the hook is stuck
    assert dropped == [threading.current_thread().name] * 50
    hook.go_on.set()
    bus.close(WAIT_S)
    assert len(hook.heard) == MAX_QUEUED + 1
    assert [arguments["number"] for _, arguments in hook.heard[1:]] == list(range(MAX_QUEUED))


def test_a_hook_that_nobody_implements_is_not_queued() -> None:
    heard: list[str] = []
    bus = Events(lambda hook, arguments: heard.append(hook), heard={"mine"})
    assert bus.hears("mine")
    assert not bus.hears("other")
    bus.emit("other")
    bus.emit("mine")
    bus.close()
    assert heard == ["mine"]
    assert not bus.hears("mine")


def test_close_delivers_what_is_queued_and_ends_the_thread() -> None:
    hook = SlowHook()
    bus = Events(hook)
    for number in range(10):
        bus.emit("hook", number=number)
    closing = threading.Thread(target=bus.close, args=(WAIT_S,))
    closing.start()
    hook.go_on.set()
    closing.join(WAIT_S)
    assert len(hook.heard) == 10
    assert not event_threads()
    bus.close()
    bus.emit("hook", number=11)
    assert not bus.wanted
    assert bus._queue.empty()
    assert len(hook.heard) == 10


@pytest.mark.parametrize("waiting", [0, 3, MAX_QUEUED])
def test_close_gives_up_on_a_stuck_hook_at_its_timeout_and_says_so(
    waiting: int, caplog: pytest.LogCaptureFixture
) -> None:
    hook = SlowHook()
    bus = Events(hook)
    bus.emit("first")
    assert hook.entered.wait(WAIT_S)
    for _ in range(waiting):
        bus.emit("hook")
    started = time.monotonic()
    bus.close(0.05)
    assert time.monotonic() - started < 5
    assert "hooks are still busy" in caplog.text
    assert event_threads()
    hook.go_on.set()  # whatever was queued is lost, and the thread ends as soon as it can
    for thread in event_threads():
        thread.join(WAIT_S)
    assert not event_threads()
    assert len(hook.heard) == 1


def test_close_takes_its_timeout_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    bus = Events(lambda hook, arguments: None)
    thread = bus._thread
    joined: list[float] = []

    class StuckThread:
        def join(self, timeout: float) -> None:
            joined.append(timeout)

        def is_alive(self) -> bool:
            return True

    def put_after_four_seconds(item: None, block: bool = True, timeout: float = 0.0) -> None:
        nonlocal now
        now += 4.0 if block else 0.0

    bus._thread = StuckThread()  # type: ignore[assignment]
    monkeypatch.setattr(events.time, "monotonic", lambda: now)
    monkeypatch.setattr(bus._queue, "put", put_after_four_seconds)
    bus.close(5.0)
    monkeypatch.undo()
    assert joined == [1.0]
    assert thread is not None
    bus._queue.put(None)
    thread.join(WAIT_S)


def test_a_call_that_raises_is_reported_and_the_next_event_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: told.append(args.exc_value))
    heard: list[str] = []
    error = SystemExit(1)

    def call(hook: str, arguments: dict[str, Any]) -> None:
        heard.append(hook)
        if hook == "bad":
            raise error

    bus = Events(call)
    for hook in ("bad", "good", "bad", "good"):
        bus.emit(hook)
    bus.close(WAIT_S)
    assert heard == ["bad", "good", "bad", "good"]
    assert told == [error, error]


def test_a_hook_may_close_the_bus() -> None:
    closed = threading.Event()
    bus: Events

    def call(hook: str, arguments: dict[str, Any]) -> None:
        bus.close()
        closed.set()

    bus = Events(call)
    bus.emit("hook")
    assert closed.wait(WAIT_S)
    bus.close()
    for thread in event_threads():
        thread.join(WAIT_S)
    assert not event_threads()


def test_the_bound_is_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_QUEUED", 2)
    hook = SlowHook()
    dropped: list[int] = []
    bus = Events(hook, lambda: dropped.append(1))
    bus.emit("first")
    assert hook.entered.wait(WAIT_S)
    for _ in range(5):
        bus.emit("hook")
    assert len(dropped) == 3
    hook.go_on.set()
    bus.close()


def test_between_deliveries_the_thread_pauses_and_close_does_not_wait_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    paused = threading.Event()

    class Closing(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            paused.set()
            return super().wait(timeout)

    monkeypatch.setattr(events, "PAUSE_S", 4 * WAIT_S)
    heard: list[int] = []
    bus = Events(lambda hook, kwargs: heard.append(kwargs["n"]))
    monkeypatch.setattr(bus, "_closing", Closing())
    bus.emit("hook", n=0)
    assert paused.wait(WAIT_S)
    for number in range(1, 4):
        bus.emit("hook", n=number)
    assert heard == [0]
    bus.close(timeout_s=WAIT_S)
    assert heard == [0, 1, 2, 3]
