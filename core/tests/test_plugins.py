"""Plugins are found without importing them, and whatever is wrong with one is said by name."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from lmcache_core import hookspecs, plugins
from lmcache_core.cli import main as lmc
from lmcache_core.errors import PluginConflict, PluginImportFailed, PluginIncompatible, PluginNotFound
from lmcache_core.keys import ChunkKey
from lmcache_core.plugins import BACKENDS, CODECS, COMMANDS, DEVICES, HOOKS, POLICIES

BACKEND = """
from lmcache_core.backend import Backend

class Good(Backend):
    api_version = {api}
    def contains(self, key): return False
    def get(self, key, into): return None
    def put(self, key, data): pass
    def remove(self, key): return False
"""
Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """`install(dist, version, {group: {name: target}}, **modules)` writes metadata and modules into a folder."""
    before = set(sys.modules)

    def write(
        dist: str,
        version: str = "1.0",
        offers: dict[str, dict[str, str]] | None = None,
        *,
        folder: str = "site",
        egg: bool = False,
        **modules: str,
    ) -> Path:
        site = tmp_path / folder
        if str(site) not in sys.path:
            site.mkdir()
            monkeypatch.syspath_prepend(str(site))
        stem = dist.replace("-", "_")
        info = site / (f"{stem}.egg-info" if egg else f"{stem}-{version}.dist-info")
        info.mkdir()
        (info / ("PKG-INFO" if egg else "METADATA")).write_text(
            f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n\nName: not-the-header\n"
        )
        lines = [
            f"[{group}]\n" + "".join(f"{n} = {t}\n" for n, t in of.items()) for group, of in (offers or {}).items()
        ]
        (info / "entry_points.txt").write_text("\n".join(lines))
        for module, source in modules.items():
            (site / f"{module}.py").write_text(source)
        importlib.invalidate_caches()
        return info

    yield write
    for name in set(sys.modules) - before:
        if name.startswith("plugtest_"):
            del sys.modules[name]


def good(api: str = "(1, 0)") -> str:
    return BACKEND.format(api=api)


def test_discovery_reads_metadata_and_imports_nothing(install: Install) -> None:
    install("a-dist", "2.5", {BACKENDS: {"zz-one": "plugtest_boom:Good"}, DEVICES: {"zz-gpu": "plugtest_boom:Gpu"}},
            plugtest_boom="raise SystemExit")  # fmt: skip
    found = {(o.group, o.name): o for o in plugins.discover()}
    offer = found[BACKENDS, "zz-one"]
    assert (offer.dist, offer.version, offer.target) == ("a-dist", "2.5", "plugtest_boom:Good")
    assert Path(offer.location).name == "site"
    assert found[DEVICES, "zz-gpu"].kind == "device"
    assert [o.name for o in plugins.discover(DEVICES) if o.dist == "a-dist"] == ["zz-gpu"]
    assert "plugtest_boom" not in sys.modules


def test_a_plugin_is_loaded_by_name_and_by_name_at_distribution(install: Install) -> None:
    install("a-dist", offers={BACKENDS: {"zz-one": "plugtest_good:Good"}}, plugtest_good=good())
    cls = plugins.load(BACKENDS, "zz-one")
    assert cls.__name__ == "Good"
    for written in ("zz-one@a-dist", "zz-one@A_Dist"):
        assert plugins.load(BACKENDS, written) is cls


def test_two_distributions_with_one_name_are_an_error_only_when_it_is_used(install: Install) -> None:
    for dist, number in (("lmcache-redis", "1.0"), ("acme-redis", "3.1")):
        install(dist, number, {BACKENDS: {"zz-redis": "plugtest_good:Good"}}, plugtest_good=good())
    install("other", offers={BACKENDS: {"zz-other": "plugtest_good:Good"}})
    assert plugins.load(BACKENDS, "zz-other").__name__ == "Good"
    with pytest.raises(PluginConflict) as caught:
        plugins.resolve(BACKENDS, "zz-redis")
    for text in ("zz-redis@acme-redis or zz-redis@lmcache-redis", "acme-redis 3.1 in ", "lmcache-redis 1.0 in "):
        assert text in str(caught.value)
    assert plugins.resolve(BACKENDS, "zz-redis@lmcache-redis").dist == "lmcache-redis"
    assert plugins.resolve(BACKENDS, "zz-redis", ["acme-redis"]).dist == "lmcache-redis"


@pytest.mark.parametrize("same_folder", [True, False])
def test_a_stale_egg_info_is_passed_over_wherever_it_lies(install: Install, same_folder: bool) -> None:
    install("a-dist", "2.0", {BACKENDS: {"zz-one": "plugtest_new:Good"}})
    stale = {"zz-one": "plugtest_old:Good", "zz-gone": "plugtest_old:Gone"}
    install("a-dist", "1.0", {BACKENDS: stale}, egg=True, folder="site" if same_folder else "earlier")
    offers = [o for o in plugins.discover(BACKENDS) if o.dist == "a-dist"]
    assert [(o.name, o.version, o.target) for o in offers] == [("zz-one", "2.0", "plugtest_new:Good")]


def test_what_only_the_stale_metadata_offers_is_not_offered(install: Install) -> None:
    install("a-dist", "2.0", {"console_scripts": {"x": "y:z"}})
    install("a-dist", "1.0", {BACKENDS: {"zz-gone": "plugtest_old:Gone"}}, egg=True, folder="earlier")
    assert not [o for o in plugins.discover() if o.dist == "a-dist"]


def test_of_two_installs_of_one_distribution_the_one_that_python_would_import_is_offered(install: Install) -> None:
    install("a-dist", "1.0", {BACKENDS: {"zz-one": "plugtest_a:Good"}}, folder="later")
    install("a-dist", "0.9", {BACKENDS: {"zz-one": "plugtest_b:Good"}}, folder="first")
    assert plugins.resolve(BACKENDS, "zz-one").version == "0.9"


def test_an_egg_info_alone_counts(install: Install) -> None:
    install("a-dist", "1.0", {BACKENDS: {"zz-one": "plugtest_good:Good"}}, egg=True, plugtest_good=good())
    assert plugins.load(BACKENDS, "zz-one").__name__ == "Good"


def test_a_miss_lists_near_spellings_and_what_was_found_where(install: Install) -> None:
    info = install("a-dist", "2.5", {BACKENDS: {"zz-valkey": "plugtest_good:Good"}})
    with pytest.raises(PluginNotFound) as caught:
        plugins.resolve(BACKENDS, "zz-valky")
    for text in ("no backend 'zz-valky' is installed", "did you mean 'zz-valkey'?", f"a-dist 2.5 in {info.parent}"):
        assert text in str(caught.value)
    with pytest.raises(PluginNotFound, match="no backend 'zz-valkey@b-dist' is installed"):
        plugins.resolve(BACKENDS, "zz-valkey@b-dist")


@pytest.mark.parametrize("disable", ["a-dist", "A_dist", "zz-one", "zz-one@a-dist"])
def test_a_disabled_plugin_is_as_if_not_installed_and_the_error_says_why(install: Install, disable: str) -> None:
    install("a-dist", "2.5", {BACKENDS: {"zz-one": "plugtest_good:Good"}}, plugtest_good=good())
    with pytest.raises(PluginNotFound, match=r"'zz-one' \(a-dist 2\.5\) is disabled by plugins\.disable"):
        plugins.load(BACKENDS, "zz-one", [disable])
    assert plugins.load(BACKENDS, "zz-one", ["something-else", "zz-one@other"]).__name__ == "Good"


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("raise ImportError('libx.so: cannot open')", r"ImportError: libx\.so: cannot open \(.*plugtest_bad\.py:1\)"),
        ("\ndef f(:\n", r"SyntaxError: .*plugtest_bad\.py.*2"),
        ("import sys\nsys.exit('bye')", r"SystemExit: bye \(.*plugtest_bad\.py:2\)"),
        ("class Odd(BaseException): pass\nraise Odd", r"Odd \(.*plugtest_bad\.py:2\)"),
        (
            "import plugtest_nowhere",
            r"ModuleNotFoundError: No module named 'plugtest_nowhere' \(.*plugtest_bad\.py:1\)",
        ),
        ("x = 1", r"AttributeError: .*Good"),
        ("raise RuntimeError('a\\n' * 900)", r"RuntimeError: a a a"),
    ],
)
def test_whatever_an_import_raises_becomes_one_error_with_package_version_file_and_cause(
    install: Install, source: str, cause: str
) -> None:
    install("a-dist", "2.5", {BACKENDS: {"zz-one": "plugtest_bad:Good"}}, plugtest_bad=source)
    with pytest.raises(PluginImportFailed, match=cause) as caught:
        plugins.load(BACKENDS, "zz-one")
    assert "backend 'zz-one' of a-dist 2.5 (plugtest_bad:Good)" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("target", ["plugtest_nowhere:Good", "not a target", ""])
def test_a_target_that_names_nothing_is_an_import_failure(install: Install, target: str) -> None:
    install("a-dist", "2.5", {BACKENDS: {"zz-one": target}})
    with pytest.raises(PluginImportFailed, match=r"a-dist 2\.5"):
        plugins.load(BACKENDS, "zz-one")


def test_an_interrupt_while_importing_passes(install: Install) -> None:
    install("a-dist", offers={BACKENDS: {"zz-one": "plugtest_int:Good"}}, plugtest_int="raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        plugins.load(BACKENDS, "zz-one")


@pytest.mark.parametrize(
    ("api", "says"),
    [
        ("(2, 0)", r"needs plugin API 2\.0, this lmcache-core speaks 1\.0: upgrade lmcache-core"),
        ("(1, 1)", "upgrade lmcache-core"),
        ("(0, 9)", "upgrade a-dist"),
        ("None", "declares no api_version of its own; add `api_version = "),
        ("'1.0'", "not a pair"),
        ("[1, 0]", "not a pair"),
        ("(1,)", "not a pair"),
        ("(1, 0, 0)", "not a pair"),
        ("(1.0, 0)", "not a pair"),
        ("(1, -1)", "not a pair"),
    ],
)
def test_an_api_that_core_does_not_speak_says_which_side_to_upgrade(install: Install, api: str, says: str) -> None:
    install("a-dist", offers={BACKENDS: {"zz-one": "plugtest_api:Good"}}, plugtest_api=good(api))
    with pytest.raises(PluginIncompatible, match=says):
        plugins.load(BACKENDS, "zz-one")


def test_an_inherited_api_version_does_not_count(install: Install) -> None:
    source = good() + "\nclass Child(Good):\n    pass\n"
    install("a-dist", offers={BACKENDS: {"zz-one": "plugtest_child:Child"}}, plugtest_child=source)
    with pytest.raises(PluginIncompatible, match="declares no api_version of its own"):
        plugins.load(BACKENDS, "zz-one")


@pytest.mark.parametrize("group", [DEVICES, CODECS, POLICIES])
def test_a_class_of_another_kind_is_refused(install: Install, group: str) -> None:
    install("a-dist", offers={group: {"zz-one": "plugtest_kind:Good"}}, plugtest_kind=good())
    with pytest.raises(PluginIncompatible, match="is the class Good, not a subclass of lmcache_core"):
        plugins.load(group, "zz-one")


def test_what_is_no_class_is_refused(install: Install) -> None:
    install("a-dist", offers={BACKENDS: {"zz-one": "plugtest_obj:thing"}}, plugtest_obj="thing = 3")
    with pytest.raises(PluginIncompatible, match="is a int, not a subclass"):
        plugins.load(BACKENDS, "zz-one")


def test_a_class_that_lacks_methods_is_refused_by_their_names(install: Install) -> None:
    source = good().replace("def remove", "def unremove")
    install("a-dist", offers={BACKENDS: {"zz-one": "plugtest_abs:Good"}}, plugtest_abs=source)
    with pytest.raises(PluginIncompatible, match="does not implement remove"):
        plugins.load(BACKENDS, "zz-one")


def test_broken_metadata_of_one_distribution_hides_only_its_own_plugins(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("good-dist", offers={BACKENDS: {"zz-one": "plugtest_good:Good"}}, plugtest_good=good())
    install("bytes-dist", offers={BACKENDS: {"zz-b": "x:y"}}).joinpath("entry_points.txt").write_bytes(
        b"[lmcache_core.backends]\nzz-b = \xff\xfe\n"
    )
    install("line-dist", offers={BACKENDS: {"zz-l": "x:y"}}).joinpath("entry_points.txt").write_text(
        "[lmcache_core.backends]\njust a line\n"
    )
    install("nameless-dist", offers={BACKENDS: {"zz-n": "x:y"}}).joinpath("METADATA").write_text("\n")
    with caplog.at_level(logging.WARNING):
        names = [offer.name for offer in plugins.discover(BACKENDS)]
        plugins.discover(BACKENDS)
    assert "zz-one" in names
    assert not {"zz-b", "zz-l", "zz-n"} & set(names)
    for dist in ("bytes_dist", "nameless_dist", "line_dist"):
        assert sum(dist in record.getMessage() for record in caplog.records) == 1, dist


# Hooks

HOOK = """
from lmcache_core import hookimpl
api_version = (1, 0)
heard = []
@hookimpl
def lmcache_tier_health(tier, error):
    heard.append((tier, error))
"""
HEALTH = {"tier": "pool", "healthy": False, "error": "refused"}


def test_hook_plugins_are_modules_classes_or_instances(install: Install) -> None:
    source = (
        HOOK
        + """
class Plugin:
    api_version = (1, 0)
    @hookimpl
    def lmcache_tier_health(self, healthy):
        heard.append(healthy)
single = Plugin()
"""
    )
    offers = {"zz-m": "plugtest_hook", "zz-c": "plugtest_hook:Plugin", "zz-i": "plugtest_hook:single"}
    install("a-dist", offers={HOOKS: offers}, plugtest_hook=source)
    manager = plugins.load_hooks(offers)
    plugins.call_hooks(manager, "lmcache_tier_health", **HEALTH)
    assert sorted(sys.modules["plugtest_hook"].heard, key=str) == [("pool", "refused"), False, False]


def test_naming_a_hook_plugin_twice_registers_it_once(install: Install) -> None:
    install("a-dist", offers={HOOKS: {"zz-m": "plugtest_hook"}}, plugtest_hook=HOOK)
    manager = plugins.load_hooks(["zz-m", "zz-m"])
    plugins.call_hooks(manager, "lmcache_tier_health", **HEALTH)
    assert len(sys.modules["plugtest_hook"].heard) == 1


def test_no_hooks_are_fine() -> None:
    plugins.call_hooks(plugins.load_hooks([]), "lmcache_tier_health", **HEALTH)


@pytest.mark.parametrize("failing", ["raise RuntimeError('x')", "raise SystemExit(3)", "raise BaseException"])
def test_a_hook_that_fails_is_logged_once_per_hook_and_keeps_nobody_from_hearing(
    install: Install, caplog: pytest.LogCaptureFixture, failing: str
) -> None:
    bad = HOOK.replace("heard.append((tier, error))", failing)
    bad += f"@hookimpl\ndef lmcache_chunks_evicted(tier):\n    {failing}\n"
    offers = {"zz-1": "plugtest_hook_one", "zz-bad": "plugtest_hook_bad", "zz-2": "plugtest_hook_two"}
    install("a-dist", offers={HOOKS: offers}, plugtest_hook_one=HOOK, plugtest_hook_bad=bad, plugtest_hook_two=HOOK)
    manager = plugins.load_hooks(offers)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            plugins.call_hooks(manager, "lmcache_tier_health", **HEALTH)
            plugins.call_hooks(manager, "lmcache_chunks_evicted", tier="pool", keys=(), reason="capacity")
    assert len(sys.modules["plugtest_hook_one"].heard) == len(sys.modules["plugtest_hook_two"].heard) == 3
    assert len(caplog.records) == 2
    assert all("zz-bad" in record.getMessage() and record.exc_info for record in caplog.records)
    other = plugins.load_hooks(["zz-bad"])
    plugins.call_hooks(other, "lmcache_tier_health", **HEALTH)
    assert len(caplog.records) == 3


def test_an_interrupt_in_a_hook_passes(install: Install) -> None:
    bad = HOOK.replace("heard.append((tier, error))", "raise KeyboardInterrupt")
    install("a-dist", offers={HOOKS: {"zz-m": "plugtest_hook"}}, plugtest_hook=bad)
    with pytest.raises(KeyboardInterrupt):
        plugins.call_hooks(plugins.load_hooks(["zz-m"]), "lmcache_tier_health", **HEALTH)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (HOOK.replace("lmcache_tier_health", "lmcache_tier_wealth"), "lmcache_tier_wealth"),
        (HOOK.replace("(tier, error)", "(tier, colour)", 1), "colour"),
        (HOOK.replace("@hookimpl", ""), "implements no hook"),
        (HOOK.replace("@hookimpl", "@hookimpl(wrapper=True)").replace("heard.append", "yield"), "not wrappers"),
        (HOOK.replace("api_version = (1, 0)", ""), "declares no api_version"),
        (HOOK.replace("(1, 0)", "(9, 0)"), "upgrade lmcache-core"),
        (HOOK + "class Plugin:\n    api_version = (1, 0)\n    def __init__(self): raise OSError('no')", "OSError: no"),
    ],
)
def test_a_hook_plugin_that_cannot_be_called_is_refused_when_it_is_loaded(
    install: Install, source: str, says: str
) -> None:
    target = "plugtest_hook:Plugin" if "class Plugin" in source else "plugtest_hook"
    install("a-dist", "2.5", {HOOKS: {"zz-m": target}}, plugtest_hook=source)
    with pytest.raises((PluginIncompatible, PluginImportFailed), match=says) as caught:
        plugins.load_hooks(["zz-m"])
    assert "hook 'zz-m' of a-dist 2.5" in str(caught.value)


def test_a_python_file_can_hold_hooks_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(HOOK.replace("api_version = (1, 0)\n", ""))
    manager = plugins.load_hooks([], inline=path)
    plugins.call_hooks(manager, "lmcache_tier_health", **HEALTH)
    plugin = manager.get_plugin("inline")
    assert plugin is not None
    assert plugin.heard == [("pool", "refused")]


@pytest.mark.parametrize(
    ("name", "source", "says"),
    [
        ("mine.py", "raise SystemExit(2)", r"mine\.py would not import: SystemExit: 2 \(.*mine\.py:1\)"),
        ("mine.py", "x = 1", "implements no hook"),
        ("mine.txt", "x = 1", "is not a Python file"),
        ("mine.py", None, "FileNotFoundError"),
    ],
)
def test_an_inline_file_that_is_wrong_is_named(tmp_path: Path, name: str, source: str | None, says: str) -> None:
    path = tmp_path / name
    if source is not None:
        path.write_text(source)
    with pytest.raises((PluginImportFailed, PluginIncompatible), match=says):
        plugins.load_hooks([], inline=str(path))


def test_the_log_plugin_uses_every_hook_and_sums_up_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    manager = plugins.load_hooks(["log"])
    hooks = [name for name in vars(hookspecs) if name.startswith("lmcache_")]
    assert [name for name in hooks if not getattr(manager.hook, name).get_hookimpls()] == []
    key = ChunkKey(bytes(48))
    with caplog.at_level(logging.DEBUG, "lmcache_core.log"):
        plugins.call_hooks(manager, "lmcache_cache_started", cache=manager)
        plugins.call_hooks(manager, "lmcache_chunks_stored", tier="disk", keys=[key] * 3, nbytes=1 << 20, seconds=0.5)
        plugins.call_hooks(manager, "lmcache_chunks_evicted", tier="disk", keys=[key] * 2, reason="capacity")
        plugins.call_hooks(manager, "lmcache_chunks_evicted", tier="disk", keys=[key], reason="corrupt")
        plugins.call_hooks(manager, "lmcache_cache_stopping", cache=manager)
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert lines[:-1] == [
        ("INFO", "PluginManager: ready"),
        ("DEBUG", "tier disk: stored 3 chunks, 1.0 MiB in 500.0 ms"),
        ("DEBUG", "tier disk: 2 chunks are gone: capacity"),
        ("WARNING", "tier disk: 1 chunks are gone: corrupt"),
    ]
    end = "PluginManager: stopping after 0 loads; chunks: 3 stored in disk, 2 left disk: capacity, 1 left disk: corrupt"
    assert lines[-1] == ("INFO", end)


def test_two_caches_have_a_log_plugin_each(caplog: pytest.LogCaptureFixture) -> None:
    one, other = plugins.load_hooks(["log"]), plugins.load_hooks(["log"])
    plugins.call_hooks(one, "lmcache_chunks_stored", tier="disk", keys=[ChunkKey(bytes(48))], nbytes=1, seconds=0.5)
    with caplog.at_level(logging.INFO, "lmcache_core.log"):
        plugins.call_hooks(other, "lmcache_cache_stopping", cache=other)
    assert caplog.records[0].getMessage().endswith("chunks: none")


def test_the_log_plugin_says_one_line_for_each_load_and_each_change_of_health(
    caplog: pytest.LogCaptureFixture,
) -> None:
    manager = plugins.load_hooks(["log"])
    with caplog.at_level(logging.INFO):
        plugins.call_hooks(
            manager, "lmcache_chunks_retrieved",
            request="req\n" * 100, hit_chunks=3, failed_chunks=1, nbytes=3 << 20, seconds=0.25,
        )  # fmt: skip
        plugins.call_hooks(manager, "lmcache_tier_health", **HEALTH)
        plugins.call_hooks(manager, "lmcache_tier_health", tier="pool", healthy=True, error="")
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in lines] == ["INFO", "WARNING", "INFO"]
    assert "prefix hit of 3 chunks, 1 failed, 3.0 MiB in 250.0 ms" in lines[0][1]
    assert "\n" not in lines[0][1]
    assert len(lines[0][1]) < 200


# commands

COMMAND = """
import click

@click.command(help="Guess.")
@click.argument("n", type=int)
def guess(n):
    click.echo(f"guessed {n}")

wrong = 3
"""


def test_an_installed_package_adds_commands_to_lmc_and_below_one_of_its_own(install: Install) -> None:
    offers = {"guess": "plugtest_guess:guess", "bench.guess": "plugtest_guess:guess"}
    install("acme-guess", offers={COMMANDS: offers}, plugtest_guess=COMMAND)
    for words in (["guess"], ["bench", "guess"]):
        assert CliRunner().invoke(lmc, [*words, "7"]).output == "guessed 7\n"
        listed = CliRunner().invoke(lmc, [*words[:-1], "--help"]).output
        assert "guess" in listed
        assert "From acme-guess 1.0." in listed
    assert "bench.guess" not in CliRunner().invoke(lmc, ["--help"]).output


def test_a_command_does_not_take_the_place_of_one_of_lmcs_own(install: Install) -> None:
    install("acme-guess", offers={COMMANDS: {"ping": "plugtest_guess:guess"}}, plugtest_guess=COMMAND)
    assert "From acme-guess" not in CliRunner().invoke(lmc, ["--help"]).output
    assert "guessed" not in CliRunner().invoke(lmc, ["ping", "7"]).output


def test_a_command_that_does_not_import_or_is_none_is_said_by_name(install: Install) -> None:
    offers = {"guess": "plugtest_guess:wrong", "guesses": "plugtest_nowhere:guess"}
    install("acme-guess", offers={COMMANDS: offers}, plugtest_guess=COMMAND)
    wrong, missing = CliRunner().invoke(lmc, ["guess"]), CliRunner().invoke(lmc, ["guesses"])
    assert (wrong.exit_code, missing.exit_code) == (2, 2)
    assert "command 'guess' of acme-guess 1.0 (plugtest_guess:wrong) is a int, not a click.Command" in wrong.output
    assert "No module named 'plugtest_nowhere'" in missing.output
    assert "guess" in CliRunner().invoke(lmc, ["--help"]).output
