"""A configuration is read strictly: each mistake is named with file, line, path and remedy."""

from __future__ import annotations

import enum
import os
import pickle
from dataclasses import FrozenInstanceError, dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from lmcache_core import nodes
from lmcache_core.config import (
    CacheConfig,
    PluginsConfig,
    TierConfig,
    find_config,
    load_config,
    parse_config,
)
from lmcache_core.endpoints import Address, ServerConfig, TcpConfig, default_socket, parse_address
from lmcache_core.errors import ConfigError, PluginIncompatible
from lmcache_core.options import RawOptions, option_fields
from lmcache_core.settings import Setting, settings
from lmcache_core.trace import TraceConfig

DESIGNED = """\
chunk_tokens: 256
device: auto
staging: 64MiB
write: on_evict
lease_timeout: 2min
key_secret: "${SECRET}"
tiers:
  - {name: host, backend: memory, capacity: 16GiB}
  - name: disk
    backend: disk
    capacity: 200GiB
    options: {path: /var/cache/lmcache}
  - {name: pool, backend: redis@lmcache-redis, timeout: 500ms, policy: lru, codec: zstd,
     options: {url: "rediss://user:hunter2@cache:6379/0", password: "${REDIS_PASSWORD}"}}
plugins: {disable: [nixl], hooks: [log], inline: null}
"""
ENVIRON = {"SECRET": "s3cret", "REDIS_PASSWORD": "hunter2"}


def parse(text: str, **environ: str) -> CacheConfig:
    return parse_config(text, "lmcache.yaml", environ)


def problem(text: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text, **environ)
    return str(caught.value)


def shown(config: CacheConfig) -> dict[str, tuple[str, str]]:
    return {s.path: (s.value, s.source) for s in settings(config, "", config.origins)}


def test_a_whole_file_becomes_frozen_dataclasses() -> None:
    config = parse_config(DESIGNED, "lmcache.yaml", ENVIRON)
    assert config.staging_nbytes == 64 << 20
    assert config.lease_timeout_s == 120.0
    assert config.key_secret == "s3cret"
    assert [(t.name, t.backend, t.capacity_nbytes, t.timeout_s) for t in config.tiers] == [
        ("host", "memory", 16 << 30, 10.0),
        ("disk", "disk", 200 << 30, 10.0),
        ("pool", "redis@lmcache-redis", None, 0.5),
    ]
    assert (config.tiers[2].policy, config.tiers[2].codec) == ("lru", "zstd")
    assert config.plugins == PluginsConfig(disable=("nixl",), hooks=("log",))
    assert config.host is config.tiers[0]
    with pytest.raises(FrozenInstanceError):
        config.write = "through"  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_tier_has_checksums_unless_told_and_nothing_else_is_taken_for_that() -> None:
    text = "tiers: [{backend: memory, capacity: 1GiB}, {backend: mooncake%s}]"
    assert parse(text % "").tiers[1].checksum == "xxh3"
    assert parse(text % ", checksum: none").tiers[1].checksum == "none"
    said = problem(text % ", checksum: crc32")
    assert "tiers.mooncake.checksum: 'crc32' is none of xxh3, none" in said


def test_no_secret_is_in_a_repr() -> None:
    config = parse_config(DESIGNED, "lmcache.yaml", ENVIRON)
    assert "s3cret" not in repr(config)
    assert "hunter2" not in repr(config)


def test_without_a_file_there_is_one_host_tier_of_a_gibibyte() -> None:
    config = parse("")
    assert config == CacheConfig()
    assert [(t.name, t.backend, t.capacity_nbytes) for t in config.tiers] == [("host", "memory", 1 << 30)]


def test_a_misspelt_key_is_named_with_file_line_path_and_suggestion() -> None:
    text = "# S33\ntiers: [{type: disk, path: /x, capasity: 1GiB}]\n"
    lines = problem(text).splitlines()
    assert any(line.startswith("lmcache.yaml:2: tiers[0].type: unknown key") for line in lines)
    assert any(line.startswith("lmcache.yaml:2: tiers[0].path: unknown key") and "options" in line for line in lines)
    assert any(
        line.startswith("lmcache.yaml:2: tiers[0].capasity: unknown key; did you mean 'capacity'?") for line in lines
    )
    assert any(line.startswith("lmcache.yaml:2: tiers[0].backend: is required") for line in lines)


def test_a_named_tier_is_called_by_its_name_in_the_path() -> None:
    text = "tiers:\n  - name: disk\n    backend: disk\n    capasity: 1GiB\n"
    assert problem(text).startswith("lmcache.yaml:4: tiers.disk.capasity: unknown key; did you mean 'capacity'?")


@pytest.mark.parametrize(
    ("capacity", "nbytes"), [("1GB", 10**9), ("1GiB", 2**30), ("1000", 1000), ('"1000"', 1000), ("1.5 MiB", 3 << 19)]
)
def test_capacity_units_differ(capacity: str, nbytes: int) -> None:
    assert parse(f"tiers: [{{backend: memory, capacity: {capacity}}}]").tiers[0].capacity_nbytes == nbytes


@pytest.mark.parametrize(
    ("capacity", "says"),
    [
        ("1G", "write GiB for powers of 1024 or GB"),
        ("-1", "is not a size"),
        ("lots", "is not a size"),
        ("0", "at least 1 byte"),
        ("yes", "is not a size"),
        ("[1GiB]", "a list, where one value is expected"),
        ("{a: 1}", "a mapping, where one value is expected"),
        ("1.5", "whole number of bytes"),
    ],
)
def test_a_capacity_that_is_none_is_refused_in_its_line(capacity: str, says: str) -> None:
    message = problem(f"tiers:\n  - backend: memory\n    capacity: {capacity}\n")
    assert message.startswith("lmcache.yaml:3: tiers.memory.capacity: ")
    assert says in message


def test_the_environment_overrides_the_file_and_says_so() -> None:
    variable = "LMCACHE__TIERS__HOST__CAPACITY"
    config = parse_config(DESIGNED, "lmcache.yaml", ENVIRON | {variable: "8GiB", "LMCACHE__CHUNK_TOKENS": "64"})
    assert config.tiers[0].capacity_nbytes == 8 << 30
    assert config.chunk_tokens == 64
    assert shown(config)["tiers.host.capacity"] == ("8GiB", f"environment variable {variable}")


def test_every_kind_of_place_can_be_overridden() -> None:
    environ = {
        "LMCACHE__WRITE": "through",
        "LMCACHE__LEASE_TIMEOUT_S": "5",
        "LMCACHE__STAGING_NBYTES": "1MiB",
        "LMCACHE__PLUGINS__DISABLE": "a, b",
        "LMCACHE__PLUGINS__HOOKS": "",
        "LMCACHE__TIERS__DISK__TIMEOUT": "1s",
        "LMCACHE__TIERS__DISK__OPTIONS__PATH": "/elsewhere",
        "LMCACHE__TIERS__POOL__OPTIONS__DB": "3",
        "LMCACHE_SOMETHING_ELSE": "not ours",
        "LMCACHE_CONFIG": "not looked at here",
    }
    config = parse_config(DESIGNED, "lmcache.yaml", ENVIRON | environ)
    assert (config.write, config.lease_timeout_s, config.staging_nbytes) == ("through", 5.0, 1 << 20)
    assert config.plugins == PluginsConfig(disable=("a", "b"), hooks=())
    assert config.tiers[1].timeout_s == 1.0

    @dataclass(frozen=True)
    class Options:
        path: Path

    assert config.tiers[1].options.into(Options).path == Path("/elsewhere")
    assert "db" in config.tiers[2].options.table.items


def test_the_default_tier_can_be_overridden_without_a_file() -> None:
    assert parse("", LMCACHE__TIERS__HOST__CAPACITY="2GiB").tiers[0].capacity_nbytes == 2 << 30


def test_a_tier_with_a_dash_is_named_with_an_underscore_in_the_environment() -> None:
    text = "tiers: [{name: near-disk, backend: disk}]"
    assert parse(text, LMCACHE__TIERS__NEAR_DISK__TIMEOUT="3").tiers[0].timeout_s == 3.0


def test_an_override_replaces_the_same_value_in_its_other_spelling() -> None:
    text = "lease_timeout_s: 7\ntiers: [{backend: memory, capacity_nbytes: 1GiB}]"
    config = parse(text, LMCACHE__LEASE_TIMEOUT="8", LMCACHE__TIERS__MEMORY__CAPACITY="2GiB")
    assert (config.lease_timeout_s, config.tiers[0].capacity_nbytes) == (8.0, 2 << 30)
    text = "tiers: [{backend: disk, options: {path: /x, idle_s: 7}}]"
    options = parse(text, LMCACHE__TIERS__DISK__OPTIONS__IDLE="8").tiers[0].options
    assert options.into(Options).idle_s == 8.0


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("LMCACHE__TIERS__HOST__CAPASITY", "LMCACHE__TIERS__HOST__CAPACITY"),
        ("LMCACHE__CHUNK_TOKEN", "LMCACHE__CHUNK_TOKENS"),
        ("LMCACHE__TIERS__HOTS__TIMEOUT", "LMCACHE__TIERS__HOST__TIMEOUT"),
        ("LMCACHE__TIERS__DISC__OPTIONS__PATH", "LMCACHE__TIERS__DISK__OPTIONS__PATH"),
        ("LMCACHE__PLUGIN__DISABLE", "LMCACHE__PLUGINS__DISABLE"),
        ("LMCACHE__PLUGINS__DISABLED", "LMCACHE__PLUGINS__DISABLE"),
        ("LMCACHE__TIERS__HOST__OPTION__X", "LMCACHE__TIERS__HOST__OPTIONS__X"),
    ],
)
def test_a_misspelt_variable_is_an_error_with_the_nearest_spelling(variable: str, meant: str) -> None:
    message = problem(DESIGNED, **ENVIRON, **{variable: "1"})
    assert message == f"environment variable {variable}: names no setting; did you mean {meant!r}?"


@pytest.mark.parametrize(
    "rest",
    [
        "",
        "TIERS",
        "PLUGINS",
        "TIERS__HOST",
        "TIERS__HOST__NAME",
        "TIERS__HOST__OPTIONS",
        "SERVER",
        "SERVER__TCP",
        "SERVER__HTTP__X",
        "A__B__C__D__E",
    ],
)
def test_a_variable_that_names_no_single_value_is_an_error(rest: str) -> None:
    assert f"environment variable LMCACHE__{rest}: names no setting" in problem("", **{f"LMCACHE__{rest}": "1"})


def test_a_wrong_value_in_a_variable_is_blamed_on_the_variable() -> None:
    message = problem("", LMCACHE__TIERS__HOST__CAPACITY="1G")
    assert message.startswith("environment variable LMCACHE__TIERS__HOST__CAPACITY: tiers.host.capacity: '1G'")


def test_every_value_says_where_it_came_from_and_secrets_are_masked() -> None:
    config = parse_config(DESIGNED, "lmcache.yaml", ENVIRON | {"LMCACHE__TIERS__POOL__OPTIONS__TOKEN": "hunter2"})
    table = shown(config)
    assert table["lease_timeout"] == ("120s", "lmcache.yaml:5")
    assert table["key_secret"] == ("${SECRET}", "lmcache.yaml:6")
    assert table["tiers.host.policy"] == ("s3fifo", "default")
    assert table["tiers.disk.capacity"] == ("200GiB", "lmcache.yaml:11")
    assert table["tiers.disk.options.path"] == ("/var/cache/lmcache", "lmcache.yaml:12")
    assert table["tiers.pool.options.password"] == ("${REDIS_PASSWORD}", "lmcache.yaml:14")
    assert table["tiers.pool.options.url"] == ("rediss://user:***@cache:6379/0", "lmcache.yaml:14")
    assert table["tiers.pool.options.token"][0] == "***"
    assert table["plugins.disable"] == ("[nixl]", "lmcache.yaml:15")
    assert table["plugins.inline"] == ("null", "lmcache.yaml:15")
    assert "hunter2" not in str(table)
    assert "s3cret" not in str(table)


def test_a_secret_in_clear_text_is_refused_without_repeating_it() -> None:
    message = problem('key_secret: "hunter2"')
    assert message.startswith("lmcache.yaml:1: key_secret: is a secret")
    assert "${KEY_SECRET}" in message
    assert "hunter2" not in message
    assert problem("key_secret: $${x}").startswith("lmcache.yaml:1: key_secret: is a secret")
    assert parse("", LMCACHE__KEY_SECRET="hunter2").key_secret == "hunter2"
    assert parse('key_secret: ""').key_secret == ""


def test_variables_are_replaced_in_values_only() -> None:
    config = parse('tiers: [{backend: disk, options: {a: "${A}-${B}", b: "$${A}", c: $A, "${A}": x}}]', A="1", B="")

    @dataclass(frozen=True)
    class Options:
        a: str
        b: str
        c: str

    with pytest.raises(ConfigError, match=r"tiers\.disk\.options\.\$\{A\}: unknown key"):
        config.tiers[0].options.into(Options)
    items = config.tiers[0].options.table.items
    assert [items[key].value for key in "abc"] == ["1-", "${A}", "$A"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ('"${MISSING}"', "lmcache.yaml:2: environment variable MISSING is not set"),
        (f'"${{{"M" * 5000}}}"', f"lmcache.yaml:2: environment variable {'M' * 100}… is not set"),
        ('"${}"', "lmcache.yaml:2: a variable is written ${NAME}"),
        ('"${A:-b}"', "lmcache.yaml:2: a variable is written ${NAME}"),
        ('"${A"', "lmcache.yaml:2: a variable is written ${NAME}"),
    ],
)
def test_a_variable_that_is_missing_or_malformed_is_named(value: str, says: str) -> None:
    assert says in problem(f"chunk_tokens: 1\ndevice: {value}\n", A="1")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("chunk_tokens: 1\nchunk_tokens: 2", "lmcache.yaml:2: duplicate key 'chunk_tokens', first written at lmcache."),
        ("lease_timeout: 1\nlease_timeout_s: 2", "lmcache.yaml:2: lease_timeout_s: given twice, also as lease_timeout"),
        ("tiers:\n\t- {backend: disk}", "lmcache.yaml:2: a tab; YAML indents with spaces"),
        ("tiers:\n  - backend: disk\n    options:\n\t  path: x", "lmcache.yaml:4: a tab"),
        ("write: no", "lmcache.yaml:1: write: 'no' is none of through, second_use, on_evict"),
        ("write: trough", "did you mean 'through'?"),
        ("chunk_tokens: 017", "lmcache.yaml:1: chunk_tokens: '017' is not a whole number"),
        ("chunk_tokens: 0x10", "is not a whole number"),
        ("chunk_tokens: 1_000", "is not a whole number"),
        ("chunk_tokens: 2.0", "is not a whole number"),
        ("chunk_tokens: 1e3", "is not a whole number"),
        ("chunk_tokens: 0", "lmcache.yaml:1: chunk_tokens: must be 1 to 1,048,576"),
        ("chunk_tokens:", "lmcache.yaml:1: chunk_tokens: is empty"),
        ("chunk_tokens: [1]", "lmcache.yaml:1: chunk_tokens: a list, where one value is expected"),
        ("chunk_tokenz: 1", "lmcache.yaml:1: chunk_tokenz: unknown key; did you mean 'chunk_tokens'?"),
        ("origins: {}", "lmcache.yaml:1: origins: unknown key"),
        ("staging: 5", "lmcache.yaml:1: staging: must be at least 1MiB"),
        ("lease_timeout: 0", "lmcache.yaml:1: lease_timeout: must be above zero"),
        ("lease_timeout: 1m", "durations end in"),
        ("device: ''", "lmcache.yaml:1: device: '' is not a plugin name"),
        ("device: cuda;rm", "is not a plugin name"),
        ("- a", "lmcache.yaml:1: the configuration must be a mapping"),
        ("just text", "lmcache.yaml:1: the configuration must be a mapping"),
        ("a: &x 1", "lmcache.yaml:1: anchors and aliases"),
        ("a: 1\nb: *x", "lmcache.yaml:2: anchors and aliases"),
        ("<<: {a: 1}", "lmcache.yaml:1: <<: unknown key"),
        ("a: !!python/object/apply:os.system [ls]", "lmcache.yaml:1: tags (tag:yaml.org,2002:python"),
        ("a: !env X", "lmcache.yaml:1: tags (!env) are not supported"),
        ("a: 1\n---\nb: 2", "lmcache.yaml:2: a second document"),
        ("? [a]\n: 1", "lmcache.yaml:1: a key must be plain text"),
        ("{a: ${B}}", 'quote it: "${NAME}"'),
        ("a: 'x", "lmcache.yaml:1: not valid YAML"),
        ("a: b: c", "lmcache.yaml:1: not valid YAML: mapping values are not allowed here"),
        ("a: 1\nb: \x07", "lmcache.yaml:2: character U+0007 is not allowed"),
        ("a: " + "[" * 30, "lmcache.yaml:1: nested deeper than 20 levels"),
        ("[" * 100_000, "nested deeper than 20 levels"),
        ("a: [" + "1," * 30_000 + "]", "more than 20000 values"),
        ("#" * (nodes.MAX_TEXT_NBYTES + 1), "larger than the limit"),
        ("tiers: []", "lmcache.yaml:1: tiers: needs at least one tier"),
        ("tiers: disk", "lmcache.yaml:1: tiers: expected a list; write [a, b]"),
        ("tiers: [disk]", "lmcache.yaml:1: tiers[0]: one value, where a mapping"),
        ("tiers: {backend: disk}", "lmcache.yaml:1: tiers: expected a list"),
        ("tiers: [{backend: disk, options: [a]}]", "tiers.disk.options: a list, where a mapping"),
        ("tiers: [{backend: memory}]", "tiers.memory.capacity: is required for the memory backend"),
        ("tiers: [{name: Disk, backend: disk}]", "'Disk' is not a tier name"),
        ("tiers: [{name: a__b, backend: disk}]", "'a__b' is not a tier name"),
        ("tiers: [{name: ../x, backend: disk}]", "is not a tier name"),
        ("tiers: [{name: a, backend: a b}]", "tiers.a.backend: 'a b' is not a plugin name"),
        ("tiers: [{name: a, backend: disk, policy: ''}]", "tiers.a.policy: '' is not a plugin name"),
        ("tiers: [{name: a, backend: disk, timeout: 0}]", "tiers.a.timeout: must be above zero"),
        ("plugins: {disable: log}", "lmcache.yaml:1: plugins.disable: expected a list; write [a, b]"),
        ("plugins: {disabled: [log]}", "plugins.disabled: unknown key; did you mean 'disable'?"),
        ("plugins: {hooks: [a b]}", "plugins.hooks: 'a b' is not a plugin name"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_in_its_line(text: str, says: str) -> None:
    assert says in problem(text)


def test_the_memory_tier_is_first_and_alone() -> None:
    text = "tiers:\n- {backend: disk}\n- {name: host, backend: memory, capacity: 1GiB}"
    assert problem(text).startswith("lmcache.yaml:3: tiers.host.backend: memory is the host memory itself and must be")
    text = "tiers:\n- {name: a, backend: memory, capacity: 1GiB}\n- {name: b, backend: memory, capacity: 1GiB}"
    assert "lmcache.yaml:3: tiers.b.backend: memory is the host memory itself and may be used by one" in problem(text)
    assert parse("tiers: [{backend: disk}]").host is None


@pytest.mark.parametrize("names", [("a", "a"), ("a-b", "a_b")])
def test_tier_names_are_distinct(names: tuple[str, str]) -> None:
    text = "tiers:\n" + "".join(f"- {{name: {name}, backend: disk}}\n" for name in names)
    assert problem(text).startswith(f"lmcache.yaml:3: tiers.{names[1]}.name: two tiers are called {names[1]!r}")


def test_programs_are_checked_like_files() -> None:
    with pytest.raises(ConfigError, match="two tiers"):
        CacheConfig(tiers=(TierConfig("a", "disk"), TierConfig("a", "disk")))
    with pytest.raises(ConfigError, match="capacity"):
        TierConfig("host", "memory")
    with pytest.raises(ConfigError, match="write"):
        CacheConfig(write="sometimes")  # type: ignore[arg-type]


def test_all_mistakes_are_said_at_once_in_the_order_of_the_file() -> None:
    text = "chunk_tokens: x\nwrite: y\ntiers:\n  - {backend: disk, capacity: 1G}\n  - {backend: memory, timeout: z}\n"
    assert [line.split(": ")[0] for line in problem(text).splitlines()] == [f"lmcache.yaml:{n}" for n in (1, 2, 4, 5)]


# Files


def test_a_named_file_that_is_missing_is_fatal(tmp_path: Path) -> None:
    missing = tmp_path / "nope.yaml"
    with pytest.raises(ConfigError, match=r"nope\.yaml: cannot read the configuration: No such file"):
        load_config(missing, {})
    with pytest.raises(ConfigError, match=r"nope\.yaml.*named by \$LMCACHE_CONFIG"):
        load_config(None, {"LMCACHE_CONFIG": str(missing)})


def test_the_file_is_the_named_one_then_the_variable_then_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_config(None, {}) is None
    assert load_config(None, {}) == CacheConfig()
    for number, name in enumerate(("lmcache.yaml", "variable.yaml", "named.yaml"), start=1):
        Path(name).write_text(f"chunk_tokens: {number}\n")
    assert load_config(None, {}).chunk_tokens == 1
    assert load_config(None, {"LMCACHE_CONFIG": ""}).chunk_tokens == 1
    assert load_config(None, {"LMCACHE_CONFIG": "variable.yaml"}).chunk_tokens == 2
    assert load_config("named.yaml", {"LMCACHE_CONFIG": "variable.yaml"}).chunk_tokens == 3


def test_a_dangling_link_in_the_directory_is_not_taken_for_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lmcache.yaml").symlink_to("gone")
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(None, {})


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path, {})
    path = tmp_path / "c.yaml"
    path.write_bytes(b"write: through\ndevice: \xff\n")
    with pytest.raises(ConfigError, match=r"c\.yaml:2: not UTF-8"):
        load_config(path, {})
    path.write_bytes(b"#" * (nodes.MAX_TEXT_NBYTES + 1))
    with pytest.raises(ConfigError, match="larger than the limit"):
        load_config(path, {})
    with pytest.raises(ConfigError, match="larger than the limit"):
        load_config("/dev/zero", {})


def test_a_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(b"\xef\xbb\xbfchunk_tokens: 7\n")
    assert load_config(path, {}).chunk_tokens == 7


@hypothesis_settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("abc:[]{}-,&*!|>'\"%@`#\n\t $\\~?012"), max_size=60))
def test_any_text_is_a_configuration_or_a_config_error(text: str) -> None:
    for whole in (text, f"tiers: [{{backend: disk, options: {{a: {text}}}}}]"):
        try:
            parse(whole)
        except ConfigError as error:
            assert str(error).startswith("lmcache.yaml")  # noqa: PT017  # either outcome is right


# Options of a backend


class Mode(enum.Enum):
    FAST = "fast"
    SAFE = "safe"


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    count: int = 3
    pause_s: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    path: Path
    name: str = "x"
    depth: int = 1
    ratio: float = 0.5
    direct: bool = True
    buffer_nbytes: int = 4096
    sizes_nbytes: tuple[int, ...] = ()
    connect_timeout_s: float = 1.0
    idle_s: float | None = None
    kind: Literal["a", "b", 3] = "a"
    mode: Mode = Mode.SAFE
    hosts: tuple[str, ...] = ()
    pair: tuple[int, int] = (0, 0)
    retry: Retry = Retry()  # frozen
    password: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if self.depth < 0:
            raise ValueError("depth must not be negative")


def options(yaml: str, **environ: str) -> Options:
    text = "tiers:\n  - backend: disk\n    options:\n" + "".join(f"      {line}\n" for line in yaml.splitlines())
    return parse(text, **environ).tiers[0].options.into(Options)


def test_options_become_the_dataclass_of_the_backend() -> None:
    yaml = """\
path: /x
name: no
depth: 7
ratio: 1e-3
direct: false
buffer: 1MiB
sizes: [1KiB, 5]
connect_timeout: 250ms
idle: null
kind: 3
mode: fast
hosts: [a, 017]
pair: [1, -2]
retry: {count: 5, pause_s: 1s}
password: "${PW}"
"""
    assert options(yaml, PW="p") == Options(
        path=Path("/x"), name="no", depth=7, ratio=1e-3, direct=False, buffer_nbytes=1 << 20, sizes_nbytes=(1024, 5),
        connect_timeout_s=0.25, idle_s=None, kind=3, mode=Mode.FAST, hosts=("a", "017"), pair=(1, -2),
        retry=Retry(count=5, pause_s=1.0), password="p",
    )  # fmt: skip


def test_options_of_a_program_are_the_same_values() -> None:
    values = {
        "path": Path("/x"), "depth": 7, "ratio": 1, "direct": False, "buffer_nbytes": 8192, "connect_timeout_s": "2s",
        "mode": Mode.FAST, "hosts": ("a", "b"), "retry": Retry(count=1), "password": "p", "sizes": [1],
    }  # fmt: skip
    assert RawOptions.of(values).into(Options) == Options(
        path=Path("/x"), depth=7, ratio=1.0, direct=False, buffer_nbytes=8192, connect_timeout_s=2.0, mode=Mode.FAST,
        hosts=("a", "b"), retry=Retry(count=1), password="p", sizes_nbytes=(1,),
    )  # fmt: skip
    tier = TierConfig("t", "disk", options=RawOptions.of({"path": "/x"}))
    assert tier.options.into(Options).path == Path("/x")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("pahth: /x", "lmcache.yaml:5: tiers.disk.options.pahth: unknown key; did you mean 'path'?"),
        ("direct: yes", "lmcache.yaml:5: tiers.disk.options.direct: 'yes' is not a switch; write true or false"),
        ("direct: 1", "is not a switch"),
        ("depth: 07", "is not a whole number"),
        ("depth: -1", "lmcache.yaml:4: tiers.disk.options: depth must not be negative"),
        ("ratio: .nan", "is not a number"),
        ("ratio: 1e999", "is not a number"),
        ("ratio: half", "is not a number"),
        ("buffer: 4K", "write KiB"),
        ("sizes: [1, x]", "tiers.disk.options.sizes[1]: 'x' is not a size"),
        ("connect_timeout: soon", "is not a duration"),
        ("connect_timeout: -1", "is not a duration"),
        ("kind: c", "'c' is none of a, b, 3"),
        ("mode: FAST", "'FAST' is none of fast, safe; did you mean 'fast'?"),
        ("hosts: a", "expected a list"),
        ("pair: [1]", "expected 2 values, got 1"),
        ("retry: {count: x}", "tiers.disk.options.retry.count: 'x' is not a whole number"),
        ("retry: {cuont: 1}", "tiers.disk.options.retry.cuont: unknown key; did you mean 'count'?"),
        ("retry: 3", "where a mapping (key: value) is expected"),
        ("name:", "tiers.disk.options.name: is empty"),
        ("password: hunter2", 'is a secret, which must not stand in a file; write "${PASSWORD}"'),
    ],
)
def test_a_wrong_option_is_named_in_its_line(line: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        options(f"path: /x\n{line}")
    assert says in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_missing_option_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^lmcache\.yaml:2: tiers\.disk\.options\.path: is required and missing$"):
        parse("tiers:\n  - backend: disk\n").tiers[0].options.into(Options)
    with pytest.raises(ConfigError, match=r"program: options\.path: is required"):
        RawOptions.of({}).into(Options)


def test_an_empty_path_is_refused_and_a_tilde_is_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/user")
    assert options("path: ~/cache").path == Path("/home/user/cache")
    for bad in ("", "a\0b"):
        with pytest.raises(ConfigError, match="is not a path"):
            RawOptions.of({"name": "n", "path": bad}).into(Options)
    with pytest.raises(ConfigError, match="is empty"):
        options("path: ~")


def test_a_type_that_no_configuration_can_express_is_the_plugins_fault() -> None:
    @dataclass(frozen=True)
    class Odd:
        callback: object

    with pytest.raises(PluginIncompatible, match="callback"):
        RawOptions.of({"callback": "x"}).into(Odd)


def test_a_program_cannot_pass_a_wrong_type_either() -> None:
    for values in (
        {"name": 3},
        {"direct": 1},
        {"depth": True},
        {"ratio": float("nan")},
        {"depth": "x"},
        {"hosts": "a"},
    ):
        with pytest.raises(ConfigError, match="program: options"):
            RawOptions.of({"path": "/x", **values}).into(Options)


def test_options_show_their_effective_values_with_secrets_masked() -> None:
    text = 'tiers:\n  - {backend: disk, options: {path: /x, password: "${PW}", connect_timeout: 250ms}}'
    config = parse(text, PW="hunter2", LMCACHE__TIERS__DISK__OPTIONS__PASSWORD="hunter3")
    origins = dict(config.origins)
    typed = config.tiers[0].options.into(Options, origins)
    table = {s.path: s for s in settings(typed, "tiers.disk.options", origins)}
    at = "tiers.disk.options."
    assert table[f"{at}connect_timeout"] == Setting(f"{at}connect_timeout", "0.25s", "lmcache.yaml:2")
    assert table[f"{at}password"].value == "***"
    assert table[f"{at}password"].source == "environment variable LMCACHE__TIERS__DISK__OPTIONS__PASSWORD"
    assert table[f"{at}buffer"] == Setting(f"{at}buffer", "4KiB", "default")
    assert table[f"{at}mode"].value == "safe"
    assert table[f"{at}retry.pause"].value == "0.1s"
    assert "hunter" not in str(table)


def test_what_sounds_like_a_secret_is_masked_though_no_plugin_says_that_it_is_one() -> None:
    text = 'tiers:\n  - {backend: nobodys, options: {path: /x, password: hunter2, api_keys: [hunter3], token: "${PW}"}}'
    config = parse(text, PW="hunter4")
    table = {s.path: s.value for s in settings(config, "", dict(config.origins))}
    at = "tiers.nobodys.options."
    assert (table[f"{at}path"], table[f"{at}password"], table[f"{at}token"]) == ("/x", "***", "${PW}")
    assert "hunter" not in str(table)


# The server


def test_variables_reach_the_server_section_and_what_is_below_it() -> None:
    config = parse(
        "server: {http: '127.0.0.1:1', max_clients: 3}",
        LMCACHE__SERVER__HTTP="[::1]:9464",
        LMCACHE__SERVER__ALLOWED_UIDS="1000, 1001",
        LMCACHE__SERVER__TCP__LISTEN="127.0.0.1:0",
        LMCACHE__SERVER__TCP__TOKEN="hunter2-hunter2-hunter2",
        LMCACHE__SOCKET="/run/x",
    )
    assert config.server.max_clients == 3
    assert config.server.http == "[::1]:9464"
    assert config.server.allowed_uids == (1000, 1001)
    assert config.server.tcp.token == "hunter2-hunter2-hunter2"
    assert config.socket == "/run/x"
    table = shown(config)
    assert table["server.tcp.listen"] == ("127.0.0.1:0", "environment variable LMCACHE__SERVER__TCP__LISTEN")
    assert table["server.tcp.token"][0] == "***"
    assert table["server.max_clients"] == ("3", "lmcache.yaml:1")
    assert "hunter2" not in str(table) + repr(config)


def test_the_daemon_listens_where_the_server_section_says_else_where_engines_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert parse("socket: /a\nserver: {socket: /b}").daemon_socket == Path("/b")
    assert parse("socket: /a").daemon_socket == Path("/a")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert parse("").daemon_socket == parse("socket: auto").daemon_socket == Path("/run/user/7/lmcache/lmcache.sock")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr("os.getuid", lambda: 0)
    assert default_socket() == Path("/run/lmcache/lmcache.sock")
    monkeypatch.setattr("os.getuid", lambda: 7)
    assert default_socket() == Path("/tmp/lmcache-7/lmcache.sock")
    monkeypatch.setattr("pathlib.Path.lstat", lambda path: os.stat_result((0o40777, 1, 1, 1, 8, 8, 0, 0, 0, 0)))
    with pytest.raises(ConfigError, match="another user's"):
        default_socket()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('socket: ""', "socket: is empty; give a path, auto, or leave the key out"),
        ("socket_timeout: 0s", "socket_timeout: must be above zero"),
        ("server: {max_clients: 0}", "server.max_clients: must be 1 to 65,536"),
        ("server: {max_client: 5}", "server.max_client: unknown key; did you mean 'max_clients'?"),
        ("server: {http: '10.0.0.1:80'}", "server.http: 10.0.0.1:80 is not on loopback"),
        ("server: {page: '0.0.0.0:9466'}", "server.page: 0.0.0.0:9466 is not on loopback"),
        (
            "server: {http: '127.0.0.1:1', page: '127.0.0.1:1'}",
            "server.page: 127.0.0.1:1 is the address of server.http",
        ),
        ("server: {page_token: '${SHORT}'}", "server.page_token: needs at least 16 characters"),
        ("server: {page_token: in-clear-text-in-clear-text}", "server.page_token: "),
    ],
)
def test_a_mistake_in_the_server_section_is_named(text: str, says: str) -> None:
    assert f"lmcache.yaml:1: {says}" in problem(text, SHORT="short")


def test_addresses_are_an_ip_and_a_port() -> None:
    assert parse_address("127.0.0.1:80") == Address("127.0.0.1", 80)
    assert str(parse_address("[::1]:80")) == "[::1]:80"
    assert parse_address("[::1]:0").is_loopback
    assert not parse_address("0.0.0.0:0").is_loopback
    for text in ("", "80", "::1:80", "[127.0.0.1:80", "1.2.3:80", "1.2.3.4", "1.2.3.4:", "1.2.3.4:-1", "1.2.3.4:65536"):
        with pytest.raises(ValueError, match="is not an IP address and a port"):
            parse_address(text)


# The page


def test_the_example_of_the_page_is_a_good_configuration() -> None:
    text = (Path(__file__).parents[2] / "docs" / "config.md").read_text(encoding="utf-8")
    example = text.split("```yaml\n")[1].split("```")[0]
    assert [tier.name for tier in parse(example, REDIS_PASSWORD="x").tiers] == ["host", "disk", "pool"]


def test_every_setting_is_documented() -> None:
    page = Path(__file__).parents[2] / "docs" / "config.md"
    text = page.read_text(encoding="utf-8")
    tables = ((CacheConfig, ""), (TierConfig, "tiers[]."), (PluginsConfig, "plugins."), (ServerConfig, "server."),
              (TcpConfig, "server.tcp."), (TraceConfig, "trace."))  # fmt: skip
    for kind, head in tables:
        for name in option_fields(kind):
            if (kind, name) == (ServerConfig, "tcp"):
                continue  # a table of its own
            assert f"| `{head}{name}` |" in text, f"{head}{name} has no row in {page}"
