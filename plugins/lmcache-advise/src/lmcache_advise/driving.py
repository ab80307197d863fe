"""Many users at once: sessions are taken in turn, and each user waits for an answer before going on."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from .prompts import Session
from .serving import Answer, Endpoint, Message, ask

MAX_USERS: Final = 512


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request of a workload."""

    session: str
    turn: int
    answer: Answer

    @property
    def ok(self) -> bool:
        return not self.answer.error


@dataclass(frozen=True, slots=True)
class Run:
    """A workload on one endpoint."""

    outcomes: tuple[Outcome, ...]
    seconds: float
    asked: int
    """Requests that the workload has; those that were not asked within the time are missing among the outcomes."""
    loads: tuple[float, ...] = ()
    """The load average of this machine when it began and when it ended, for each round."""


def alternate(
    endpoints: Mapping[str, Endpoint], sessions: Sequence[Session], users: int, *, rounds: int, limit_s: float
) -> dict[str, Run]:
    """Ask each endpoint everything, a part of the sessions at a time and the first endpoint last in every other round.

    What else the machine does meanwhile, and how that changes, then falls on both.
    """
    runs: dict[str, list[Run]] = {side: [] for side in endpoints}
    parts = parts_of(sessions, rounds)
    for number, part in enumerate(parts):
        for side in list(endpoints)[:: -1 if number % 2 else 1]:
            runs[side].append(drive(endpoints[side], part, users, limit_s=limit_s / len(parts)))
    return {side: _joined(each) for side, each in runs.items()}


def parts_of(sessions: Sequence[Session], rounds: int) -> list[list[Session]]:
    """As many parts as rounds, fewer where there are fewer sessions; each begins at once."""
    rounds = max(1, min(rounds, len(sessions)))
    cuts = [len(sessions) * number // rounds for number in range(rounds + 1)]
    parts = [sessions[begin:end] for begin, end in pairwise(cuts)]
    return [[replace(each, at_s=each.at_s - part[0].at_s) for each in part] for part in parts]


def _joined(runs: Sequence[Run]) -> Run:
    return Run(
        tuple(outcome for run in runs for outcome in run.outcomes),
        sum(run.seconds for run in runs),
        sum(run.asked for run in runs),
        tuple(load for run in runs for load in run.loads),
    )


def drive(
    endpoint: Endpoint,
    sessions: Sequence[Session],
    users: int,
    *,
    limit_s: float = 3600.0,
) -> Run:
    """Ask everything, at most `users` at a time and not for longer than `limit_s`."""
    waiting = deque(sessions)
    outcomes: list[Outcome] = []
    lock = threading.Lock()
    stop = threading.Event()
    load = os.getloadavg()[0]
    began = time.perf_counter()

    def is_over() -> bool:
        return stop.is_set() or time.perf_counter() - began > limit_s

    def work() -> None:
        while not is_over():
            with lock:
                if not waiting:
                    return
                session = waiting.popleft()
            if session.at_s and stop.wait(max(0.0, began + session.at_s - time.perf_counter())):
                return
            found = _talk(endpoint, session, is_over)
            with lock:
                outcomes.extend(found)

    threads = [
        threading.Thread(target=work, name=f"user {n}") for n in range(max(1, min(users, MAX_USERS, len(sessions))))
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    asked = sum(len(session.turns) for session in sessions)
    return Run(tuple(outcomes), time.perf_counter() - began, asked, (load, os.getloadavg()[0]))


def _talk(endpoint: Endpoint, session: Session, is_over: Callable[[], bool]) -> list[Outcome]:
    """The turns of one session; after one that failed its conversation is over."""
    messages: list[Message] = [{"role": "system", "content": session.system}] if session.system else []
    found = []
    for turn, question in enumerate(session.turns):
        if is_over():
            break
        messages.append({"role": "user", "content": question})
        answer = ask(endpoint, messages)
        found.append(Outcome(session.name, turn, answer))
        if answer.error:
            break
        messages.append({"role": "assistant", "content": answer.text})
    return found
