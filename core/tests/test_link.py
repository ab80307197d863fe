"""One connection to a daemon: who receives what, with a daemon's end that the test plays."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lmcache_core import wire
from lmcache_core.client.link import Link
from lmcache_core.errors import BackendUnavailable

WAIT_S = 60.0


class Ends:
    """A link with its reader thread, and the other end of its socket."""

    def __init__(self, link: Link, far: socket.socket) -> None:
        self.link = link
        self.far = far
        self._frames = wire.Frames(wire.to_daemon_decoder())
        self.heard: list[str] = []
        self.changed = threading.Condition()
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        try:
            for message in self.link.messages():
                assert isinstance(message, wire.Answered)
                with self.changed:
                    self.heard.append(message.request)
                    self.changed.notify_all()
        except (OSError, wire.WireError) as error:
            self.link.close(str(error))

    def until_heard(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.heard) >= count, WAIT_S), f"{len(self.heard)} of {count}"

    def next(self) -> list[wire.ToDaemon]:
        data = self.far.recv(1 << 16)
        return list(self._frames.feed(data))

    def send(self, *messages: object) -> None:
        self.far.sendall(b"".join(map(wire.encode, messages)))

    def ask(self, timeout_s: float = WAIT_S) -> wire.Reply:
        call = self.link.next_call()
        return self.link.ask(call, wire.Commit(call, []), timeout_s)


@contextmanager
def linked(tmp_path: Path) -> Iterator[Ends]:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def welcome() -> socket.socket:
            far, _ = listener.accept()
            far.recv(1 << 16)
            far.sendall(wire.encode(wire.Welcome(wire.PROTOCOL, "boot", 1)))
            return far

        accepted: list[socket.socket] = []
        acceptor = threading.Thread(target=lambda: accepted.append(welcome()))
        acceptor.start()
        link = Link(path, "c", connect_timeout_s=WAIT_S, send_timeout_s=WAIT_S, quiet=True, on_open=lambda extent: None)
        acceptor.join(WAIT_S)
    with accepted[0] as far:
        ends = Ends(link, far)
        try:
            yield ends
        finally:
            link.abandon("the test ends")
            ends.reader.join(WAIT_S)
            assert not ends.reader.is_alive(), "the reader was not woken by the end"


def in_thread(answers: list[object], ends: Ends) -> threading.Thread:
    def ask() -> None:
        try:
            answers.append(ends.ask())
        except BackendUnavailable as error:
            answers.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def test_who_waits_for_an_answer_keeps_no_other_message_from_the_reader(tmp_path: Path) -> None:
    with linked(tmp_path) as ends:
        answers: list[object] = []
        asking = in_thread(answers, ends)
        (question,) = ends.next()
        assert isinstance(question, wire.Commit)
        for number in range(20):
            ends.send(wire.Answered(f"r{number}"))
            ends.until_heard(number + 1)
        assert not answers
        ends.send(wire.Count(question.call, 7))
        asking.join(WAIT_S)
        assert answers == [wire.Count(question.call, 7)]


def test_messages_come_in_their_order_whoever_receives_them(tmp_path: Path) -> None:
    with linked(tmp_path) as ends:
        for round_ in range(50):
            answers: list[object] = []
            asking = in_thread(answers, ends)
            (question,) = ends.next()
            assert isinstance(question, wire.Commit)
            ends.send(wire.Answered(f"{round_}a"), wire.Count(question.call, round_), wire.Answered(f"{round_}b"))
            asking.join(WAIT_S)
            assert answers == [wire.Count(question.call, round_)]
            ends.send(wire.Answered(f"{round_}c"))
        ends.until_heard(150)
        assert ends.heard == [f"{round_}{letter}" for round_ in range(50) for letter in "abc"]


def test_many_threads_that_ask_at_once_are_all_answered(tmp_path: Path) -> None:
    with linked(tmp_path) as ends:
        done: list[int] = []

        def ask_often() -> None:
            for _ in range(200):
                ends.ask()
            done.append(1)

        askers = [threading.Thread(target=ask_often) for _ in range(4)]
        for asker in askers:
            asker.start()
        answered = 0
        while answered < 800:
            questions = [message for message in ends.next() if isinstance(message, wire.Commit)]
            ends.send(*(part for q in questions for part in (wire.Answered(str(q.call)), wire.Count(q.call, 1))))
            answered += len(questions)
        for asker in askers:
            asker.join(WAIT_S)
        assert len(done) == 4
        ends.until_heard(800)


def test_who_waits_learns_of_the_end(tmp_path: Path) -> None:
    with linked(tmp_path) as ends:
        answers: list[object] = []
        asking = in_thread(answers, ends)
        ends.next()
        ends.far.shutdown(socket.SHUT_RDWR)
        asking.join(WAIT_S)
        assert isinstance(answers[0], BackendUnavailable)


def test_an_answer_that_is_too_late_goes_to_the_reader(tmp_path: Path) -> None:
    with linked(tmp_path) as ends:
        with pytest.raises(BackendUnavailable, match="no answer"):
            ends.ask(timeout_s=0.01)
        ends.next()
        ends.send(wire.Answered("after"))
        ends.until_heard(1)
