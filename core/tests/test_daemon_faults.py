"""A daemon that is absent, stopped, killed or replaced, and clients that fork: misses in time, and back by itself."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing import forkserver, get_context, resource_tracker
from pathlib import Path

import pytest
from daemons import ClientProcess, DaemonProcess, Gate, open_remote, serving
from tiny import BLOCKS, Engine, chain, load, open_local, store, until

from lmcache_core import wire
from lmcache_core.buffers import Slot
from lmcache_core.client.cache import connect
from lmcache_core.testing.dict_backend import DictBackend
from lmcache_core.testing.faults import Fault, FaultBackend

DEADLINE_S = 0.25
SLACK_S = 5.0
"""What a loaded machine may add to a deadline."""


def warnings(caplog) -> list[str]:
    """What the client said, once per change of state."""
    return [r.getMessage() for r in caplog.records if "client" in r.name and r.levelno >= logging.WARNING]


def test_a_stopped_daemon_is_misses_within_the_deadline_said_once_and_back_when_it_continues(tmp_path, caplog):
    with DaemonProcess(tmp_path / "s") as daemon, connect(tmp_path / "s") as cache:
        assert store(cache, chain(4)).ok_chunks == 4
        daemon.signal(signal.SIGSTOP)
        began = time.monotonic()
        assert cache.lookup(chain(4), "first").chunks == 0
        assert time.monotonic() - began < DEADLINE_S + SLACK_S
        began = time.monotonic()
        for n in range(200):
            assert cache.lookup(chain(4), f"r{n}").chunks == 0
            cache.release(f"r{n}")
        assert time.monotonic() - began < SLACK_S, "only the first waits for its deadline"
        assert store(cache, chain(2, seed=1)).ok_chunks == 0
        assert len(warnings(caplog)) == 1
        assert "no answer from the daemon in 0.25 s" in warnings(caplog)[0]
        link = cache._pool._link
        daemon.signal(signal.SIGCONT)
        assert until(lambda: cache.lookup(chain(4), "again").chunks == 4)
        assert cache._pool._link is link, "the same connection"
        cache.release("again")
        assert load(cache, chain(4))[1].ok_chunks == 4
        assert until(lambda: cache._pool.status()["records_in_use"] == 0), "what was answered too late was given back"
        assert store(cache, chain(2, seed=1)).ok_chunks == 2
        assert len(warnings(caplog)) == 1


def test_a_daemon_that_is_stopped_until_the_socket_is_full_stalls_nobody_for_long(tmp_path):
    with DaemonProcess(tmp_path / "s") as daemon, connect(tmp_path / "s") as cache:
        assert store(cache, chain(4)).ok_chunks == 4
        daemon.signal(signal.SIGSTOP)
        began, longest = time.monotonic(), 0.0
        for _ in range(3000):
            start = time.monotonic()
            if (link := cache._pool._link) is not None:
                cache._pool._tell_on(link, wire.Release("x" * 1000))
            longest = max(longest, time.monotonic() - start)
        assert longest < DEADLINE_S + SLACK_S
        assert time.monotonic() - began < 4 * DEADLINE_S + SLACK_S
        daemon.signal(signal.SIGCONT)
        assert until(lambda: load(cache, chain(4))[0] == 4, 20)


def test_a_killed_daemon_is_misses_and_another_one_is_found_by_itself(tmp_path, caplog):
    with DaemonProcess(tmp_path / "s") as daemon, connect(tmp_path / "s", call_timeout_s=5.0) as cache:
        assert store(cache, chain(4)).ok_chunks == 4
        hit = cache.lookup(chain(4), "r")
        daemon.kill()
        assert until(lambda: not cache.connected)
        assert load(cache, chain(4))[0] == 0
        engine = Engine()
        shard, ids = chain(4).model.shards[0], list(range(16))
        assert cache.retrieve(hit, shard, range(4), engine.pages, ids).wait(5).ok_chunks == 0
        assert engine.poisoned(0)
        daemon.start()
        assert until(lambda: cache.connected)
        assert cache._pool.boot_id != hit.boot_id
        result = cache.retrieve(hit, shard, range(4), engine.pages, ids).wait(5)
        assert result.failed == ((0, 4, "miss"),), "a hit of another boot is no promise"
        assert store(cache, chain(4)).ok_chunks == 4
        assert load(cache, chain(4))[1].ok_chunks == 4
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize("kind", ["store", "retrieve"])
def test_a_daemon_that_is_killed_in_the_middle_of_a_copy_costs_that_job_at_most(kind, tmp_path):
    device = Gate()
    engine = Engine()
    prompt = chain(4)
    shard = prompt.model.shards[0]
    ids = engine.compute(prompt, shard, range(4))
    with DaemonProcess(tmp_path / "s") as daemon, connect(tmp_path / "s", device, call_timeout_s=5.0) as cache:
        assert store(cache, prompt).ok_chunks == 4
        device.verbs = ("gather", "scatter")
        if kind == "store":
            job = cache.store(chain(4, seed=1), shard, range(4), engine.pages, ids)
        else:
            target = Engine()
            job = cache.retrieve(cache.lookup(prompt, "r"), shard, range(4), target.pages, ids)
        assert device.entered.wait(5)
        daemon.kill()
        assert until(lambda: not cache.connected)
        device.go.set()
        result = job.wait(10)
        if kind == "store":
            assert result.ok_chunks == 0
            assert result.failed[0][:2] == (0, 4)
        else:
            assert result.ok_chunks == 4, "the memory is ours as long as we map it"
            assert all(target.holds(prompt, shard, n, n * BLOCKS) for n in range(4))
        daemon.start()
        assert until(lambda: cache.connected)
        assert load(cache, chain(4, seed=1))[0] == 0
        assert store(cache, prompt).ok_chunks == 4


def test_loads_that_wait_for_a_tier_end_at_once_when_the_daemon_goes(tmp_path):
    backend = DictBackend()
    with open_local([backend]) as filler:
        store(filler, chain(4))
        assert filler.drain(5)
    stalled = FaultBackend(DictBackend(store=backend.store), rates={Fault.STALL: 1.0}, verbs=["get"])
    with connect(tmp_path / "s", connect_timeout_s=0.05, call_timeout_s=5.0) as cache:
        engine = Engine()
        with serving(tmp_path / "s", [stalled], timeout_s=30.0):
            assert until(lambda: cache.connected)
            hit = cache.lookup(chain(4), "r")
            assert (hit.chunks, hit.resident) == (4, 0)
            job = cache.retrieve(hit, chain(4).model.shards[0], range(4), engine.pages, list(range(16)))
            assert stalled.stalled.acquire(timeout=5)
            cache._pool._link.abandon("cut")
            assert job.wait(5).failed == ((0, 4, "the daemon is gone"),)
            assert engine.poisoned(0)
            stalled.release_stalls()


def test_a_load_that_the_daemon_does_not_answer_is_late_at_its_deadline(tmp_path):
    with (
        DaemonProcess(tmp_path / "s") as daemon,
        connect(tmp_path / "s", load_timeout_s=0.3, call_timeout_s=5.0) as cache,
    ):
        store(cache, chain(2))
        hit = cache.lookup(chain(2), "r")
        daemon.signal(signal.SIGSTOP)
        engine = Engine()
        job = cache.retrieve(hit, chain(2).model.shards[0], range(2), engine.pages, list(range(8)))
        assert job.wait(5).failed == ((0, 2, "late"),)
        assert cache.metrics.count("loads", result="late") == 2
        daemon.signal(signal.SIGCONT)
        assert until(lambda: cache._pool.status()["records_in_use"] == 2), "the lease, and nothing that came too late"
        cache.release("r")
        assert until(lambda: cache._pool.status()["records_in_use"] == 0)


class Liar:
    """Something that listens on the socket and is no daemon of ours."""

    def __init__(self, path: Path, *answers: bytes, linger: bool = False) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        self.answers, self.linger = answers, linger
        self.calls = 0
        self.kept: list[socket.socket] = []
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            self.calls += 1
            try:
                for answer in self.answers:
                    sock.recv(1 << 16)
                    sock.sendall(answer)
            except OSError:
                pass
            if self.linger:
                self.kept.append(sock)
            else:
                sock.close()

    def __enter__(self) -> Liar:
        return self

    def __exit__(self, *exc: object) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.thread.join()
        for sock in (self.listener, *self.kept):
            sock.close()


WELCOME = wire.encode(wire.Welcome(wire.PROTOCOL, "boot", 1))
LIES = {
    "garbage": (b"HTTP/1.1 400 Bad Request\r\n\r\n",),
    "nothing": (),
    "an oversized frame": (b"\xff\xff\xff\xff",),
    "another protocol": (wire.encode(wire.Welcome(99, "boot", 1)),),
    "a refusal": (wire.encode(wire.Refused("because")),),
    "garbage later": (WELCOME, b"\x03\0\0\0abc"),
    "an extent without its descriptor": (WELCOME, wire.encode(wire.ExtentOpened(0, 1 << 20))),
    "the wrong answer": (WELCOME, wire.encode(wire.Count(1, 5))),
    "slots that are not ours": (WELCOME, wire.encode(wire.Reserved(1, [0], [(7, 0, 8192)], [1], 0, []))),
    "a position that was not asked for": (WELCOME, wire.encode(wire.Reserved(1, [99], [(7, 0, 8192)], [1], 0, []))),
}


@pytest.mark.parametrize("name", LIES)
def test_a_daemon_that_speaks_nonsense_is_a_miss_and_not_asked_in_a_loop(name, tmp_path):
    began = time.monotonic()
    with (
        Liar(tmp_path / "s", *LIES[name]) as liar,
        connect(tmp_path / "s", connect_timeout_s=0.2, call_timeout_s=0.2) as cache,
    ):
        for n in range(5):
            assert cache.lookup(chain(3), f"r{n}").chunks in (0,)
            assert store(cache, chain(2, seed=n)).ok_chunks == 0
        assert until(lambda: liar.calls > 0)
        assert liar.calls <= 3 + 10 * (time.monotonic() - began)
        assert all(thread.is_alive() for thread in (cache._pool._reader, cache._pool._watch, cache._mover))


def test_a_silent_listener_holds_up_neither_connect_nor_close(tmp_path):
    with Liar(tmp_path / "s", linger=True):
        began = time.monotonic()
        cache = connect(tmp_path / "s", connect_timeout_s=0.2)
        assert load(cache, chain(2))[0] == 0
        cache.close()
        assert time.monotonic() - began < 0.6 + 2 * SLACK_S


def test_closing_at_any_moment_of_a_connection_ends_the_threads(tmp_path):
    with serving(tmp_path / "s") as daemon:
        for n in range(60):
            cache = connect(tmp_path / "s", connect_timeout_s=0.0001 * (n % 10))
            closing = threading.Thread(target=cache.close)
            closing.start()
            closing.join(10)
            assert not closing.is_alive()
            assert not cache._pool._reader.is_alive()
        assert until(lambda: not daemon._sessions)


def test_an_answer_that_comes_just_too_late_is_given_back(tmp_path):
    with serving(tmp_path / "s") as daemon, connect(tmp_path / "s", call_timeout_s=0.0001) as cache:
        for n in range(300):
            of = chain(2, seed=n % 20)
            store(cache, of)
            cache._pool._ask_again_at = 0.0
        assert cache._pool._link is not None
        assert until(lambda: daemon._pool.usage()[1] == 0), "no slot stays reserved"
        (session,) = daemon._sessions.values()
        assert until(lambda: not session.reserved)
        assert until(lambda: not cache._pool._link.late)


def test_a_client_that_was_idle_for_hours_goes_on(tmp_path):  # S21
    now = [0.0]
    with (
        serving(tmp_path / "s", clock=lambda: now[0], chunks=8) as daemon,
        connect(tmp_path / "s", call_timeout_s=5.0) as cache,
    ):
        assert store(cache, chain(4)).ok_chunks == 4
        assert cache.lookup(chain(4), "kept").chunks == 4
        link = cache._pool._link
        now[0] = 7200.0
        assert load(cache, chain(4), "later")[1].ok_chunks == 4
        assert store(cache, chain(8, seed=1)).ok_chunks == 8, "the old lease has ended, since room was needed"
        assert load(cache, chain(8, seed=1), "again")[1].ok_chunks == 8
        cache.release("kept")
        assert cache._pool._link is link
        assert len(daemon._sessions) == 1


# Processes.


def child_report(work) -> object:
    """What `work()` returns in a forked child, which has ten seconds."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.write(write, json.dumps(work()).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    ended: list[int] = []

    def exited() -> bool:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            ended.append(os.waitstatus_to_exitcode(status))
        return bool(ended)

    if not until(exited, 10):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        ended.append(-999)
    with open(read, "rb") as pipe:
        said = pipe.read()
    assert ended == [0], f"the child ended with {ended}: {said!r}"
    return json.loads(said)


@pytest.mark.parametrize("opened", [open_local, open_remote], ids=["local", "daemon"])
def test_in_a_forked_child_a_cache_is_empty_and_the_parents_is_undisturbed(opened):
    with opened() as cache:
        prompt = chain(4)
        store(cache, prompt)
        hit = cache.lookup(prompt, "r")
        shard = prompt.model.shards[0]

        def work():
            engine = Engine()
            ids = engine.compute(prompt, shard, range(4))
            jobs = [
                cache.retrieve(hit, shard, range(4), engine.pages, ids),
                cache.store(chain(4, seed=1), shard, range(4), engine.pages, ids),
                cache.prefetch(prompt),
            ]
            found = [cache.lookup(prompt, "r").chunks, cache.lookup_answered(prompt, "s", timeout_s=9).chunks]
            cache.release("r")
            cache.unpin(prompt)
            results = [job.wait(5).failed for job in jobs]
            polled = len(cache.poll())
            rest = [cache.pin(prompt), cache.evict(prompt), cache.drain(5)]
            cache.close()
            cache.close()
            return [found, results, polled, rest]

        found, results, polled, rest = child_report(work)
        assert found == [0, 0]
        assert results == [[[0, 4, "forked"]]] * 3
        assert polled == 3
        assert rest == [0, 0, True]
        link = getattr(cache._pool, "_link", None)
        assert cache.lookup(prompt, "r") == hit
        assert load(cache, prompt, "s")[1].ok_chunks == 4
        assert store(cache, chain(2, seed=3)).ok_chunks == 2
        assert getattr(cache._pool, "_link", None) is link
        cache.release("r")


def test_a_fork_while_other_threads_hold_every_lock_does_not_hang_the_child(tmp_path):
    with serving(tmp_path / "s"), connect(tmp_path / "s", call_timeout_s=5.0) as remote, open_local() as local:
        stop = threading.Event()

        def busy(cache, seed: int) -> None:
            while not stop.is_set():
                store(cache, chain(3, seed=seed))
                load(cache, chain(3, seed=seed), f"busy {seed}")

        threads = [threading.Thread(target=busy, args=(c, n)) for n, c in enumerate((remote, local, remote, local))]
        for thread in threads:
            thread.start()
        try:
            for _ in range(30):

                def work():
                    found = [cache.lookup(chain(3), "r").chunks for cache in (remote, local)]
                    for cache in (remote, local):
                        cache.close()
                    return found

                assert child_report(work) == [0, 0]
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def test_a_forked_child_opens_a_cache_of_its_own_in_the_same_daemon(tmp_path):
    with serving(tmp_path / "s") as daemon, connect(tmp_path / "s", call_timeout_s=5.0) as cache:
        store(cache, chain(4))

        def work():
            with connect(tmp_path / "s", call_timeout_s=5.0) as mine:
                return [load(mine, chain(4))[1].ok_chunks, store(mine, chain(2, seed=1)).ok_chunks]

        assert child_report(work) == [4, 2]
        assert load(cache, chain(2, seed=1))[1].ok_chunks == 2
        assert until(lambda: len(daemon._sessions) == 1)


FORK = """
import ctypes, gc, mmap, os, sys
from lmcache_core.buffers import Extent
from lmcache_core.client.link import MappedExtent
extent = Extent(0, 1 << 20)
if sys.argv[1] == "client":
    mapped = MappedExtent(0, 1 << 20, extent.fd)
    extent.close()
    extent = mapped
    del mapped
address, nbytes = extent.address, extent.nbytes
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
pid = os.fork()
if pid == 0:
    got = libc.mmap(address, nbytes, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    assert got == address, "the parent's extent is not mapped here"
    ctypes.memset(got, 7, nbytes)
    del extent
    gc.collect()
    assert ctypes.string_at(got, nbytes) == bytes([7]) * nbytes, "somebody unmapped it"
    sys.exit(0)
_, status = os.waitpid(pid, 0)
extent.view[:4] = b"mine"
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize("side", ["owner", "client"])
def test_memory_that_a_forked_child_maps_where_an_extent_was_stays_its_own(side):
    ran = subprocess.run([sys.executable, "-c", FORK, side], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr


ORPHAN = """
import os, signal
store(cache, chain(4))
cache.lookup(chain(4), "r")
copy = os.dup(pool._link._sock.fileno())
child = os.fork()
if child == 0:
    signal.pause()
say(child)
sys.stdin.readline()
"""


def test_a_client_that_is_killed_is_gone_though_a_forked_child_of_it_lives(tmp_path):
    with serving(tmp_path / "s") as daemon, ClientProcess(tmp_path / "s", ORPHAN) as client:
        child = int(client.heard())
        try:
            assert len(daemon._sessions) == 1
            assert daemon._pool.usage()[1] == 4
            client.kill()
            assert until(lambda: not daemon._sessions)
            assert daemon._pool.usage()[1] == 0
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.fixture(scope="module")
def starters():
    """What the library starts once per process and never ends."""
    forkserver.ensure_running()
    resource_tracker.ensure_running()


def spawned(path: str, pipe) -> None:
    with connect(path, call_timeout_s=5.0) as cache:
        pipe.send([load(cache, chain(4))[1].ok_chunks, store(cache, chain(2, seed=1)).ok_chunks])


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_a_child_however_started_shares_what_its_parent_stored(method, tmp_path, starters):
    context = get_context(method)
    with serving(tmp_path / "s"), connect(tmp_path / "s", call_timeout_s=5.0) as cache:
        store(cache, chain(4))
        ours, theirs = context.Pipe()
        process = context.Process(target=spawned, args=(str(tmp_path / "s"), theirs))
        process.start()
        assert ours.poll(30)
        assert ours.recv() == [4, 2]
        process.join()
        assert process.exitcode == 0
        process.close()
        for pipe in (ours, theirs):
            pipe.close()
        assert load(cache, chain(2, seed=1))[1].ok_chunks == 2
    gc.collect()


def test_a_store_that_a_dying_daemon_leaves_unanswered_keeps_none_of_its_memory(tmp_path):
    """Also without the garbage collector, which may not look at old objects for hours."""

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("/memfd:lmcache-extent")

    device, engine, new = Gate(), Engine(), chain(4, seed=1)
    shard = new.model.shards[0]
    ids = engine.compute(new, shard, range(4))
    gc.collect()
    before = mapped()
    with DaemonProcess(tmp_path / "s") as daemon, connect(tmp_path / "s", device, call_timeout_s=5.0) as cache:
        store(cache, chain(1))
        device.verbs = ("gather",)
        job = cache.store(new, shard, range(4), engine.pages, ids)
        assert device.entered.wait(5)
        receiving = cache._pool._link._receiving
        daemon.signal(signal.SIGSTOP)
        device.go.set()
        assert until(receiving.locked), "the store waits for its answer"
        assert mapped() > before
        gc.disable()
        try:
            daemon.kill()
            assert job.wait(10).ok_chunks == 0
            assert until(lambda: not cache.connected)
            assert until(lambda: mapped() == before, 5)
        finally:
            gc.enable()
            daemon.start()


def test_memory_of_a_dead_daemon_stays_readable_while_a_client_maps_it(tmp_path):  # S27
    with DaemonProcess(tmp_path / "s") as daemon, connect(tmp_path / "s", call_timeout_s=5.0) as cache:
        store(cache, chain(1))
        extent = next(iter(cache._pool._link.extents.values()))
        record = bytes(extent.view[: Slot(0, 0, 8192).nbytes])
        daemon.kill()
        assert until(lambda: not cache.connected)
        assert bytes(extent.view[:8192]) == record
        daemon.start()
    del extent
    assert not [name for name in os.listdir("/dev/shm") if "lmcache-extent" in name]
