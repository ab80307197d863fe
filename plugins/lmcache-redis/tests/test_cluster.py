"""A cluster of six real nodes: slots, redirections, a master that is killed."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from binascii import crc_hqx
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from records import comes_back, empty, keys, new_key, open_backend, record, round_trip
from scripted import answers, scripted
from servers import Server, free_port, redis_server, until

from lmcache_core import BackendError, BackendUnavailable, ChunkKey, Context
from lmcache_core.testing import BackendLaws
from lmcache_redis import RedisBackend, RedisOptions, ValkeyBackend

NODE_TIMEOUT_MS = 1500
SLOTS = 16384


@dataclass
class Nodes:
    servers: list[Server]

    @property
    def url(self) -> str:
        return "redis://" + ",".join(f"127.0.0.1:{server.port}" for server in self.servers)

    def owner(self, key: ChunkKey) -> Server:
        slot = slot_of(key)
        for line in self._any().ask("CLUSTER", "NODES").splitlines():
            words = line.split()
            if len(words) > 8 and "master" in words[2] and "fail" not in words[2].replace("fail?", ""):
                for part in words[8:]:
                    first, _, last = part.partition("-")
                    if first.isdigit() and int(first) <= slot <= int(last or first):
                        port = int(words[1].partition("@")[0].rpartition(":")[2])
                        return next(server for server in self.servers if server.port == port)
        raise AssertionError(f"nobody owns slot {slot}")

    def id_of(self, server: Server) -> str:
        return server.ask("CLUSTER", "MYID").splitlines()[1]

    def _any(self) -> Server:
        return next(server for server in self.servers if server.runs)


def slot_of(key: ChunkKey) -> int:
    return crc_hqx(b"lmcache:" + key.text.encode(), 0) % SLOTS


@contextlib.contextmanager
def cluster_of_six(folder: Path) -> Iterator[Nodes]:
    """Three masters, a replica for each, in order and able to fail over."""
    cli = shutil.which("redis-cli")
    if cli is None:
        pytest.skip("cannot run here: redis-cli is not installed (Debian's package redis-server brings it)")
    servers: list[Server] = []
    try:
        for _ in range(6):
            bus, port = free_port(), free_port()
            arguments = (
                "--cluster-enabled",
                "yes",
                "--cluster-port",
                str(bus),
                "--cluster-config-file",
                f"{port}.conf",
            )
            more = ("--cluster-node-timeout", str(NODE_TIMEOUT_MS), "--cluster-require-full-coverage", "no")
            servers.append(redis_server(folder, *arguments, *more, port=port))
        addresses = [f"127.0.0.1:{server.port}" for server in servers]
        create = [cli, "--cluster", "create", *addresses, "--cluster-replicas", "1", "--cluster-yes"]
        made = subprocess.run(create, capture_output=True, text=True, timeout=60, check=False)
        assert made.returncode == 0, made.stdout[-2000:] + made.stderr
        # Killed before its replica has caught up, a master is never replaced.
        until(lambda: all("cluster_state:ok" in s.ask("CLUSTER", "INFO") for s in servers), "all nodes agree", 30.0)
        until(
            lambda: sum("master_link_status:up" in s.ask("INFO", "replication") for s in servers) == 3, "replicas", 30.0
        )
        yield Nodes(servers)
    finally:
        for server in servers:
            server.kill()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with cluster_of_six(tmp_path_factory.mktemp("cluster")) as made:
        yield made


class TestLawsInACluster(BackendLaws):
    kind: type[RedisBackend] = RedisBackend

    @pytest.fixture(autouse=True)
    def _nodes(self, nodes: Nodes) -> None:
        self.nodes = nodes

    def open_backend(self, context: Context) -> RedisBackend:
        return self.kind(RedisOptions(url=self.nodes.url, cluster=True), context)

    @contextlib.contextmanager
    def _all_stalled(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for server in self.nodes.servers:
                stack.enter_context(server.stalled())
            yield

    def stall_store(self) -> contextlib.AbstractContextManager[None]:
        return self._all_stalled()


class TestLawsOfTheOtherClientInACluster(TestLawsInACluster):
    kind = ValkeyBackend


def test_a_batch_is_spread_over_the_masters_and_comes_back_in_order(nodes: Nodes) -> None:
    with open_backend(nodes.servers[0].url.removesuffix("/0"), cluster=True, connections=2) as backend:
        many = keys(512)
        data = [record(key, 3000) for key in many]
        assert backend.put_many(many, data, timeout_s=10.0) == [None] * len(many)
        assert backend.contains_prefix(many, timeout_s=10.0) == len(many)
        into = [empty(3000) for _ in many]
        assert backend.get_many(many, into, timeout_s=10.0) == [3000] * len(many)
        assert into == data
        assert len({nodes.owner(key).port for key in many[:40]}) == 3
        assert len(backend._pool._shelves) == 3


SIZES = pytest.mark.parametrize("nbytes", [64, 100_000], ids=["whole", "in pieces"])


@SIZES
def test_a_slot_that_moves_is_followed(nodes: Nodes, nbytes: int) -> None:
    key = new_key()
    with open_backend(nodes.url, cluster=True, read_slice_nbytes=8192) as backend:
        backend.put(key, record(key, nbytes))
        backend.remove(key)
        old = nodes.owner(key)
        new = next(server for server in nodes.servers if server is not old and _is_master(server))
        _move(nodes, slot_of(key), old, new)
        try:
            backend.put(key, record(key, nbytes))
            assert comes_back(backend, key, nbytes)
            assert new.ask("EXISTS", f"lmcache:{key.text}") == ":1"
            backend.remove(key)
        finally:
            _move(nodes, slot_of(key), new, old)


@SIZES
def test_a_key_of_a_slot_under_way_is_asked_for_where_it_is(nodes: Nodes, nbytes: int) -> None:
    there, gone = new_key(), new_key()
    while slot_of(there) == slot_of(gone):
        gone = new_key()
    with open_backend(nodes.url, cluster=True, read_slice_nbytes=8192) as backend:
        backend.put(there, record(there, nbytes))
        old = nodes.owner(there)
        new = next(server for server in nodes.servers if server is not old and _is_master(server))
        slot = str(slot_of(there))
        new.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", nodes.id_of(old))
        old.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", nodes.id_of(new))
        try:
            assert comes_back(backend, there, nbytes)
            old.ask("MIGRATE", "127.0.0.1", str(new.port), f"lmcache:{there.text}", "0", "5000")
            assert "ASK" in old.ask("EXISTS", f"lmcache:{there.text}")
            assert comes_back(backend, there, nbytes)
            assert backend.contains(there)
            assert backend.remove(there)
        finally:
            for server in (old, new):
                server.ask("CLUSTER", "SETSLOT", slot, "STABLE")


def _follows(server: Server) -> bool:
    return "master_link_status:up" in server.ask("INFO", "replication")


def _is_master(server: Server) -> bool:
    return "role:master" in server.ask("INFO", "replication")


def _move(nodes: Nodes, slot: int, old: Server, new: Server) -> None:
    """Give an empty slot to another master."""
    new.ask("CLUSTER", "SETSLOT", str(slot), "IMPORTING", nodes.id_of(old))
    old.ask("CLUSTER", "SETSLOT", str(slot), "MIGRATING", nodes.id_of(new))
    for server in (new, old):
        assert server.ask("CLUSTER", "SETSLOT", str(slot), "NODE", nodes.id_of(new)) == "+OK"


def test_a_node_of_a_cluster_that_is_taken_for_one_server_says_what_to_set(nodes: Nodes) -> None:
    with open_backend(nodes.servers[0].url) as backend:
        results = backend.put_many(many := keys(40), [record(key, 8) for key in many], timeout_s=5.0)
    errors = [result for result in results if result is not None]
    assert errors
    assert all("cluster: true" in str(error) for error in errors)


def test_one_server_that_is_taken_for_a_cluster_is_an_error_that_says_so(redis: Server) -> None:
    with open_backend(redis.url, cluster=True) as backend, pytest.raises(BackendError, match="cluster"):
        backend.contains(new_key())


def _slots(port: int) -> bytes:
    """An answer to CLUSTER SLOTS: one node has all."""
    return b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n" % port


@pytest.mark.parametrize(
    "answer",
    [
        b"*100001\r\n",
        b"*-2\r\n",
        b"*1\r\n" * 9 + b":1\r\n",
        b"$1048577\r\n" + bytes(1 << 20),
        b":1\r\n",
        b"*1\r\n*1\r\n:0\r\n",
        b"*0\r\n",
        b"_\r\n",
        b"*1\r\n*3\r\n:0\r\n:x\r\n*0\r\n",
    ],
)
def test_a_topology_that_makes_no_sense_is_a_fault(answer: bytes) -> None:
    with scripted(answers(answer)) as server, open_backend(server.url, cluster=True, timeout_s=20.0) as backend:
        started = time.monotonic()
        with pytest.raises(BackendError):
            backend.contains(new_key())
        assert time.monotonic() - started < 10.0  # known from the answer, not from the clock


def test_a_node_in_doubt_is_not_the_one_that_is_asked_who_owns_what() -> None:
    with scripted() as silent, scripted() as other:
        silent.scripts = [answers(_slots(silent.port)), answers()]
        other.scripts = [answers(_slots(other.port)), answers(b":1\r\n")]
        url = f"{silent.url},127.0.0.1:{other.port}"
        with open_backend(url, cluster=True) as backend:
            with pytest.raises(BackendUnavailable, match="no answer in time"):
                backend.contains_prefix([new_key()], timeout_s=0.5)
            assert backend.contains_prefix([new_key()], timeout_s=1.5) == 1  # less than a connection may take


def test_redirections_without_end_are_given_up() -> None:
    with scripted() as server:
        moved = b"-MOVED 1 127.0.0.1:%d\r\n" % server.port
        server.scripts = [answers(_slots(server.port)), answers(*[moved] * 8)]
        with (
            open_backend(server.url, cluster=True, connections=1) as backend,
            pytest.raises(BackendUnavailable, match="node to node"),
        ):
            backend.contains(new_key())


# The last test: the cluster is not the same afterwards.


def test_a_killed_master_costs_faults_until_another_takes_over_and_nothing_waits(nodes: Nodes) -> None:
    with open_backend(nodes.url, cluster=True, timeout_s=20.0, connect_timeout_s=0.5) as backend:
        key = round_trip(backend)
        victim = nodes.owner(key)
        others = [other for other in keys(60) if nodes.owner(other) is not victim][:10]
        victim.kill()
        started = time.monotonic()
        with pytest.raises(BackendUnavailable):
            backend.put(key, record(key, 64))
        assert time.monotonic() - started < 10.0
        mixed = [key, *others]
        results = backend.put_many(mixed, [record(each, 64) for each in mixed], timeout_s=20.0)
        assert results[1:] == [None] * len(others)  # the masters that are there go on
        assert isinstance(results[0], BackendUnavailable)

        def stored() -> bool:
            try:
                backend.put(key, record(key, 64))
            except BackendError:
                return False
            return True

        until(stored, "a replica has taken over", 30.0)
        assert comes_back(backend, key, 64)
        assert nodes.owner(key) is not victim
        victim.start()

        def settled() -> bool:  # the nodes may still be at odds for a moment, and say so
            try:
                for _ in range(20):
                    round_trip(backend, 1000)
            except BackendUnavailable:
                return False
            return True

        until(settled, "every node serves again", 30.0)
