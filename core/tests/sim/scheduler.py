"""Threads one at a time: who runs next, and what time it is, follows from a seed and from nothing else.

Each simulated thread is a real one that holds a baton while it runs.  It may lose it at a `point`, where another thread
is drawn to go on, and gives it up in `block`.  The clock stands still while anybody can run, but for the small delays
that are drawn at points; when nobody can, it jumps to the next timer.
"""

from __future__ import annotations

import _thread
import heapq
import itertools
import random
import sys
import threading
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import lmcache_core

MAX_STEPS: Final = 300_000
_CORE: Final = str(Path(lmcache_core.__file__).parent)
_START: Final = 1_000.0


class SimulationError(AssertionError):
    """Something that must not happen has happened."""


class Killed(BaseException):
    """Ends a simulated thread whose simulation is over; nobody catches it."""


class SimThread:
    """A thread as the scheduler knows it."""

    __slots__ = (
        "block_id",
        "blocked",
        "done",
        "go",
        "joiners",
        "lines",
        "name",
        "number",
        "owner",
        "real",
        "since",
        "woken",
    )

    def __init__(self, number: int, name: str, owner: object = None) -> None:
        self.number = number
        self.name = name
        self.owner = owner
        """What `threading.current_thread()` is in it."""
        self.go = _thread.allocate_lock()
        self.go.acquire()
        self.real: threading.Thread | None = None
        self.done = False
        self.blocked = False
        self.woken = False
        self.block_id = 0
        """Of its last block; a timer of an older one means nothing."""
        self.joiners: list[SimThread] = []
        self.lines = 0
        """Lines of core until it may lose the baton between two of them; 0 for never."""
        self.since = 0.0
        """When it was last blocked."""


class Scheduler:
    """`switch` is the chance to lose the baton at a point, `lines` about how many lines of core run between two draws
    (0: only at points), `delay_s` the most that a point may take."""

    def __init__(self, seed: int, *, switch: float = 0.1, lines: int = 0, delay_s: float = 0.0) -> None:
        self.random = random.Random(seed)
        self.now = _START
        self.delayed_s = 0.0
        """How much of the time was delays at points, which no deadline can do anything about."""
        self.steps = 0
        self.dead = False
        self.failure: BaseException | None = None
        self.unhandled: list[BaseException] = []
        """Exceptions that core's threads have reported as bugs."""
        self.at_points: Callable[[], None] = lambda: None
        """Called now and then where a thread may lose the baton; looks, and changes nothing."""
        self.refuses: Callable[[str], bool] = lambda name: False
        """Whether a thread of that name cannot be started now."""
        self._switch_chance = switch
        self._lines = lines
        self._delay_s = delay_s
        self._trace = 0
        self._codes: dict[CodeType, bool] = {}
        self._timers: list[tuple[float, int, SimThread, int]] = []
        self._order = 0
        self._ready: list[SimThread] = []
        self._looking = False
        self.main = SimThread(0, "main")
        self.current = self.main
        self.threads = [self.main]
        """All that have not ended."""
        self._numbers = itertools.count(1)

    @property
    def trace(self) -> int:
        """A digest of every decision so far: equal for two runs that went the same way."""
        return self._trace

    def number(self) -> int:
        """Another one each time."""
        return next(self._numbers)

    def note(self, what: str) -> None:
        """Let `what` into the trace."""
        self._trace = zlib.crc32(what.encode(), self._trace)

    def enter(self) -> None:
        """The calling thread is the main one from now on."""
        self._set_trace(self.main)

    def leave(self) -> None:
        """End every other thread, wherever it is."""
        sys.settrace(None)
        self.dead = True
        for thread in self.threads[1:]:
            thread.go.release()
        for thread in self.threads[1:]:
            assert thread.real is not None
            thread.real.join()

    def start(self, name: str, body: Callable[[], None], owner: object = None) -> SimThread:
        """A new thread, which will run when it is drawn."""
        thread = SimThread(self.number(), name, owner)
        thread.real = threading.Thread(target=self._run, args=(thread, body), name=f"sim {name}", daemon=True)
        thread.real.start()
        self.threads.append(thread)
        self._ready.append(thread)
        return thread

    def point(self) -> None:
        """Here another thread may go on, and time may pass."""
        if self.dead:
            raise Killed
        self.steps += 1
        if self.steps > MAX_STEPS:
            self.fail(SimulationError(f"no end after {MAX_STEPS} steps: a livelock\n{self.stacks()}"))
        draw = self.random.random()
        if draw >= self._switch_chance:
            return
        if self._delay_s and draw < self._switch_chance / 4:
            self._delay(self.random.random() ** 4 * self._delay_s)
        if not self._looking:
            self._looking = True
            self.at_points()
            self._looking = False
        self.yield_()

    def yield_(self) -> None:
        """Let one of those who can run go on, oneself perhaps."""
        if self._ready:
            self._ready.append(self.current)
            self._give(self._draw())

    def block(self, until: float | None = None) -> bool:
        """Wait until `wake`, or until that time; whether it was woken."""
        if self.dead:
            raise Killed
        me = self.current
        me.woken, me.blocked, me.since = False, True, self.now
        me.block_id += 1
        if until is not None:
            self._order += 1
            heapq.heappush(self._timers, (until, self._order, me, me.block_id))
            self._fire()
        while not self._ready:
            self._pass_time()
        self._give(self._draw())
        return me.woken

    def wake(self, thread: SimThread) -> None:
        """End the block that `thread` is in; if it has timed out by now, it never hears of this."""
        if thread.blocked:
            thread.woken, thread.blocked = True, False
            self._ready.append(thread)

    def sleep(self, seconds: float) -> None:
        """Let simulated time pass."""
        self.block(self.now + max(0.0, seconds))

    def fail(self, failure: BaseException) -> None:
        """End the simulation with this failure, from any of its threads."""
        if self.failure is None:
            self.failure = failure
        if self.current is self.main:
            raise self.failure
        self.dead = True
        self.main.go.release()
        raise Killed

    def stacks(self) -> str:
        """Where every thread is, the lines of core and of the simulation's clients only."""
        frames = sys._current_frames()
        told = []
        for thread in self.threads:
            ident = thread.real.ident if thread.real is not None else threading.main_thread().ident
            frame = frames.get(ident) if ident is not None else None
            stack = traceback.extract_stack(frame) if frame is not None else []
            inner = [f"{Path(each.filename).name}:{each.lineno} {each.name}" for each in stack[-8:]]
            told.append(f"{thread.name} (since {self.now - thread.since:.3f} s): {' > '.join(inner)}")
        return "\n".join(told)

    def _run(self, thread: SimThread, body: Callable[[], None]) -> None:
        thread.go.acquire()
        try:
            if not self.dead:
                self._set_trace(thread)
                body()
        except Killed:
            pass
        except BaseException as error:
            if not self.dead:
                self.failure = self.failure or error
                self.dead = True
                self.main.go.release()
        finally:
            sys.settrace(None)
            self._end(thread)

    def _end(self, thread: SimThread) -> None:
        thread.done = True
        if self.dead:
            return
        self.threads.remove(thread)
        for joiner in thread.joiners:
            self.wake(joiner)
        try:
            while not self._ready:
                self._pass_time()
        except Killed:
            return
        other = self._draw()
        self.current = other
        other.go.release()

    def _draw(self) -> SimThread:
        index = self.random.randrange(len(self._ready)) if len(self._ready) > 1 else 0
        self._ready[index], self._ready[-1] = self._ready[-1], self._ready[index]
        return self._ready.pop()

    def _give(self, other: SimThread) -> None:
        me = self.current
        self._trace = zlib.crc32(b"%d %d" % (other.number, self.steps), self._trace)
        if other is me:
            return
        self.current = other
        other.go.release()
        me.go.acquire()
        if self.dead:
            if me is self.main and self.failure is not None:
                raise self.failure
            raise Killed

    def _delay(self, seconds: float) -> None:
        self.now += seconds
        self.delayed_s += seconds
        self._fire()

    def _pass_time(self) -> None:
        """Nobody can run: go to the next timer."""
        while self._timers:
            when, _, thread, block_id = self._timers[0]
            if thread.blocked and thread.block_id == block_id:
                self.now = max(self.now, when)
                self._fire()
                return
            heapq.heappop(self._timers)
        self.fail(SimulationError(f"every thread waits for another: a deadlock\n{self.stacks()}"))

    def _fire(self) -> None:
        """Wake whose time has come."""
        while self._timers and self._timers[0][0] <= self.now:
            _, _, thread, block_id = heapq.heappop(self._timers)
            if thread.blocked and thread.block_id == block_id:
                thread.blocked = False
                self._ready.append(thread)

    def _set_trace(self, thread: SimThread) -> None:
        if self._lines:
            thread.lines = self._between()
            sys.settrace(self._traced)

    def _between(self) -> int:
        return 1 + int(self.random.expovariate(1 / self._lines))

    def _traced(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        wanted = self._codes.get(code)
        if wanted is None:
            wanted = self._codes[code] = code.co_filename.startswith(_CORE)
        return self._traced_line if wanted else None

    def _traced_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and not self.dead and not self._looking:
            me = self.current
            me.lines -= 1
            if me.lines <= 0:
                me.lines = self._between()
                self.yield_()
        return self._traced_line
