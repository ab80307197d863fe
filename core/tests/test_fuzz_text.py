"""What people and packages write may be anything: it is a configuration, a key, an offer, or one of our errors."""

from __future__ import annotations

import importlib
import itertools
import math
import random
import sys
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import click
import pytest
from click.testing import CliRunner
from fuzz_corpus import CONFIGS, KEYS, METADATA, STRUCTURES
from fuzzing import mutate, run_cases

from lmcache_core import plugins
from lmcache_core.chain import Chain
from lmcache_core.cli import config as config_commands
from lmcache_core.cli import incumbent, main
from lmcache_core.cli.key import prompt_of
from lmcache_core.config import CacheConfig, load_config, parse_config
from lmcache_core.errors import CacheError, ConfigError, PluginError
from lmcache_core.keys import ChunkKey
from lmcache_core.options import RawOptions
from lmcache_core.settings import settings

ENVIRON = {"REDIS_PASSWORD": "pw", "ODD": "a: [b", "EMPTY": ""}
GOOD = """\
chunk_tokens: 256
device: auto
write: through
lease_timeout: 60s
tiers:
  - {name: host, backend: memory, capacity: 1GiB}
  - {name: disk, backend: disk, capacity: 200GiB, policy: s3fifo, options: {path: /var/cache/lmcache, direct: auto}}
  - {name: pool, backend: redis@lmcache-redis, timeout: 500ms, options: {url: "rediss://c:6379/0", password: "${ODD}"}}
plugins: {disable: [a, b], hooks: [log], inline: ./mine.py}
server: {socket: /run/s, socket_mode: "0660", allowed_uids: [1, 2], http: "127.0.0.1:9464", tcp: {listen: ""}}
"""
TOKENS = [
    *(
        b"- ",
        b"? ",
        b": ",
        b"&a ",
        b"*a",
        b"!!int ",
        b"!t ",
        b"|\n",
        b">-\n",
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b"#",
        b"\t",
    ),
    *(b"---\n", b"...\n", b"%YAML 1.1\n---\n", b"%YAML 1." + b"9" * 5000 + b"\n---\n", b"%TAG ! a:\n---\n", b"<<: "),
    *(b'"\\UFFFFFFFF"', b'"\\ud800"', b'"\\0"', b'"\\x"', b"\xff", b"\xef\xbb\xbf", b"\xc2\x85", b"\xe2\x80\xa8"),
    *(b"${", b"${ODD}", b"${NOT_SET}", b"$${", b"${EMPTY}", b"null", b"~", b"no", b"017", b"1e999", b"-1", b".inf"),
    *(b"9" * 400, b"9" * 5000, b"1GiB", b"1PiB", b"99999999999PiB", b"500ms", b"0s", b"tiers:\n", b"  - backend: "),
    *(
        b"memory",
        b"disk",
        b"a@b",
        b"../..",
        b"inline:X",
        b"\t",
        b"[" * 30,
        b"- " * 30,
        b"\r",
        b"\n",
        b"\n  ",
        b"'",
        b'"',
    ),
]


def checked(error: CacheError) -> None:
    """Its text can be printed and is not as long as what it complains about."""
    text = str(error)
    text.encode()
    assert text.strip()
    assert all(len(line) < 2000 for line in text.splitlines()), f"a line of {max(map(len, text.splitlines()))}"


def read_config(text: str, environ: dict[str, str] | None = None) -> CacheConfig | None:
    try:
        config = parse_config(text, "lmcache.yaml", {**ENVIRON, **(environ or {})})
    except ConfigError as error:
        checked(error)
        return None
    assert 1 <= config.chunk_tokens <= 1 << 20
    assert 1 <= len(config.tiers) <= 16
    assert all(tier.capacity_nbytes is None or 1 <= tier.capacity_nbytes < 1 << 63 for tier in config.tiers)
    assert all(0 < tier.timeout_s < math.inf for tier in config.tiers)
    shown = [f"{setting.path} {setting.value} {setting.source}" for setting in settings(config, "", config.origins)]
    "\n".join(shown).encode()
    assert not any("pw" in line and "***" not in line for line in shown if "password" in line)
    return config


def test_any_text_is_a_configuration_or_a_config_error_that_says_where_and_costs_no_more_than_its_length() -> None:
    assert read_config(GOOD) is not None
    accepted = 0

    def one(rng: random.Random) -> int:
        nonlocal accepted
        data = mutate(rng, GOOD.encode(), TOKENS, most=4)
        accepted += read_config(data.decode("utf-8", "surrogateescape")) is not None
        return len(data)

    run_cases(one, cases=1500, soak=50_000, per_byte=1500, fixed=4 << 20)
    assert accepted > 10, "the mutations are so wild that nothing is tried but the parser"


@pytest.mark.parametrize("text", CONFIGS)
def test_a_configuration_of_the_corpus_is_a_config_error(text: str) -> None:
    assert read_config(text) is None


def test_a_file_of_any_bytes_is_a_configuration_or_a_config_error(tmp_path: Path) -> None:
    path = tmp_path / "lmcache.yaml"

    def one(rng: random.Random) -> int:
        path.write_bytes(mutate(rng, GOOD.encode(), [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\0", b"\xfe\xff"]))
        try:
            load_config(path, ENVIRON)
        except ConfigError as error:
            checked(error)
        return path.stat().st_size

    run_cases(one, cases=200, soak=10_000, per_byte=1500, fixed=4 << 20)


def test_variables_of_any_name_and_value_are_settings_or_a_config_error() -> None:
    names = ["CHUNK_TOKENS", "TIERS__DISK__CAPACITY", "TIERS__DISK__OPTIONS__PATH", "SERVER__TCP__LISTEN", "PLUGINS"]
    values = ["256", "1GiB", "", "a,b", "127.0.0.1:1", "\udcff", "9" * 5000, "null", "${ODD}", "[1]", "true"]

    def one(rng: random.Random) -> int:
        raw = mutate(rng, rng.choice(names).encode(), [b"__", b"_", b"TIERS", b"\xff"], most=3)
        name = raw.replace(b"\0", b"").decode("utf-8", "surrogateescape")
        value = rng.choice(values) if rng.random() < 0.7 else mutate(rng, b"1GiB", [b",", b"s"]).decode("latin-1")
        read_config(GOOD, {f"LMCACHE__{name}": value})
        return len(GOOD) + len(name) + len(value)

    run_cases(one, cases=300, soak=20_000, per_byte=1500, fixed=4 << 20)


# Values that come from a program.


class Colour(Enum):
    RED = "red"
    BLUE = 2


@dataclass(frozen=True, kw_only=True)
class Inner:
    depth: int = 0
    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Options:
    url: str
    count: int = 1
    ratio: float = 0.5
    flag: bool = False
    path: Path | None = None
    size_nbytes: int = 1
    wait_s: float = 1.0
    whole_s: int = 1
    colour: Colour = Colour.RED
    mode: Literal["a", "b", 3, True] = "a"
    inner: Inner = Inner()
    pair: tuple[int, float] = (1, 2.0)
    more: RawOptions = field(default_factory=RawOptions)
    secret: str = field(default="", repr=False)


LEAVES: list[Any] = [
    *(None, True, False, 0, -1, 1 << 70, 10**400, 10**5000, 0.0, -0.0, 1e308, math.inf, math.nan, 1j, b"x", object()),
    *("", "x", "1", "1.5", "true", "red", "2", "1GiB", "5s", "\udcff", "\0", "x" * 100_000, "~", "~nobody-here/x"),
    *(Colour.BLUE, Path("/x"), Path(), Inner(), Inner, range(3), {1, 2}, (1, 2.0), ["a"], {"depth": 3}, {1: 2}),
]


def structure(rng: random.Random, depth: int = 0) -> Any:
    if depth > 3 or rng.random() < 0.6:
        return rng.choice(LEAVES)
    if rng.random() < 0.4:
        return [structure(rng, depth + 1) for _ in range(rng.randrange(4))]
    names = [*vars(Options)["__dataclass_fields__"], "size", "wait", "depth", "names", "nope", "", 7]
    return {rng.choice(names): structure(rng, depth + 1) for _ in range(rng.randrange(5))}


def built(values: Any) -> Options | None:
    try:
        return RawOptions.of(values).into(Options)
    except ConfigError as error:
        checked(error)
        return None


def test_any_values_of_a_program_are_options_or_a_config_error() -> None:
    accepted = 0

    def one(rng: random.Random) -> int:
        nonlocal accepted
        names = [*vars(Options)["__dataclass_fields__"], "size", "wait", "nope"]
        values = {rng.choice(names): structure(rng) for _ in range(rng.randrange(4))}
        if rng.random() < 0.9:
            values["url"] = "u"
        made = built(values)
        if made is not None:
            accepted += 1
            assert type(made.count) is int
            assert type(made.flag) is bool
            assert type(made.ratio) is float
            assert math.isfinite(made.ratio)
            assert type(made.url) is str
            assert type(made.size_nbytes) is int
        return 1000

    run_cases(one, cases=3000, soak=100_000, per_byte=200, fixed=4 << 20)
    assert accepted > 100


@pytest.mark.parametrize("values", STRUCTURES, ids=lambda values: str(next(iter(values)))[:20])
def test_values_of_the_corpus_are_a_config_error(values: dict[str, Any]) -> None:
    assert built({"url": "u", **values}) is None


THEIRS = b"""\
chunk_size: 256
local_cpu: true
max_local_cpu_size: 5.0
local_disk: "file:///var/cache"
max_local_disk_size: 5.0
remote_url: "redis://user:pw@h:6379/1"
remote_serde: naive
cache_policy: LRU
blocking_timeout_secs: 10
pin_timeout_sec: 300
extra_config: {a: 1, remote_config: {b: [c]}}
"""
LAUGHS = (
    b"a: &a ["
    + b"x, " * 9
    + b"]\n"
    + b"".join(b"%c: &%c [%s]\n" % (n + 1, n + 1, b"*%c, " % n * 9) for n in b"abcdefgh")
)
THEIR_TOKENS = [
    *TOKENS, *(b"0x" + b"f" * 5000, b".inf", b".nan", b"-.inf", b"1:30:00", b"2001-01-01", b"!!set {a}", b"&a [*a]"),
    *(b"s3://b.x/y", b"fs://h/x", b"lm://h:1", b"redis://[::1", b"://", b"\"\\ud800\"", b"\n" + LAUGHS),
]  # fmt: skip


def migrated(path: Path) -> str | None:
    try:
        theirs = config_commands._their_values(path)
        made = incumbent.migrate(theirs)
        text = config_commands._migrated_text(path, made)
    except CacheError as error:
        checked(error)
        return None
    assert all(len(note.key) + len(note.value) < 2000 for note in made.notes)
    text.encode()
    if theirs.get("remote_url") == "redis://user:pw@h:6379/1" and path.read_bytes().count(b"pw") == 1:
        assert "pw" not in text
    parse_config(text, "ours", {**ENVIRON, **dict.fromkeys(made.environ, "x")})
    return text


def test_any_file_of_the_incumbent_is_migrated_into_what_can_be_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"

    def one(rng: random.Random) -> int:
        path.write_bytes(mutate(rng, THEIRS, THEIR_TOKENS, most=3))
        migrated(path)
        return path.stat().st_size

    run_cases(one, cases=500, soak=20_000, per_byte=3000, fixed=4 << 20)


def test_a_page_that_names_billions_is_migrated_in_a_page_of_memory(tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_bytes(THEIRS + LAUGHS)
    tracemalloc.start()
    try:
        assert migrated(path) is not None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


# Keys.


def test_any_text_is_the_text_of_a_key_and_comes_back_or_is_a_value_error() -> None:
    good = bytes(range(48)).hex().encode()
    accepted = 0

    def one(rng: random.Random) -> int:
        nonlocal accepted
        data = mutate(rng, good, [b"A", b"0x", b" ", b"\n", b"g", "٣".encode(), b"\0"], most=3)
        text = data.decode("utf-8", "surrogateescape")
        try:
            key = ChunkKey.from_text(text)
        except ValueError:
            assert len(text) != 96 or set(text) - set("0123456789abcdef")
        else:
            accepted += 1
            assert key.text == text
            assert len(key) == 48
        return len(data)

    run_cases(one, cases=4000, soak=1_000_000, per_byte=100, fixed=1 << 16)
    assert accepted


@pytest.mark.parametrize("text", KEYS)
def test_a_key_of_the_corpus_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        ChunkKey.from_text(text)


PROMPT: dict[str, Any] = {
    "tokens": "1,2,3,4 5 6 7 8", "tokens_file": None, "model": "m", "weights": "w", "kv_dtype": "bfloat16",
    "chunk_tokens": 4, "adapter": "", "salt": None, "key_secret": "", "tags": (), "layers": "0:2", "heads": "0:0",
    "group": 0, "block_tokens": 2, "block_nbytes": 64, "region": "kv", "packing": "HND",
}  # fmt: skip
NUMBERS = (0, -1, 1, 3, 1 << 20, (1 << 20) + 1, 1 << 62, 1 << 200)


def test_any_prompt_for_lmc_key_has_keys_or_is_one_of_our_errors() -> None:
    accepted = 0

    def odd(rng: random.Random, value: Any) -> Any:
        if isinstance(value, int):
            return rng.choice(NUMBERS)
        if isinstance(value, tuple):
            return tuple(mutate(rng, b"a=b", [b"=", b"\xff"]).decode("utf-8", "surrogateescape") for _ in range(2))
        text = (value or "tenant").encode()
        tokens = [b",", b":", b" ", b"-1", b"4294967295", b"4294967296", b"9" * 11, b"[", b"]", b"\0", b"\xff", b"\n"]
        return mutate(rng, text, tokens).decode("utf-8", "surrogateescape")

    def one(rng: random.Random) -> int:
        nonlocal accepted
        given = dict(PROMPT)
        for name in rng.sample([name for name in PROMPT if name != "tokens_file"], rng.randrange(1, 4)):
            given[name] = odd(rng, given[name])
        try:
            chain = prompt_of(**given)
        except (CacheError, click.UsageError):
            return 1000
        accepted += 1
        assert isinstance(chain, Chain)
        (shard,) = chain.model.shards
        assert all(ChunkKey.from_text(key.text) == key for key in chain.keys(shard))
        assert len(chain) == chain.tokens // given["chunk_tokens"]
        return 1000

    run_cases(one, cases=2000, soak=100_000, per_byte=200, fixed=1 << 20)
    assert accepted > 100


def test_the_command_ends_with_a_message_and_never_a_traceback_whatever_it_is_given(tmp_path: Path) -> None:
    runner = CliRunner()
    given = ["key", "--model", "m", "--weights", "w", "--kv-dtype", "f", "--chunk-tokens", "4", "--tokens", "1,2,3,4,5"]
    tokens = [b"--json", b"-1", b"--", b"\xff", b"[1", b",,", b" ", b"9" * 30, b"--tokens-file=-"]

    def one(rng: random.Random) -> int:
        words = list(given)
        for _ in range(rng.randrange(1, 3)):
            at = rng.randrange(1, len(words))
            words[at] = mutate(rng, words[at].encode(), tokens, most=3).replace(b"\0", b"").decode("utf-8", "replace")
        stdin = mutate(rng, b"[1, 2, 3, 4]", tokens)
        result = runner.invoke(main, words, input=stdin)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        assert result.exit_code in (0, 2)
        assert result.exit_code == 0 or "Error" in result.output or "Usage" in result.output
        return 1000

    run_cases(one, cases=150, soak=10_000, per_byte=200, fixed=8 << 20)


# Metadata of packages.

METADATA_GOOD = b"Metadata-Version: 2.1\nName: lmcache-odd\nVersion: 1.2.3\n\nA text.\n"
ENTRIES_GOOD = (
    b"[console_scripts]\nodd = odd:main\n\n[lmcache_core.backends]\nodd = lmcache_odd_missing:Odd\n"
    b"odd2 = lmcache_odd_missing.sub:Odd.Inner [extra]\n\n[lmcache_core.hooks]\nodd = lmcache_odd_missing\n"
)
METADATA_TOKENS = [
    *(b"Name:", b"Name: ", b"name: x\n", b"Version: \n", b"\n\n", b"\n", b"\r\n", b" ", b"\xff", b"\0", b"..", b"/"),
    *(b"[lmcache_core.backends]\n", b"[lmcache_core.", b"]", b"[", b"=", b"a = b\n", b":", b"= :\n", b"[x]", b"#"),
    *(b"9" * 500, "ü".encode(), b"lmcache-core", b"disk", b"\xe2\x80\xa8", b"; "),
]


class Installed:
    """A folder with the metadata of one package, as the only one that there is beside core's."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folders = (folder / str(number) for number in itertools.count())
        self.monkeypatch = monkeypatch
        monkeypatch.setattr(plugins, "_metadata_faults", set())

    def offers(self, metadata: bytes, entries: bytes, info: str = "lmcache_odd-1.2.3.dist-info") -> list[Any]:
        folder = next(self.folders) / info
        folder.mkdir(parents=True)
        (folder / "METADATA").write_bytes(metadata)
        (folder / "entry_points.txt").write_bytes(entries)
        with self.monkeypatch.context() as patch:
            patch.setattr(sys, "path", [str(folder.parent)])
            found = plugins.discover()
            for offer in found:
                self.check(offer, metadata, entries)
        plugins._metadata_faults.clear()
        importlib.invalidate_caches()
        return found

    def check(self, offer: plugins.PluginInfo, metadata: bytes, entries: bytes) -> None:
        """What is offered was written, and what cannot be loaded says so."""
        text = metadata.decode("utf-8", "replace"), entries.decode("utf-8", "replace")
        assert offer.group in plugins.GROUPS
        assert offer.name in text[1]
        assert offer.target in text[1]
        assert offer.dist in text[0]
        assert offer.version in text[0]
        with pytest.raises(PluginError) as caught:
            plugins.LOADERS[offer.group](offer)
        assert str(caught.value)


def test_any_metadata_is_offers_that_were_written_or_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL")
    installed = Installed(tmp_path, monkeypatch)
    assert len(installed.offers(METADATA_GOOD, ENTRIES_GOOD)) == 3
    offered = 0

    def one(rng: random.Random) -> int:
        nonlocal offered
        metadata = mutate(rng, METADATA_GOOD, METADATA_TOKENS) if rng.random() < 0.6 else METADATA_GOOD
        entries = mutate(rng, ENTRIES_GOOD, METADATA_TOKENS) if rng.random() < 0.8 else ENTRIES_GOOD
        offered += bool(installed.offers(metadata, entries))
        return len(metadata) + len(entries)

    run_cases(one, cases=500, soak=20_000, per_byte=200, fixed=4 << 20)
    assert offered > 100


@pytest.mark.parametrize(("metadata", "entries"), METADATA)
def test_metadata_of_the_corpus_offers_nothing_and_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metadata: bytes, entries: bytes
) -> None:
    assert Installed(tmp_path, monkeypatch).offers(metadata or METADATA_GOOD, entries or ENTRIES_GOOD) == []


@pytest.fixture(autouse=True)
def _own_import_state() -> Iterator[None]:
    before = dict(sys.modules)
    yield
    for name in set(sys.modules) - set(before):
        if name.startswith("lmcache_odd"):
            del sys.modules[name]
