"""Bad input to the daemon: refused with a reason, others unharmed, nothing left of it."""

from __future__ import annotations

import logging
import os
import random
import socket
import struct
from contextlib import contextmanager
from unittest.mock import patch

import pytest
from daemons import serving
from tiny import RECORD, chain, load, model, open_pool, store, until

from lmcache_core import wire
from lmcache_core.client.cache import connect
from lmcache_core.index import State
from lmcache_core.server import daemon as daemon_module
from lmcache_core.server.session import MAX_REQUESTS, Session

DIGESTS = b"".join(chain(4).digests)
HELLO = wire.Hello(wire.PROTOCOL, "raw", True)


class Raw:
    """A client that sends what it likes."""

    def __init__(self, path, *messages):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(10)
        self.sock.connect(str(path))
        self.frames = wire.Frames(wire.to_client_decoder())
        self.inbox = []
        self.tell(*messages)

    def tell(self, *messages):
        self.send(b"".join(map(wire.encode, messages)))

    def send(self, data):
        try:
            self.sock.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass

    def hear(self):
        """The next message, or None at the end."""
        while not self.inbox:
            try:
                data = self.sock.recv(1 << 16)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self.inbox += self.frames.feed(data)
        return self.inbox.pop(0)

    def end(self):
        """Everything until the end."""
        heard = []
        while (message := self.hear()) is not None:
            heard.append(message)
        return heard

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.sock.close()


@contextmanager
def unharmed(tmp_path, **settings):
    """A daemon whose other client stores before and loads after, and that holds nothing in between."""
    with serving(tmp_path / "s", **settings) as daemon, connect(tmp_path / "s", call_timeout_s=5.0) as other:
        assert store(other, chain(4)).ok_chunks == 4
        yield daemon
        assert until(lambda: len(daemon._sessions) == 1)
        assert load(other, chain(4))[1].ok_chunks == 4
        assert until(lambda: daemon._pool.leases.count() == 0)
        assert until(lambda: daemon._pool.usage()[1] == 0)
        assert until(lambda: len(daemon._quarantine) == 0)
        assert all(entry.state is State.READY for entry in daemon._pool._index.entries.values())


DEFINED = [HELLO, wire.Define(1, model())]
BAD = {
    "before hello": ([wire.Status(1)], "the first message is Status, not Hello"),
    "another protocol": ([wire.Hello(99, "raw", True)], "speaks protocol 99, this daemon 1: upgrade"),
    "hello twice": ([HELLO, HELLO], "unexpected Hello"),
    "undefined model": ([HELLO, wire.Lookup(1, 5, DIGESTS, 64, "r")], "model 5 was not defined"),
    "digests of odd length": ([*DEFINED, wire.Lookup(1, 1, DIGESTS[:-1], 64, "r")], "not whole digests"),
    "a digest twice": ([*DEFINED, wire.Reserve(1, 1, 0, 0, DIGESTS + DIGESTS)], "one digest twice"),
    "shard out of range": ([*DEFINED, wire.Reserve(1, 1, 1, 0, DIGESTS)], "shard 1 of a model with 1"),
    "negative shard": ([*DEFINED, wire.Acquire(1, 1, -1, 0, DIGESTS)], "shard -1"),
    "start out of range": ([*DEFINED, wire.Reserve(1, 1, 0, 9, DIGESTS)], "a span that starts at 9 of 4"),
    "negative start": ([*DEFINED, wire.Acquire(1, 1, 0, -1, DIGESTS)], "a span that starts at -1"),
    "start beyond all": ([*DEFINED, wire.Acquire(1, 1, 0, 1 << 40, DIGESTS)], "a span that starts at"),
    "commit of another's": ([*DEFINED, wire.Commit(1, [1])], "generation 1 was not reserved by this connection"),
    "abort of another's": ([*DEFINED, wire.Abort([1], "mine")], "generation 1 was not reserved"),
    "unhold of another's": ([*DEFINED, wire.Unhold([1])], "generation 1 is not held by this connection"),
    "a message of ours to clients": ([HELLO, wire.Refused("you")], "not a message of ours"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_a_client_may_not_say_ends_its_connection_with_the_reason(name, tmp_path, caplog):
    messages, reason = BAD[name]
    with unharmed(tmp_path), Raw(tmp_path / "s", *messages) as raw:
        last = raw.end()[-1]
        assert isinstance(last, wire.Refused)
        assert reason in last.reason
    assert any(reason in record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "over the limit"),
        (struct.pack("<I", 1 << 31), "over the limit"),
        (struct.pack("<I", wire.MAX_HELLO_NBYTES + 1), "over the limit"),
        (struct.pack("<I", 5) + b"\xc1" * 5, "not a message of ours"),
        (struct.pack("<I", 0), "not a message of ours"),
        (wire.encode(HELLO) + struct.pack("<I", wire.MAX_FRAME_NBYTES + 1), "over the limit"),
        (wire.encode(HELLO) + struct.pack("<I", 3) + b"abc", "not a message of ours"),
    ],
)
def test_garbage_and_oversized_frames_are_refused(data, reason, tmp_path):
    with unharmed(tmp_path), Raw(tmp_path / "s") as raw:
        raw.send(data)
        last = raw.end()[-1]
        assert isinstance(last, wire.Refused)
        assert reason in last.reason


def test_a_frame_that_ends_in_the_middle_leaves_nothing(tmp_path):
    whole = wire.encode(wire.Reserve(1, 1, 0, 0, DIGESTS))
    with unharmed(tmp_path) as daemon:
        for cut in (1, 4, 5, len(whole) - 1):
            with Raw(tmp_path / "s", *DEFINED) as raw:
                raw.send(whole[:cut])
                assert isinstance(raw.hear(), wire.Welcome)
        assert until(lambda: len(daemon._sessions) == 1)


def test_a_client_that_never_says_hello_is_refused_in_time_however_slowly_it_speaks(tmp_path):
    with patch.object(daemon_module, "_HELLO_TIMEOUT_S", 0.2), unharmed(tmp_path):
        with Raw(tmp_path / "s") as raw:
            assert raw.end() == []
        with Raw(tmp_path / "s") as raw:
            body = wire.encode(HELLO)
            raw.sock.settimeout(0.05)
            sent, ended = 0, False
            while not ended and sent < len(body) - 1:
                raw.send(body[sent : sent + 1])
                sent += 1
                try:
                    ended = raw.sock.recv(1) == b""
                except TimeoutError:
                    continue
                except ConnectionResetError:
                    ended = True
            assert ended


def test_a_user_who_is_not_allowed_is_refused_by_number(tmp_path):
    with (
        serving(tmp_path / "s", server={"allowed_uids": (os.getuid() + 4242,)}),
        Raw(tmp_path / "s", HELLO) as raw,
    ):
        (last,) = raw.end()
        assert isinstance(last, wire.Refused)
        assert f"uid {os.getuid()} is not among server.allowed_uids" in last.reason


def test_a_client_says_once_why_it_is_refused(tmp_path, caplog):
    with (
        serving(tmp_path / "s", server={"max_clients": 1}) as daemon,
        connect(tmp_path / "s") as first,
        connect(tmp_path / "s", connect_timeout_s=0.05) as second,
    ):
        assert first.connected
        assert until(lambda: "1 clients are connected, which is the limit" in caplog.text)
        assert load(second, chain(2))[0] == 0
        first.close()
        assert until(lambda: not daemon._sessions or second.connected)
        assert until(lambda: second.connected)
        assert store(second, chain(2)).ok_chunks == 2
    lines = [r.getMessage() for r in caplog.records if r.name.endswith("remote") and r.levelno == logging.WARNING]
    assert len(lines) == 1
    assert "going on without a cache" in lines[0]


def test_ten_thousand_connections_are_refused_beyond_the_limit_and_harm_nobody(tmp_path):
    count = 10_000
    with unharmed(tmp_path, server={"max_clients": 64}) as daemon:
        kept, refused = [], 0
        for _ in range(count):
            raw = Raw(tmp_path / "s", HELLO)
            first = raw.hear()
            if isinstance(first, wire.Welcome):
                kept.append(raw)
                assert len(kept) < 64
            else:
                assert isinstance(first, wire.Refused)
                assert "clients are connected, which is the limit" in first.reason
                refused += 1
                raw.sock.close()
        assert (len(kept), refused) == (63, count - 63)
        assert len(daemon._sessions) == 64
        for raw in kept:
            raw.sock.close()


def test_without_descriptors_for_more_connections_they_are_refused_and_come_later(tmp_path):
    with unharmed(tmp_path) as daemon, patch.object(daemon_module, "max_connections", lambda: 2):
        with Raw(tmp_path / "s", HELLO) as one, Raw(tmp_path / "s", HELLO) as two:
            assert isinstance(one.hear(), wire.Welcome)
            assert isinstance(two.hear(), wire.Refused)
        assert until(lambda: len(daemon._sessions) == 1)
        with Raw(tmp_path / "s", HELLO) as three:
            assert isinstance(three.hear(), wire.Welcome)


def test_a_client_that_never_reads_its_answers_is_dropped_at_its_bound(tmp_path, caplog):
    with patch.object(daemon_module, "MAX_UNSENT_NBYTES", 1 << 20), unharmed(tmp_path) as daemon:
        with Raw(tmp_path / "s", HELLO) as raw:
            assert isinstance(raw.hear(), wire.Welcome)
            burst = b"".join(wire.encode(wire.Status(n)) for n in range(100))
            raw.sock.settimeout(0.2)
            try:
                for _ in range(10_000):
                    raw.sock.sendall(burst)
            except (BrokenPipeError, ConnectionResetError, TimeoutError):
                pass
            assert until(lambda: len(daemon._sessions) == 1)
        assert "does not read its answers" in caplog.text


def test_requests_beyond_the_bound_of_a_connection_release_its_oldest_only(tmp_path):
    with serving(tmp_path / "s") as daemon, connect(tmp_path / "s") as other, Raw(tmp_path / "s", *DEFINED) as raw:
        store(other, chain(4))
        other.lookup(chain(4), "mine")
        assert isinstance(raw.hear(), wire.Welcome)
        for n in range(MAX_REQUESTS + 10):
            raw.tell(wire.Lookup(n, 1, DIGESTS, 64, f"r{n}"))
            assert raw.hear().resident == 4
        assert daemon._pool.leases.count() == MAX_REQUESTS + 1
        assert f"{max(daemon._sessions)}/r9" not in daemon._pool.leases._leases
        raw.sock.close()
        assert until(lambda: daemon._pool.leases.count() == 1), "the other's is still there"
        assert daemon._pool.usage()[1] == 4
        other.release("mine")


def test_a_shard_id_that_is_none_is_refused(tmp_path):
    import msgspec

    good = msgspec.to_builtins(wire.Define(1, model()), builtin_types=(bytes,))
    shard = good[2]["groups"][0]["shards"][0]
    shard["shard_id"] = b"short"
    data = msgspec.msgpack.encode(good)
    with unharmed(tmp_path), Raw(tmp_path / "s", HELLO) as raw:
        raw.send(struct.pack("<I", len(data)) + data)
        last = raw.end()[-1]
        assert isinstance(last, wire.Refused)
        assert "shard_id" in last.reason


class FakeLoop:
    """Calls what was planned when told to."""

    def __init__(self):
        self.planned = []

    def call_soon_threadsafe(self, call, *args):
        self.planned.append((call, args))

    def run(self):
        while self.planned:
            call, args = self.planned.pop(0)
            call(*args)


class Liar:
    """Messages of the right types that mean anything, right and wrong."""

    def __init__(self, rng):
        self.rng = rng
        self.seen = [0, 1, 2]
        self.models = [model(), model(shards=2), model(model="org/other")]

    def digests(self):
        of = chain(6, seed=self.rng.randrange(3), of=self.rng.choice(self.models)).digests
        chosen = list(of[: self.rng.randrange(7)])
        match self.rng.randrange(12):
            case 0:
                self.rng.shuffle(chosen)
            case 1:
                chosen *= 2
            case 2:
                chosen.append(self.rng.randbytes(5))
        return b"".join(chosen)

    def generations(self):
        return [self.rng.choice(self.seen) for _ in range(self.rng.randrange(4))]

    def message(self):
        rng = self.rng
        of, shard, start = rng.choice((1, 1, 2, 2, 3, 9)), rng.choice((0, 0, 0, 1, -1)), rng.choice((0, 0, 1, 3, 7, -2))
        request = f"r{rng.randrange(4)}"
        match rng.randrange(12):
            case 0:
                return wire.Define(of, rng.choice(self.models))
            case 1 | 2:
                return wire.Lookup(1, of, self.digests(), rng.randrange(-5, 200), request)
            case 3:
                return wire.Release(request)
            case 4 | 5:
                return wire.Reserve(1, of, shard, start, self.digests())
            case 6:
                return wire.Commit(1, self.generations())
            case 7:
                return wire.Abort(self.generations(), "x")
            case 8:
                return wire.Acquire(1, of, shard, start, self.digests())
            case 9:
                return wire.Unhold(self.generations())
            case 10:
                return wire.Hold(1, of, self.digests(), request)
            case _:
                return wire.Evict(1, of, self.digests())


def test_whatever_clients_say_nothing_is_left_of_them_and_every_slot_is_accounted_for():
    for seed in range(400):
        rng = random.Random(seed)
        pool = open_pool(chunks=12, extent_nbytes=4 * RECORD)
        loop, liars = FakeLoop(), []
        try:
            for number in (1, 2):
                liar = Liar(rng)
                sent = []
                session = Session(number, pool, loop, lambda data, fd, s=sent: s.append(data), lambda: False)
                for n, of in enumerate(liar.models):
                    session.handle(wire.Define(n + 1, of))
                liars.append((liar, session, sent))
            kept = []
            for _ in range(60):
                liar, session, sent = rng.choice(liars)
                try:
                    session.handle(liar.message())
                    loop.run()
                    for message in wire.Frames(wire.to_client_decoder()).feed(b"".join(sent)):
                        liar.seen += getattr(message, "generations", [])
                    sent.clear()
                except wire.WireError:
                    if rng.random() < 0.3:  # the daemon ends the connection
                        kept += session.close().values()
                        liars.remove((liar, session, sent))
                if not liars:
                    break
            for _, session, _ in liars:
                kept += session.close().values()
            loop.run()
            records, in_use, _ = pool.usage()
            assert in_use == 0
            assert pool.leases.count() == 0
            assert all(entry.state is State.READY for entry in pool._index.entries.values())
            free = sum(len(extent.free) for extent in pool.slab.extents.values())
            assert free + records + len(kept) == sum(extent.slots for extent in pool.slab.extents.values())
            pool.give_slots(kept)
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
        finally:
            pool.close()
