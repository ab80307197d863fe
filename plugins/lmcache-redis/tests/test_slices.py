"""Records that are read in pieces: whole or not at all, by any user, on a connection that stays in order."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
from pathlib import Path

import pytest
from records import comes_back, empty, keys, new_key, open_backend, record
from scripted import answers, scripted
from servers import Server, ended, redis_server

from lmcache_core import BackendUnavailable, ChunkCorrupt, ChunkKey
from lmcache_redis import RedisBackend, slices

STEP = 8192
COMMANDS = ("watch", "strlen", "getrange", "multi", "exec")


def pieces(server: Server) -> int:
    """How often the server was asked for a part of a value since it started."""
    for line in server.ask("INFO", "commandstats").splitlines():
        if line.startswith("cmdstat_getrange:"):
            return int(line.partition("calls=")[2].partition(",")[0])
    return 0


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("nbytes", [2 * STEP - 1, 2 * STEP, 2 * STEP + 1, 3 * STEP, 40 * STEP + 7])
def test_records_of_two_pieces_and_more_come_in_pieces(redis: Server, protocol: int, nbytes: int) -> None:
    with open_backend(redis.url, read_slice_nbytes=STEP, protocol=protocol) as backend:
        key = new_key()
        backend.put(key, record(key, nbytes))
        before = pieces(redis)
        assert comes_back(backend, key, nbytes)
        asked = pieces(redis) - before
        assert asked == (-(-nbytes // STEP) if nbytes >= 2 * STEP else 0)


def test_each_backend_reads_as_its_servers_are_fastest(redis: Server, valkey: Server) -> None:
    for server, kind, sliced in ((redis, "redis", True), (valkey, "valkey", False)):
        with open_backend(server.url, kind=kind) as backend:
            key = new_key()
            backend.put(key, record(key, 1 << 20))
            before = pieces(server)
            assert comes_back(backend, key, 1 << 20)
            assert (pieces(server) > before) is sliced


def test_a_record_that_is_absent_or_smaller_or_larger_is_what_it_is(redis: Server) -> None:
    with open_backend(redis.url, read_slice_nbytes=STEP, connections=1) as backend:
        for nbytes in (0, 1, STEP - 1, STEP, STEP + 1, 3 * STEP):
            key = new_key()
            backend.put(key, record(key, nbytes))
            into = empty(4 * STEP)
            assert backend.get(key, into) == nbytes
            assert into[:nbytes] == record(key, nbytes)
        (link,) = next(iter(backend._pool._shelves.values())).idle
        assert backend.get(new_key(), empty(4 * STEP)) is None
        key = new_key()
        backend.put(key, record(key, 5 * STEP))
        with pytest.raises(ChunkCorrupt, match=str(5 * STEP)):
            backend.get(key, empty(4 * STEP))
        redis.ask("LPUSH", f"lmcache:{(other := new_key()).text}", "x")
        with pytest.raises(ChunkCorrupt, match="WRONGTYPE"):
            backend.get(other, empty(4 * STEP))
        assert comes_back(backend, key, 5 * STEP)
        assert next(iter(backend._pool._shelves.values())).idle == [link]


def test_small_and_large_records_of_a_batch_each_get_their_own(redis: Server) -> None:
    with open_backend(redis.url, read_slice_nbytes=STEP) as backend:
        many = keys(12)
        sizes = [(100, 3 * STEP, STEP, 5 * STEP + 1)[index % 4] for index in range(12)]
        data = [record(key, nbytes) for key, nbytes in zip(many, sizes, strict=True)]
        assert backend.put_many(many, data, timeout_s=10.0) == [None] * 12
        backend.remove(many[5])
        into = [empty(nbytes) for nbytes in sizes]
        found = backend.get_many(many, into, timeout_s=10.0)
        assert found == [None if index == 5 else nbytes for index, nbytes in enumerate(sizes)]
        assert [view == part for view, part in zip(into, data, strict=True)] == [index != 5 for index in range(12)]


@pytest.mark.parametrize("at", [1, 2, 4])
@pytest.mark.parametrize("change", ["other bytes", "fewer bytes", "more bytes", "removed", "too many bytes"])
def test_a_record_that_changes_while_it_is_read_is_one_or_the_other(
    redis: Server, monkeypatch: pytest.MonkeyPatch, at: int, change: str
) -> None:
    nbytes = 4 * STEP
    sizes = {"other bytes": nbytes, "fewer bytes": STEP + 1, "more bytes": 5 * STEP, "too many bytes": 7 * STEP}
    key, asked = new_key(), 0
    put_by = new_key()
    plain = slices._range

    with open_backend(redis.url) as other, open_backend(redis.url, read_slice_nbytes=STEP, connections=1) as backend:

        def changing(name: bytes, start: int, count: int) -> bytes:
            nonlocal asked
            asked += 1
            if asked == at:
                if change == "removed":
                    other.remove(key)
                else:
                    other.put(key, record(put_by, sizes[change]))
            return plain(name, start, count)

        other.put(key, record(key, nbytes))
        monkeypatch.setattr(slices, "_range", changing)
        into = empty(6 * STEP)
        before = record(key, nbytes)
        try:
            found = backend.get(key, into)
        except ChunkCorrupt:
            assert change == "too many bytes"
        else:
            after = None if change == "removed" else record(put_by, sizes[change])
            assert found is not None or after is None
            assert found is None or into[:found] in (before, after)
        monkeypatch.undo()
        _stays_in_order(backend)


@pytest.mark.parametrize("missing", COMMANDS)
def test_a_user_that_may_only_get_reads_whole_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, missing: str
) -> None:
    allowed = " ".join(f"+{command}" for command in (*COMMANDS, "unwatch") if command != missing)
    users = f"user default on nopass ~* +@all\nuser kv on >hunter2 ~lmcache:* +get +set +exists {allowed}\n"
    (tmp_path / "users.acl").write_text(users)
    caplog.set_level(logging.WARNING)
    server = redis_server(tmp_path, "--aclfile", str(tmp_path / "users.acl"))
    with (
        ended(server),
        open_backend(
            server.url, username="kv", password="hunter2", read_slice_nbytes=STEP, connections=1, timeout_s=5.0
        ) as backend,
    ):
        many = keys(3)
        for key in many:
            backend.put(key, record(key, 3 * STEP))
        if missing == "exec":
            # Queued commands would be the next caller's trouble: this connection is given up.
            with pytest.raises(BackendUnavailable, match="EXEC"):
                backend.get(many[0], empty(3 * STEP))
        else:
            assert all(comes_back(backend, key, 3 * STEP) for key in many)
            (said,) = [entry.message for entry in caplog.records if "read whole" in entry.message]
            assert "NOPERM" in said
        assert backend.contains_prefix(many, timeout_s=5.0) == 3


@pytest.mark.parametrize(
    "said",
    [
        (b"+OK\r\n:24576\r\n$8192\r\n" + bytes(8192) + b"\r\n", b"$8192\r\n1234"),
        (b"+OK\r\n:24576\r\n$8192\r\n" + bytes(8192) + b"\r\n", b":5\r\n"),
        (b"+OK\r\n:24576\r\n$9000\r\n" + bytes(9000) + b"\r\n", b"$8192\r\n" + bytes(8192) + b"\r\n", b":3\r\n"),
        (b"+OK\r\n+twelve\r\n$-1\r\n",),
        (b":1\r\n:24576\r\n$8192\r\n" + bytes(8192) + b"\r\n",),
        (b"+OK\r\n:0\r\n$0\r\n\r\n", b"+OK\r\n", b":7\r\n"),
    ],
)
def test_after_pieces_that_make_no_sense_the_next_caller_gets_its_own(said: tuple[bytes, ...]) -> None:
    right = answers(b"$8\r\n12345678\r\n")
    with (
        scripted(answers(*said, hang_up=True), right) as server,
        open_backend(server.url, read_slice_nbytes=STEP) as backend,
    ):
        with pytest.raises(BackendUnavailable):
            backend.get(new_key(), empty(3 * STEP))
        into = empty(8)
        assert backend.get(new_key(), into) == 8
        assert into == b"12345678"
        assert len(server.connections) == 2


def test_a_piece_that_is_short_is_no_part_of_a_record_whatever_the_end_says() -> None:
    whole, piece = b"$24576\r\n" + b"b" * 24576 + b"\r\n", b"$8192\r\n" + b"a" * STEP + b"\r\n"
    pieces_said = iter((piece, b"$3\r\nabc\r\n", piece))
    fixed = {"STRLEN": b":24576\r\n", "EXEC": b"*0\r\n", "GET": whole}

    def serve(connection: socket.socket) -> None:
        while asked := connection.recv(1 << 16):
            for verb in re.findall(r"\$\d+\r\n([A-Z]+)\r\n", asked.decode()):
                connection.sendall(next(pieces_said) if verb == "GETRANGE" else fixed.get(verb, b"+OK\r\n"))

    with scripted(serve) as server, open_backend(server.url, read_slice_nbytes=STEP) as backend:
        into = empty(3 * STEP)
        assert backend.get(new_key(), into) == 3 * STEP
        assert into == b"b" * 24576


def test_nothing_stays_watched(valkey: Server) -> None:
    with open_backend(valkey.url, kind="valkey", read_slice_nbytes=STEP, connections=1) as backend:
        for stored, room in ((3, 3), (4, 3), (0, 3), (None, 3)):
            key = new_key()
            if stored is not None:
                backend.put(key, record(key, stored * STEP))
            with contextlib.suppress(ChunkCorrupt):
                backend.get(key, empty(room * STEP))
            counts = re.findall(r"\bwatch=(\d+)", valkey.ask("CLIENT", "LIST"))
            assert counts
            assert set(counts) == {"0"}


def _stays_in_order(backend: RedisBackend) -> None:
    """Whatever was under way is over: the one connection serves small and large records as before."""
    links = list(next(iter(backend._pool._shelves.values())).idle)
    for nbytes in (10, 3 * STEP):
        key = ChunkKey(new_key())
        backend.put(key, record(key, nbytes))
        assert comes_back(backend, key, nbytes)
    assert next(iter(backend._pool._shelves.values())).idle == links
    assert len(links) == 1
