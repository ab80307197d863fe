"""`lmc serve` from start to end, and the commands that ask it."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from serve import Serve, joined, lmc, prompt_arguments, write_config
from tiny import CHUNK, RECORD, load, model, open_local, store, until

from lmcache_core import Chain, LocalCache, RemoteCache, load_config, open_cache

TOKENS = list(range(1000, 1000 + 6 * CHUNK))
PROMPT = Chain.of(model(), TOKENS)
DESCRIBED = prompt_arguments(model(), TOKENS)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path)


def test_sigterm_writes_what_is_left_exits_0_and_the_next_daemon_finds_it_on_disk(config: Path) -> None:
    with Serve(config) as daemon, joined(daemon.ready().socket) as cache:
        boot_id = daemon.said("boot id ([0-9a-f]{32})")[1]
        assert store(cache, PROMPT).ok_chunks == 6
        assert daemon.stop() == 0
        assert not daemon.socket.exists()
        assert until(lambda: not cache.connected)
        with Serve(config) as again:
            assert again.ready().said("boot id ([0-9a-f]{32})")[1] != boot_id
            assert until(lambda: cache.connected)
            assert load(cache, PROMPT)[1].ok_chunks == 6
            assert again.stop() == 0


def test_the_log_has_one_line_for_each_change_of_state(config: Path) -> None:
    with Serve(config) as daemon:
        daemon.ready()
        with joined(daemon.socket) as cache:
            store(cache, PROMPT)
        assert lmc("drain", "--config", config).exit_code == 0
        assert daemon.stop() == 0
    said = [line.split(": ", 1)[1] for line in daemon.lines]
    starts = ("pid ", "disk store ", "cache ready", "serving on ", "draining", "stopping", "stopped")
    assert [next((s for s in starts if line.startswith(s)), line) for line in said] == list(starts)


def test_with_json_every_line_of_the_log_is_an_object(config: Path) -> None:
    config.write_text(json.dumps({**json.loads(config.read_text()), "log_requests": "text"}))
    with Serve(config, "--json") as daemon:
        daemon.ready()
        with joined(daemon.socket) as cache:
            load(cache, PROMPT, request="mine")
        assert daemon.stop() == 0
    said = [json.loads(line) for line in daemon.lines]
    assert {"time", "level", "logger"} <= set.intersection(*(set(fields) for fields in said))
    (lookup,) = [fields for fields in said if fields.get("event") == "lookup"]
    assert (lookup["result"], lookup["reason"]) == ("miss", "never stored")


def test_status_and_ping_succeed_only_if_the_daemon_answers(config: Path) -> None:
    for command in ("status", "ping", "drain"):
        result = lmc(command, "--config", config)
        assert result.exit_code == 2
        assert "no daemon was started there" in result.output
    with Serve(config) as daemon:
        boot_id = daemon.ready().said("boot id ([0-9a-f]{32})")[1]
        with joined(daemon.socket) as cache:
            store(cache, PROMPT)
            cache.lookup(PROMPT, "r")
            assert cache.drain(10)
            found = json.loads(lmc("status", "--config", config, "--json").output)
            assert found["boot_id"] == boot_id
            assert found["pid"] == daemon.process.pid
            assert (found["clients"], found["leases"], found["records_in_use"]) == (1, 1, 6)
            assert (found["records"], found["capacity_nbytes"]) == (6, 64 * RECORD)
            (disk,) = found["tiers"]
            assert (disk["name"], disk["records"], disk["breaker"]) == ("disk", 6, "closed")
            for text in (
                lmc("status", "--socket", daemon.socket).output,
                lmc("status", LMCACHE_CONFIG=str(config)).output,
            ):
                assert text.startswith("ready: ")
                assert boot_id in text
                assert "1 clients, 1 leases, 6 records in use, 0 pins" in text
                assert re.search(r"^host +memory +ready +6 ", text, re.M)
                assert re.search(r"^disk +disk +ready +6 ", text, re.M)
                assert re.search(r"^disk: (direct|buffered) I/O", text, re.M)
        assert f"pid {daemon.process.pid}, boot id {boot_id}" in lmc("ping", "--config", config).output
        daemon.process.kill()
        daemon.process.wait()
    result = lmc("ping", "--config", config)
    assert result.exit_code == 2
    assert "no daemon serves it any more" in result.output


def test_a_socket_that_accepts_and_says_nothing_is_no_daemon(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(tmp_path / "mute"))
        mute.listen()
        result = lmc("ping", "--socket", tmp_path / "mute", "--timeout", "0.05")
    assert result.exit_code == 2
    assert "does not answer within 0.05 s" in result.output


def test_after_drain_nothing_new_is_stored_and_what_is_there_is_still_found(config: Path) -> None:
    with Serve(config) as daemon, joined(daemon.ready().socket) as cache:
        store(cache, PROMPT)
        assert "everything is written" in lmc("drain", "--config", config).output
        assert json.loads(lmc("status", "--config", config, "--json").output)["tiers"][0]["records"] == 6
        assert lmc("status", "--config", config).output.startswith("draining: ")
        assert store(cache, PROMPT.extend(range(3 * CHUNK))).ok_chunks == 0
        assert load(cache, PROMPT)[1].ok_chunks == 6
        assert daemon.stop() == 0


def test_clear_removes_a_family_a_shard_or_all_and_a_family_also_after_a_restart(config: Path) -> None:
    other = Chain.of(model(weights="w2"), TOKENS)
    two = Chain.of(model(shards=2, weights="w3"), TOKENS)
    with Serve(config) as daemon, joined(daemon.ready().socket) as cache:
        for chain in (PROMPT, other, two):
            for shard in chain.model.shards:
                store(cache, chain, shard=shard)
        assert cache.drain(30)

        def clear(namespace: str) -> str:
            return lmc("clear", "--config", config, "--namespace", namespace).output

        assert clear("ab" * 16).startswith("0 records")
        assert clear(two.model.family.family_id.hex()).startswith("12 records")
        assert cache.lookup(two, "two").chunks == 0
        assert clear(other.model.shards[0].shard_id.hex()).startswith("6 records")
        assert cache.lookup(other, "other").chunks == 0
        assert load(cache, PROMPT)[0] == 6
        assert daemon.stop() == 0
        with Serve(config) as again:
            again.ready()
            assert clear(PROMPT.model.family.family_id.hex()).startswith("6 records")
            assert until(lambda: cache.connected)
            assert cache.lookup(PROMPT, "gone").chunks == 0
            cache.release("gone")
            assert store(cache, PROMPT).ok_chunks == 6
            assert cache.drain(30), "what is being written is in use, and stays"
            assert clear("all").startswith("6 records")
            assert again.stop() == 0
    result = lmc("clear", "--config", config, "--namespace", "all of it")
    assert result.exit_code == 2
    assert "neither `all` nor the 32 hex digits" in result.output


def test_a_pin_outlives_whoever_asked_for_it_and_keeps_the_prompt_in_memory(tmp_path: Path) -> None:
    config = write_config(tmp_path, disk=False, host_nbytes=8 * RECORD)
    flood = [Chain.of(model(), [n, *TOKENS]) for n in range(3)]
    with Serve(config) as daemon, joined(daemon.ready().socket) as cache:
        store(cache, PROMPT)
        assert "6 of 6 chunks" in lmc("pin", *DESCRIBED, "--config", config).output
        status = json.loads(lmc("status", "--config", config, "--json").output)
        assert (status["pins"], status["records_in_use"]) == (1, 6)
        for chain in flood:
            store(cache, chain)
        assert load(cache, PROMPT)[0] == 6
        assert lmc("unpin", *DESCRIBED, "--config", config).output == "unpinned\n"
        for chain in flood:
            store(cache, chain)
        assert load(cache, PROMPT)[0] < 6
        again = lmc("unpin", *DESCRIBED, "--config", config)
        assert (again.exit_code, again.output) == (1, "that prompt was not pinned\n")
        assert daemon.stop() == 0


def test_prefetch_brings_a_prompt_from_disk_into_memory(config: Path) -> None:
    with Serve(config) as daemon, joined(daemon.ready().socket) as cache:
        store(cache, PROMPT)
        assert daemon.stop() == 0
    with Serve(config) as daemon, joined(daemon.ready().socket) as cache:
        assert cache.lookup(PROMPT, "r").resident == 0
        cache.release("r")
        pinned = lmc("pin", *DESCRIBED, "--config", config)
        assert "0 of 6 chunks" in pinned.output
        assert "lmc prefetch" in pinned.output
        assert lmc("prefetch", *DESCRIBED, "--config", config).output == "6 of 6 chunks are in memory\n"
        assert cache.lookup(PROMPT, "s").resident == 6
        assert daemon.stop() == 0


def test_one_file_serves_the_daemon_and_the_engines_that_use_it(config: Path) -> None:
    with Serve(config) as daemon:
        daemon.ready()
        with open_cache(config) as cache:
            assert isinstance(cache, RemoteCache)
            assert store(cache, PROMPT).ok_chunks == 6
            assert cache.drain(10)
            status = cache.status()
            assert (status.records, status.device, [tier.name for tier in status.tiers]) == (6, "cpu", ["disk"])
        assert daemon.stop() == 0


def test_the_variable_and_the_argument_turn_a_cache_into_one_in_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "own.yaml"
    config.write_text("{chunk_tokens: 16, socket_timeout: 10s, tiers: [{name: host, backend: memory, capacity: 1MiB}]}")
    with open_cache(config) as cache:
        assert isinstance(cache, LocalCache)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with Serve(config) as daemon:  # where it was not told to listen
        daemon.said(f"serving on {tmp_path}/lmcache/lmcache.sock")
        with open_cache(config, socket="auto") as cache:
            assert isinstance(cache, RemoteCache)
            assert cache.connected
        monkeypatch.setenv("LMCACHE__SOCKET", "auto")
        with open_cache(config) as cache:
            assert isinstance(cache, RemoteCache)
            assert cache.connected
        assert lmc("ping").exit_code == 0
        assert daemon.stop() == 0


def test_without_its_daemon_a_cache_has_an_empty_status_and_misses(tmp_path: Path) -> None:
    with open_cache(load_config(write_config(tmp_path))) as cache:
        assert (cache.status().boot_id, cache.status().records, cache.status().tiers) == ("", 0, ())
        assert load(cache, PROMPT)[0] == 0
    assert not (tmp_path / "store").exists()


def test_an_adapter_reads_the_same_status_of_either_kind_of_cache(config: Path) -> None:
    with Serve(config) as daemon, open_cache(config) as remote, open_local() as local:
        daemon.ready()
        assert until(lambda: remote.connected)
        assert type(remote.status()) is type(local.status())
        assert daemon.stop() == 0


# What it refuses, and how it starts.


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tierz: []", "tierz: unknown key; did you mean 'tiers'?"),
        ("tiers: [{backend: nothing-like-it}]", "no backend 'nothing-like-it' is installed"),
        ('server: {http: "0.0.0.0:0"}', "not on loopback"),
        ('server: {http: "localhost"}', "not an IP address and a port"),
        ('server: {socket_mode: "rw"}', "is not an octal mode"),
        ('server: {socket_group: "no such group"}', "no such group"),
        ('socket: "/dev/null"', "exists and is not a socket"),
        (f'socket: "/tmp/{"x" * 200}"', "cannot listen on"),
    ],
)
def test_a_daemon_that_cannot_start_says_why_and_exits_2(text: str, says: str, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(text)
    with Serve(config, *([] if "socket:" in text else ["--socket", str(tmp_path / "s")])) as daemon:
        assert daemon.process.wait(30) == 2
    errors = [line for line in daemon.lines if line.startswith("Error: ")]
    assert len(errors) == 1, daemon.lines
    assert says in errors[0]
    assert not any("Traceback" in line for line in daemon.lines)


def test_a_second_daemon_is_refused_and_the_first_goes_on(config: Path) -> None:
    with Serve(config) as daemon:
        daemon.ready()
        with Serve(write_other(config)) as second:
            assert second.process.wait(30) == 2
        assert any("another daemon serves" in line for line in second.lines)
        assert lmc("ping", "--config", config).exit_code == 0
        assert daemon.stop() == 0


def write_other(config: Path) -> Path:
    """The same socket, another disk store."""
    other = config.parent / "other.yaml"
    other.write_text(json.dumps({"socket": str(config.parent / "s"), "chunk_tokens": CHUNK}))
    return other


def test_the_socket_that_a_killed_daemon_left_is_replaced(config: Path) -> None:
    with Serve(config) as daemon:
        daemon.ready()
        daemon.process.kill()
        daemon.process.wait()
    assert (config.parent / "s").exists()
    with Serve(config) as daemon:
        daemon.ready()
        assert lmc("ping", "--config", config).exit_code == 0
        assert daemon.stop() == 0


def test_the_socket_has_the_mode_and_the_group_that_were_configured(tmp_path: Path) -> None:
    with Serve(write_config(tmp_path)) as daemon:
        found = daemon.ready().socket.stat()
        assert stat.S_IMODE(found.st_mode) == 0o600
        assert daemon.stop() == 0
    if os.getuid() != 0:
        pytest.skip("cannot run here: only root may give a socket to another group")
    for group, number in (("daemon", 1), ("64500", 64500)):
        with Serve(write_config(tmp_path, socket_mode="0660", socket_group=group)) as daemon:
            found = daemon.ready().socket.stat()
            assert stat.S_IMODE(found.st_mode) == 0o660
            assert found.st_gid == number
            assert daemon.stop() == 0


def test_only_the_users_that_are_allowed_may_connect(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("cannot run here: only root can be several users")
    tmp_path.chmod(0o711)
    for parent in list(tmp_path.parents)[: len(tmp_path.parents) - 2]:
        parent.chmod(parent.stat().st_mode | 0o011)
    with Serve(write_config(tmp_path, socket_mode="0666", allowed_uids=[1234])) as daemon:
        daemon.ready()
        assert "Welcome" in as_user(1234, daemon.socket)
        refused = as_user(4321, daemon.socket)
        assert "uid 4321 is not among server.allowed_uids (1234,)" in refused
        assert daemon.stop() == 0
    with Serve(write_config(tmp_path)) as daemon:
        daemon.ready()
        assert "Permission denied" in as_user(4321, daemon.socket)
        assert daemon.stop() == 0


def as_user(uid: int, path: Path) -> str:
    """What a child of that user hears at the socket."""
    from lmcache_core.client.control import Control
    from lmcache_core.errors import CacheError

    back, front = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            with Control.unix(path, timeout_s=5) as daemon:
                answer = repr(daemon.welcome)
        except CacheError as error:
            answer = str(error)
        except BaseException as error:
            answer = f"unexpected {error!r}"
        os.write(front, answer.encode())
        os._exit(0)
    os.close(front)
    with os.fdopen(back) as stream:
        answer = stream.read()
    os.waitpid(child, 0)
    return answer


def test_the_service_manager_is_told_when_the_daemon_is_ready_and_when_it_stops(config: Path, tmp_path: Path) -> None:
    for address in (str(tmp_path / "notify"), f"@lmcache-test-{os.getpid()}"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.bind("\0" + address[1:] if address.startswith("@") else address)
            manager.settimeout(30)
            with Serve(config, environ={"NOTIFY_SOCKET": address}) as daemon:
                assert manager.recv(100) == b"READY=1"
                assert lmc("ping", "--config", config).exit_code == 0
                daemon.process.terminate()
                assert manager.recv(100) == b"STOPPING=1"
                assert daemon.process.wait(30) == 0


def fetch(address: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:0"])
def test_http_says_alive_ready_and_the_metrics(address: str, tmp_path: Path) -> None:
    if "::1" in address and not has_ipv6():
        pytest.skip("cannot run here: no IPv6 loopback")
    with Serve(write_config(tmp_path, http=address)) as daemon:
        where = daemon.said("http ([^ ,]+)")[1]
        with joined(daemon.socket) as cache:
            store(cache, PROMPT)
            load(cache, PROMPT)
            assert cache.drain(10)
            assert fetch(where, "/healthz") == (200, "alive\n")
            assert fetch(where, "/readyz") == (200, "ready\n")
            code, text = fetch(where, "/metrics")
            assert code == 200
            assert 'lmcache_lookups_total{result="full"} 1.0' in text
            assert "lmcache_clients 1.0" in text
            assert fetch(where, "/secrets")[0] == 404
        assert lmc("drain", "--config", daemon.config).exit_code == 0
        assert fetch(where, "/readyz") == (503, "draining\n")
        assert fetch(where, "/healthz")[0] == 200
        assert daemon.stop() == 0


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_the_daemon_is_small_beside_its_slab(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path, host_nbytes=2 << 30)
    began = time.monotonic()
    with Serve(config) as daemon, joined(daemon.ready().socket) as cache:
        ready_s = time.monotonic() - began
        assert store(cache, PROMPT).ok_chunks == 6
        status = Path(f"/proc/{daemon.process.pid}/status").read_text()
        sizes = {name: int(kib) << 10 for name, kib in re.findall(r"(RssAnon|RssFile):\s+(\d+) kB", status)}
        with capsys.disabled():
            own = sum(sizes.values()) / 2**20
            print(f"\n  lmc serve with a slab of 2 GiB: ready in {ready_s:.2f} s, {own:.0f} MiB beside the slab")
        assert sum(sizes.values()) < 120 << 20  # the slab is RssShmem
        assert daemon.stop() == 0


def test_an_idle_daemon_uses_no_cpu(config: Path) -> None:
    with Serve(config) as daemon, joined(daemon.ready().socket) as cache:
        assert store(cache, PROMPT).ok_chunks == 6
        assert cache.drain(10)
        stat_file = Path(f"/proc/{daemon.process.pid}/stat")

        def switches() -> int:
            tasks = Path(f"/proc/{daemon.process.pid}/task").glob("*/status")
            return sum(int(re.search(r"^voluntary_ctxt_switches:\s+(\d+)", t.read_text(), re.M)[1]) for t in tasks)

        before, ticks = switches(), sum(map(int, stat_file.read_text().split()[13:15]))
        assert not until(lambda: False, 2.0)
        assert switches() - before <= 20
        assert sum(map(int, stat_file.read_text().split()[13:15])) - ticks <= 5
        assert daemon.stop() == 0
