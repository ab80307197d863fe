"""Leases and slots over the daemon: whose they are, when they end, and what happens to memory that may be written."""

from __future__ import annotations

import signal
import threading

import pytest
from daemons import ClientProcess, Gate, descriptors, serving
from tiny import BLOCKS, RECORD, Engine, chain, load, model, store, until

from lmcache_core import wire
from lmcache_core.client.cache import connect
from lmcache_core.server.quarantine import GRACE_S, Quarantine

WAIT = "\nsys.stdin.readline()\n"
RESERVE = """
of = chain(3, seed=7)
reservation = pool.reserve(of, of.model.shards[0], range(3))
for _, entry in reservation.new:
    pool.payload(entry)[:16] = bytes(16)
say(len(reservation.new))
"""


def begin(cache, of, engine, kind="store", hit=None):
    """Start a store or a retrieve of a whole chain."""
    shard, span = of.model.shards[0], range(len(of))
    if kind == "store":
        return cache.store(of, shard, span, engine.pages, engine.compute(of, shard, span))
    return cache.retrieve(hit, shard, span, engine.pages, list(range(len(of) * BLOCKS)))


def test_nothing_is_visible_before_its_commit(tmp_path):
    device = Gate("gather")
    with serving(tmp_path / "s"), connect(tmp_path / "s", device) as one, connect(tmp_path / "s") as two:
        job = begin(one, chain(4), Engine())
        assert device.entered.wait(5)
        assert two.lookup(chain(4), "early").chunks == 0
        again = store(two, chain(4))
        assert (again.ok_chunks, again.skipped) == (0, 4), "it is done once"
        device.go.set()
        assert job.wait(5).ok_chunks == 4
        assert load(two, chain(4))[1].ok_chunks == 4


def test_slots_of_a_client_that_was_killed_while_it_wrote_come_back_when_it_is_dead(tmp_path):
    with serving(tmp_path / "s", chunks=4) as daemon, connect(tmp_path / "s", call_timeout_s=5.0) as other:
        with ClientProcess(tmp_path / "s", RESERVE + WAIT) as client:
            assert client.heard() == "3"
            assert store(other, chain(4)).failed == ((1, 4, "no room"),)
            client.kill()
        assert until(lambda: daemon._pool.usage() == (1, 0, daemon._pool.slab.used_nbytes))
        assert until(lambda: len(daemon._quarantine) == 0)
        assert load(other, chain(3, seed=7))[0] == 0
        assert store(other, chain(4)).ok_chunks == 3


def test_slots_of_a_lost_connection_wait_while_its_process_lives(tmp_path):
    lost = "pool._closing = True\npool._link.abandon('lost')\npool._reader.join()\nsay('lost')"
    with serving(tmp_path / "s", chunks=4) as daemon, connect(tmp_path / "s", call_timeout_s=5.0) as other:
        with ClientProcess(tmp_path / "s", RESERVE + lost + WAIT) as client:
            assert [client.heard(), client.heard()] == ["3", "lost"]
            assert until(lambda: len(daemon._quarantine) == 3)
            for seed in range(20):
                assert store(other, chain(4, seed=seed)).failed == ((1, 4, "no room"),)
            assert len(daemon._quarantine) == 3
            assert load(other, chain(3, seed=7))[0] == 0, "what was reserved is not there, and nobody waits for it"
            client.kill()
        assert until(lambda: len(daemon._quarantine) == 0)
        assert store(other, chain(4, seed=30)).ok_chunks == 4


class Loop:
    """The part of a loop that a quarantine uses; time passes when the test says so."""

    def __init__(self):
        self.readers, self.timers, self.now = {}, [], 0.0

    def time(self):
        return self.now

    def add_reader(self, fd, call, *args):
        self.readers[fd] = (call, args)

    def remove_reader(self, fd):
        return self.readers.pop(fd, None) is not None

    def call_later(self, delay, call):
        self.timers.append((self.now + delay, call))
        return Timer(self.now + delay)

    def exited(self, fd):
        call, args = self.readers[fd]
        call(*args)

    def advance(self, to):
        self.now = to
        due, self.timers = [t for t in self.timers if t[0] <= to], [t for t in self.timers if t[0] > to]
        for _, call in due:
            call()


class Timer:
    def __init__(self, when):
        self._when = when

    def when(self):
        return self._when

    def cancel(self):
        return None


class Given:
    def __init__(self):
        self.slots = []

    def give_slots(self, entries):
        self.slots += entries


def pipe_end():
    import os

    end, other = os.pipe()
    os.close(other)
    return end


def test_slots_are_given_back_a_second_after_the_exit_and_only_of_the_client_that_exited():
    pool, loop = Given(), Loop()
    quarantine = Quarantine(pool, loop)
    first, second = pipe_end(), pipe_end()
    quarantine.add("a", ["a1", "a2"], first)
    quarantine.add("b", ["b1"], second)
    loop.exited(first)
    loop.advance(GRACE_S - 0.01)
    assert (pool.slots, len(quarantine)) == ([], 3)
    loop.advance(GRACE_S)
    assert (pool.slots, len(quarantine)) == (["a1", "a2"], 1)
    quarantine.released_by("b")
    assert pool.slots == ["a1", "a2", "b1"]
    assert not loop.readers, "a client that is here again is not watched any more"
    quarantine.close()
    assert GRACE_S >= 1.0


def test_slots_of_a_process_that_nobody_can_watch_stay_aside_until_it_connects_again():
    pool, loop = Given(), Loop()
    quarantine = Quarantine(pool, loop)
    quarantine.add("a", ["a1"], None)
    loop.advance(1e6)
    assert pool.slots == []
    quarantine.released_by("a")
    assert pool.slots == ["a1"]


def test_a_writer_that_lost_its_connection_says_when_its_copies_have_ended(tmp_path):
    device = Gate("gather")
    with serving(tmp_path / "s", chunks=4) as daemon, connect(tmp_path / "s", device, call_timeout_s=5.0) as cache:
        job = begin(cache, chain(3), Engine())
        assert device.entered.wait(5)
        lost = cache._pool._link
        lost.abandon("cut")
        assert until(lambda: cache._pool._link not in (None, lost))
        assert len(daemon._quarantine) == 3, "it is back, and its copy is still running"
        with connect(tmp_path / "s", call_timeout_s=5.0) as other:
            assert store(other, chain(4, seed=1)).ok_chunks == 1
        device.go.set()
        result = job.wait(5)
        assert result.ok_chunks == 0
        assert "did not confirm" in result.failed[0][2]
        assert cache.metrics.count("stores", result="ok") == 0
        assert until(lambda: len(daemon._quarantine) == 0), "it says so"
        assert store(cache, chain(4, seed=2)).ok_chunks == 4


def test_a_writer_that_was_idle_when_it_lost_its_connection_says_so_at_once(tmp_path):
    with serving(tmp_path / "s", chunks=4) as daemon, connect(tmp_path / "s", call_timeout_s=5.0) as cache:
        of = chain(3)
        cache._pool.reserve(of, of.model.shards[0], range(3))
        cache._pool._link.writing = 0  # as if nothing was going to write them
        lost = cache._pool._link
        lost.abandon("cut")
        assert until(lambda: cache._pool._link not in (None, lost))
        assert until(lambda: len(daemon._quarantine) == 0)
        assert store(cache, chain(4, seed=2)).ok_chunks == 4


def test_slots_that_were_reserved_on_a_lost_connection_are_not_written(tmp_path):
    with serving(tmp_path / "s", chunks=4), connect(tmp_path / "s", call_timeout_s=5.0) as cache:
        of = chain(3)
        real, calls = cache._pool._entry, []

        def lost_meanwhile(*args):
            entry = real(*args)
            calls.append(entry)
            if len(calls) == 3:
                link = cache._pool._link
                link.abandon("cut")
                assert until(lambda: cache._pool._link is not link)
            return entry

        cache._pool._entry = lost_meanwhile
        reservation = cache._pool.reserve(of, of.model.shards[0], range(3))
        cache._pool._entry = real
        assert None not in calls
        calls.clear()
        assert (reservation.new, reservation.refused) == ([], [0, 1, 2])


def test_a_reader_whose_slots_were_reused_meanwhile_reports_a_failed_load(tmp_path):
    device = Gate("scatter")
    with serving(tmp_path / "s", chunks=3), connect(tmp_path / "s", device) as cache:
        assert store(cache, chain(3)).ok_chunks == 3
        hit = cache.lookup(chain(3), "r")
        assert hit.chunks == 3
        job = begin(cache, chain(3), Engine(), "retrieve", hit)
        assert device.entered.wait(5)
        lost = cache._pool._link
        lost.abandon("cut")
        with connect(tmp_path / "s", call_timeout_s=5.0) as other:
            assert until(lambda: store(other, chain(3, seed=1)).skipped == 3)
            assert load(other, chain(3, seed=1))[1].ok_chunks == 3
        device.go.set()
        result = job.wait(5)
        assert (result.ok_chunks, result.nbytes) == (0, 0)
        assert result.failed == ((0, 3, "overwritten"),)


def test_a_reader_that_lost_its_connection_in_the_middle_still_has_the_right_bytes(tmp_path):
    device = Gate("scatter")
    engine = Engine()
    with serving(tmp_path / "s"), connect(tmp_path / "s", device) as cache:
        store(cache, chain(3))
        job = begin(cache, chain(3), engine, "retrieve", cache.lookup(chain(3), "r"))
        assert device.entered.wait(5)
        cache._pool._link.abandon("cut")
        device.go.set()
        assert job.wait(5).ok_chunks == 3
        assert all(engine.holds(chain(3), chain(3).model.shards[0], n, n * BLOCKS) for n in range(3))


def test_what_a_client_reads_is_not_evicted_under_it_by_what_others_store(tmp_path):
    device = Gate("scatter")
    with (
        serving(tmp_path / "s", chunks=4),
        connect(tmp_path / "s", device) as reader,
        connect(tmp_path / "s", call_timeout_s=5.0) as writer,
    ):
        store(reader, chain(3))
        engine = Engine()
        job = begin(reader, chain(3), engine, "retrieve", reader.lookup(chain(3), "r"))
        assert device.entered.wait(5)
        reader.release("r")  # the job's own hold is left
        for seed in range(1, 20):
            assert store(writer, chain(3, seed=seed)).ok_chunks == 1
        device.go.set()
        assert job.wait(5).ok_chunks == 3
        assert all(engine.holds(chain(3), chain(3).model.shards[0], n, n * BLOCKS) for n in range(3))


def test_a_client_that_is_stopped_in_the_middle_of_a_store_delays_nobody(tmp_path):
    with serving(tmp_path / "s", chunks=16) as daemon, connect(tmp_path / "s", call_timeout_s=5.0) as other:
        with ClientProcess(tmp_path / "s", RESERVE + WAIT) as client:
            assert client.heard() == "3"
            client.process.send_signal(signal.SIGSTOP)
            for seed in range(20):
                assert store(other, chain(5, seed=100 + seed)).ok_chunks == 5
                assert load(other, chain(5, seed=100 + seed))[1].ok_chunks == 5
            assert load(other, chain(3, seed=7))[0] == 0
            client.kill()
        assert until(lambda: len(daemon._quarantine) == 0)
        assert until(lambda: len(daemon._sessions) == 1)
        assert store(other, chain(3, seed=7)).ok_chunks == 3


EVERYTHING = """
store(cache, chain(6))
for n in range(20):
    cache.lookup(chain(6), f"r{n}")
cache.pin(chain(3))
arrived = threading.Event()
of = chain(6)
pool.acquire(of, of.model.shards[0], range(6), lambda position, entry, reason: position == 5 and arrived.set())
assert arrived.wait(5)
"""


@pytest.mark.parametrize("end", ["kill", "exception", "exit", "os._exit"])
def test_nothing_of_a_dead_client_is_left(end, tmp_path):
    code = {"kill": WAIT, "exception": "raise SystemExit(3)", "exit": "cache.close()", "os._exit": "os._exit(0)"}[end]
    with serving(tmp_path / "s") as daemon:
        before, running = descriptors(), threading.active_count()
        with ClientProcess(tmp_path / "s", "import os\n" + EVERYTHING + RESERVE + code) as client:
            assert client.heard() == "3"
            if end == "kill":
                assert daemon._pool.usage()[1] == 9
                client.kill()
            client.process.wait(20)
        assert until(lambda: not daemon._sessions)
        # A session is out of the list before what it held is given back.
        assert until(lambda: (len(daemon._quarantine), *daemon._pool.usage()[:2]) == (0, 6, 0)), daemon._pool.usage()
        assert daemon._pool.leases.count() == 0
        after = descriptors()
        extents = {kind: after.get(kind, 0) - before.get(kind, 0) for kind in after if kind.startswith("/memfd")}
        assert until(lambda: {k: n for k, n in descriptors().items() if k not in extents} == before), descriptors()
        assert threading.active_count() == running
        slab = daemon._pool.slab
        assert sum(len(e.free) for e in slab.extents.values()) + 6 == sum(e.slots for e in slab.extents.values())


def test_an_extent_that_is_dropped_before_its_descriptor_was_sent_is_not_mixed_up_with_another(tmp_path):
    import os
    import socket

    from lmcache_core.buffers import Extent
    from lmcache_core.server.daemon import Writer

    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    writers = []

    class Selector:
        def add_writer(self, sock, call):
            writers.append(call)

        def remove_writer(self, sock):
            return None

    writer = Writer(ours, Selector())
    writer.send(bytes(4 << 20), None)
    assert writers, "the socket is full"
    extent = Extent(1, RECORD)
    extent.view[:4] = b"mine"
    writer.send(b"extent", extent.fd)
    number = extent.fd
    extent.close()
    other = Extent(2, RECORD)
    assert other.fd == number, "the number is another file's now"
    got, fds = b"", []
    while not got.endswith(b"extent"):
        data, new, _, _ = socket.recv_fds(theirs, 1 << 20, 4)
        got, fds = (got + data)[-6:], fds + list(new)
        writers[-1]()
    assert os.pread(fds[0], 4, 0) == b"mine"
    os.close(fds[0])
    other.close()
    ours.close()
    theirs.close()


def test_models_that_many_threads_use_at_first_at_the_same_time_are_not_confused(tmp_path):
    models = [model(model=f"org/m{n}") for n in range(40)]
    with serving(tmp_path / "s", chunks=400), connect(tmp_path / "s", call_timeout_s=10.0) as cache:
        barrier = threading.Barrier(8)

        def work(number: int) -> None:
            barrier.wait()
            for n in range(40):
                of = chain(2, of=models[(n * (number + 1) + number) % 40])
                cache.lookup(of, f"{number}-{n}")
                cache.release(f"{number}-{n}")

        link = cache._pool._link
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(link._models.values())) == len(link._models) == 40
        for of in models:
            assert store(cache, chain(2, of=of)).ok_chunks == 2
        for of in models:
            assert load(cache, chain(2, of=of))[1].ok_chunks == 2


def test_more_models_than_a_connection_may_name_are_named_anew(tmp_path):
    count = wire.MAX_MODELS + 20
    with serving(tmp_path / "s"), connect(tmp_path / "s", call_timeout_s=5.0) as cache:
        first = cache._pool._link
        assert store(cache, chain(1, of=model(model="org/m0"))).ok_chunks == 1
        for n in range(1, count):
            cache.lookup(chain(1, of=model(model=f"org/m{n}")), "r")
        assert load(cache, chain(1, of=model(model="org/m0")))[1].ok_chunks == 1
        assert cache._pool._link is first
