"""The command `lmc`: cheap to ask for help, one clear line for what a person can mend, never a traceback."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from lmcache_core.cli import COMMANDS, main

KEY = ("key", "--model", "m", "--weights", "w", "--kv-dtype", "bfloat16", "--chunk-tokens", "2")


def lmc(*arguments: object, **environ: str) -> Result:
    return CliRunner(env=environ).invoke(main, [str(argument) for argument in arguments])


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LMCACHE_CONFIG", raising=False)


def test_help_imports_click_and_three_small_modules_of_ours() -> None:
    program = (
        "import sys\nimport click\nfrom lmcache_core.cli import main\n"
        "try:\n    main(['--help'], prog_name='lmc')\nexcept SystemExit: pass\n"
        "print([n for n in sorted(sys.modules) if n.startswith('lmcache_core.')])\n"
        "print([n for n in ('numpy', 'yaml', 'pluggy', 'rich', 'asyncio', 'ssl', 'msgspec') if n in sys.modules])"
    )
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    *shown, ours, others = child.stdout.splitlines()
    assert "Usage: lmc" in shown[0]
    assert ours == "['lmcache_core.cli', 'lmcache_core.errors', 'lmcache_core.spelling']"
    assert others == "[]"


def test_the_lines_of_help_are_those_of_the_commands() -> None:
    for name, (place, line) in COMMANDS.items():
        module, _, attribute = place.partition(":")
        command = getattr(importlib.import_module(module, "lmcache_core.cli"), attribute or "command")
        assert isinstance(command, click.Command)
        assert command.help == line
        assert lmc(name, "--help").exit_code == 0
        assert line in lmc("--help").output


def test_every_command_in_the_documentation_exists_with_its_options() -> None:
    root = Path(__file__).parents[2]
    others = set()  # of packages beside core, whose own tests look at them
    for path in root.glob("plugins/*/pyproject.toml"):
        points = tomllib.loads(path.read_text()).get("project", {}).get("entry-points", {})
        others |= points.get("lmcache_core.commands", {}).keys()
    shown = 0
    for page in (root / "README.md", *sorted((root / "docs").glob("*.md"))):
        for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
            for line in block.splitlines():
                words = line.partition("#")[0].split()
                if words[:1] != ["lmc"] or len(words) < 2:
                    continue
                name = words[1].rstrip(",")
                if name in others or ".".join(words[1:3]) in others:
                    continue
                assert name in COMMANDS, f"{page.name}: {line}"
                options = {word.partition("=")[0] for word in words[2:] if word.startswith("-") and len(word) > 1}
                helps = [lmc(name, "--help").output]
                helps += [lmc(name, word, "--help").output for word in words[2:3] if not word.startswith("-")]
                assert all(any(option in text for text in helps) for option in options), f"{page.name}: {line}"
                shown += 1
    assert shown > 25


def test_the_version_is_the_packages() -> None:
    import lmcache_core

    assert lmc("--version").output == f"lmc, version {lmcache_core.__version__}\n"


def test_an_unknown_command_is_a_usage_error() -> None:
    result = lmc("plugin")
    assert result.exit_code == 2
    assert "No such command 'plugin'" in result.output
    assert "did you mean 'plugins'?" in result.output


# plugins


def test_the_plugins_of_core_are_listed_and_load() -> None:
    rows = json.loads(lmc("plugins", "--json").stdout)
    core = {(r["group"], r["name"]): r for r in rows if r["distribution"] == "lmcache-core"}
    assert set(core) == {
        ("backends", "disk"),
        ("devices", "cpu"),
        ("codecs", "identity"),
        ("policies", "arc"),
        ("policies", "fifo"),
        ("policies", "lfu"),
        ("policies", "lru"),
        ("policies", "s3fifo"),
        ("hooks", "log"),
    }
    assert {row["state"] for row in core.values()} == {"not loaded"}
    assert {row["api"] for row in core.values()} == {"?"}
    loaded = json.loads(lmc("plugins", "--json", "--load").stdout)
    assert {(r["state"], r["api"]) for r in loaded if r["distribution"] == "lmcache-core"} == {("loaded", "1.0")}


def test_the_table_has_the_columns_of_the_json() -> None:
    lines = lmc("plugins").stdout.splitlines()
    assert lines[0].split() == ["GROUP", "NAME", "DISTRIBUTION", "VERSION", "API", "STATE"]
    assert any(line.split() == ["backends", "disk", "lmcache-core", "0.1.0", "?", "not", "loaded"] for line in lines)


def test_a_broken_configuration_does_not_hide_the_plugins_unless_it_was_named() -> None:
    Path("lmcache.yaml").write_text("tierz: []")
    result = lmc("plugins")
    assert result.exit_code == 0
    assert "tierz: unknown key" in result.output
    assert "disk" in result.stdout
    assert lmc("plugins", "--config", "lmcache.yaml").exit_code == 2


# key


def test_keys_are_printed_for_whole_chunks() -> None:
    found = json.loads(lmc(*KEY, "--tokens", "1,2,3,4,5", "--json").output)
    assert found == {
        "family_id": "55d826258937e626175d62ca0bb8178e",
        "shard_id": "da34ee02b7e387780e993b053f7daa56",
        "layout": "d530b7fe60e4365eb721abe3ce0dbdda",
        "tokens": 5,
        "keys": [
            "da34ee02b7e387780e993b053f7daa563855e8ca2b8db9969857a18838fc2a477e0a28ad61c6574a60a7622ae3a369c8",
            "da34ee02b7e387780e993b053f7daa56df144b0808387babc653c71e61fe2db98322a54926adacb05975f7238726bb3d",
        ],
    }
    text = lmc(*KEY, "--tokens", "1 2 3 4 5").output
    for key in (*found["keys"], found["family_id"], found["shard_id"], "1 in the tail"):
        assert key in text


def test_tokens_come_from_a_file_or_standard_input_in_any_of_the_usual_forms() -> None:
    expected = lmc(*KEY, "--tokens", "1,2,3", "--json").output
    for text in ("[1, 2, 3]\n", "1\n2\n3\n", "1,2,3"):
        Path("tokens").write_text(text)
        assert lmc(*KEY, "--tokens-file", "tokens", "--json").output == expected
        piped = CliRunner().invoke(main, [*KEY, "--tokens-file", "-", "--json"], input=text)
        assert piped.output == expected


def test_every_option_of_the_identity_changes_a_key() -> None:
    base = (*KEY, "--tokens", "1,2", "--json")
    options = [
        (), ("--adapter", "a"), ("--salt", "t"), ("--salt", "t", "--key-secret", "s"), ("--tag", "rope=x"),
        ("--layers", "1:2"), ("--heads", "0:4"), ("--group", "1"), ("--block-nbytes", "8"), ("--block-tokens", "1"),
        ("--packing", "NHD"), ("--region", "latent"), ("--model", "m2"), ("--weights", "w2"), ("--kv-dtype", "float16"),
    ]  # fmt: skip
    keys = [json.loads(lmc(*base, *option).output)["keys"][0] for option in options]
    assert len(set(keys)) == len(options)
    tagged = [lmc(*base, "--tag", "a=1", "--tag", "b=2"), lmc(*base, "--tag", "b=2", "--tag", "a=1")]
    assert tagged[0].output == tagged[1].output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--tokens", "1,x"), "token 1 is 'x', not a token id"),
        (("--tokens", "1,-2"), "token 1 is '-2'"),
        (("--tokens", "4294967296"), "token ids must be 0 to 4,294,967,295"),
        ((), "either --tokens or --tokens-file"),
        (("--tokens", "1", "--tokens-file", "-"), "either --tokens or --tokens-file"),
        (("--tokens-file", "nope"), "No such file"),
        (("--tokens", "1", "--model", ""), "model: must not be empty"),
        (("--tokens", "1", "--salt", "a/b"), "salt: a tenant salt is"),
        (("--tokens", "1", "--tag", "x"), "--tag takes NAME=VALUE"),
        (("--tokens", "1", "--tag", "x=1", "--tag", "x=2"), "tags: names must be sorted and distinct"),
        (("--tokens", "1", "--layers", "3"), "--layers takes A:B"),
        (("--tokens", "1", "--layers", "3:3"), "layers must be at least 1"),
        (("--tokens", "1", "--heads", "3:1"), "heads: must be a range"),
        (("--tokens", "1", "--chunk-tokens", "0"), "chunk_tokens: must be 1 to"),
        (("--tokens", "1", "--block-tokens", "3"), "not a whole number of its blocks"),
    ],
)
def test_a_wrong_argument_of_key_is_named(arguments: tuple[str, ...], says: str) -> None:
    result = lmc(*KEY, *arguments)
    assert result.exit_code == 2
    assert says in result.output
    assert isinstance(result.exception, SystemExit)


def test_no_tokens_are_no_keys() -> None:
    assert json.loads(lmc(*KEY, "--tokens", "", "--json").output)["keys"] == []


# config


def test_the_starter_is_a_good_configuration_and_is_not_overwritten() -> None:
    assert lmc("config", "init").exit_code == 0
    check = lmc("config", "check")
    assert check.exit_code == 0, check.output
    assert check.output == "lmcache.yaml: fine; tiers: host (memory), disk (disk)\n"
    Path("lmcache.yaml").write_text("chunk_tokens: 8")
    again = lmc("config", "init")
    assert again.exit_code == 2
    assert "--force replaces it" in again.output
    assert Path("lmcache.yaml").read_text() == "chunk_tokens: 8"
    assert lmc("config", "init", "--force").exit_code == 0
    assert lmc("config", "init", "--config", "no/such/dir.yaml").exit_code == 2


def test_check_finds_what_only_the_plugin_knows() -> None:
    Path("c.yaml").write_text(
        "tiers:\n  - backend: disk\n    policy: lrv\n    codec: zstd\n    options: {path: /x, pahth: /y}\n"
        "device: cqu\nplugins: {hooks: [lag]}\n"
    )
    result = lmc("config", "check", "--config", "c.yaml")
    assert result.exit_code == 2
    for text in (
        "c.yaml:3: tiers.disk.policy: no policy 'lrv' is installed; did you mean 'lru'?",
        "c.yaml:4: tiers.disk.codec: no codec 'zstd' is installed",
        "c.yaml:5: tiers.disk.options.pahth: unknown key; did you mean 'path'?",
        "c.yaml:6: device: no device 'cqu' is installed; did you mean 'cpu'?",
        "c.yaml:7: plugins.hooks: no hook 'lag' is installed; did you mean 'log'?",
    ):
        assert text in result.output


def test_check_names_a_missing_file() -> None:
    result = lmc("config", "check", "--config", "nope.yaml")
    assert result.exit_code == 2
    assert result.output == "Error: nope.yaml: cannot read the configuration: No such file or directory\n"
    result = lmc("config", "check", LMCACHE_CONFIG="gone.yaml")
    assert result.exit_code == 2
    assert "gone.yaml" in result.output


def test_check_names_a_misspelt_variable() -> None:
    result = lmc("config", "check", LMCACHE__TIERS__HOST__CAPASITY="1GiB")
    assert result.exit_code == 2
    assert "did you mean 'LMCACHE__TIERS__HOST__CAPACITY'?" in result.output


def test_show_prints_each_value_with_its_source_and_no_secret() -> None:
    Path("lmcache.yaml").write_text(
        'key_secret: "${SECRET}"\ntiers:\n  - {name: host, backend: memory, capacity: 1GiB}\n'
        "  - {name: low, backend: disk, options: {path: /x}}\n"
        '  - {name: pool, backend: not-installed, options: {url: "redis://u:hunter2@h", password: "${SECRET}"}}\n'
    )
    result = lmc("config", "show", SECRET="hunter2", LMCACHE__TIERS__HOST__CAPACITY="2GiB",
                 LMCACHE__TIERS__POOL__OPTIONS__TOKEN="hunter2")  # fmt: skip
    assert result.exit_code == 0
    assert "hunter2" not in result.output
    lines = [tuple(part.strip() for part in line.split(" # ")) for line in result.stdout.splitlines()]
    for expected in (
        ("chunk_tokens: 256", "default"),
        ("key_secret: ${SECRET}", "lmcache.yaml:1"),
        ("tiers.host.capacity: 2GiB", "environment variable LMCACHE__TIERS__HOST__CAPACITY"),
        ("tiers.low.options.path: /x", "lmcache.yaml:4"),
        ("tiers.low.options.direct: auto", "default"),
        ("tiers.pool.options.url: redis://u:***@h", "lmcache.yaml:5"),
        ("tiers.pool.options.token: ***", "environment variable LMCACHE__TIERS__POOL__OPTIONS__TOKEN"),
    ):
        assert expected in lines
    assert "no backend 'not-installed' is installed" in result.output
    printed = lmc("config", "show", "--json", SECRET="x").output
    as_json = json.loads(printed[printed.index("[\n") :])  # behind the warning
    assert {"path": "chunk_tokens", "value": "256", "source": "default"} in as_json
