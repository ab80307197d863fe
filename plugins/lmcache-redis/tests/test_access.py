"""Who may in: passwords, access control lists, TLS and certificates; databases, prefixes, lifetimes; forks."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from records import comes_back, empty, keys, new_key, open_backend, record, round_trip
from servers import Server, ended, redis_server, until

from lmcache_core import BackendError, BackendUnavailable
from lmcache_redis import RedisBackend

KINDS = pytest.mark.parametrize("kind", ["redis", "valkey"])
PROTOCOLS = pytest.mark.parametrize("protocol", [2, 3])
RULES = "~lmcache:* +get +set +exists +unlink +hello +select +watch +unwatch +strlen +getrange +multi +exec"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a user `kv`, as the README proposes, and one that may only read."""
    assert RULES in (Path(__file__).parent.parent / "README.md").read_text()
    folder = tmp_path_factory.mktemp("guarded")
    users = f"user default off\nuser kv on >hunter2 {RULES}\nuser reader on >hunter2 ~lmcache:* +get +exists\n"
    (folder / "users.acl").write_text(users)
    server = redis_server(folder, "--aclfile", str(folder / "users.acl"))
    with ended(server):
        yield server


@KINDS
@PROTOCOLS
def test_the_user_that_the_readme_proposes_can_do_everything(
    guarded: Server, kind: str, protocol: int, caplog: pytest.LogCaptureFixture
) -> None:
    access = {"username": "kv", "password": "hunter2", "protocol": protocol, "read_slice_nbytes": 8192}
    with open_backend(guarded.url, kind=kind, **access) as backend:
        key = round_trip(backend)
        assert backend.remove(key)
    assert not caplog.records


@KINDS
@PROTOCOLS
@pytest.mark.parametrize("password", ["wrong", ""])
def test_a_wrong_password_is_known_at_once_and_not_retryable(
    guarded: Server, kind: str, protocol: int, password: str
) -> None:
    with open_backend(guarded.url, kind=kind, username="kv", password=password, protocol=protocol) as backend:
        started = time.monotonic()
        with pytest.raises(BackendError) as caught:
            backend.get(new_key(), empty(8))
        assert time.monotonic() - started < 3.0  # the client's own retries would take longer
        assert not caught.value.retryable
        assert "kv" in str(caught.value)


def test_what_a_user_may_not_do_is_an_error_that_says_so(guarded: Server) -> None:
    with open_backend(guarded.url, username="reader", password="hunter2") as backend:
        assert not backend.contains(new_key())
        with pytest.raises(BackendError, match="NOPERM") as caught:
            backend.put(new_key(), empty(8))
        assert not caught.value.retryable
    with (
        open_backend(guarded.url, username="kv", password="hunter2", prefix="other:") as backend,
        pytest.raises(BackendError, match="NOPERM"),
    ):
        backend.contains(new_key())


def test_without_a_password_the_hint_is_to_set_one(guarded: Server) -> None:
    with open_backend(guarded.url) as backend, pytest.raises(BackendError, match="option password"):
        backend.contains(new_key())


# TLS.


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory, certificates: Any) -> Iterator[Server]:
    yield from _tls_server(tmp_path_factory, certificates, certificates.server, certificates.server_key)


@pytest.fixture(scope="module")
def tls_elsewhere(tmp_path_factory: pytest.TempPathFactory, certificates: Any) -> Iterator[Server]:
    """Its certificate is of the right authority and of another host."""
    yield from _tls_server(tmp_path_factory, certificates, certificates.elsewhere, certificates.elsewhere_key)


def _tls_server(factory: pytest.TempPathFactory, certificates: Any, certificate: Any, key: Any) -> Iterator[Server]:
    files = ("--tls-cert-file", str(certificate), "--tls-key-file", str(key))
    server = redis_server(factory.mktemp("tls"), *files, "--tls-ca-cert-file", str(certificates.ca), tls=True)
    with ended(server):
        yield server


def mutual(certificates: Any, **more: Any) -> dict[str, Any]:
    files = {"ca_file": certificates.ca, "cert_file": certificates.client, "key_file": certificates.client_key}
    return files | more


@KINDS
@PROTOCOLS
def test_large_records_go_over_mutual_tls(tls: Server, certificates: Any, kind: str, protocol: int) -> None:
    with open_backend(tls.url, kind=kind, protocol=protocol, **mutual(certificates)) as backend:
        round_trip(backend, 5_000_000)
        many = keys(8)
        data = [record(key, 300_000) for key in many]
        assert backend.put_many(many, data, timeout_s=10.0) == [None] * 8
        into = [empty(300_000) for _ in many]
        assert backend.get_many(many, into, timeout_s=10.0) == [300_000] * 8
        assert into == data
        assert backend.contains_prefix(many, timeout_s=10.0) == 8


@KINDS
def test_a_wrong_authority_is_refused_and_says_so(tls: Server, certificates: Any, kind: str) -> None:
    wrong = mutual(certificates, ca_file=certificates.other_ca)
    _expect_refused(open_backend(tls.url, kind=kind, **wrong), "CERTIFICATE_VERIFY_FAILED")


@KINDS
def test_a_missing_or_foreign_client_certificate_is_refused(tls: Server, certificates: Any, kind: str) -> None:
    _expect_refused(open_backend(tls.url, kind=kind, ca_file=certificates.ca))
    foreign = mutual(certificates, cert_file=certificates.stranger, key_file=certificates.stranger_key)
    _expect_refused(open_backend(tls.url, kind=kind, **foreign))


def _expect_refused(opened: RedisBackend, problem: str | None = None) -> None:
    with opened as backend, pytest.raises(BackendError, match=problem):
        backend.contains(new_key())


@KINDS
def test_the_host_name_is_checked_unless_told_otherwise(tls_elsewhere: Server, certificates: Any, kind: str) -> None:
    _expect_refused(open_backend(tls_elsewhere.url, kind=kind, **mutual(certificates)), "CERTIFICATE_VERIFY_FAILED")
    with open_backend(tls_elsewhere.url, kind=kind, tls_verify="ca", **mutual(certificates)) as backend:
        round_trip(backend)
    wrong = mutual(certificates, ca_file=certificates.other_ca, tls_verify="ca")
    _expect_refused(open_backend(tls_elsewhere.url, kind=kind, **wrong), "CERTIFICATE_VERIFY_FAILED")
    with open_backend(tls_elsewhere.url, kind=kind, tls_verify="none", **mutual(certificates)) as backend:
        round_trip(backend)


def test_plain_text_to_a_tls_port_and_the_reverse_are_faults(tls: Server, redis: Server, certificates: Any) -> None:
    _expect_refused(open_backend(tls.url.replace("rediss", "redis")))
    _expect_refused(open_backend(redis.url.replace("redis", "rediss"), timeout_s=1.0, **mutual(certificates)))


def test_a_stalled_server_over_tls_keeps_nobody_beyond_the_deadline(tls: Server, certificates: Any) -> None:
    with open_backend(tls.url, **mutual(certificates)) as backend:
        key = round_trip(backend)
        with tls.stalled():
            for call in (
                lambda: backend.get_many([key], [empty(100_000)], timeout_s=0.3),
                lambda: backend.put_many([key], [empty(16 << 20)], timeout_s=0.3),
            ):
                started = time.monotonic()
                (result,) = call()
                assert isinstance(result, BackendUnavailable)
                assert time.monotonic() - started < 5.0
        assert comes_back(backend, key, 100_000)


# Where records are, and for how long.


def test_databases_and_prefixes_keep_records_apart(redis: Server) -> None:
    key = new_key()
    with (
        open_backend(redis.url) as zero,
        open_backend(redis.url.removesuffix("0") + "5") as five,
        open_backend(redis.url, prefix="other:") as other,
        open_backend(redis.url, prefix="") as bare,
    ):
        zero.put(key, record(key, 64))
        assert [each.contains(key) for each in (zero, five, other, bare)] == [True, False, False, False]
        bare.put(key, record(key, 64))
        assert redis.ask("EXISTS", f"lmcache:{key.text}", key.text, f"other:{key.text}") == ":2"


def test_a_record_is_forgotten_after_its_ttl(redis: Server) -> None:
    key = new_key()
    with open_backend(redis.url, ttl_s=0.2) as backend:
        assert backend.put_many([key], [record(key, 64)], timeout_s=5.0) == [None]
        until(lambda: not backend.contains(key), "the record is forgotten", 5.0)
    with open_backend(redis.url, ttl_s=86400.0) as backend:
        backend.put(key, record(key, 64))
        assert 86_300_000 < int(redis.ask("PTTL", f"lmcache:{key.text}").removeprefix(":")) <= 86_400_000
    with open_backend(redis.url) as backend:
        backend.put(key, record(key, 64))
        assert redis.ask("PTTL", f"lmcache:{key.text}") == ":-1"


def test_512_keys_are_asked_for_in_one_round_trip(redis: Server) -> None:
    many = keys(512)
    with open_backend(redis.url, connections=1) as backend:
        backend.put_many(many[:500], [record(key, 8) for key in many[:500]], timeout_s=10.0)
        before = _reads(redis)
        assert backend.contains_prefix(many, timeout_s=10.0) == 500
        # Our question is 69 kB, which a server reads in buffers of 16 KiB or more; one round trip for each key would
        # take 512 reads.  The other reads are those of the question about reads.
        assert _reads(redis) - before < 20


def _reads(server: Server) -> int:
    for line in server.ask("INFO", "stats").splitlines():
        if line.startswith("total_reads_processed:"):
            return int(line.partition(":")[2])
    raise AssertionError("the server does not say how often it has read")


def test_batches_larger_than_a_window_are_whole(redis: Server) -> None:
    with open_backend(redis.url) as backend:
        many = keys(10_000)
        data = [record(key, 8) for key in many]
        assert backend.put_many(many, data, timeout_s=20.0) == [None] * len(many)
        into = [empty(8) for _ in many]
        assert backend.get_many(many, into, timeout_s=20.0) == [8] * len(many)
        assert into == data
        assert backend.contains_prefix([*many, new_key()], timeout_s=20.0) == len(many)
        large = keys(5)
        data = [record(key, 20 << 20) for key in large]
        assert backend.put_many(large, data, timeout_s=30.0) == [None] * 5
        into = [empty(20 << 20) for _ in large]
        assert backend.get_many(large, into, timeout_s=30.0) == [20 << 20] * 5
        assert into == data


def test_after_a_fork_parent_and_child_each_get_their_own_answers(redis: Server) -> None:
    with open_backend(redis.url, connections=2) as backend:
        key = round_trip(backend)
        pid = os.fork()
        if not pid:
            try:
                ok = all(comes_back(backend, key, 100_000) for _ in range(50)) and _own_connections(backend)
            except BaseException:
                traceback.print_exc()
                ok = False
            os._exit(0 if ok else 1)
        assert all(comes_back(backend, key, 100_000) for _ in range(50))
        _, status = os.waitpid(pid, 0)
        assert status == 0
        assert comes_back(backend, key, 100_000)


def _own_connections(backend: Any) -> bool:
    links = [link for shelf in backend._pool._shelves.values() for link in shelf.idle]
    return bool(links) and all(link.pid == os.getpid() for link in links)


def test_connections_that_the_server_closes_while_idle_are_replaced(redis: Server) -> None:
    with open_backend(redis.url, connections=1) as backend:
        for _ in range(5):
            round_trip(backend)
            redis.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
