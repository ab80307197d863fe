"""Servers that several tests of a module share, and certificates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import Server, ended, redis_server, valkey_server


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("redis")
    path = folder / "s.sock"
    server = redis_server(folder, "--unixsocket", str(path))
    server.socket_path = path
    with ended(server):
        yield server


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = valkey_server(tmp_path_factory.mktemp("valkey"))
    with ended(server):
        yield server


class Certificates:
    """Two authorities, a server's and a client's certificate by the first, a client's by the second."""

    def __init__(self, folder: Path) -> None:
        import trustme

        ours, other = trustme.CA(), trustme.CA()
        self.ca = folder / "ca.pem"
        self.other_ca = folder / "other-ca.pem"
        ours.cert_pem.write_to_path(str(self.ca))
        other.cert_pem.write_to_path(str(self.other_ca))
        self.server, self.server_key = self._issue(ours, folder, "server", "127.0.0.1", "localhost")
        self.elsewhere, self.elsewhere_key = self._issue(ours, folder, "elsewhere", "cache.example")
        self.client, self.client_key = self._issue(ours, folder, "client", "client.example")
        self.stranger, self.stranger_key = self._issue(other, folder, "stranger", "client.example")

    def _issue(self, ca: object, folder: Path, name: str, *identities: str) -> tuple[Path, Path]:
        issued = ca.issue_cert(*identities)  # type: ignore[attr-defined]
        certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
        issued.cert_chain_pems[0].write_to_path(str(certificate))
        issued.private_key_pem.write_to_path(str(key))
        return certificate, key


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))
