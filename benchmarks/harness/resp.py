"""Records to and from a Redis or Valkey, by the backend and by a bare loop over sockets: what two benchmarks share."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np

from lmcache_core.backend import Backend, Context
from lmcache_core.keys import ChunkKey

from .measure import MiB, Options, Timings, check_equal, gibps, paired, private_buffer, random_bytes, seconds
from .peer import Missing
from .report import Must, Row
from .servers import running, version

TIMEOUT_S: Final = 60.0
SHARD_ID: Final = bytes(16)
EXISTS_KEYS: Final = 512
Open = Callable[[str, int], Backend[Any]]
"""A backend by URL and number of connections."""


def rows_of(bench: str, binary: Path | Missing, open_backend: Open, options: Options, *, get: Must) -> Iterator[Row]:
    """Get and put of 8 and 32 MiB on 1 and 4 connections, and existence of 512 keys."""
    if isinstance(binary, Missing):
        print(f"{bench}: not measured: {binary.reason}", file=sys.stderr)
        return
    with running(binary, options.directory) as port:
        server = version(port)
        for chunk_nbytes in (8 * MiB, 32 * MiB):
            for connections in (1, 4):
                yield from _transfer_rows(bench, server, port, open_backend, options, chunk_nbytes, connections, get)
        yield _exists_row(bench, server, port, open_backend, options)


def _transfer_rows(
    bench: str,
    server: str,
    port: int,
    open_backend: Open,
    options: Options,
    chunk_nbytes: int,
    connections: int,
    get: Must,
) -> Iterator[Row]:
    total_nbytes = (64 if options.quick else 256) * MiB
    chunks = max(connections, total_nbytes // chunk_nbytes)
    with (
        _Records(chunk_nbytes, chunks) as records,
        _Ours(open_backend(f"redis://127.0.0.1:{port}/0", connections), records, connections) as ours,
        _Bare(port, records, connections) as bare,
    ):
        measured = paired(
            options,
            {"ours": ours.round, "limit": bare.round},
            "resp",
            port=port,
            chunk_nbytes=chunk_nbytes,
            chunks=chunks,
            workers=connections,
        )
    speed = gibps(chunks * chunk_nbytes)
    size = f"{chunk_nbytes // MiB} MiB, {connections} connection{'s' if connections > 1 else ''}"
    note = f"{server}; {chunks} records, one call each; limit: sendall and recv_into, nothing else"
    for what, peer, must in (("get", "read", get), ("put", "write", Must(ratio_limit=0.9, ratio_peer=1.0))):
        yield measured.row(bench, f"{what}, {size}", "GiB/s", what, speed, peer=peer, must=must, note=note)


def _exists_row(bench: str, server: str, port: int, open_backend: Open, options: Options) -> Row:
    keys = [ChunkKey(SHARD_ID + os.urandom(32)) for _ in range(EXISTS_KEYS)]
    batches = 4 if options.quick else 40
    with open_backend(f"redis://127.0.0.1:{port}/0", 1) as backend, _Socket(port) as link:
        assert backend.put_many(keys, [memoryview(key) for key in keys], timeout_s=TIMEOUT_S) == [None] * len(keys)

        def ours() -> Timings:
            def ask() -> None:
                for _ in range(batches):
                    assert backend.contains_prefix(keys, timeout_s=TIMEOUT_S) == len(keys)

            return {"exists": seconds(ask)}

        def bare() -> Timings:
            question = b"".join(_command(b"EXISTS", _name(key)) for key in keys)
            answer = b":1\r\n" * len(keys)

            def ask() -> None:
                for _ in range(batches):
                    link.sock.sendall(question)
                    assert link.exactly(len(answer)) == answer

            return {"exists": seconds(ask)}

        measured = paired(options, {"ours": ours, "limit": bare})
        for key in keys:
            backend.remove(key)
    note = f"{server}; 512 keys in one round trip; limit: the same question ready made, its answer compared"
    rate = EXISTS_KEYS * batches
    return measured.row(
        bench, "exists, 512 keys", "keys/s", "exists", lambda taken: rate / taken, must=Must(at_least=80_000), note=note
    )


class _Records:
    """What is stored, and where it comes back to; touched memory that all sides share."""

    def __init__(self, chunk_nbytes: int, chunks: int) -> None:
        self.sources = private_buffer(chunks * chunk_nbytes, huge=True).reshape(chunks, chunk_nbytes)
        self.targets = private_buffer(chunks * chunk_nbytes, huge=True).reshape(chunks, chunk_nbytes)
        for number, source in enumerate(self.sources):
            source[:] = random_bytes(chunk_nbytes, seed=number)

    def check(self, side: str) -> None:
        check_equal(self.targets, self.sources, side)

    def __enter__(self) -> _Records:
        return self

    def __exit__(self, *exc: object) -> None:
        del self.sources, self.targets


class _Side:
    """Records one by one over as many threads as connections."""

    name = ""

    def __init__(self, records: _Records, connections: int) -> None:
        self._records = records
        self._connections = connections
        self._threads = ThreadPoolExecutor(connections) if connections > 1 else None

    def put(self, connection: int, key: ChunkKey, data: memoryview) -> None:
        raise NotImplementedError

    def get(self, connection: int, key: ChunkKey, into: memoryview) -> None:
        raise NotImplementedError

    def forget(self, key: ChunkKey) -> None:
        raise NotImplementedError

    def round(self) -> Timings:
        keys = [ChunkKey(SHARD_ID + os.urandom(32)) for _ in self._records.sources]
        self._records.targets.fill(0)
        figures = {
            "put": seconds(lambda: self._each(self.put, keys, self._records.sources)),
            "get": seconds(lambda: self._each(self.get, keys, self._records.targets)),
        }
        self._records.check(self.name)
        for key in keys:
            self.forget(key)
        return figures

    def _each(
        self, verb: Callable[[int, ChunkKey, memoryview], None], keys: list[ChunkKey], buffers: np.ndarray[Any, Any]
    ) -> None:
        def some(connection: int) -> None:
            for number in range(connection, len(keys), self._connections):
                verb(connection, keys[number], memoryview(buffers[number]))

        if self._threads is None:
            some(0)
        else:
            list(self._threads.map(some, range(self._connections)))

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()


class _Ours(_Side):
    name = "ours"

    def __init__(self, backend: Backend[Any], records: _Records, connections: int) -> None:
        super().__init__(records, connections)
        self._backend = backend

    def put(self, connection: int, key: ChunkKey, data: memoryview) -> None:
        self._backend.put(key, data)

    def get(self, connection: int, key: ChunkKey, into: memoryview) -> None:
        assert self._backend.get(key, into) == len(into), "a miss"

    def forget(self, key: ChunkKey) -> None:
        self._backend.remove(key)

    def __enter__(self) -> _Ours:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
        self._backend.close()


class _Bare(_Side):
    """No checks, no deadlines, no errors: what the machine and the server can do."""

    name = "limit"

    def __init__(self, port: int, records: _Records, connections: int) -> None:
        super().__init__(records, connections)
        self._links = [_Socket(port) for _ in range(connections)]

    def put(self, connection: int, key: ChunkKey, data: memoryview) -> None:
        link, name = self._links[connection], _name(key)
        link.sock.sendall(b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, len(data)))
        link.sock.sendall(data)
        link.sock.sendall(b"\r\n")
        assert link.exactly(5) == b"+OK\r\n"

    def get(self, connection: int, key: ChunkKey, into: memoryview) -> None:
        link = self._links[connection]
        link.sock.sendall(_command(b"GET", _name(key)))
        head = b"$%d\r\n" % len(into)
        assert link.exactly(len(head)) == head
        done = 0
        while done < len(into):
            done += link.sock.recv_into(into[done:])
        link.exactly(2)

    def forget(self, key: ChunkKey) -> None:
        self._links[0].sock.sendall(_command(b"UNLINK", _name(key)))
        assert self._links[0].exactly(4) == b":1\r\n"

    def __enter__(self) -> _Bare:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
        for link in self._links:
            link.sock.close()


class _Socket:
    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.settimeout(None)

    def exactly(self, nbytes: int) -> bytes:
        got = b""
        while len(got) < nbytes:
            part = self.sock.recv(nbytes - len(got))
            assert part, "the server closed the connection"
            got += part
        return got

    def __enter__(self) -> _Socket:
        return self

    def __exit__(self, *exc: object) -> None:
        self.sock.close()


def _name(key: ChunkKey) -> bytes:
    return b"lmcache:" + key.text.encode()


def _command(verb: bytes, name: bytes) -> bytes:
    return b"*2\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(verb), verb, len(name), name)


def context() -> Context:
    return Context(timeout_s=TIMEOUT_S)
