"""Many clients at once: one store and one load of each record, and nobody waits for somebody else's slow tier."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from daemons import Gate, counted, open_remote, pool_of, serving
from tiny import BLOCKS, RECORD, Engine, chain, load, open_local, store, until

from lmcache_core.client.cache import connect
from lmcache_core.testing.dict_backend import DictBackend
from lmcache_core.testing.faults import Fault, FaultBackend

CLIENTS = 6


def below(*seeds: int, chunks: int = 4) -> DictBackend:
    """A store that holds prompts, as another daemon left them."""
    backend = DictBackend()
    with open_local([backend]) as cache:
        for seed in seeds:
            store(cache, chain(chunks, seed=seed))
        assert cache.drain(5)
    return DictBackend(store=backend.store)


def retrieve(cache, of, engine, request="r"):
    """A job that loads all of `of`, which is found."""
    hit = cache.lookup_answered(of, request, timeout_s=5)
    assert hit.chunks == len(of)
    return cache.retrieve(hit, of.model.shards[0], range(len(of)), engine.pages, list(range(len(of) * BLOCKS)))


def right(of, engine) -> bool:
    return all(engine.holds(of, of.model.shards[0], n, n * BLOCKS) for n in range(len(of)))


def test_stores_of_one_prompt_by_many_clients_at_once_are_done_once(tmp_path):
    backend = DictBackend()
    with ExitStack() as stack:
        daemon = stack.enter_context(serving(tmp_path / "s", [backend]))
        caches = [stack.enter_context(connect(tmp_path / "s", call_timeout_s=5.0)) for _ in range(CLIENTS)]
        threads = stack.enter_context(ThreadPoolExecutor(CLIENTS))
        for seed in range(20):
            results = list(threads.map(lambda cache, s=seed: store(cache, chain(4, seed=s)), caches))
            assert sum(result.ok_chunks for result in results) == 4
            assert sum(result.skipped for result in results) == 4 * (CLIENTS - 1)
        assert daemon._pool.drain(5)
        assert daemon.metrics.count("tier_writes", result="ok") == len(backend.store.records) == 80
        for cache in caches:
            assert load(cache, chain(4, seed=19))[1].ok_chunks == 4


def test_a_record_that_many_clients_wait_for_is_read_once(tmp_path):
    reads = []

    class Counting(FaultBackend):
        api_version = (1, 0)

        def get(self, key, into):
            reads.append(key)
            return super().get(key, into)

    slow = Counting(below(0), rates={Fault.STALL: 1.0}, verbs=["get"])
    with ExitStack() as stack:
        daemon = stack.enter_context(serving(tmp_path / "s", [slow], timeout_s=30.0))
        caches = [stack.enter_context(connect(tmp_path / "s", call_timeout_s=5.0)) for _ in range(CLIENTS)]
        engines = [Engine(16) for _ in caches]
        first = retrieve(caches[0], chain(4), engines[0])
        assert slow.stalled.acquire(timeout=5), "it is being read"
        jobs = [first, *map(lambda c, e: retrieve(c, chain(4), e), caches[1:], engines[1:])]
        assert until(lambda: sum(len(e.waiters) for e in daemon._pool._index.entries.values()) == 4 * CLIENTS)
        assert not any(job.done() for job in jobs)
        slow.release_stalls()
        assert [job.wait(5).ok_chunks for job in jobs] == [4] * CLIENTS
        assert all(right(chain(4), engine) for engine in engines)
        assert len(reads) == 4, "each record once"


def test_a_client_that_goes_does_not_end_the_load_that_others_wait_for(tmp_path):
    slow = FaultBackend(below(0), rates={Fault.STALL: 1.0}, verbs=["get"])
    engine = Engine(16)
    with (
        serving(tmp_path / "s", [slow], timeout_s=30.0) as daemon,
        connect(tmp_path / "s", call_timeout_s=5.0) as stays,
    ):
        with connect(tmp_path / "s", call_timeout_s=5.0) as goes:
            lost = retrieve(goes, chain(4), Engine(16))
            assert slow.stalled.acquire(timeout=5)
            job = retrieve(stays, chain(4), engine)
        assert until(lambda: len(daemon._sessions) == 1)
        assert lost.wait(5).ok_chunks == 0
        slow.release_stalls()
        assert job.wait(5).ok_chunks == 4
        assert right(chain(4), engine)
        stays.release("r")
        assert until(lambda: daemon._pool.usage()[1] == 0)


def test_while_a_tier_hangs_others_load_and_store_in_memory(tmp_path):  # S30
    hung = FaultBackend(below(0), rates={Fault.STALL: 1.0}, verbs=["get", "put"])
    with (
        serving(tmp_path / "s", [hung], timeout_s=30.0, chunks=128, max_queued_nbytes=20 * RECORD),
        connect(tmp_path / "s", call_timeout_s=5.0) as waits,
        connect(tmp_path / "s", call_timeout_s=5.0) as works,
    ):
        job = retrieve(waits, chain(4), Engine(16))
        assert hung.stalled.acquire(timeout=5)
        for seed in range(1, 60):
            assert store(works, chain(4, seed=seed)).ok_chunks > 0
            assert load(works, chain(2, seed=seed))[1].ok_chunks == 2
        assert not job.done()
        hung.release_stalls()
        assert job.wait(5).ok_chunks == 4


def test_a_client_whose_device_hangs_delays_no_other(tmp_path):
    device = Gate("scatter", "gather")
    with (
        serving(tmp_path / "s"),
        connect(tmp_path / "s", call_timeout_s=5.0) as works,
        connect(tmp_path / "s", device, call_timeout_s=5.0) as hangs,
    ):
        store(works, chain(4))
        engine = Engine(16)
        job = retrieve(hangs, chain(4), engine)
        assert device.entered.wait(5)
        for seed in range(1, 30):
            assert store(works, chain(4, seed=seed)).ok_chunks == 4
            assert load(works, chain(4, seed=seed))[1].ok_chunks == 4
        assert not job.done()
        device.go.set()
        assert job.wait(5).ok_chunks == 4
        assert right(chain(4), engine)


def test_a_load_goes_before_the_stores_that_were_asked_for_earlier():
    order: list[str] = []

    class Ordered(Gate):
        api_version = (1, 0)

        def _wait(self, verb):
            super()._wait(verb)
            order.append(verb)

    device = Ordered("gather")
    with open_remote(chunks=200) as filler:
        daemon_path = filler._pool.path
        with connect(daemon_path, device, call_timeout_s=5.0) as cache:
            store(filler, chain(4))
            hit = cache.lookup(chain(4), "r")
            engine = Engine(400)
            stores = []
            for seed in range(1, 12):
                of = chain(4, seed=seed)
                ids = engine.compute(of, of.model.shards[0], range(4), at=16 * seed)
                stores.append(cache.store(of, of.model.shards[0], range(4), engine.pages, ids))
            assert device.entered.wait(5), "the first store is being copied"
            waiting = cache._ready.qsize()
            target = Engine(16)
            job = cache.retrieve(hit, chain(4).model.shards[0], range(4), target.pages, list(range(16)))
            assert until(lambda: cache._ready.qsize() == waiting + 4), "the load has arrived"
            device.go.set()
            assert job.wait(30).ok_chunks == 4
            assert all(job.wait(30).ok_chunks == 4 for job in stores)
        assert order.index("scatter") <= 2
        assert order.count("gather") == 11
        assert pool_of(filler).usage()[0] == 48
        assert counted(filler, "drops") == 0


def test_eight_clients_at_once_all_get_on_and_read_what_is_right(tmp_path):
    with ExitStack() as stack:
        daemon = stack.enter_context(serving(tmp_path / "s", chunks=64))
        caches = [stack.enter_context(connect(tmp_path / "s", call_timeout_s=10.0)) for _ in range(8)]
        rounds = 25
        begin = threading.Barrier(len(caches))

        def work(number: int) -> int:
            begin.wait()
            loaded = 0
            for n in range(rounds):
                store(caches[number], chain(4, seed=(number + n) % 20))
                loaded += load(caches[number], chain(4, seed=(number * n) % 20), f"{n}")[1].ok_chunks
            return loaded

        with ThreadPoolExecutor(len(caches)) as threads:
            loaded = list(threads.map(work, range(len(caches))))
        assert min(loaded) > 0
        assert until(lambda: daemon._pool.usage()[1] == 0)
        assert all(not session.held and not session.reserved for session in daemon._sessions.values())


def test_four_clients_share_one_memory_of_the_stated_size(tmp_path):  # S28
    with ExitStack() as stack:
        daemon = stack.enter_context(serving(tmp_path / "s", chunks=32))
        caches = [stack.enter_context(connect(tmp_path / "s", call_timeout_s=5.0)) for _ in range(4)]
        for seed in range(40):
            assert store(caches[seed % 4], chain(4, seed=seed)).ok_chunks == 4
        for cache in caches:
            load(cache, chain(4, seed=39))
        slab = daemon._pool.slab
        assert slab.used_nbytes <= 32 * RECORD
        inodes = {os.fstat(extent.fd).st_ino for extent in slab.extents.values()}
        mapped = set()
        with open("/proc/self/maps") as maps:
            for line in maps:
                if "/memfd:lmcache-extent" in line:
                    mapped.add(int(line.split()[4]))
        assert inodes == mapped, "clients map the daemon's memory and have none of their own"
