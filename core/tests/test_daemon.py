"""The daemon over its socket: what it holds for whom, and what becomes of it when somebody is gone."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tiny import BLOCKS, Engine, chain, load, store, until

from lmcache_core import CacheConfig, ConfigError, TierConfig
from lmcache_core.client.cache import connect
from lmcache_core.config import ServerConfig
from lmcache_core.server import starts
from lmcache_core.server.daemon import Daemon, bind
from lmcache_core.testing import in_threads


@contextmanager
def serving(path: Path, config: CacheConfig | None = None):
    """A daemon on a thread of this process."""
    daemon = Daemon(config or small(), socket_path=path)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(daemon.run(handle_signals=False),))
    thread.start()
    assert until(daemon.ready.is_set)
    try:
        yield daemon
    finally:
        loop.call_soon_threadsafe(daemon.stop)
        thread.join()
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


def small(**server) -> CacheConfig:
    tiers = (TierConfig("host", "memory", 1 << 20),)
    return CacheConfig(chunk_tokens=16, tiers=tiers, server=ServerConfig(**server))


def test_what_one_client_stores_another_restores(tmp_path):
    with serving(tmp_path / "s") as daemon, connect(tmp_path / "s") as one, connect(tmp_path / "s") as two:
        assert one.connected
        assert store(one, chain(6)).ok_chunks == 6
        assert load(two, chain(9))[0] == 6
        assert load(two, chain(6))[1].ok_chunks == 6
        assert until(lambda: daemon._pool.usage()[1] == 0)
        assert two.daemon_status()["clients"] == 2


def test_without_a_daemon_everything_is_a_miss_and_it_is_found_when_it_comes(tmp_path):
    with connect(tmp_path / "s", connect_timeout_s=0.05) as cache:
        assert not cache.connected
        assert load(cache, chain(3))[0] == 0
        assert store(cache, chain(3)).ok_chunks == 0
        with serving(tmp_path / "s"):
            assert until(lambda: cache.connected)
            assert store(cache, chain(3)).ok_chunks == 3
            assert load(cache, chain(3))[1].ok_chunks == 3
        assert until(lambda: not cache.connected)
        assert load(cache, chain(3))[0] == 0
        with serving(tmp_path / "s"):
            assert until(lambda: cache.connected)
            assert load(cache, chain(3))[0] == 0
            assert store(cache, chain(3)).ok_chunks == 3


def test_a_client_that_goes_leaves_no_lease(tmp_path):
    with serving(tmp_path / "s") as daemon:
        with connect(tmp_path / "s") as cache:
            store(cache, chain(4))
            cache.lookup(chain(4), "r")
            cache.pin(chain(2))
            assert daemon._pool.usage()[1] == 4
        assert until(lambda: daemon._pool.usage()[1] == 0)
        assert daemon._pool.leases.count() == 0


def test_a_lookup_by_one_and_a_load_by_another_connection(tmp_path):
    with serving(tmp_path / "s"), connect(tmp_path / "s") as scheduler, connect(tmp_path / "s") as worker:
        store(worker, chain(4))
        hit = scheduler.lookup(chain(4), "r")
        engine = Engine()
        shard = chain(4).model.shards[0]
        assert worker.retrieve(hit, shard, range(4), engine.pages, list(range(16))).wait(5).ok_chunks == 4
        assert all(engine.holds(chain(4), shard, n, n * BLOCKS) for n in range(4))
        scheduler.release("r")


def test_a_second_daemon_on_a_socket_that_is_served_is_refused(tmp_path):
    with serving(tmp_path / "s"), pytest.raises(ConfigError, match="another daemon serves"):
        bind(tmp_path / "s", ServerConfig())


def test_of_two_daemons_that_find_a_stale_socket_at_once_one_serves_and_one_is_refused(tmp_path, monkeypatch):
    path, server = tmp_path / "s", ServerConfig()
    bind(path, server).close()
    both = threading.Barrier(2)
    unlink = Path.unlink
    served: list[socket.socket] = []
    refused: list[ConfigError] = []

    def unlink_together(self: Path) -> None:
        with suppress(threading.BrokenBarrierError):
            both.wait(1.0)
        unlink(self)

    def start() -> None:
        try:
            served.append(bind(path, server))
        except ConfigError as error:
            refused.append(error)

    monkeypatch.setattr(Path, "unlink", unlink_together)
    in_threads(start, start)
    assert (len(served), len(refused)) == (1, 1)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    served[0].close()


def test_a_folder_that_somebody_else_keeps_locked_keeps_no_daemon_from_starting(tmp_path, monkeypatch):
    monkeypatch.setattr(starts, "_WAIT_S", 0.05)
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    bind(tmp_path / "s", ServerConfig()).close()
    os.close(held)
