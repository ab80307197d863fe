"""Settings: what is refused and with which words, what is hidden, and that the README tells each of them."""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from places import Open, held, new_key, options, record
from proxy import Fault, Proxy

from lmcache_core import BackendError, ConfigError, Context, RawOptions
from lmcache_s3 import S3Backend, S3Options
from lmcache_s3.target import Target

README = Path(__file__).parent.parent / "README.md"
FIXED = {"access_key_id": "a", "secret_access_key": "b", "bucket": "kv-cache"}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"bucket": "s3://kv"}, "without s3://"),
        ({"bucket": "KV"}, "not a bucket's name"),
        ({"bucket": "a..b"}, "not a bucket's name"),
        ({"bucket": "kv--use1-az4--x-s3"}, "S3 Express"),
        ({"prefix": "/kv"}, "single slashes"),
        ({"prefix": "a//b"}, "single slashes"),
        ({"prefix": "a/../b"}, "single slashes"),
        ({"prefix": "a b"}, "single slashes"),
        ({"prefix": "x" * 1000}, "S3 allows 1024"),
        ({"endpoint": "minio:9000"}, "not a URL"),
        ({"endpoint": "ftp://minio"}, "not a URL"),
        ({"endpoint": "https://minio/kv"}, "more than scheme, host and port"),
        ({"endpoint": "https://me:pw@minio"}, "user or password"),
        ({"endpoint": "https://minio:99999"}, "not a URL"),
        ({"region": "eu west"}, "name of a region"),
        ({"expected_owner": "12"}, "12 digits"),
        ({"secret_access_key": ""}, "go together"),
        ({"access_key_id": "", "secret_access_key": "", "session_token": "t"}, "needs access_key_id"),
        ({"profile": "p"}, "excludes profile"),
        ({"anonymous": True}, "excludes profile and anonymous"),
        ({"secret_access_key": "b\n"}, "line break"),
        ({"kms_key_id": "k"}, "needs encryption"),
        ({"part_nbytes": 1}, "5MiB"),
        ({"multipart_threshold_nbytes": 6 << 30}, "5GiB"),
        ({"range_nbytes": 1}, "1MiB"),
        ({"parallel": 0}, "1 to 64"),
        ({"connections": 0}, "1 to 256"),
        ({"attempts": 0}, "1 to 10"),
        ({"connect_timeout_s": 0.0}, "over 0"),
    ],
)
def test_a_wrong_setting_is_refused_in_words_that_help(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        S3Options(**(FIXED | changed))
    assert "pw" not in str(caught.value)


def test_settings_read_from_a_configuration(no_aws: Path) -> None:
    text = {"bucket": "kv-cache", "part": "8MiB", "connect_timeout": "500ms", "skip_existing": "false"}
    read = RawOptions.of(text).into(S3Options)
    assert (read.part_nbytes, read.connect_timeout_s, read.skip_existing) == (8 << 20, 0.5, False)
    with pytest.raises(ConfigError, match="STANDARD_IA"):
        RawOptions.of(text | {"storage_class": "STANDART_IA"}).into(S3Options)


def test_the_readme_tells_every_setting_with_its_default_and_unit() -> None:
    told = dict(re.findall(r"^\| `([a-z_]+)` \| ([^|]+) \|", README.read_text(), re.MULTILINE))
    wanted: dict[str, str] = {}
    for field in dataclasses.fields(S3Options):
        name = re.sub(r"(_nbytes|_s)$", "", field.name)
        value = field.default
        if value is dataclasses.MISSING:
            wanted[name] = "required"
        elif field.name.endswith("_nbytes") and isinstance(value, int):
            wanted[name] = f"{value >> 20}MiB"
        elif field.name.endswith("_s"):
            wanted[name] = f"{value:g}s"
        else:
            wanted[name] = {None: "null", "": '""', True: "true", False: "false"}.get(value, str(value))  # type: ignore[arg-type]
    assert told == wanted


def test_secrets_are_in_no_repr() -> None:
    secrets = {"access_key_id": "id-in-clear", "secret_access_key": "key-in-clear", "session_token": "token-in-clear"}
    assert "in-clear" not in repr(S3Options(bucket="kv-cache", **secrets))


@pytest.mark.parametrize(
    ("changed", "url", "root"),
    [
        ({"region": "eu-west-1"}, "https://kv-cache.s3.eu-west-1.amazonaws.com", ""),
        ({"region": "cn-north-1"}, "https://kv-cache.s3.cn-north-1.amazonaws.com.cn", ""),
        ({"region": "eu-west-1", "bucket": "kv.cache"}, "https://s3.eu-west-1.amazonaws.com", "/kv.cache"),
        ({"region": "eu-west-1", "addressing": "path"}, "https://s3.eu-west-1.amazonaws.com", "/kv-cache"),
        ({"endpoint": "https://minio:9000"}, "https://minio:9000", "/kv-cache"),
        ({"endpoint": "https://minio:443/"}, "https://minio", "/kv-cache"),
        ({"endpoint": "http://minio:9000", "addressing": "virtual"}, "http://kv-cache.minio:9000", ""),
        ({"endpoint": "http://[::1]:9000"}, "http://[::1]:9000", "/kv-cache"),
    ],
)
def test_where_a_bucket_is(no_aws: Path, changed: dict[str, Any], url: str, root: str) -> None:
    target = Target.of(S3Options(**(FIXED | changed)))
    assert (target.url, target.root) == (url, root)


def test_the_bucket_may_stand_in_the_host_name(
    open_s3: Open, proxy: Proxy, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_up = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *more, **named: look_up("127.0.0.1", *more, **named))
    s3 = open_s3(endpoint=f"http://localhost:{proxy.port}", addressing="virtual")
    proxy.always = lambda seen: Fault(status=200)
    key = new_key()
    s3.put(key, record(64))
    assert proxy.seen[0].headers["host"] == f"records.localhost:{proxy.port}"
    assert proxy.seen[0].path == f"/{prefix}/v1/{key.shard_id.hex()}/{key.digest.hex()}"


def test_region_and_keys_come_from_a_profile(no_aws: Path, proxy: Proxy, prefix: str) -> None:
    key, secret = options("http://x").access_key_id, options("http://x").secret_access_key
    (no_aws / "config").write_text("[profile team]\nregion = eu-central-1\n")
    (no_aws / "credentials").write_text(f"[team]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")
    given = S3Options(bucket="records", endpoint=proxy.url, prefix=prefix, profile="team")
    with S3Backend(given, Context()) as s3:
        record_key, data = new_key(), record(64)
        s3.put(record_key, data)
        assert held(s3, record_key, 64) == data
    assert "/eu-central-1/s3/aws4_request" in proxy.seen[0].headers["authorization"]


def test_a_profile_that_is_not_there_is_an_error_at_once(no_aws: Path) -> None:
    with pytest.raises(ConfigError, match="profile 'nobody'"):
        S3Backend(S3Options(bucket="kv-cache", profile="nobody"), Context())


def test_no_credentials_anywhere_is_said(no_aws: Path, proxy: Proxy) -> None:
    given = S3Options(bucket="records", endpoint=proxy.url)
    said = "no credentials: give access_key_id"
    with S3Backend(given, Context(timeout_s=5)) as s3, pytest.raises(BackendError, match=said):
        s3.contains(new_key())
    assert not proxy.seen


def test_anonymous_requests_carry_no_signature(no_aws: Path, proxy: Proxy) -> None:
    proxy.always = lambda seen: Fault(status=200)
    with S3Backend(S3Options(bucket="records", endpoint=proxy.url, anonymous=True), Context()) as s3:
        assert s3.contains(new_key())
    assert "authorization" not in proxy.seen[0].headers


def test_an_expired_token_is_renewed_once(no_aws: Path, proxy: Proxy, prefix: str) -> None:
    counter, program = no_aws / "count", no_aws / "credentials.sh"
    key, secret = options("http://x").access_key_id, options("http://x").secret_access_key
    answer = f'{{"Version": 1, "AccessKeyId": "{key}", "SecretAccessKey": "{secret}"}}'
    program.write_text(f"#!/bin/sh\necho once >> {counter}\necho '{answer}'\n")
    program.chmod(0o700)
    (no_aws / "config").write_text(f"[profile role]\nregion = us-east-1\ncredential_process = {program}\n")
    with S3Backend(S3Options(bucket="records", endpoint=proxy.url, prefix=prefix, profile="role"), Context()) as s3:
        record_key, data = new_key(), record(64)
        s3.put(record_key, data)
        proxy.faults.append(Fault(status=400, code="ExpiredToken"))
        assert held(s3, record_key, 64) == data
        proxy.always = lambda seen: Fault(status=400, code="ExpiredToken")
        proxy.seen.clear()
        with pytest.raises(BackendError, match="ExpiredToken"):
            held(s3, record_key, 64)
    assert len(proxy.seen) == 1
    assert counter.read_text().split() == ["once"] * 2


def test_a_source_of_credentials_that_hangs_keeps_nobody_beyond_the_deadline(no_aws: Path, proxy: Proxy) -> None:
    gate, program = no_aws / "gate", no_aws / "credentials.sh"
    program.write_text(f"#!/bin/sh\ncat {gate}\n")
    program.chmod(0o700)
    os.mkfifo(gate)
    (no_aws / "config").write_text(f"[profile role]\nregion = us-east-1\ncredential_process = {program}\n")
    with S3Backend(S3Options(bucket="records", endpoint=proxy.url, profile="role"), Context(timeout_s=0.3)) as s3:
        started = time.monotonic()
        with pytest.raises(BackendError, match="no credentials: their source has not answered"):
            s3.contains(new_key())
        assert time.monotonic() - started < 10.0
        gate.write_text("nothing of use")
