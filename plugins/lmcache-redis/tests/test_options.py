"""Options: each documented, each checked when it is read, and no secret shown by anything."""

from __future__ import annotations

import dataclasses
import logging
import re
from pathlib import Path

import pytest
from records import BACKENDS, new_key, open_backend

from lmcache_core import BackendError, ConfigError, Context, RawOptions, load_config
from lmcache_redis import RedisBackend, RedisOptions

README = (Path(__file__).parent.parent / "README.md").read_text()
SECRETS = {"password", "sentinel_password", "key_password"}
DOCUMENTED = {
    cells[0].strip("` "): [cell.strip() for cell in cells]
    for line in README.splitlines()
    if line.startswith("| `") and len(cells := line.strip("|").split("|")) >= 4
}


def written(name: str) -> str:
    return name.removesuffix("_nbytes").removesuffix("_s")


@pytest.mark.parametrize("option", dataclasses.fields(RedisOptions), ids=lambda option: option.name)
def test_every_option_is_documented_with_its_default_and_unit(option: dataclasses.Field[object]) -> None:
    _, default, unit, meaning = DOCUMENTED[written(option.name)][:4]
    shown = {None: "null", True: "true", False: "false", 512 << 20: "512MiB", 512 << 10: "512KiB"}
    match option.default:
        case dataclasses.MISSING:
            assert default == "required"
        case str(text):
            assert default in (f'"{text}"', text)
        case None | bool():
            assert default == shown[option.default]
        case value if option.name.endswith("_s"):
            assert default == f"{value:g}s"
        case value:
            assert default == shown.get(value, str(value))
    expected = "duration" if option.name.endswith("_s") else "size" if option.name.endswith("_nbytes") else None
    assert expected is None or unit == expected
    assert ("secret" in meaning.lower()) == (option.name in SECRETS)
    assert len(meaning) > 15


def test_nothing_is_documented_that_is_no_option() -> None:
    assert DOCUMENTED.keys() == {written(option.name) for option in dataclasses.fields(RedisOptions)}


def test_the_configuration_of_the_readme_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    (tmp_path / "lmcache.yaml").write_text(blocks[0])
    monkeypatch.setenv("REDIS_PASSWORD", "hunter2")
    (host, pool) = load_config(tmp_path / "lmcache.yaml").tiers
    assert host.backend == "memory"
    options = pool.options.into(RedisOptions)
    assert (options.username, options.password, options.ttl_s) == ("kv", "hunter2", 86400.0)
    for name in ("ca.pem", "me.pem", "me.key"):
        (tmp_path / name).touch()
    others = blocks[1].replace("/etc/kv", str(tmp_path)).strip().splitlines()
    assert len(others) == 5
    for line in others:
        text = f"tiers: [{{backend: memory, capacity: 1GiB}}, {{backend: redis, {line.partition('#')[0]}}}]"
        (tmp_path / "other.yaml").write_text(text)
        assert load_config(tmp_path / "other.yaml").tiers[1].options.into(RedisOptions).location.addresses


def test_options_are_read_as_a_configuration_writes_them() -> None:
    raw = RawOptions.of(
        {"url": "rediss://h:1/2", "ttl": "24h", "max_value": "1GiB", "protocol": "3", "connections": "2"}
    )
    assert raw.into(RedisOptions) == RedisOptions(
        url="rediss://h:1/2", ttl_s=86400.0, max_value_nbytes=1 << 30, protocol=3, connections=2
    )


def test_urls_name_servers_tls_and_database() -> None:
    def read(url: str, **more: object) -> tuple[list[str], bool, int]:
        location = RedisOptions(url=url, **more).location  # type: ignore[arg-type]
        return [str(address) for address in location.addresses], location.tls, location.db

    assert read("redis://cache") == (["cache:6379"], False, 0)
    assert read("valkeys://cache:7000/15") == (["cache:7000"], True, 15)
    assert read("redis://[::1]:7000/") == (["[::1]:7000"], False, 0)
    assert read("unix:///run/redis.sock?db=4") == (["/run/redis.sock"], False, 4)
    assert read("redis://a,b:1,c", master="m") == (["a:26379", "b:1", "c:26379"], False, 0)
    assert read("redis://a,b:1", cluster=True) == (["a:6379", "b:1"], False, 0)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"url": "cache:6379"}, "does not begin with"),
        ({"url": "http://cache:6379"}, "does not begin with"),
        ({"url": "redis://"}, "not HOST:PORT"),
        ({"url": "redis://cache:0"}, "port"),
        ({"url": "redis://cache:99999"}, "port"),
        ({"url": "redis://cache/one"}, "database"),
        ({"url": "unix://relative"}, "absolute"),
        ({"url": "redis://a,b"}, "several servers"),
        ({"url": "redis://a", "cluster": "true", "master": "m"}, "one of them"),
        ({"url": "redis://a/1", "cluster": "true"}, "database 0"),
        ({"url": "unix:///s", "cluster": "true"}, "one server"),
        ({"url": "redis://a", "sentinel_username": "s"}, "need master"),
        ({"url": "redis://a", "prefix": "{x}"}, "prefix"),
        ({"url": "redis://a", "prefix": "a b"}, "prefix"),
        ({"url": "redis://a", "ttl": "0s"}, "ttl"),
        ({"url": "redis://a", "connections": "0"}, "connections"),
        ({"url": "redis://a", "connect_timeout": "0"}, "connect_timeout"),
        ({"url": "redis://a", "max_value": "1"}, "max_value"),
        ({"url": "redis://a", "tls_verify": "none"}, "rediss://"),
        ({"url": "redis://a", "ca_file": "/etc/ca.pem"}, "rediss://"),
        ({"url": "rediss://a", "ca_file": "/no/such/ca.pem"}, "/no/such/ca.pem"),
        ({"url": "rediss://a", "key_file": "/etc/hostname"}, "cert_file"),
        ({"url": "redis://a", "protocol": "4"}, "protocol"),
        ({"url": "redis://a", "tls_verify": "maybe"}, "tls_verify"),
        ({"uri": "redis://a"}, "did you mean 'url'"),
    ],
)
def test_what_cannot_work_is_refused_when_it_is_read(options: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        RawOptions.of(options).into(RedisOptions)


@pytest.mark.parametrize(
    "url", ["redis://:hunter2@cache", "redis://kv:hunter2@cache/0", "redis://h,kv:hunter2@cache/0"]
)
def test_a_password_in_a_url_is_refused_without_being_shown(url: str) -> None:
    with pytest.raises(ConfigError, match="password") as caught:
        RawOptions.of({"url": url}).into(RedisOptions)
    assert "hunter2" not in str(caught.value)


def test_records_over_the_servers_limit_are_refused_at_configuration() -> None:
    options = RedisOptions(url="redis://a", max_value_nbytes=1 << 20)
    with pytest.raises(ConfigError, match="proto-max-bulk-len"):
        RedisBackend(options, Context(record_nbytes=(1 << 20) + 1))
    with RedisBackend(options, Context(record_nbytes=1 << 20)) as backend:
        assert backend.traits.max_nbytes == 1 << 20
        with pytest.raises(BackendError, match="max_value"):
            backend.put(new_key(), memoryview(bytes((1 << 20) + 1)))


def test_as_many_threads_as_connections_are_asked_for() -> None:
    with open_backend("redis://a", connections=7) as backend:
        assert backend.traits.io_threads == 7
    assert RedisBackend.traits.io_threads == 4


def everything(error: BaseException | None) -> str:
    """What a log of `error` with all that caused it would show."""
    text = ""
    while error is not None:
        text += f"{error!r} {error} {error.args}"
        error = error.__cause__ or error.__context__
    return text


@pytest.mark.parametrize("kind", sorted(BACKENDS))
@pytest.mark.parametrize("more", [{}, {"master": "m", "sentinel_password": "hunter2-s"}, {"cluster": True}])
def test_no_secret_is_in_repr_logs_or_errors(
    kind: str, more: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with open_backend("redis://127.0.0.1:1", kind=kind, username="kv", password="hunter2", **more) as backend:
        shown = [repr(backend.options), repr(backend), repr(vars(backend)), str(backend.context)]
        shown += [repr(vars(backend._exchange)), repr(vars(backend._pool)), repr(backend._pool._dial)]
        with pytest.raises(BackendError) as caught:
            backend.contains(new_key())
    shown += [everything(caught.value), caplog.text]
    assert "hunter2" not in " ".join(shown)
    assert "127.0.0.1:1" in str(caught.value)


@pytest.mark.parametrize(
    ("url", "warned"),
    [
        ("redis://cache.example", True),
        ("redis://10.0.0.1,127.0.0.1", True),
        ("rediss://cache.example", False),
        ("redis://localhost", False),
        ("redis://[::1]", False),
        ("unix:///run/redis.sock", False),
    ],
)
def test_plain_text_to_another_host_warns_once(url: str, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    with open_backend(url, cluster="," in url):
        pass
    assert sum("unencrypted" in record.message for record in caplog.records) == warned


def test_a_certificate_that_is_not_checked_warns(caplog: pytest.LogCaptureFixture) -> None:
    with open_backend("rediss://cache.example", tls_verify="none"):
        pass
    assert "not checked" in caplog.text
