"""Operators' commands over TCP: TLS and a token, and nothing but status, drain and clear."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest
from serve import Serve, joined, lmc, write_config
from tiny import chain, model, store

from lmcache_core import wire
from lmcache_core.config import parse_config
from lmcache_core.endpoints import Address, parse_address
from lmcache_core.errors import ConfigError

TOKEN = "a token of the tests"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("cannot run here: no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("certificate")
    made, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=lmcache", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(made)], check=True, capture_output=True)
    return made, key


def serve_tcp(folder: Path, certificate: tuple[Path, Path] | None = None, **more: Any) -> Serve:
    tcp = {"listen": "127.0.0.1:0", "token": "${OPERATORS}"} | more
    if certificate is not None:
        tcp |= {"certificate": str(certificate[0]), "key": str(certificate[1])}
    return Serve(write_config(folder, tcp=tcp), environ={"OPERATORS": TOKEN})


def address_of(daemon: Serve) -> Address:
    return parse_address(daemon.said("tcp ([^ ,]+)")[1])


def test_an_operator_with_token_and_certificate_sees_drains_and_clears(
    tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    with serve_tcp(tmp_path, certificate) as daemon, joined(daemon.ready().socket) as cache:
        store(cache, chain(5))
        assert cache.drain(10)
        over = ("--tcp", address_of(daemon), "--ca", certificate[0])
        found = json.loads(lmc("status", "--json", *over, LMCACHE_TOKEN=TOKEN).output)
        assert (found["records"], found["pid"]) == (5, daemon.process.pid)
        assert f"pid {daemon.process.pid}" in lmc("ping", *over, LMCACHE_TOKEN=TOKEN).output
        assert lmc("clear", "--namespace", "all", *over, LMCACHE_TOKEN=TOKEN).output.startswith("5 records")
        assert lmc("drain", *over, LMCACHE_TOKEN=TOKEN).exit_code == 0
        assert lmc("status", *over, LMCACHE_TOKEN=TOKEN).output.startswith("draining")
        assert daemon.stop() == 0


def test_whoever_lacks_the_token_or_trusts_another_certificate_learns_nothing(
    tmp_path: Path, certificate: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    with serve_tcp(tmp_path, certificate) as daemon:
        where = address_of(daemon.ready())
        over = ("--tcp", where, "--ca", certificate[0])
        for token, says in (("a wrong token of the tests", "the token is not this daemon's"), ("", "LMCACHE_TOKEN")):
            result = lmc("status", *over, LMCACHE_TOKEN=token)
            assert result.exit_code == 2
            assert says in result.output
            assert "boot" not in result.output
        result = lmc("status", "--tcp", where, "--ca", default_authorities(), LMCACHE_TOKEN=TOKEN)
        assert result.exit_code == 2
        assert "certificate verify failed" in result.output.lower()
        result = lmc("status", "--tcp", where, "--ca", tmp_path / "none.pem", LMCACHE_TOKEN=TOKEN)
        assert "No such file" in result.output
        result = lmc("status", "--tcp", where, LMCACHE_TOKEN=TOKEN)  # in clear text
        assert result.exit_code == 2
        assert TOKEN not in "".join(daemon.lines)
        assert daemon.stop() == 0


def default_authorities() -> Path:
    """Certificates of others: of ours, none of them says anything."""
    found = ssl.get_default_verify_paths().cafile
    if found is None or not Path(found).exists():
        pytest.skip("cannot run here: no authorities of the system")
    return Path(found)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (wire.Define(1, model()), "Define is not for TCP, which shares no memory"),
        (wire.Reserve(1, 1, 0, 0, bytes(32)), "Reserve is not for TCP"),
        (wire.Pin(1, 1, bytes(32)), "Pin is not for TCP"),
        (wire.Hello(wire.PROTOCOL, "x", True, TOKEN), "Hello is not for TCP"),
    ],
)
def test_what_needs_shared_memory_or_holds_it_is_refused(message: object, says: str, tmp_path: Path) -> None:
    with serve_tcp(tmp_path) as daemon:
        answers = spoken(address_of(daemon.ready()), wire.Hello(wire.PROTOCOL, "x", True, TOKEN), message)
        assert isinstance(answers[0], wire.Welcome)
        (refused,) = answers[1:]
        assert isinstance(refused, wire.Refused)
        assert says in refused.reason
        assert daemon.stop() == 0


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (wire.encode(wire.Status(1)), "the token is not this daemon's"),
        (wire.encode(wire.Hello(wire.PROTOCOL + 1, "x", True, TOKEN)), "the client speaks protocol"),
        (b"GET / HTTP/1.1\r\n\r\n", "over the limit"),
        (b"\x04\0\0\0abcd", "not a message of ours"),
        ((1 << 20).to_bytes(4, "little"), "over the limit of 65536"),
    ],
)
def test_garbage_is_refused_with_a_reason_and_the_next_operator_served(data: bytes, says: str, tmp_path: Path) -> None:
    with serve_tcp(tmp_path) as daemon:
        where = address_of(daemon.ready())
        (refused,) = spoken(where, data)
        assert isinstance(refused, wire.Refused)
        assert says in refused.reason
        assert lmc("ping", "--tcp", where, LMCACHE_TOKEN=TOKEN).exit_code == 0
        assert daemon.stop() == 0


def spoken(where: Address, *messages: Any) -> list[wire.ToClient]:
    """What the daemon answers until it closes the connection."""
    frames = wire.Frames(wire.to_client_decoder())
    answers: list[wire.ToClient] = []
    with socket.create_connection((where.host, where.port), 10) as sock:
        for message in messages:
            sock.sendall(message if isinstance(message, bytes) else wire.encode(message))
        while data := sock.recv(65536):
            answers += frames.feed(data)
    return answers


def test_operators_beyond_the_limit_are_refused_and_engines_unharmed(tmp_path: Path) -> None:
    from lmcache_core.server.tcp import MAX_CONNECTIONS

    with serve_tcp(tmp_path) as daemon, joined(daemon.ready().socket) as cache:
        where = address_of(daemon)
        crowd = [socket.create_connection((where.host, where.port), 10) for _ in range(MAX_CONNECTIONS)]
        try:
            for sock in crowd:
                sock.sendall(wire.encode(wire.Hello(wire.PROTOCOL, "x", True, TOKEN)))
                assert sock.recv(1000)
            result = lmc("ping", "--tcp", where, LMCACHE_TOKEN=TOKEN)
            assert result.exit_code == 2
            assert f"{MAX_CONNECTIONS} operators are connected" in result.output
            assert store(cache, chain(2)).ok_chunks == 2
            assert daemon.stop() == 0  # which ends them
        finally:
            for sock in crowd:
                sock.close()


@pytest.mark.parametrize(
    ("tcp", "says"),
    [
        ('{listen: "0.0.0.0:7000", token: "${T}"}', "server.tcp.certificate: 0.0.0.0:7000 is not on loopback"),
        ('{listen: "[::]:7000", token: "${T}"}', "is not on loopback: TCP needs TLS there"),
        ('{listen: "127.0.0.1:7000"}', "server.tcp.token: TCP needs a token of at least 16 characters"),
        ('{listen: "127.0.0.1:7000", token: "${SHORT}"}', "at least 16 characters"),
        ('{listen: "127.0.0.1:7000", token: "in clear text, in the file"}', "must not stand in a file"),
        ('{listen: "127.0.0.1:7000", token: "${T}", certificate: /c}', "a certificate and its key are given together"),
        ('{listen: "localhost:7000", token: "${T}"}', "server.tcp.listen: 'localhost:7000' is not an IP address"),
        ('{listen: "127.0.0.1:70000", token: "${T}"}', "is not an IP address and a port"),
    ],
)
def test_tcp_without_what_protects_it_is_a_mistake_in_the_configuration(tcp: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(f"server: {{tcp: {tcp}}}", environ={"T": TOKEN, "SHORT": "short"})
    assert says in str(caught.value)


def test_a_certificate_that_is_none_or_a_port_that_is_taken_is_said_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "c.pem").write_text("no certificate")
    with serve_tcp(tmp_path, (tmp_path / "c.pem", tmp_path / "c.pem")) as daemon:
        assert daemon.process.wait(30) == 2
    assert any("server.tcp.certificate: cannot use" in line for line in daemon.lines)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with serve_tcp(tmp_path, listen=f"127.0.0.1:{taken.getsockname()[1]}") as daemon:
            assert daemon.process.wait(30) == 2
        assert any("server.tcp.listen: cannot listen on" in line for line in daemon.lines)
    assert not daemon.socket.exists()


def test_the_token_comes_from_the_environment_and_is_never_shown(tmp_path: Path) -> None:
    config = write_config(tmp_path, tcp={"listen": "127.0.0.1:0"})
    result = lmc("config", "show", "--config", config, LMCACHE__SERVER__TCP__TOKEN=TOKEN)
    assert result.exit_code == 0
    assert TOKEN not in result.output
    assert "server.tcp.token: ***" in result.output
    result = lmc("config", "show", "--config", config, LMCACHE__SERVER__TCP__TOKEEN=TOKEN)
    assert "did you mean 'LMCACHE__SERVER__TCP__TOKEN'?" in result.output
