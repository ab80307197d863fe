"""Options: each documented, each checked when it is read."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from lmcache_core import ConfigError, RawOptions, load_config
from lmcache_mooncake import MooncakeOptions
from lmcache_mooncake.address import Address

README = (Path(__file__).parent.parent / "README.md").read_text()
DOCUMENTED = {
    cells[0].strip("` "): [cell.strip() for cell in cells]
    for line in README.splitlines()
    if line.startswith("| `") and len(cells := line.strip("|").split("|")) >= 4
}


def written(name: str) -> str:
    return name.removesuffix("_nbytes").removesuffix("_s")


@pytest.mark.parametrize("option", dataclasses.fields(MooncakeOptions), ids=lambda option: option.name)
def test_every_option_is_documented_with_its_default_and_unit(option: dataclasses.Field[object]) -> None:
    _, default, unit, meaning = DOCUMENTED[written(option.name)][:4]
    match option.default:
        case dataclasses.MISSING:
            assert default == "required"
        case str(text):
            assert default in (f'"{text}"', text)
        case None:
            assert default == "null"
        case bool(value):
            assert default == str(value).lower()
        case value if option.name.endswith("_s"):
            assert default == f"{value:g}s"
        case value:
            assert default == str(value)
    expected = "duration" if option.name.endswith("_s") else "size" if option.name.endswith("_nbytes") else None
    assert expected is None or unit == expected
    assert len(meaning) > 15


def test_nothing_is_documented_that_is_no_option() -> None:
    assert DOCUMENTED.keys() == {written(option.name) for option in dataclasses.fields(MooncakeOptions)}


def test_the_configurations_of_the_readme_can_be_read(tmp_path: Path) -> None:
    (first,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    (tmp_path / "lmcache.yaml").write_text(first)
    host, pool = load_config(tmp_path / "lmcache.yaml").tiers
    assert host.backend == "memory"
    options = pool.options.into(MooncakeOptions)
    assert (options.master, options.protocol, options.replicas, options.soft_pin) == ("10.0.0.1:50051", "rdma", 2, True)
    (walk,) = re.findall(r"cat >pool.yaml <<'END'\n(.*?)END\n", README, re.DOTALL)
    (tmp_path / "pool.yaml").write_text(walk)
    pool = load_config(tmp_path / "pool.yaml").tiers[1]
    assert pool.options.into(MooncakeOptions) == MooncakeOptions(master="127.0.0.1:50051")


def test_options_are_read_as_a_configuration_writes_them() -> None:
    raw = RawOptions.of(
        {"master": "m:1", "segment": "4GiB", "soft_pin": "true", "soft_pin_ttl": "10min", "threads": "8"}
    )
    assert raw.into(MooncakeOptions) == MooncakeOptions(
        master="m:1", segment_nbytes=4 << 30, soft_pin=True, soft_pin_ttl_s=600.0, threads=8
    )


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"master": "m"}, "HOST:PORT"),
        ({"master": "m:0"}, "port"),
        ({"master": "m:99999"}, "port"),
        ({"master": "etcd://m:1"}, "HOST:PORT"),
        ({"master": "m:1,n:1"}, "HOST:PORT"),
        ({"master": "m:1", "metadata": "m:8080"}, "metadata"),
        ({"master": "m:1", "metadata": "http://user:secret@m:8080/metadata"}, "metadata"),
        ({"master": "m:1", "hostname": "h:1"}, "hostname"),
        ({"master": "m:1", "protocol": "TCP"}, "protocol"),
        ({"master": "m:1", "protocol": "rdma", "devices": "a b"}, "devices"),
        ({"master": "m:1", "devices": "mlx5_0"}, "protocol: rdma"),
        ({"master": "m:1", "segment": "1MiB"}, "segment"),
        ({"master": "m:1", "prefer_local": "true"}, "segment"),
        ({"master": "m:1", "replicas": "0"}, "replicas"),
        ({"master": "m:1", "soft_pin_ttl": "1min"}, "soft_pin"),
        ({"master": "m:1", "soft_pin": "true", "soft_pin_ttl": "0s"}, "soft_pin_ttl"),
        ({"master": "m:1", "prefix": "a b"}, "prefix"),
        ({"master": "m:1", "threads": "0"}, "threads"),
        ({"master": "m:1", "connect_timeout": "0s"}, "connect_timeout"),
        ({"master": "m:1", "connect_timeout": "601s"}, "connect_timeout"),
    ],
)
def test_a_mistake_is_named(options: dict[str, str], problem: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=problem):
        RawOptions.of(options).into(MooncakeOptions)


def test_addresses_are_read_and_told_apart() -> None:
    assert Address.parse("[::1]:50051") == Address("::1", 50051)
    assert str(Address.parse("[fe80::1]:1")) == "[fe80::1]:1"
    assert Address.parse("127.0.0.9:1").is_local
    assert Address.parse("localhost:1").is_local
    assert not Address.parse("10.0.0.1:1").is_local
    assert not Address.parse("master:1").is_local
    assert Address.parse("127.0.0.1:1").seen_from() == "127.0.0.1"
