"""Sentinel: the master that three of them name, and another after it is killed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from records import comes_back, new_key, open_backend, record, round_trip
from servers import Server, ended, redis_binary, redis_server, until

from lmcache_core import BackendError, BackendUnavailable

KINDS = pytest.mark.parametrize("kind", ["redis", "valkey"])


@dataclass
class Watched:
    master: Server
    replica: Server
    sentinels: list[Server]

    @property
    def url(self) -> str:
        return "redis://" + ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels) + "/2"


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("sentinel")
    secret = ("--requirepass", "hunter2", "--masterauth", "hunter2")
    master = redis_server(folder, *secret)
    with ended(master):
        replica = redis_server(folder, *secret, "--replicaof", f"127.0.0.1 {master.port}")
        with ended(replica):
            sentinels = [_sentinel(folder, number, master) for number in range(3)]
            with ended(*sentinels):
                yield _ready(Watched(master, replica, sentinels))


def _sentinel(folder: Path, number: int, master: Server) -> Server:
    config = folder / f"sentinel{number}.conf"
    config.write_text(
        f"sentinel monitor mine 127.0.0.1 {master.port} 2\nsentinel auth-pass mine hunter2\n"
        "sentinel down-after-milliseconds mine 500\nsentinel failover-timeout mine 4000\n"
        "requirepass watch\nsentinel sentinel-pass watch\n"
    )
    return Server(redis_binary(), folder, str(config), "--sentinel")


def _ready(watched: Watched) -> Watched:
    """All Sentinels know each other and the replica: before that there is no failover."""

    def known(sentinel: Server) -> bool:
        with_password = sentinel.ask_as("watch", "SENTINEL", "MASTER", "mine").splitlines()
        fields = dict(zip(with_password[2::4], with_password[4::4], strict=False))
        return fields.get("num-other-sentinels") == "2" and fields.get("num-slaves") == "1"

    until(lambda: all(known(sentinel) for sentinel in watched.sentinels), "the Sentinels know each other", 30.0)
    return watched


def options(**more: object) -> dict[str, object]:
    return {"master": "mine", "password": "hunter2", "sentinel_password": "watch", **more}


@KINDS
@pytest.mark.parametrize("protocol", [2, 3])
def test_records_go_to_the_master_that_the_sentinels_name(watched: Watched, kind: str, protocol: int) -> None:
    with open_backend(watched.url, kind=kind, **options(protocol=protocol)) as backend:
        key = round_trip(backend)
    assert watched.master.ask_as("hunter2", "DBSIZE") == ":0"
    with open_backend(watched.master.url.removesuffix("0") + "2", password="hunter2") as straight:
        assert comes_back(straight, key, 100_000)


def test_a_sentinel_that_is_down_is_passed_over(watched: Watched) -> None:
    watched.sentinels[0].stop()
    try:
        with open_backend(watched.url, **options()) as backend:
            round_trip(backend)
    finally:
        watched.sentinels[0].start()


def test_a_name_that_no_sentinel_knows_and_a_wrong_password_say_so(watched: Watched) -> None:
    with (
        open_backend(watched.url, **options(master="yours")) as backend,
        pytest.raises(BackendUnavailable, match="yours"),
    ):
        backend.contains(new_key())
    with open_backend(watched.url, **options(sentinel_password="no")) as backend, pytest.raises(BackendError) as caught:
        backend.contains(new_key())
    assert "WRONGPASS" in str(caught.value) or "invalid" in str(caught.value)


# The last test: the master is another one afterwards.


def test_a_killed_master_is_followed_to_its_replica(watched: Watched) -> None:
    with open_backend(watched.url, timeout_s=2.0, connect_timeout_s=0.5, **options()) as backend:
        kept = round_trip(backend)
        until(lambda: _replicated(watched), "the replica has everything", 10.0)
        watched.master.kill()
        with pytest.raises(BackendUnavailable):
            backend.contains(kept)

        def stored() -> bool:
            key = new_key()
            try:
                backend.put(key, record(key, 64))
            except BackendError:
                return False
            return comes_back(backend, key, 64)

        until(stored, "the replica is the master", 30.0)
        assert comes_back(backend, kept, 100_000)
        assert "role:master" in watched.replica.ask_as("hunter2", "INFO", "replication")
        watched.master.start()
        round_trip(backend)


def _replicated(watched: Watched) -> bool:
    def offset(server: Server, field: str) -> str:
        lines = server.ask_as("hunter2", "INFO", "replication").splitlines()
        return next((line.partition(":")[2] for line in lines if line.startswith(field)), "")

    return offset(watched.master, "master_repl_offset") == offset(watched.replica, "slave_repl_offset") != ""
