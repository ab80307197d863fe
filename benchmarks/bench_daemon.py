"""The daemon: stores, loads and lookups of a client process, of eight at once, its start and its size.

Ours are a client's calls through `lmc serve`, a process of its own.  The peer is `lmcache server` with the client of
`lmcache bench server --mode cpu`, in both ways that it can transfer.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from harness.caches import ended, layout_of, memory_cache, model_of, mover, new_chain, paged
from harness.daemon import serve, slots
from harness.daemon_client import BATCH as CLIENT_BATCH
from harness.measure import (
    GiB,
    MiB,
    Options,
    Timings,
    gibps,
    milliseconds,
    paired,
    private_buffer,
    random_bytes,
    seconds,
    shared_buffer,
)
from harness.peer import BENCHMARKS
from harness.report import Must, Row

from lmcache_core import wire
from lmcache_core.chain import Chain
from lmcache_core.client.cache import connect

BATCH = 8
LAYERS, BLOCKS, BLOCK_NBYTES = 32, 16, 64 << 10
CHUNK_NBYTES = 32 * MiB
PREFIX = 512
CLIENTS = 8
TIMEOUT_S = 60.0
PEER_SHAPE = "(2,385,16,8,128):float16:32"
"""32 MiB in a chunk of 256 tokens.  385 blocks, so that no request of ours to it uses block 0, which means none."""
PEER_SMALL = "(2,8500,16,1,8):float16:1"


def rows(options: Options) -> Iterator[Row]:
    yield from _transfers(options)
    yield from _lookups(options)
    yield from _crowd(options)
    yield from _start(options)


def _transfers(options: Options) -> Iterator[Row]:
    """32 MiB chunks in batches of 8, through the daemon and beside it in this process's own memory tier."""
    nbytes = BATCH * CHUNK_NBYTES
    layout = layout_of(layers=LAYERS, blocks=BLOCKS, block_nbytes=BLOCK_NBYTES)
    model, shard = model_of(layout)
    source, target = private_buffer(nbytes, huge=False), private_buffer(nbytes, huge=False)
    source[:] = random_bytes(nbytes, seed=0)
    size = f"{BATCH} chunks of 32 MiB"
    with (
        serve(options.directory / "transfers", slots(2 * BATCH, layout)) as served,
        connect(served.socket, call_timeout_s=TIMEOUT_S) as client,
        memory_cache(2 * BATCH, layout) as own,
    ):
        work = {"ours": client, "limit": own}
        sides = {side: mover(cache, model, shard, source, target, BATCH, TIMEOUT_S) for side, cache in work.items()}
        for side in sides.values():
            side(), side()  # every slot has been used once: a slab in service has its memory already
        for transfer, what in (("lmcache_driven", "its handles"), ("engine_driven", "its slots")):
            measured = paired(
                options, sides, "server",
                transfer=transfer, shape=PEER_SHAPE, tokens=BATCH * 256, l1_gib=2, lookups=1, store=True,
            )  # fmt: skip
            first = transfer == "lmcache_driven"
            for name, must in (("store", 0.9), ("load", 0.95)):
                yield measured.row(
                    "daemon", name if first else f"{name}, beside {what}", "GiB/s", name, gibps(nbytes),
                    limit=None if first else "none",
                    must=Must(ratio_limit=must, ratio_peer=1.0) if first else Must(ratio_peer=1.0),
                    note=f"{size}; limit: the same in this process's own memory tier; peer: over shared memory, {what}",
                )  # fmt: skip


def _lookups(options: Options) -> Iterator[Row]:
    """A prefix of 512 chunks, 131,072 tokens, looked up and released; the limit is a bare echo of as many bytes."""
    repeat = 20 if options.quick else 100
    layout = layout_of(layers=1, blocks=1, block_nbytes=4096)
    model, shard = model_of(layout)
    chain = new_chain(model, PREFIX)
    with (
        serve(options.directory / "lookups", slots(2 * PREFIX, layout)) as served,
        connect(served.socket, call_timeout_s=TIMEOUT_S) as client,
        echo(len(request_of(chain))) as ask_echo,
    ):
        pages = paged(private_buffer(PREFIX * 4096, huge=False), layout)
        stored = ended(client.store(chain, shard, range(PREFIX), pages, range(PREFIX)).wait(TIMEOUT_S))
        assert stored.ok_chunks == PREFIX, stored
        look = _looker(client, chain)

        def ours() -> Timings:
            return _percentiles([look() for _ in range(repeat)]) | {"request": float(len(request_of(chain)))}

        def limit() -> Timings:
            return _percentiles([ask_echo() for _ in range(repeat)])

        measured = paired(
            options, {"ours": ours, "limit": limit}, "server", transfer="engine_driven", shape=PEER_SMALL,
            tokens=PREFIX * 256, l1_gib=0.5, lookups=20, store=False,
        )  # fmt: skip
        status = client.daemon_status()
        assert status is not None
        assert not status["records_in_use"], status
    note = f"{PREFIX} chunks, all there; limit: an echo of as many bytes over a Unix socket"
    yield measured.row(
        "daemon", "lookup, median", "ms", "median", milliseconds, peer="lookup",
        must=Must(at_most=0.5, ratio_peer=1.0), note=note,
    )  # fmt: skip
    yield measured.row(
        "daemon", "lookup, p99", "ms", "p99", milliseconds, peer="lookup p99",
        must=Must(at_most=2.0, ratio_peer=1.0), note=note,
    )  # fmt: skip
    yield measured.row(
        "daemon", "lookup, request", "KB", "request", lambda nbytes: nbytes / 1000, limit="none", peer="none",
        must=Must(at_most=30.0), note="bytes of the message, whatever the ranks and layer groups",
    )  # fmt: skip


def _crowd(options: Options) -> Iterator[Row]:
    """Eight client processes at once that store, look up and load, and a ninth that only looks up."""
    duration_s = 0.5 if options.quick else 2.0
    layout = layout_of(layers=LAYERS, blocks=BLOCKS, block_nbytes=BLOCK_NBYTES)
    small = layout_of(layers=1, blocks=1, block_nbytes=4096)
    model, shard = model_of(small)
    chain = new_chain(model, PREFIX)
    room = slots(3 * CLIENTS * CLIENT_BATCH, layout) + slots(2 * PREFIX, small) + 64 * MiB
    nbytes = CLIENT_BATCH * CHUNK_NBYTES
    private, shared = private_buffer(nbytes, huge=False), shared_buffer(nbytes, huge=False)
    with ExitStack() as stack:
        served = stack.enter_context(serve(options.directory / "crowd", room))
        client = stack.enter_context(connect(served.socket, call_timeout_s=TIMEOUT_S))
        ask_echo = stack.enter_context(echo(len(request_of(chain))))
        pages = paged(private_buffer(PREFIX * 4096, huge=False), small)
        ended(client.store(chain, shard, range(PREFIX), pages, range(PREFIX)).wait(TIMEOUT_S))
        assert client.pin(chain) == PREFIX
        clients = [stack.enter_context(client_process(str(served.socket), number)) for number in range(CLIENTS)]
        look = _looker(client, chain)

        def ours() -> Timings:
            for each in clients:
                each.begin()
            looks, echoes = [], []
            until = time.perf_counter() + duration_s
            while time.perf_counter() < until:
                looks.append(look())
                echoes.append(ask_echo())
            done = [each.end() for each in clients]
            moved = [did["stored"] + did["loaded"] for did in done]
            assert all(moved), "a client did nothing at all"
            rates = [amount / did["seconds"] for amount, did in zip(moved, done, strict=True)]
            return {
                "moved": 1 / sum(rates),
                "look p99": _percentiles(looks)["p99"],
                "echo p99": _percentiles(echoes)["p99"],
                "slowest": 100 * min(rates) / statistics.mean(rates),
            }

        def limit() -> Timings:
            taken = seconds(lambda: (np.copyto(shared, private), np.copyto(private, shared)))
            return {"moved": taken / (2 * nbytes)}

        for _ in range(3):
            ours()  # until every slot has been used once
        measured = paired(replace(options, rounds=max(3, options.rounds)), {"ours": ours, "limit": limit})
    yield measured.row(
        "daemon", f"{CLIENTS} clients, all together", "GiB/s", "moved", lambda taken: 1 / taken / GiB,
        must=Must(ratio_limit=0.8),
        note=f"each stores {CLIENT_BATCH} chunks of 32 MiB, looks them up, loads them; limit: np.copyto of one process",
    )  # fmt: skip
    looks, echoes = (measured.values("ours", what, milliseconds) or [] for what in ("look p99", "echo p99"))
    yield replace_limit(measured.row("daemon", f"lookup, p99 beside {CLIENTS} clients", "ms", "look p99", milliseconds,
                        limit="none", note="limit: a bare echo of as many bytes by the same process at the same time"),
                        looks, echoes, 1 / 1.5)  # fmt: skip
    yield measured.row(
        "daemon", f"{CLIENTS} clients, the slowest", "% of mean", "slowest", float, limit="none",
        must=Must(at_least=50.0), note="bytes per second of the client that got least, of what they got on average",
    )  # fmt: skip


def replace_limit(row: Row, ours: list[float], limit: list[float], must: float) -> Row:
    """`row` beside a limit that the same side measured."""
    from harness.report import row_of

    return row_of(
        row.bench, row.row, row.unit, ours, limit=limit, must=Must(ratio_limit=must), load=row.load, note=row.note
    )


def _start(options: Options) -> Iterator[Row]:
    """From the start of the process to ready, with a slab of 2 GiB, and what it takes beside the slab."""
    layout = layout_of(layers=1, blocks=1, block_nbytes=4096)
    model, shard = model_of(layout)
    count = 0

    def ours() -> Timings:
        nonlocal count
        count += 1
        with (
            serve(options.directory / f"start{count}", 2 * GiB) as served,
            connect(served.socket, call_timeout_s=TIMEOUT_S) as client,
        ):
            pages = paged(private_buffer(64 * 4096, huge=False), layout)
            stored = client.store(new_chain(model, 64), shard, range(64), pages, range(64)).wait(TIMEOUT_S)
            assert ended(stored).ok_chunks == 64
            return {"ready": served.ready_s, "own": float(served.own_nbytes())}

    def limit() -> Timings:
        imports = "import numpy, msgspec, yaml, prometheus_client, click, asyncio"
        return {"ready": seconds(lambda: subprocess.run([sys.executable, "-c", imports], check=True))}

    measured = paired(options, {"ours": ours, "limit": limit})
    yield measured.row(
        "daemon", "start to ready, 2 GiB", "s", "ready", float, must=Must(at_most=0.5),
        note="limit: a Python that imports what the daemon needs of others",
    )  # fmt: skip
    yield measured.row(
        "daemon", "memory beside the slab", "MiB", "own", lambda nbytes: nbytes / MiB, limit="none",
        must=Must(at_most=120.0), note="resident, after it has served a client",
    )  # fmt: skip


def request_of(chain: Chain) -> bytes:
    """What a client sends to look `chain` up."""
    return wire.encode(wire.Lookup(1, 1, b"".join(chain.digests), chain.tokens, "a request's name, of an engine"))


def _looker(cache: Any, chain: Chain) -> Callable[[], float]:
    number = 0

    def look() -> float:
        nonlocal number
        number += 1
        request = f"request {number}"
        began = time.perf_counter()
        hit = cache.lookup(chain, request)
        taken = time.perf_counter() - began
        assert hit.resident == PREFIX, "not the whole prefix"
        cache.release(request)
        return taken

    return look


def _percentiles(taken: list[float]) -> Timings:
    ordered = sorted(taken)
    return {"median": statistics.median(ordered), "p99": ordered[len(ordered) * 99 // 100]}


ECHO = """
import socket, sys
near, nbytes = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
buffer = memoryview(bytearray(nbytes))
while True:
    got = 0
    while got < nbytes:
        part = near.recv_into(buffer[got:])
        if not part:
            sys.exit()
        got += part
    near.sendall(buffer)
"""


@contextmanager
def echo(nbytes: int) -> Iterator[Callable[[], float]]:
    """A process that sends back what it gets, and what a round trip of `nbytes` to it takes."""
    near, far = socket.socketpair()
    message, buffer = bytes(nbytes), memoryview(bytearray(nbytes))
    command = [sys.executable, "-c", ECHO, str(far.fileno()), str(nbytes)]
    with near, subprocess.Popen(command, pass_fds=[far.fileno()]):
        far.close()

        def ask() -> float:
            began = time.perf_counter()
            near.sendall(message)
            got = 0
            while got < nbytes:
                got += near.recv_into(buffer[got:])
            return time.perf_counter() - began

        try:
            ask()
            yield ask
        finally:
            near.close()  # which ends the process


class ClientProcess:
    """A client of its own process, which works between `begin` and `end`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def begin(self) -> None:
        self._tell()

    def end(self) -> dict[str, float]:
        self._tell()
        return self.hear()

    def hear(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "a client process ended"
        answer: dict[str, float] = json.loads(line)
        return answer

    def _tell(self) -> None:
        assert self._process.stdin is not None
        os.write(self._process.stdin.fileno(), b".")


@contextmanager
def client_process(path: str, number: int) -> Iterator[ClientProcess]:
    command = [sys.executable, "-m", "harness.daemon_client", path, str(number)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=BENCHMARKS) as process:
        client = ClientProcess(process)
        try:
            assert client.hear()["connected"]
            yield client
        except BaseException:
            process.kill()
            raise
