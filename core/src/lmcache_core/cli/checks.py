"""What `lmc doctor` looks at on the machine and in the configuration; `tier_checks` and `security` look further."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from lmcache_core import __version__, choice, plugins
from lmcache_core.config import CacheConfig, find_config
from lmcache_core.device import SupportsPaths
from lmcache_core.diagnosis import Diagnosis, Level, SupportsDiagnosis
from lmcache_core.errors import CacheError, PluginError

from .config import parts, problems
from .display import size

_TIME_ERROR: Final = 5
_EARLIEST: Final = 1_735_689_600.0
"""The beginning of 2025: a clock before it is wrong."""
_DESCRIPTORS_PER_CLIENT: Final = 3


def environment() -> Iterator[Diagnosis]:
    """Versions and the machine."""
    system = os.uname()
    yield Diagnosis("ok", f"lmcache-core {__version__}, Python {platform.python_version()} ({sys.prefix})")
    cpus = len(os.sched_getaffinity(0))
    total, available = memory()
    yield Diagnosis(
        "ok",
        f"{system.sysname} {system.release} {system.machine}, {cpus} CPUs, {size(available)} of {size(total)} free",
    )
    limit = cgroup_limit()
    if limit is not None and limit < total:
        yield Diagnosis("ok", f"this group of processes may use {size(limit)} (cgroup)")
    yield from _clock(time.time())


def installed(disable: Iterable[str] = ()) -> Iterator[Diagnosis]:
    """Every distribution with plugins, and names that two of them offer."""
    offers = plugins.discover()
    dists: dict[str, list[str]] = {}
    for offer in offers:
        state = " (disabled)" if plugins.is_disabled(offer, tuple(disable)) else ""
        dists.setdefault(f"{offer.dist} {offer.version}", []).append(f"{offer.kind} {offer.name}{state}")
    for dist, names in sorted(dists.items()):
        yield Diagnosis("ok", f"{dist}: {', '.join(names)}")
    for group, name in sorted({(offer.group, offer.name) for offer in offers}):
        try:
            plugins.resolve(group, name, tuple(disable))
        except PluginError as error:
            if "disabled" not in str(error):
                yield Diagnosis("warning", str(error), "write name@distribution where it is named, or uninstall one")


def configuration(config: CacheConfig, path: Path | None) -> Iterator[Diagnosis]:
    """The file, what is wrong with it, and what in it is not the default."""
    found = find_config(path, os.environ)
    yield Diagnosis("ok", f"read from {found}" if found is not None else "no file: the defaults are in effect")
    for problem in problems(config):
        yield Diagnosis("error", problem, "`lmc config check` says it again once it is mended")
    with contextlib.redirect_stderr(None):  # what it warns of is a problem, said above
        table = [setting for part in parts(config) for setting in part]
    for one in table:
        if one.source != "default":
            yield Diagnosis("ok", f"{one.path}: {one.value}  # {one.source}")


def devices(config: CacheConfig) -> Iterator[Diagnosis]:
    """Each installed device: how many there are, or why there is none, and what it says of itself."""
    there: list[str] = []
    for offer in plugins.discover(plugins.DEVICES):
        if plugins.is_disabled(offer, config.plugins.disable):
            continue
        wanted = config.device.partition("@")[0] == offer.name
        try:
            with contextlib.redirect_stdout(sys.stderr):
                kind: Any = plugins.load_offer(offer)
                probe = kind.probe()
        except PluginError as error:
            yield Diagnosis("error" if wanted else "note", f"{offer.name}: {error}", "upgrade or uninstall it")
            continue
        if probe.count:
            yield Diagnosis("ok", f"{offer.name}: {probe.count} here{f' ({probe.reason})' if probe.reason else ''}")
            there += [offer.name] if offer.name != "cpu" else []
            yield from _paths(kind, offer.name)
        else:
            level: Level = "error" if wanted else "note"
            yield Diagnosis(level, f"{offer.name}: none here: {probe.reason or 'it does not say why'}")
        yield from own(kind, offer.name)
    if config.device == "auto":
        chosen = there[0] if len(there) == 1 else "cpu"
        if len(there) > 1:
            yield Diagnosis("error", f"device: auto finds {', '.join(there)}", "name the one to use: device: NAME")
        else:
            yield Diagnosis("ok", f"device: auto means {chosen}")


def _paths(kind: Any, name: str) -> Iterator[Diagnosis]:
    """How a device copies that could do so in several ways."""
    if not isinstance(kind, SupportsPaths):
        return
    found = choice.find(name, kind)
    if isinstance(found, choice.Choice):
        yield Diagnosis("ok", f"{name}: {found}")
    else:
        why = f" ({found})" if found else ", none was measured here"
        yield Diagnosis("note", f"{name}: copies by {kind.path_names[0]}{why}", f"lmc bench device {name}")


def limits(config: CacheConfig, *, daemon_runs: bool) -> Iterator[Diagnosis]:
    """Memory, locked memory, huge pages and open files, held against what the configuration wants."""
    host = config.host
    wanted = host.capacity_nbytes if host is not None and host.capacity_nbytes else config.staging_nbytes
    yield from _memory(wanted, daemon_runs)
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if hard == resource.RLIM_INFINITY or hard >= wanted:
        yield Diagnosis("ok", f"memlock: {_limit(hard)}")
    else:
        yield Diagnosis(
            "note",
            f"memlock: {_limit(hard)}, less than the host memory of {size(wanted)}",
            "only devices and networks that pin memory need it: LimitMEMLOCK=infinity, or ulimit -l unlimited",
        )
    yield from _huge_pages()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _DESCRIPTORS_PER_CLIENT * config.server.max_clients + 64
    if hard != resource.RLIM_INFINITY and hard < needed:
        yield Diagnosis(
            "note",
            f"open files: at most {hard:,}, enough for {max(1, (hard - 64) // _DESCRIPTORS_PER_CLIENT):,} clients",
            f"a daemon with server.max_clients {config.server.max_clients} needs LimitNOFILE={needed}",
        )
    else:
        yield Diagnosis("ok", f"open files: {_count(soft)}, at most {_count(hard)}")


def own(subject: Any, name: str) -> Iterator[Diagnosis]:
    """What a plugin says of itself; one that fails at it is told of, and breaks nothing."""
    if not isinstance(subject, SupportsDiagnosis):
        return
    try:
        with contextlib.redirect_stdout(sys.stderr):
            said = list(subject.diagnose())
    except Exception as error:  # a plugin may raise anything
        kind = type(error).__name__
        yield Diagnosis("warning", f"{name}: its own check raised {kind}: {error}", "tell whoever maintains the plugin")
        return
    yield from (Diagnosis(d.level, f"{name}: {d.text}", d.remedy) for d in said)


def memory() -> tuple[int, int]:
    """Bytes in all, and bytes that could be had."""
    values = {}
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(":")
        values[name] = int(rest.split()[0]) << 10
    return values["MemTotal"], values["MemAvailable"]


def cgroup_limit(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The memory limit of our control group, as far as it can be seen from inside."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limit = int((root / name).read_text(encoding="ascii"))
            return limit if limit < 1 << 60 else None
    return None


def _memory(wanted: int, daemon_runs: bool) -> Iterator[Diagnosis]:
    total, available = memory()
    total = min(total, cgroup_limit() or total)
    if wanted > total:
        yield Diagnosis(
            "error", f"host memory: {size(wanted)} wanted, {size(total)} there", "lower the host tier's capacity"
        )
    elif wanted > available and not daemon_runs:
        yield Diagnosis(
            "warning",
            f"host memory: {size(wanted)} wanted, {size(available)} free now",
            "lower the host tier's capacity, or free memory: the kernel ends processes when there is none",
        )
    else:
        yield Diagnosis("ok", f"host memory: {size(wanted)} of {size(total)}")


def _huge_pages(root: Path = Path("/sys/kernel/mm/transparent_hugepage")) -> Iterator[Diagnosis]:
    for kind, name, advised in (
        ("shared memory, a daemon's", "shmem_enabled", "advise"),
        ("private memory, a cache's in the engine's process", "enabled", "madvise"),
    ):
        with contextlib.suppress(OSError):
            setting = (root / name).read_text(encoding="ascii")
            chosen = setting[setting.find("[") + 1 : setting.find("]")]
            if chosen in ("never", "deny"):
                remedy = f"echo {advised} > {root}/{name} makes copies cheaper"
                yield Diagnosis("note", f"huge pages for {kind}: {chosen}", remedy)
            else:
                yield Diagnosis("ok", f"huge pages for {kind}: {chosen}")


def _clock(now: float) -> Iterator[Diagnosis]:
    if now < _EARLIEST:
        yield Diagnosis(
            "error", f"the clock says {time.strftime('%Y-%m-%d', time.gmtime(now))}", "set it: ages depend on it"
        )
        return
    state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))
    if state == _TIME_ERROR:
        yield Diagnosis(
            "note",
            "the clock is not synchronised, or this process cannot see it",
            "where several nodes share a store, run chrony or systemd-timesyncd: ages are compared",
        )
    else:
        yield Diagnosis("ok", "the clock is synchronised")


def _limit(nbytes: int) -> str:
    return "unlimited" if nbytes == resource.RLIM_INFINITY else size(nbytes)


def _count(count: int) -> str:
    return "unlimited" if count == resource.RLIM_INFINITY else f"{count:,}"


def broken(error: CacheError) -> Iterator[Diagnosis]:
    """A configuration that cannot be read."""
    yield from (Diagnosis("error", line) for line in str(error).splitlines())
