"""Stand-ins for the modules `threading`, `queue` and `time` over a scheduler, and core's modules made to use them."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

from .scheduler import Killed, Scheduler, SimThread

EPOCH: Final = 1_700_000_000.0
"""What `time.time()` says when the simulated clock shows 0."""


class Lock:
    """Whoever is drawn gets it, like a real one."""

    _reentrant = False

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._owner: SimThread | None = None
        self._depth = 0
        self._waiting: list[SimThread] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = self._scheduler
        scheduler.point()
        me = scheduler.current
        if self._reentrant and self._owner is me:
            self._depth += 1
            return True
        while self._owner is not None:
            if not blocking:
                return False
            assert timeout < 0, "no lock of core's is waited for with a timeout"
            self._waiting.append(me)
            scheduler.block()
        self._owner = me
        self._depth = 1
        return True

    def release(self) -> None:
        scheduler = self._scheduler
        if scheduler.dead:
            return
        if self._owner is not scheduler.current:
            raise RuntimeError("cannot release a lock that another thread has")
        self._depth -= 1
        if self._depth:
            return
        self._free()
        scheduler.point()

    def _free(self) -> None:
        self._owner = None
        self._depth = 0
        if self._waiting:
            self._scheduler.wake(self._waiting.pop(self._scheduler.random.randrange(len(self._waiting))))

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()


class RLock(Lock):
    _reentrant = True


class Condition:
    def __init__(self, scheduler: Scheduler, lock: Lock | None = None) -> None:
        self._scheduler = scheduler
        self._lock = lock or RLock(scheduler)
        self._waiting: list[SimThread] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def wait(self, timeout: float | None = None) -> bool:
        scheduler, lock = self._scheduler, self._lock
        me = scheduler.current
        assert scheduler.dead or lock._owner is me, "wait without the lock"
        depth = lock._depth
        self._waiting.append(me)
        lock._free()
        notified = scheduler.block(None if timeout is None else scheduler.now + max(0.0, timeout))
        if not notified and me in self._waiting:
            self._waiting.remove(me)
        lock.acquire()
        lock._depth = depth
        return notified

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        until = None if timeout is None else self._scheduler.now + timeout
        while not (result := predicate()):
            left = None if until is None else until - self._scheduler.now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        assert self._scheduler.dead or self._lock._owner is self._scheduler.current, "notify without the lock"
        for thread in self._waiting[:n]:
            self._waiting.remove(thread)
            self._scheduler.wake(thread)

    def notify_all(self) -> None:
        self.notify(len(self._waiting))

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()


class Event:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._set = False
        self._waiting: list[SimThread] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        waiting, self._waiting = self._waiting, []
        for thread in waiting:
            self._scheduler.wake(thread)
        if not self._scheduler.dead:
            self._scheduler.point()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        scheduler = self._scheduler
        scheduler.point()
        until = None if timeout is None else scheduler.now + max(0.0, timeout)
        while not self._set:
            self._waiting.append(scheduler.current)
            if not scheduler.block(until):
                if scheduler.current in self._waiting:
                    self._waiting.remove(scheduler.current)
                return self._set
        return True


class SimpleQueue:
    """Also stands for `Queue`, with a bound."""

    def __init__(self, scheduler: Scheduler, maxsize: int = 0) -> None:
        self._scheduler = scheduler
        self._maxsize = maxsize
        self._items: deque[Any] = deque()
        self._getters: list[SimThread] = []
        self._putters: list[SimThread] = []

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._await(lambda: not self._maxsize or len(self._items) < self._maxsize, self._putters, block, timeout)
        self._items.append(item)
        self._wake(self._getters)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        self._await(lambda: bool(self._items), self._getters, block, timeout)
        item = self._items.popleft()
        self._wake(self._putters)
        return item

    def put_nowait(self, item: Any) -> None:
        self.put(item, block=False)

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)

    def _await(self, ready: Callable[[], bool], waiting: list[SimThread], block: bool, timeout: float | None) -> None:
        scheduler = self._scheduler
        scheduler.point()
        until = None if timeout is None else scheduler.now + timeout
        while not ready():
            if not block or (until is not None and scheduler.now >= until):
                raise queue.Empty if waiting is self._getters else queue.Full
            me = scheduler.current
            waiting.append(me)
            if not scheduler.block(until) and me in waiting:
                waiting.remove(me)

    def _wake(self, waiting: list[SimThread]) -> None:
        while waiting:
            thread = waiting.pop(0)
            if thread.blocked:
                self._scheduler.wake(thread)
                return


class Thread:
    """What core uses of `threading.Thread`."""

    def __init__(
        self,
        scheduler: Scheduler,
        target: Callable[..., None],
        name: str,
        args: tuple[Any, ...] = (),
        daemon: bool | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._body = lambda: target(*args)
        self.name = name
        self.daemon = daemon
        self._thread: SimThread | None = None
        self._number = scheduler.number()

    def __hash__(self) -> int:
        """By number, not by address: sets of threads are gone through in the same order every time."""
        return self._number

    def start(self) -> None:
        if self._scheduler.refuses(self.name):
            raise RuntimeError("can't start new thread")
        self._thread = self._scheduler.start(self.name, self._body, self)
        self._scheduler.point()

    def join(self, timeout: float | None = None) -> None:
        scheduler, thread, me = self._scheduler, self._thread, self._scheduler.current
        scheduler.point()
        assert thread is not None, "joined before it was started"
        if not thread.done:
            thread.joiners.append(me)
            if not scheduler.block(None if timeout is None else scheduler.now + max(0.0, timeout)) and not thread.done:
                thread.joiners.remove(me)

    def is_alive(self) -> bool:
        return self._thread is not None and not self._thread.done


def simulated_modules(scheduler: Scheduler) -> dict[str, SimpleNamespace]:
    """What core gets for `threading`, `queue` and `time`; what is not here, it cannot use in a simulation."""

    def excepthook(arguments: Any) -> None:
        error = arguments.exc_value
        if not isinstance(error, Killed):
            scheduler.unhandled.append(error)

    return {
        "threading": SimpleNamespace(
            Lock=partial(Lock, scheduler),
            RLock=partial(RLock, scheduler),
            Condition=partial(Condition, scheduler),
            Event=partial(Event, scheduler),
            Thread=partial(Thread, scheduler),
            current_thread=lambda: scheduler.current.owner,
            local=threading.local,
            excepthook=excepthook,
            ExceptHookArgs=threading.ExceptHookArgs,
        ),
        "queue": SimpleNamespace(
            SimpleQueue=partial(SimpleQueue, scheduler),
            Queue=partial(SimpleQueue, scheduler),
            Empty=queue.Empty,
            Full=queue.Full,
        ),
        "time": SimpleNamespace(
            monotonic=lambda: scheduler.now,
            time=lambda: EPOCH + scheduler.now,
            time_ns=lambda: int((EPOCH + scheduler.now) * 1e9),
            sleep=scheduler.sleep,
        ),
    }


@contextmanager
def simulated(scheduler: Scheduler) -> Iterator[Scheduler]:
    """Every module of core that says `import threading`, `queue` or `time` gets the stand-ins, for so long."""
    real = {"threading": threading, "queue": queue, "time": time}
    standins = simulated_modules(scheduler)
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "lmcache_core"]
    changed = [(m, name) for m in modules for name, module in real.items() if vars(m).get(name) is module]
    for module, name in changed:
        setattr(module, name, standins[name])
    scheduler.enter()
    try:
        yield scheduler
    finally:
        scheduler.leave()
        for module, name in changed:
            setattr(module, name, real[name])
