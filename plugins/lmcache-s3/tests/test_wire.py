"""HTTP on a socket: answers in whatever pieces they come, and what is no answer."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from lmcache_s3.wire import MAX_HEAD_NBYTES, Connection, Deadline, Late, WireError

Pair = tuple[Connection, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    connection = Connection(ours)
    yield connection, theirs
    connection.close()
    theirs.close()


def soon() -> Deadline:
    return Deadline.after(5.0)


@contextlib.contextmanager
def sending(theirs: socket.socket, data: bytes, step: int, *, hang_up: bool = False) -> Iterator[None]:
    """Send `data` in pieces of `step` bytes, each in a packet of its own as far as that can be had."""

    def run() -> None:
        for start in range(0, len(data), step):
            theirs.sendall(data[start : start + step])
        if hang_up:
            theirs.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
def test_answers_are_read_in_whatever_pieces_they_come(pair: Pair, step: int) -> None:
    connection, theirs = pair
    body = bytes(range(256)) * 3
    chunked = b"5;x=y\r\nhello\r\n6\r\n world\r\n0\r\nTrailer: z\r\n\r\n"
    answers = (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 768\r\nETag: \"x\"\r\n\r\n" + body
        + b"HTTP/1.1 404 Not Found\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked
        + b"HTTP/1.1 204 No Content\r\n\r\n"
    )  # fmt: skip
    with sending(theirs, answers, step):
        head = connection.head(soon())
        into = memoryview(bytearray(768))
        connection.read_into(head, into, soon())
        assert (head.status, head.headers["etag"], bytes(into)) == (200, '"x"', body)
        head = connection.head(soon())
        assert (head.status, connection.read_text(head, soon())) == (404, b"hello world")
        assert connection.head(soon()).status == 204
    assert connection.reusable


def test_a_body_without_a_length_ends_with_the_connection(pair: Pair) -> None:
    connection, theirs = pair
    with sending(theirs, b"HTTP/1.0 500 x\r\n\r\nto the end", 3, hang_up=True):
        head = connection.head(soon())
        assert connection.read_text(head, soon()) == b"to the end"
    assert not connection.reusable


def test_more_than_was_asked_for_ends_the_connection(pair: Pair) -> None:
    connection, theirs = pair
    theirs.sendall(b"HTTP/1.1 200 x\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 x\r\n")
    assert connection.read_text(connection.head(soon()), soon()) == b"ok"
    assert not connection.reusable


@pytest.mark.parametrize("value", ["close", "Close", "keep-alive, close"])
def test_a_connection_that_is_to_be_closed_is_not_used_again(pair: Pair, value: str) -> None:
    connection, theirs = pair
    theirs.sendall(f"HTTP/1.1 200 x\r\nConnection: {value}\r\nContent-Length: 0\r\n\r\n".encode())
    connection.head(soon())
    assert not connection.reusable


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 2x0 y\r\n\r\n",
        b"HTTP/1.1 200 x\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 x\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 x\r\nContent-Length: 1e3\r\n\r\n",
        b"HTTP/1.1 200 x\r\nContent-Length: 99999999999\r\n\r\n",
        b"HTTP/1.1 200 x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 x\r\nTransfer-Encoding: chunked\r\n\r\nfffffffff\r\n",
        b"HTTP/1.1 200 x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel",
        b"HTTP/1.1 200 x\r\nContent-Length: 5\r\n\r\nhel",
        b"x" * (MAX_HEAD_NBYTES + 20_000),
        b"HTTP/1.1 200 x\r\n",
        b"",
    ],
)
def test_what_is_no_answer_ends_the_connection(pair: Pair, answer: bytes) -> None:
    connection, theirs = pair
    with sending(theirs, answer, 4096, hang_up=True), pytest.raises(WireError):
        connection.read_text(connection.head(soon()), soon())
    assert not connection.reusable


def test_silence_ends_at_the_deadline(pair: Pair) -> None:
    connection, theirs = pair
    with pytest.raises(Late):
        connection.head(Deadline.after(0.05))
    theirs.sendall(b"HTTP/1.1 200 x\r\nContent-Length: 5\r\n\r\nhel")
    head = connection.head(soon())
    with pytest.raises(Late):
        connection.read_into(head, memoryview(bytearray(5)), Deadline.after(0.05))
    assert not connection.reusable


def test_a_request_that_nobody_reads_ends_at_the_deadline(pair: Pair) -> None:
    connection, _ = pair
    with pytest.raises(Late):
        connection.send(b"PUT / HTTP/1.1\r\n\r\n", memoryview(bytes(32 << 20)), Deadline.after(0.05))
    assert not connection.reusable


def test_an_answer_before_the_body_is_an_answer_and_the_last_of_its_connection(pair: Pair) -> None:
    connection, theirs = pair
    theirs.sendall(b"HTTP/1.1 412 x\r\nContent-Length: 0\r\n\r\n")
    head = connection.send(b"PUT / HTTP/1.1\r\nexpect: 100-continue\r\n\r\n", memoryview(b"body"), soon())
    assert head is not None
    assert head.status == 412
    assert not connection.reusable
    assert theirs.recv(1000).endswith(b"\r\n\r\n")


def test_what_a_server_says_before_it_hangs_up_on_a_body_is_heard(pair: Pair) -> None:
    connection, theirs = pair
    theirs.sendall(b"HTTP/1.1 403 x\r\nContent-Length: 0\r\n\r\n")
    theirs.shutdown(socket.SHUT_RD)
    head = connection.send(b"PUT / HTTP/1.1\r\n\r\n", memoryview(bytes(1 << 20)), soon())
    assert head is not None
    assert head.status == 403
    assert not connection.reusable
