"""Find plugins from metadata, import one only when it is named, and keep a broken one from hurting the others.

An entry point names a class: a Backend, Device, Codec or EvictionPolicy by its group; in the group of hooks, a module
or class with hook implementations; in that of commands, what `lmc` shall have beside its own.  Discovery reads metadata
files and imports nothing.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import logging
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import Distribution, EntryPoint, distributions
from pathlib import Path
from types import ModuleType
from typing import Any, Final
from weakref import WeakKeyDictionary

import pluggy

from . import hookspecs
from .backend import API_VERSION
from .errors import PluginConflict, PluginError, PluginImportFailed, PluginIncompatible, PluginNotFound
from .spelling import did_you_mean

BACKENDS: Final = "lmcache_core.backends"
DEVICES: Final = "lmcache_core.devices"
CODECS: Final = "lmcache_core.codecs"
POLICIES: Final = "lmcache_core.policies"
HOOKS: Final = "lmcache_core.hooks"
COMMANDS: Final = "lmcache_core.commands"
"""Subcommands of `lmc`, each a `click.Command`; one of a command that has its own is named "bench.serve"."""
GROUPS: Final = (BACKENDS, DEVICES, CODECS, POLICIES, HOOKS, COMMANDS)
CORE: Final = "lmcache-core"
INLINE: Final = "inline:"
"""A plugin's name that begins so is that of a class in the file that `plugins.inline` names."""
SLOW_IMPORT_S: Final = 3.0
"""An import that takes longer is said aloud: whoever waits for it should know for what."""

_KINDS: Final = {
    BACKENDS: ("lmcache_core.backend", "Backend"),
    DEVICES: ("lmcache_core.device", "Device"),
    CODECS: ("lmcache_core.codec", "Codec"),
    POLICIES: ("lmcache_core.policy", "EvictionPolicy"),
}
_log = logging.getLogger(__name__)
_failed_hooks: WeakKeyDictionary[pluggy.PluginManager, set[tuple[str, str]]] = WeakKeyDictionary()
_metadata_faults: set[str] = set()


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """One offer of one name by one installed distribution, from metadata: nothing has been imported."""

    group: str
    name: str
    target: str
    dist: str
    version: str
    location: str
    """Directory of the distribution's metadata."""
    entry_point: EntryPoint = field(repr=False, compare=False)

    @property
    def kind(self) -> str:
        """Singular of the group, for messages: "backend"."""
        return kind_of(self.group)

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r} of {self.dist} {self.version} ({self.target})"


def kind_of(group: str) -> str:
    """ "lmcache_core.backends" is "backend", for messages."""
    last = group.rpartition(".")[2]
    return "policy" if last == "policies" else last.removesuffix("s")


def discover(group: str | None = None) -> list[PluginInfo]:
    """Every installed offer (of one group), in the order of groups, names and distributions."""
    wanted = GROUPS if group is None else (group,)
    offers: dict[tuple[str, str, str], PluginInfo] = {}
    for dist in _offering_distributions():
        for offer in _offers(dist):
            if offer.group in wanted:
                offers.setdefault((offer.group, offer.name, _normal(offer.dist)), offer)
    return sorted(offers.values(), key=lambda o: (wanted.index(o.group), o.name, _normal(o.dist)))


def is_disabled(offer: PluginInfo, disable: Iterable[str]) -> bool:
    """Whether `disable` holds the offer's distribution, its name, or name@distribution."""
    mine = {_normal(offer.dist), offer.name, f"{offer.name}@{_normal(offer.dist)}"}
    return any(entry in mine or _normal_entry(entry) in mine for entry in disable)


def resolve(group: str, name: str, disable: Iterable[str] = ()) -> PluginInfo:
    """The one offer called `name`; "name@distribution" picks between rivals.

    A built-in's bare name stays the built-in's, whoever else offers it.
    """
    bare, _, dist = name.partition("@")
    disable = tuple(disable)
    offers = discover(group)
    named = [offer for offer in offers if offer.name == bare and dist in ("", offer.dist)]
    if not named and dist:
        named = [offer for offer in offers if offer.name == bare and _normal(dist) == _normal(offer.dist)]
    found = [offer for offer in named if not is_disabled(offer, disable)]
    if len(found) > 1:
        found = [offer for offer in found if _normal(offer.dist) == CORE] or found
    if len(found) == 1:
        return found[0]
    kind = kind_of(group)
    if found:
        rivals = " or ".join(f"{bare}@{offer.dist}" for offer in found)
        where = "; ".join(f"{o.dist} {o.version} in {o.location}" for o in found)
        raise PluginConflict(f"{len(found)} distributions offer the {kind} {bare!r} ({where}); write {rivals}")
    if named:
        who = ", ".join(f"{offer.dist} {offer.version}" for offer in named)
        raise PluginNotFound(f"the {kind} {name!r} ({who}) is disabled by plugins.disable; remove it there to use it")
    raise PluginNotFound(_not_found(kind, name, [offer for offer in offers if not is_disabled(offer, disable)]))


def load(group: str, name: str, disable: Iterable[str] = (), inline: str | Path | None = None) -> type[Any]:
    """Import the plugin called `name` and check its kind and API version; PluginError says what is wrong and where.

    "inline:Name" is the class Name in the Python file `inline`.
    """
    if not name.startswith(INLINE):
        return load_offer(resolve(group, name, disable))
    bare = name.removeprefix(INLINE)
    if inline is None:
        raise PluginNotFound(f"the {kind_of(group)} {name!r} stands in a file that plugins.inline must name")
    module = _import_file(Path(inline))
    if bare not in vars(module):
        known = [each for each, value in vars(module).items() if isinstance(value, type)]
        raise PluginNotFound(f"inline plugin {inline} has no {bare}{did_you_mean(bare, known)}")
    return _checked(f"{kind_of(group)} {bare!r} of inline plugin {inline}", group, vars(module)[bare], "it")


def load_offer(offer: PluginInfo) -> type[Any]:
    """Import the class behind a discovered offer of any group but hooks, and check it."""
    return _checked(str(offer), offer.group, _import(offer), offer.dist)


def _checked(described: str, group: str, loaded: Any, owner: str) -> type[Any]:
    base = _base(group)
    if not isinstance(loaded, type) or not issubclass(loaded, base):
        what = f"the class {loaded.__qualname__}" if isinstance(loaded, type) else f"a {type(loaded).__name__}"
        raise PluginIncompatible(f"{described} is {what}, not a subclass of {base.__module__}.{base.__qualname__}")
    check_api_version(described, vars(loaded).get("api_version"), owner)
    if inspect.isabstract(loaded):
        missing = ", ".join(sorted(vars(loaded)["__abstractmethods__"]))
        raise PluginIncompatible(f"{described} does not implement {missing}")
    return loaded


def _base(group: str) -> type[Any]:
    module, name = _KINDS[group]
    base: type[Any] = getattr(importlib.import_module(module), name)
    return base


def check_api_version(offer: object, declared: object, owner: str) -> None:
    """Same major, and no newer minor than this core's; PluginIncompatible says which side to upgrade.

    `offer` and `owner` are what declared it and the distribution it is in, for the message.
    """
    if declared is None:
        raise PluginIncompatible(
            f"{offer} declares no api_version of its own; add `api_version = {API_VERSION}`, the API it was written for"
        )
    match declared:
        case (int(major), int(minor)) if isinstance(declared, tuple) and major >= 0 and minor >= 0:
            pass
        case _:
            raise PluginIncompatible(
                f"{offer} declares api_version = {declared!r:.80}, which is not a pair like (1, 0)"
            )
    if major != API_VERSION[0] or minor > API_VERSION[1]:
        fix = f"upgrade {CORE}" if (major, minor) > API_VERSION else f"upgrade {owner}"
        ours = f"{API_VERSION[0]}.{API_VERSION[1]}"
        raise PluginIncompatible(f"{offer} needs plugin API {major}.{minor}, this {CORE} speaks {ours}: {fix}")


def load_hooks(
    names: Iterable[str], disable: Iterable[str] = (), inline: str | Path | None = None
) -> pluggy.PluginManager:
    """A manager with the hook plugins `names`, and those in the Python file `inline` as one more, called "inline".

    A file that has plugin classes need not have hooks.
    """
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    disable = tuple(disable)
    for name in dict.fromkeys(names):
        offer = resolve(HOOKS, name, disable)
        _register(manager, load_hook_offer(offer), offer.name, str(offer))
    if inline is not None:
        module = _import_file(Path(inline))
        _register(manager, module, "inline", f"inline plugin {inline}", may_be_empty=_has_plugins(module))
    _failed_hooks[manager] = set()
    return manager


def load_hook_offer(offer: PluginInfo) -> object:
    """Import a hook plugin: a module, an instance, or a class that is called without arguments."""
    loaded = _import(offer)
    holder = loaded if isinstance(loaded, (type, ModuleType)) else type(loaded)
    check_api_version(offer, vars(holder).get("api_version"), offer.dist)
    if not isinstance(loaded, type):
        return loaded
    try:
        return loaded()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise PluginImportFailed(f"{offer}: {_cause(error)}") from error


def load_command(offer: PluginInfo) -> Any:
    """Import a subcommand of `lmc`: a `click.Command`."""
    import click

    loaded = _import(offer)
    if not isinstance(loaded, click.Command):
        raise PluginIncompatible(f"{offer} is a {type(loaded).__name__}, not a click.Command")
    return loaded


def call_hooks(manager: pluggy.PluginManager, hook: str, **arguments: Any) -> list[str]:
    """Call each implementation of `hook` by itself; one that fails is logged once and keeps nobody from hearing.

    Returns the names of the plugins that failed.
    """
    failed: list[str] = []
    caller: pluggy.HookCaller = getattr(manager.hook, hook)
    for implementation in reversed(caller.get_hookimpls()):
        wanted = {name: arguments[name] for name in implementation.argnames}
        try:
            implementation.function(**wanted)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            failed.append(implementation.plugin_name)
            seen = _failed_hooks.setdefault(manager, set())
            if (implementation.plugin_name, hook) not in seen:
                seen.add((implementation.plugin_name, hook))
                _log.exception(
                    "hook plugin %r: %s failed (%s); later failures of it are not logged",
                    implementation.plugin_name, hook, type(error).__name__,
                )  # fmt: skip
    return failed


def _has_plugins(module: ModuleType) -> bool:
    own = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__]
    return any(issubclass(each, _base(group)) for each in own for group in _KINDS)


def _register(
    manager: pluggy.PluginManager, plugin: object, name: str, described: str, *, may_be_empty: bool = False
) -> None:
    try:
        manager.register(plugin, name)
        manager.check_pending()
    except Exception as error:  # registering looks at every attribute, which runs the plugin's properties
        raise PluginIncompatible(f"{described}: {error}") from error
    callers = manager.get_hookcallers(plugin) or []
    implementations = [impl for caller in callers for impl in caller.get_hookimpls() if impl.plugin is plugin]
    if any(impl.wrapper or impl.hookwrapper for impl in implementations):
        raise PluginIncompatible(f"{described}: hooks here only observe; write plain functions, not wrappers")
    if not implementations and not may_be_empty:
        known = ", ".join(sorted(name for name in vars(hookspecs) if name.startswith("lmcache_")))
        raise PluginIncompatible(f"{described} implements no hook; mark functions with @hookimpl, known are {known}")


def _import(offer: PluginInfo) -> Any:
    """The object behind an offer; whatever its import raises, SystemExit too, becomes PluginImportFailed."""
    started = time.monotonic()
    try:
        loaded = offer.entry_point.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise PluginImportFailed(f"{offer} in {offer.location} would not import: {_cause(error)}") from error
    seconds = time.monotonic() - started
    if seconds > SLOW_IMPORT_S:
        _log.warning("%s took %.1f s to import", offer, seconds)
    return loaded


def _import_file(path: Path) -> ModuleType:
    """The file as a module, imported once for all the names in it, and again only if it has changed."""
    try:
        stat = path.stat()
        file = f"{path.resolve()} {stat.st_mtime_ns} {stat.st_size}"
        # A name that nothing else has, known to Python, or dataclasses in the file would not find their own types.
        name = f"lmcache_inline_{hashlib.blake2b(file.encode(), digest_size=8).hexdigest()}"
        if name in sys.modules:
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is not a Python file")
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise PluginImportFailed(f"inline plugin {path} would not import: {_cause(error)}") from error
    return module


def _cause(error: BaseException) -> str:
    """What an import raised and in which line, e.g. "OSError: libcufile.so.0 ... (plugin.py:3)"."""
    text = " ".join(str(error).split())[:400]
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, SyntaxError):
        return what if error.filename and error.filename in text else f"{what} ({error.filename}:{error.lineno})"
    machinery = (__file__, importlib.__file__, "<frozen ", importlib.metadata.__file__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(machinery)]
    return f"{what} ({frames[-1].filename}:{frames[-1].lineno})" if frames else what


def _offering_distributions() -> Iterator[Distribution]:
    """Each distribution that offers something to one of our groups; stale metadata of it is passed over."""
    for dist in distributions():
        try:
            text = dist.read_text("entry_points.txt")
            if not text or "lmcache_core." not in text:
                continue
            yield _freshest(_name(dist), dist)
        except Exception as error:  # unreadable metadata of one distribution is its own problem
            _report_metadata_fault(dist, error)


def _freshest(name: str, found: Distribution) -> Distribution:
    """Of several metadata directories of one distribution the one that pip wrote, of those the first on the path.

    An `.egg-info` that an older tool left behind is passed over wherever it lies.
    """
    for dist in Distribution.discover(name=name):
        if dist.read_text("METADATA") is not None:
            return dist
    return found


def _offers(dist: Distribution) -> list[PluginInfo]:
    try:
        name, version, location = _name(dist), _version(dist), str(dist.locate_file(""))
        return [
            PluginInfo(ep.group, ep.name, ep.value, name, version, location, ep)
            for ep in dist.entry_points
            if ep.group in GROUPS
        ]
    except Exception as error:  # as above
        _report_metadata_fault(dist, error)
        return []


def _report_metadata_fault(dist: Distribution, error: Exception) -> None:
    where = str(getattr(dist, "_path", None) or dist.locate_file(""))
    if where not in _metadata_faults and len(_metadata_faults) < 100:
        _metadata_faults.add(where)
        _log.warning("the entry points of %s cannot be read (%r); its plugins are not offered", where, error)


def _name(dist: Distribution) -> str:
    return _field(dist, "Name")


def _version(dist: Distribution) -> str:
    return _field(dist, "Version")


def _field(dist: Distribution, field_name: str) -> str:
    """One field from the head of the metadata; parsing all of it would cost as much as the rest of discovery."""
    text = dist.read_text("METADATA") or dist.read_text("PKG-INFO") or ""
    match = re.search(rf"^{field_name}:[ \t]*(\S+)", text.partition("\n\n")[0], re.MULTILINE | re.IGNORECASE)
    if match is None:
        raise PluginError(f"its metadata has no {field_name}")
    return match[1]


def _normal(dist: str) -> str:
    return re.sub(r"[-_.]+", "-", dist).lower()


def _normal_entry(entry: str) -> str:
    name, at, dist = entry.partition("@")
    return f"{name}@{_normal(dist)}" if at else _normal(entry)


def _not_found(kind: str, name: str, offers: list[PluginInfo]) -> str:
    names = sorted({offer.name for offer in offers})
    near = did_you_mean(name.partition("@")[0], names)
    found = "; ".join(f"{o.name} from {o.dist} {o.version} in {o.location}" for o in offers[:20]) or "none"
    more = f" and {len(offers) - 20} more" if len(offers) > 20 else ""
    searched = f" (Python {sys.executable})" if not offers else ""
    return f"no {kind} {name!r} is installed{near}; found: {found}{more}{searched}"


LOADERS: Final[dict[str, Callable[[PluginInfo], Any]]] = {
    **dict.fromkeys(_KINDS, load_offer),
    HOOKS: load_hook_offer,
    COMMANDS: load_command,
}
"""What imports and checks an offer, by its group."""
