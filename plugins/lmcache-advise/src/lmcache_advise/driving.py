"""Many users at once: sessions have their turns one after another, and each user waits for an answer."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    """Ask everything, at most `users` at a time and not for longer than `limit_s`.

    Sessions alternate: after a turn, all others have theirs first.  So what an engine computes at a time is what the
    users ask, and what it would have to keep is all sessions, as where conversations pause for tools and people.
    """
    waiting = deque(_Talk(session) for session in sessions)
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
                talk = waiting.popleft()
            session = talk.session
            if not talk.turn and session.at_s and stop.wait(max(0.0, began + session.at_s - time.perf_counter())):
                return
            found = talk.ask(endpoint)
            with lock:
                outcomes.append(found)
                if found.ok and talk.turn < len(session.turns):
                    waiting.append(talk)

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


@dataclass(slots=True)
class _Talk:
    """A session that goes on; after a turn that failed it is over."""

    session: Session
    turn: int = 0
    messages: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.session.system:
            self.messages.append({"role": "system", "content": self.session.system})

    def ask(self, endpoint: Endpoint) -> Outcome:
        """The next turn, with all that was said before."""
        self.messages.append({"role": "user", "content": self.session.turns[self.turn]})
        answer = ask(endpoint, self.messages)
        self.messages.append({"role": "assistant", "content": answer.text})
        self.turn += 1
        return Outcome(self.session.name, self.turn - 1, answer)
