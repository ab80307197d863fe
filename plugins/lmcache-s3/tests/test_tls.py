"""TLS: an authority of one's own, one that is not known, and a name that is not the certificate's."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from places import held, new_key, options, record
from proxy import Fault, Proxy
from seaweed import Seaweed

from lmcache_core import BackendError, BackendUnavailable, ConfigError, Context
from lmcache_s3 import S3Backend

MiB = 1 << 20


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tuple[trustme.CA, Path]:
    ca = trustme.CA()
    path = tmp_path_factory.mktemp("tls") / "ca.pem"
    ca.cert_pem.write_to_path(str(path))
    return ca, path


@pytest.fixture
def secure(server: Seaweed, authority: tuple[trustme.CA, Path]) -> Iterator[Proxy]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority[0].issue_cert("localhost").configure_cert(context)
    with Proxy(server.port, tls=context) as proxy:
        yield proxy


def test_records_go_over_tls_and_the_connection_is_kept(
    secure: Proxy, authority: tuple[trustme.CA, Path], prefix: str
) -> None:
    given = options(secure.url, prefix, ca_file=authority[1], range_nbytes=3 * MiB)
    with S3Backend(given, Context(timeout_s=20)) as s3:
        for nbytes in (1, 100_000, 8 * MiB + 1):
            key, data = new_key(), record(nbytes)
            s3.put(key, data)
            assert held(s3, key, nbytes) == data
            assert s3.contains(key)
        assert len({seen.connection for seen in secure.seen}) <= 3
        assert len(secure.seen) >= 11


def test_a_stall_over_tls_ends_at_the_deadline(secure: Proxy, authority: tuple[trustme.CA, Path], prefix: str) -> None:
    given = options(secure.url, prefix, ca_file=authority[1])
    with S3Backend(given, Context(timeout_s=1.0)) as s3:
        key, data = new_key(), record(100_000)
        s3.put(key, data)
        for what in ("stall", "stall body", "dribble"):
            secure.faults.append(Fault(what))
            with pytest.raises(BackendUnavailable, match="no answer in 1 s"):
                held(s3, key, 100_000)
        secure.release.set()
        assert held(s3, key, 100_000) == data


def test_an_unknown_authority_is_refused_and_named(secure: Proxy, prefix: str) -> None:
    said = "certificate is not trusted"
    with (
        S3Backend(options(secure.url, prefix), Context(timeout_s=20)) as s3,
        pytest.raises(BackendError, match=said) as caught,
    ):
        s3.contains(new_key())
    assert not isinstance(caught.value, BackendUnavailable)
    assert not secure.seen


def test_a_certificate_for_another_name_is_refused(
    secure: Proxy, authority: tuple[trustme.CA, Path], prefix: str
) -> None:
    given = options(f"https://127.0.0.1:{secure.port}", prefix, ca_file=authority[1])
    with S3Backend(given, Context(timeout_s=20)) as s3, pytest.raises(BackendError, match="not trusted"):
        s3.contains(new_key())


def test_a_ca_file_that_cannot_be_read_is_an_error_at_once(tmp_path: Path) -> None:
    for path, text in ((tmp_path / "missing", None), (tmp_path / "empty", ""), (tmp_path / "no.pem", "no")):
        if text is not None:
            path.write_text(text)
        with pytest.raises(ConfigError, match=f"ca_file {path}"):
            S3Backend(options("https://minio:9000", ca_file=path), Context())


def test_plain_text_where_tls_is_wanted_is_said(server: Seaweed, prefix: str) -> None:
    given = options(f"https://127.0.0.1:{server.port}", prefix)
    with S3Backend(given, Context(timeout_s=20)) as s3, pytest.raises(BackendUnavailable, match="no connection"):
        s3.contains(new_key())
