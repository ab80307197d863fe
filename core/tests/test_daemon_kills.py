"""SIGKILL at random points, under load: no wrong byte is ever read, and nothing is left of who was killed.

With LMCACHE_SOAK set, ten times as often.
"""

from __future__ import annotations

import json
import os
import random
import threading
from collections import Counter
from pathlib import Path

from daemon_worker import LONGEST, SEEDS
from daemons import DaemonProcess, descriptors, serving, threads
from tiny import RECORD, chain, load, store, until
from workers import Workers

from lmcache_core.client.cache import connect
from lmcache_core.events import Events
from lmcache_core.index import State
from lmcache_core.testing.dict_backend import DictBackend
from lmcache_core.testing.faults import Fault, FaultBackend

SOAK = bool(os.environ.get("LMCACHE_SOAK"))
CLIENT_KILLS = 500 if SOAK else 50
DAEMON_KILLS = 100 if SOAK else 10
OPERATIONS = 10_000 if SOAK else 2_000
CHUNKS = 64
pause = threading.Event()
"""Never set: its wait is the random time until a kill."""


class Clients(Workers):
    """Workers with a client each, of the daemon at `path`; a report of each that ends is in `folder`."""

    def __init__(self, path: Path, folder: Path) -> None:
        super().__init__("daemon_worker.py")
        self.path, self.folder = path, folder

    def client(self, seed: int, steps: int = 0) -> int:
        return self.fork(self.path, seed, steps, self.folder / f"{seed}.json")


def everything_is_right(cache) -> int:
    """Load whatever is there of the workers' prompts and check it; how many chunks."""
    return sum(load(cache, chain(LONGEST, seed=seed))[1].ok_chunks for seed in range(SEEDS))


def fill(cache) -> None:
    for seed in range(SEEDS):
        store(cache, chain(LONGEST, seed=seed))


def extents_mapped(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("/memfd:lmcache-extent")


def test_clients_killed_at_random_points_leave_no_wrong_byte_and_nothing_else(tmp_path):
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    print(f"seed {seed}")
    with (
        DaemonProcess(tmp_path / "s", chunks=CHUNKS, grace_s=0.02) as daemon,
        connect(tmp_path / "s", call_timeout_s=5.0) as cache,
        Clients(tmp_path / "s", tmp_path) as workers,
    ):
        fill(cache)
        assert until(lambda: cache._pool.status()["records_in_use"] == 0)
        pid = daemon.process.pid
        files, running = descriptors(pid), threads(pid)
        for number in range(4):
            workers.client(seed + number)
        for number in range(CLIENT_KILLS):
            _, operations = workers.totals()
            assert until(lambda least=operations + 8: workers.totals()[1] >= least, 20), "they go on"
            pause.wait(rng.random() * 0.02)
            workers.kill(rng.choice(workers.running))
            workers.client(seed + 4 + number)
        proven, operations = workers.totals()
        for worker in list(workers.running):
            workers.kill(worker)
        status: dict = {}

        def nothing_left() -> bool:
            status.update(cache._pool.status() or {})
            return [status[k] for k in ("clients", "leases", "records_in_use", "quarantined_slots")] == [1, 0, 0, 0]

        assert until(nothing_left, 10), status
        assert until(lambda: descriptors(pid) == files), (files, descriptors(pid))
        assert until(lambda: threads(pid) == running)
        fill(cache)
        assert until(lambda: cache._pool.status()["records"] >= CHUNKS - CHUNKS // 8), "no slot is lost"
        right = everything_is_right(cache)
        assert right >= CHUNKS // 2
    assert proven > CLIENT_KILLS
    assert not [name for name in os.listdir("/dev/shm") if "lmcache-extent" in name]
    print(f"{CLIENT_KILLS} clients killed: {operations} operations, {proven} chunks read and right, {right} at the end")


def test_daemons_killed_at_random_points_leave_no_wrong_byte_and_clients_that_go_on(tmp_path):
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    print(f"seed {seed}")
    with DaemonProcess(tmp_path / "s", chunks=CHUNKS) as daemon, Clients(tmp_path / "s", tmp_path) as workers:
        pids = [workers.client(seed + number) for number in range(3)]
        assert until(lambda: workers.totals()[0] > 50, 20)
        running = [4, 4, 4]  # itself, the mover, the reader and the watch
        assert until(lambda: [threads(pid) for pid in pids] == running)
        boots = set()
        for _ in range(DAEMON_KILLS):
            proven, _ = workers.totals()
            assert until(lambda least=proven + 10: workers.totals()[0] >= least, 20), "they are served again"
            pause.wait(rng.random() * 0.02)
            daemon.kill()
            daemon.start()
            with connect(tmp_path / "s", connect_timeout_s=5.0) as cache:
                boots.add(cache._pool.boot_id)
        proven, _ = workers.totals()
        assert until(lambda: workers.totals()[0] >= proven + 50, 20)
        assert len(boots) == DAEMON_KILLS
        assert until(lambda: [threads(pid) for pid in pids] == running)
        here = daemon.process.pid  # which goes on taking memory
        assert until(lambda: all(extents_mapped(pid) <= extents_mapped(here) for pid in pids)), (
            "memory of dead daemons was let go"
        )
        proven, operations = workers.totals()
        for pid in pids:
            workers.kill(pid)
        with connect(tmp_path / "s", call_timeout_s=5.0) as cache:
            assert until(lambda: cache._pool.status()["clients"] == 0), "this one has only asked for the status"
            right = everything_is_right(cache)
    print(f"{DAEMON_KILLS} daemons killed: {operations} operations, {proven} chunks read and right, {right} at the end")


def test_counters_of_four_processes_and_a_faulty_tier_add_up(tmp_path):  # S34
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rates = {
        Fault.FLIP: 0.02,
        Fault.TRUNCATE: 0.02,
        Fault.VANISH: 0.02,
        Fault.UNAVAILABLE: 0.02,
        Fault.BROKEN: 0.01,
        Fault.SHORT_PUT: 0.01,
    }
    faulty = FaultBackend(DictBackend(), seed=seed, rates=rates)
    removed: Counter[str] = Counter()

    def hook(name: str, said: dict) -> None:
        if name == "lmcache_chunks_evicted":
            removed[said["tier"]] += len(said["keys"])

    settings = {"tier_capacity_nbytes": 90 * RECORD, "probe_interval_s": 0.0, "events": Events(hook)}
    with (
        serving(tmp_path / "s", [faulty], chunks=CHUNKS, **settings) as daemon,
        Clients(tmp_path / "s", tmp_path) as workers,
    ):
        seeds = [seed + number for number in range(4)]
        pids = [workers.client(number, OPERATIONS // 4) for number in seeds]
        ended = threading.Event()
        fallen: list[str] = []

        def watch() -> None:
            last: dict = {}
            while not ended.wait(0.01):
                now = dict(daemon.metrics._counters)
                fallen.extend(str(name) for name, value in last.items() if now[name] < value)
                last = now

        watcher = threading.Thread(target=watch)
        watcher.start()
        codes = [workers.wait(pid) for pid in pids]
        ended.set()
        watcher.join()
        assert codes == [0, 0, 0, 0]
        assert not fallen
        asked: Counter[str] = Counter()
        for number in seeds:
            asked.update(json.loads((tmp_path / f"{number}.json").read_text()))
        pool, count = daemon._pool, daemon.metrics.count
        assert until(lambda: not daemon._sessions)
        assert pool.drain(10) or pool.tiers[0].drain(10)
        assert until(lambda: pool.usage()[1] == 0)
        results = [count("lookups", result=result) for result in ("full", "partial", "miss")]
        assert sum(results) == count("lookups")
        assert count("lookups") >= asked["lookups"] > 0
        assert min(results) > 0
        assert asked["loads ok"] + asked["loads failed"] + asked["loads late"] == asked["loads"] > 0
        assert asked["stores ok"] + asked["stores failed"] + asked["stores skipped"] == asked["stores"] > 0
        assert len(faulty.log) > OPERATIONS // 200  # fewer than drawn: the breaker keeps calls away
        assert count("tier_reads") == sum(
            count("tier_reads", result=result) for result in ("ok", "miss", "corrupt", "fault", "late")
        )
        tier = pool.tiers[0]
        assert sum(tier.known.values()) == tier.status().used_nbytes <= 90 * RECORD
        slab = pool.slab
        free = sum(len(extent.free) for extent in slab.extents.values())
        assert free + pool.usage()[0] == sum(extent.slots for extent in slab.extents.values())
        assert all(entry.state is State.READY for entry in pool._index.entries.values())
        assert until(lambda: all(removed[name] == count("evictions", tier=name) for name in ("host", tier.name)))
        assert removed["host"] > 0
        idle = dict(daemon.metrics._counters)
        assert not until(lambda: dict(daemon.metrics._counters) != idle, 1.0), "nothing moves when nobody asks"
    print(f"{OPERATIONS} operations, {len(faulty.log)} faults, {asked['loads ok']} chunks read and right")
