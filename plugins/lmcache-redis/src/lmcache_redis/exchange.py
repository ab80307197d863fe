"""One batch of commands: sent at once to the servers that own the keys, answered in order, whatever fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from lmcache_core import BackendError, BackendUnavailable

from .address import Address
from .faults import is_doubtful, redirection
from .links import LinkPool
from .topology import Topology
from .wire import Answer, Link, Oversize, Part, ProtocolError, ServerError, command

_MAX_ROUNDS: Final = 4
"""How often a key may be sent on before it is given up."""
_ASKING: Final = command(b"ASKING")


@dataclass(frozen=True, slots=True)
class Call:
    """One command about one key."""

    key: bytes
    parts: tuple[Part, ...]
    wants: Literal["a number", "OK", "a record"]
    into: memoryview | None = None
    """Where the record goes."""
    converse: Callable[[Link], Answer] | None = None
    """In place of `parts`: asks and reads in turn, on a connection where nothing else is under way."""


@dataclass(slots=True)
class _Todo:
    """A call that has no answer yet."""

    index: int
    call: Call
    asking: bool = False


class Exchange:
    """Calls and their answers, through a pool of connections."""

    def __init__(self, name: str, topology: Topology, pool: LinkPool) -> None:
        self._name = name
        self._topology = topology
        self._pool = pool

    def run(self, calls: Sequence[Call], deadline: float) -> list[Answer]:
        """For each call its answer, or the BackendError that it ended with.  An error answer is a ServerError."""
        answers: list[Answer] = [None] * len(calls)
        try:
            routed = self._topology.route([call.key for call in calls], deadline)
        except BackendError as error:
            return [error.with_traceback(None)] * len(calls)
        groups: dict[Address, list[_Todo]] = {}
        for index, (call, address) in enumerate(zip(calls, routed, strict=True)):
            groups.setdefault(address, []).append(_Todo(index, call))
        for _ in range(_MAX_ROUNDS):
            self._send_and_read(groups, answers, deadline)
            groups = self._redirected(groups, answers)
            if not groups:
                break
        for todos in groups.values():
            for todo in todos:
                answers[todo.index] = BackendUnavailable(f"{self._name}: sent from node to node {_MAX_ROUNDS} times")
        return answers

    def _send_and_read(self, groups: dict[Address, list[_Todo]], answers: list[Answer], deadline: float) -> None:
        links: dict[Address, Link] = {}
        try:
            # In one order, so that two threads with several servers each do not wait for one another.
            for address in sorted(groups):
                try:
                    links[address] = link = self._pool.take(address, deadline)
                except BackendError as error:
                    # Its frames hold the answers, which hold it: a cycle that would keep the callers' buffers.
                    self._fail(address, groups[address], answers, error.with_traceback(None))
                    continue
                try:
                    link.send(part for todo in groups[address] if not _converse(todo) for part in _parts(todo))
                except OSError as error:
                    said = link.last_words()
                    self._lose(links.pop(address), groups[address], answers, f"{error}; {said}" if said else str(error))
            for address in list(links):
                self._read(links[address], groups[address], answers)
                link = links.pop(address)
        finally:
            for link in links.values():
                self._pool.throw_away(link)

    def _read(self, link: Link, todos: Sequence[_Todo], answers: list[Answer]) -> None:
        """Read the answers on `link`, then give it back or throw it away."""
        todos = sorted(todos, key=lambda todo: _converse(todo) is not None)
        done = 0
        doubtful = False
        try:
            for todo in todos:
                answer = answers[todo.index] = _expected(todo.call, _answer(link, todo))
                doubtful |= isinstance(answer, ServerError) and is_doubtful(answer)
                done += 1
        except OSError as error:
            self._lose(link, todos[done:], answers, str(error))
            return
        if doubtful:
            self._pool.throw_away(link)
            self._pool.drop_idle(link.address)
            self._topology.doubt(link.address)
        else:
            self._pool.give_back(link)

    def _lose(self, link: Link, todos: Sequence[_Todo], answers: list[Answer], why: str) -> None:
        self._pool.throw_away(link)
        self._fail(link.address, todos, answers, BackendUnavailable(f"{self._name} {link.address}: {why}"))

    def _fail(self, address: Address, todos: Sequence[_Todo], answers: list[Answer], error: BackendError) -> None:
        self._topology.doubt(address)
        for todo in todos:
            answers[todo.index] = error

    def _redirected(self, groups: dict[Address, list[_Todo]], answers: list[Answer]) -> dict[Address, list[_Todo]]:
        """The calls that another server is to answer."""
        again: dict[Address, list[_Todo]] = {}
        for asked, todos in groups.items():
            for todo in todos:
                answer = answers[todo.index]
                found = redirection(answer) if isinstance(answer, ServerError) else None
                if found is None:
                    continue
                kind, slot, text = found
                address = (
                    self._topology.moved(slot, text, asked) if kind == "MOVED" else self._topology.target(text, asked)
                )
                if address is not None:
                    again.setdefault(address, []).append(_Todo(todo.index, todo.call, kind == "ASK"))
        return again


def _expected(call: Call, answer: Answer) -> Answer:
    """`answer`, if it can be one to `call`; else it may well be another's."""
    fits = {
        "a number": type(answer) is int,
        "OK": answer == "OK",
        "a record": answer is None or isinstance(answer, int | Oversize),
    }
    if fits[call.wants] or isinstance(answer, ServerError):
        return answer
    raise ProtocolError(f"{str(answer)[:32]!r} where {call.wants} is expected")


def _converse(todo: _Todo) -> Callable[[Link], Answer] | None:
    return None if todo.asking else todo.call.converse  # ASKING holds for one command


def _answer(link: Link, todo: _Todo) -> Answer:
    if converse := _converse(todo):
        return converse(link)
    if todo.asking:
        link.read()
    return link.read(todo.call.into)


def _parts(todo: _Todo) -> tuple[Part, ...]:
    return (_ASKING, *todo.call.parts) if todo.asking else todo.call.parts
