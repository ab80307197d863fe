"""What a server may answer, and what becomes of the call, of its connection, and of the next caller."""

from __future__ import annotations

import contextlib
import gc
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from records import comes_back, empty, keys, new_key, open_backend, record, round_trip
from scripted import answers, scripted
from servers import Server, ended, redis_server

from lmcache_core import BackendError, BackendFull, BackendUnavailable, ChunkCorrupt


def bulk(data: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(data), data)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"-OOM command not allowed when used memory > 'maxmemory'.", BackendFull),
        (b"-READONLY You can't write against a read only replica.", BackendUnavailable),
        (b"-LOADING Redis is loading the dataset in memory", BackendUnavailable),
        (b"-MASTERDOWN Link with MASTER is down", BackendUnavailable),
        (b"-CLUSTERDOWN Hash slot not served", BackendUnavailable),
        (b"-MISCONF Errors writing to the append only file", BackendUnavailable),
        (b"-NOAUTH Authentication required.", BackendError),
        (b"-NOPERM User kv has no permissions", BackendError),
        (b"-MOVED 3999 127.0.0.1:6381", BackendError),
        (b"-ERR something else", BackendError),
        (b"-", BackendError),
        (b":17", BackendUnavailable),
        (b"+QUEUED", BackendUnavailable),
    ],
)
def test_an_error_in_place_of_ok_is_its_own_kind_of_fault(answer: bytes, error: type[BackendError]) -> None:
    with scripted(answers(answer + b"\r\n")) as server, open_backend(server.url) as backend:
        with pytest.raises(BackendError) as caught:
            backend.put(new_key(), empty(8))
        assert type(caught.value) is error
        assert answer[1:].decode().split(" ")[0] in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"-LOADING Redis is loading", BackendUnavailable),
        (b"-WRONGTYPE Operation against a key holding the wrong kind of value", ChunkCorrupt),
    ],
)
def test_an_error_in_place_of_a_record_is_no_miss(answer: bytes, error: type[BackendError]) -> None:
    with scripted(answers(answer + b"\r\n")) as server, open_backend(server.url) as backend:
        with pytest.raises(BackendError) as caught:
            backend.get(new_key(), empty(8))
        assert type(caught.value) is error


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"$8\r\n1234",
        b"$8\r\n12345678",
        b"$8\r\n12345678\r",
        b"$8",
        b":8\r\n",
        b"+OK\r\n",
        b"*1\r\n$8\r\n12345678\r\n",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"$8\r\n12345678xx",
        b"$-2\r\n",
        b"$eight\r\n12345678\r\n",
        b"*100000000\r\n",
        b"*1\r\n" * 9 + b":1\r\n",
        b"$" + b"1" * 20_000,
    ],
)
def test_after_an_answer_that_makes_no_sense_the_next_caller_gets_its_own(answer: bytes) -> None:
    wrong, right = answers(answer, hang_up=True), answers(bulk(b"12345678"))
    with scripted(wrong, right) as server, open_backend(server.url) as backend:
        with pytest.raises(BackendUnavailable):
            backend.get(new_key(), empty(8))
        into = empty(8)
        assert backend.get(new_key(), into) == 8
        assert into == b"12345678"
        assert len(server.connections) == 2


def test_a_late_answer_is_never_given_to_the_next_caller() -> None:
    def late(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        if connection.recv(1 << 16):  # another question on the connection that was given up
            connection.sendall(bulk(b"of A....") + bulk(b"of B...."))

    with (
        scripted(late, answers(bulk(b"of B...."))) as server,
        open_backend(server.url, connections=1) as backend,
    ):
        (result,) = backend.get_many([new_key()], [empty(8)], timeout_s=0.3)
        assert isinstance(result, BackendUnavailable)
        assert "no answer in time" in str(result)
        into = empty(8)
        assert backend.get(new_key(), into) == 8
        assert into == b"of B...."


def test_a_server_is_not_asked_for_more_than_a_window_at_once() -> None:
    asked: list[int] = []

    def count(connection: socket.socket) -> None:
        while question := connection.recv(1 << 16):
            asked.append(question.count(b"GET"))
            connection.sendall(b"$-1\r\n" * asked[-1])

    with scripted(count) as server, open_backend(server.url, read_slice_nbytes=0) as backend:
        assert backend.get_many(keys(3), [empty(40 << 20) for _ in range(3)], timeout_s=5.0) == [None] * 3
        assert backend.get_many(keys(3), [empty(8) for _ in range(3)], timeout_s=5.0) == [None] * 3
    assert asked == [1, 1, 1, 3]


def test_bytes_that_nobody_asked_for_end_the_connection() -> None:
    twice = answers(bulk(b"of A....") + bulk(b"of A...."))
    with scripted(twice, answers(bulk(b"of B...."))) as server, open_backend(server.url, connections=1) as backend:
        backend.get(new_key(), empty(8))
        into = empty(8)
        backend.get(new_key(), into)
        assert into == b"of B...."


@pytest.mark.parametrize("error", [b"READONLY You can't", b"LOADING Redis is", b"NOAUTH Authentication required."])
def test_a_server_that_is_not_what_it_was_is_connected_to_anew(error: bytes) -> None:
    with (
        scripted(answers(b"-" + error + b"\r\n"), answers(b"+OK\r\n")) as server,
        open_backend(server.url, connections=1) as backend,
    ):
        with pytest.raises(BackendError):
            backend.put(new_key(), empty(8))
        backend.put(new_key(), empty(8))
        assert len(server.connections) == 2


def test_an_error_that_is_in_order_keeps_the_connection() -> None:
    with (
        scripted(answers(b"-OOM no\r\n", b"+OK\r\n")) as server,
        open_backend(server.url, connections=1) as backend,
    ):
        with pytest.raises(BackendFull):
            backend.put(new_key(), empty(8))
        backend.put(new_key(), empty(8))
        assert len(server.connections) == 1


def test_what_came_before_the_break_counts_and_what_came_after_does_not() -> None:
    half = answers(bulk(b"11111111") + b"$-1\r\n" + bulk(b"3333333333") + b"$8\r\n4444", hang_up=True)
    with scripted(half) as server, open_backend(server.url) as backend:
        into = [empty(8) for _ in range(5)]
        results = backend.get_many(keys(5), into, timeout_s=5.0)
    assert results[:2] == [8, None]
    assert isinstance(results[2], ChunkCorrupt)
    assert [type(result) for result in results[3:]] == [BackendUnavailable] * 2
    assert into[0] == b"11111111"
    assert into[2] == bytes(8)


def test_news_between_answers_of_protocol_3_are_passed_over() -> None:
    news = b">2\r\n+invalidate\r\n*1\r\n$3\r\nabc\r\n"
    hello = b"%1\r\n$5\r\nproto\r\n:3\r\n"
    with (
        scripted(answers(hello, news + bulk(b"12345678"), b"_\r\n")) as server,
        open_backend(server.url, protocol=3) as backend,
    ):
        assert backend.get(new_key(), empty(8)) == 8
        assert backend.get(new_key(), empty(8)) is None


def test_an_answer_that_drips_is_bounded_by_the_deadline_of_the_operation() -> None:
    def drip(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(b"$100000\r\n")
        while True:
            connection.sendall(b"x")
            time.sleep(0.02)  # the pace of the server, not a wait of the test

    with scripted(drip) as server, open_backend(server.url) as backend:
        started = time.monotonic()
        (result,) = backend.get_many([new_key()], [empty(100_000)], timeout_s=0.3)
        assert isinstance(result, BackendUnavailable)
        assert time.monotonic() - started < 5.0


def test_a_server_that_takes_nothing_is_bounded_by_the_deadline_of_the_operation() -> None:
    hold = threading.Event()
    with scripted(lambda connection: hold.wait(10) and None) as server, open_backend(server.url) as backend:
        started = time.monotonic()
        (result,) = backend.put_many([new_key()], [empty(64 << 20)], timeout_s=0.3)
        assert isinstance(result, BackendUnavailable)
        assert time.monotonic() - started < 5.0
        hold.set()


def test_close_ends_a_call_that_waits() -> None:
    asked = threading.Event()

    def silent(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        asked.set()
        connection.recv(1)

    with scripted(silent) as server:
        backend = open_backend(server.url, timeout_s=30.0)
        errors: list[BackendError] = []

        def call() -> None:
            try:
                backend.get(new_key(), empty(8))
            except BackendError as error:
                errors.append(error)

        waiting = threading.Thread(target=call)
        waiting.start()
        assert asked.wait(5)
        backend.close()
        waiting.join(5)
        assert not waiting.is_alive()
        assert len(errors) == 1


@pytest.mark.parametrize("kind", ["redis", "valkey"])
@pytest.mark.parametrize("options", [{}, {"cluster": True}, {"master": "m"}])
@pytest.mark.parametrize("how", ["refused", "silent", "closed", "nonsense"])
def test_buffers_are_let_go_after_a_fault_without_the_garbage_collector(
    kind: str, options: dict[str, Any], how: str
) -> None:
    script = {"silent": answers(), "closed": answers(b"", hang_up=True), "nonsense": answers(b"?\r\n")}
    with scripted(script.get(how, answers())) as server:
        url = "redis://127.0.0.1:1" if how == "refused" else server.url
        with open_backend(url, kind=kind, **options) as backend, _no_garbage_collector():
            for verb in (backend.get_many, backend.put_many):
                view = empty(8192)
                held = weakref.ref(view)
                (result,) = verb([new_key()], [view], timeout_s=0.2)
                assert isinstance(result, BackendError)
                del result, view
                assert held() is None


@contextlib.contextmanager
def _no_garbage_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# The same from real servers.


def test_a_full_server_refuses_the_record_and_is_used_again_when_it_has_room(redis: Server) -> None:
    redis.ask("CONFIG", "SET", "maxmemory", "1mb")
    redis.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
    try:
        with open_backend(redis.url) as backend:
            many = keys(64)
            results = backend.put_many(many, [record(key, 64 << 10) for key in many], timeout_s=5.0)
            assert isinstance(results[-1], BackendFull)
            assert "OOM" in str(results[-1])
    finally:
        redis.ask("CONFIG", "SET", "maxmemory", "0")
    with open_backend(redis.url) as backend:
        round_trip(backend)


def test_a_value_over_the_servers_own_limit_is_a_fault_with_its_words(redis: Server) -> None:
    redis.ask("CONFIG", "SET", "proto-max-bulk-len", "1mb")
    try:
        with open_backend(redis.url) as backend:
            kept = round_trip(backend)
            with pytest.raises(BackendError, match="invalid bulk length"):
                backend.put(new_key(), empty(16 << 20))
            assert comes_back(backend, kept, 100_000)
    finally:
        redis.ask("CONFIG", "SET", "proto-max-bulk-len", "512mb")


def test_a_replica_is_read_from_and_not_written_to(tmp_path_factory: pytest.TempPathFactory, redis: Server) -> None:
    replica = redis_server(tmp_path_factory.mktemp("replica"), "--replicaof", f"127.0.0.1 {redis.port}")
    with ended(replica), open_backend(replica.url) as backend, pytest.raises(BackendUnavailable, match="READONLY"):
        backend.put(new_key(), empty(8))


def test_a_key_that_holds_something_else_is_corrupt(redis: Server) -> None:
    key = new_key()
    redis.ask("LPUSH", f"lmcache:{key.text}", "x")
    with open_backend(redis.url) as backend:
        with pytest.raises(ChunkCorrupt):
            backend.get(key, empty(8))
        assert backend.remove(key)


def test_a_server_that_restarts_is_used_again_without_a_fault(redis: Server) -> None:
    with open_backend(redis.url) as backend:
        round_trip(backend)
        redis.stop()
        redis.start()
        round_trip(backend)


def test_a_server_that_dies_in_the_middle_is_a_fault_and_then_used_again(redis: Server) -> None:
    with open_backend(redis.url, timeout_s=5.0) as backend:
        round_trip(backend)
        with redis.stalled():
            failed: list[BackendError] = []

            def call() -> None:
                try:
                    backend.put(new_key(), empty(32 << 20))
                except BackendError as error:
                    failed.append(error)

            writer = threading.Thread(target=call)
            writer.start()
            redis.kill()
            writer.join(5)
        assert isinstance(failed[0], BackendUnavailable)
        redis.start()
        round_trip(backend)


def test_a_refused_port_is_known_at_once() -> None:
    with scripted(answers()) as server:
        port = server.port
    with (
        open_backend(f"redis://127.0.0.1:{port}") as backend,
        open_backend(f"redis://127.0.0.1:{port}", kind="valkey") as other,
    ):
        for each in (backend, other):
            started = time.monotonic()
            with pytest.raises(BackendUnavailable, match=f"127.0.0.1:{port}"):
                each.contains(new_key())
            assert time.monotonic() - started < 3.0


@pytest.mark.parametrize("kind", ["redis", "valkey"])
def test_a_black_hole_costs_the_connect_timeout_and_opening_costs_nothing(kind: str) -> None:
    # A listener that never accepts, and whose queue is full: the system drops what else comes.
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        hole.listen(0)
        address = hole.getsockname()
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(address)
        started = time.monotonic()
        with open_backend(
            f"redis://127.0.0.1:{address[1]}", kind=kind, connect_timeout_s=0.3, username="u", password="p"
        ) as backend:
            opened = time.monotonic()
            assert opened - started < 3.0
            with pytest.raises(BackendUnavailable):
                backend.contains(new_key())
            assert time.monotonic() - opened < 5.0
        for filler in fillers:
            filler.close()
    gc.collect()


@pytest.mark.parametrize("kind", ["redis", "valkey"])
def test_a_server_that_accepts_and_says_nothing_costs_the_connect_timeout(kind: str) -> None:
    with (
        scripted(answers()) as server,
        open_backend(server.url, kind=kind, connect_timeout_s=0.3, password="p") as backend,
    ):
        started = time.monotonic()
        with pytest.raises(BackendUnavailable):
            backend.contains(new_key())
        assert time.monotonic() - started < 5.0
    gc.collect()


class _Most:
    """How many connections were served at once, at most."""

    def __init__(self) -> None:
        self.at_once = self._now = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self._now += 1
            self.at_once = max(self.at_once, self._now)

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._now -= 1


def test_connections_are_bounded_and_waiting_for_one_is_too() -> None:
    most = _Most()

    def silent(connection: socket.socket) -> None:
        with most:
            while connection.recv(1 << 16):
                pass

    with scripted(silent) as server, open_backend(server.url, timeout_s=0.4, connections=2) as backend:
        failed: list[str] = []

        def call() -> None:
            try:
                backend.contains(new_key())
            except BackendUnavailable as error:
                failed.append(str(error))

        threads = [threading.Thread(target=call) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(5)
        assert len(failed) == 6
        assert sum("are in use" in text for text in failed) >= 1
        assert most.at_once == 2
