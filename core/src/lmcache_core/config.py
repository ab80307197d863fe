"""The configuration: one YAML file and `LMCACHE__` variables into frozen dataclasses, each value with its origin.

The inside of the program sees `CacheConfig` only, never a dict or an environment variable.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from .endpoints import AUTO, ServerConfig, TcpConfig, check_loopback, socket_path
from .errors import ConfigError
from .nodes import MAX_TEXT_NBYTES, Scalar, Sequence, Table, parse_yaml
from .options import (
    NOT_CONFIGURED,
    FieldError,
    Origins,
    RawOptions,
    build,
    option_fields,
    written,
)
from .spelling import did_you_mean, shown
from .trace import TraceConfig

MEMORY: Final = "memory"
"""The backend that is the host memory itself, not a plugin."""
DEFAULT_FILE: Final = "lmcache.yaml"
FILE_VARIABLE: Final = "LMCACHE_CONFIG"
PREFIX: Final = "LMCACHE__"
MAX_TIERS: Final = 16
_TIER_NAME: Final = re.compile(r"[a-z](?:[-_]?[a-z0-9]){0,31}")
_PLUGIN_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}(@[A-Za-z0-9][A-Za-z0-9_.-]{0,127})?")
_INLINE_NAME: Final = re.compile(r"inline:[A-Za-z_][A-Za-z0-9_]{0,24}")
"""No longer than a codec's name may be in a record."""


@dataclass(frozen=True, slots=True)
class TierConfig:
    """One tier; `docs/config.md` says what each key means."""

    name: str
    backend: str
    capacity_nbytes: int | None = None
    policy: str = "s3fifo"
    codec: str = "identity"
    checksum: Literal["xxh3", "none"] = "xxh3"
    timeout_s: float = 10.0
    tenant_quota_nbytes: int | None = None
    options: RawOptions = field(default_factory=RawOptions)

    def __post_init__(self) -> None:
        if not _TIER_NAME.fullmatch(self.name):
            raise FieldError("name", f"{self.name[:80]!r} is not a tier name; write a-z, 0-9 and single - or _")
        for key in ("backend", "policy", "codec"):
            _check_plugin_name(key, getattr(self, key))
        if self.capacity_nbytes is not None and self.capacity_nbytes < 1:
            raise FieldError("capacity", f"must be at least 1 byte, got {self.capacity_nbytes}")
        if self.backend == MEMORY and self.capacity_nbytes is None:
            raise FieldError("capacity", "is required for the memory backend; write e.g. capacity: 16GiB")
        if self.tenant_quota_nbytes is not None and self.tenant_quota_nbytes < 1:
            raise FieldError("tenant_quota", f"must be at least 1 byte, got {self.tenant_quota_nbytes}")
        if not self.timeout_s > 0:
            raise FieldError("timeout", f"must be above zero, got {self.timeout_s}")


@dataclass(frozen=True, slots=True)
class PluginsConfig:
    """Which plugins count as not installed, which hook plugins run, and a Python file with plugins of one's own."""

    disable: tuple[str, ...] = ()
    hooks: tuple[str, ...] = ()
    inline: str | None = None

    def __post_init__(self) -> None:
        for key in ("disable", "hooks"):
            for name in getattr(self, key):
                _check_plugin_name(key, name)


def _default_tiers() -> tuple[TierConfig, ...]:
    return (TierConfig("host", MEMORY, capacity_nbytes=1 << 30),)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Everything that a cache is told; `docs/config.md` says what each key means."""

    chunk_tokens: int = 256
    device: str = "auto"
    staging_nbytes: int = 256 << 20
    write: Literal["through", "second_use", "on_evict"] = "through"
    admission: Literal["auto", "always"] = "auto"
    log_requests: Literal["off", "text", "json"] = "off"
    metrics: str = ""
    """"127.0.0.1:9465", say: where a cache that `open_cache` opens serves its metrics; empty for nowhere."""
    lease_timeout_s: float = 60.0
    key_secret: str = field(default="", repr=False)
    socket: str | None = None
    """Of the daemon whose memory and tiers `open_cache` is to use; "auto" for its default.  None opens our own."""
    socket_timeout_s: float = 0.25
    """How long a request waits for an answer of that daemon before it goes on without a cache."""
    tiers: tuple[TierConfig, ...] = field(default_factory=_default_tiers)
    plugins: PluginsConfig = PluginsConfig()
    server: ServerConfig = field(default_factory=ServerConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    origins: Origins = field(default_factory=dict, repr=False, compare=False, metadata=NOT_CONFIGURED)
    """Where each value came from, by key path; what is missing has its default."""

    def __post_init__(self) -> None:
        if not 1 <= self.chunk_tokens <= 1 << 20:
            raise FieldError("chunk_tokens", f"must be 1 to 1,048,576, got {self.chunk_tokens}")
        if self.staging_nbytes < 1 << 20:
            raise FieldError("staging", f"must be at least 1MiB, got {self.staging_nbytes} bytes")
        if self.write not in ("through", "second_use", "on_evict"):
            raise FieldError("write", f"{self.write!r} is none of through, second_use, on_evict")
        if self.admission not in ("auto", "always"):
            raise FieldError("admission", f"{self.admission!r} is none of auto, always")
        if self.log_requests not in ("off", "text", "json"):
            raise FieldError("log_requests", f"{self.log_requests!r} is none of off, text, json")
        check_loopback("metrics", self.metrics)
        if not self.lease_timeout_s > 0:
            raise FieldError("lease_timeout", f"must be above zero, got {self.lease_timeout_s}")
        if not self.socket_timeout_s > 0:
            raise FieldError("socket_timeout", f"must be above zero, got {self.socket_timeout_s}")
        if self.socket == "":
            raise FieldError("socket", "is empty; give a path, auto, or leave the key out")
        _check_plugin_name("device", self.device)
        _check_tiers(self.tiers)

    @property
    def daemon_socket(self) -> Path:
        """Where a daemon with this configuration listens, and where to look for it."""
        return socket_path(self.server.socket or self.socket or AUTO)

    @property
    def host(self) -> TierConfig | None:
        """The host memory tier, if there is one."""
        return self.tiers[0] if self.tiers[0].backend == MEMORY else None


_SECTIONS: Final[dict[tuple[type, str], type]] = {
    (CacheConfig, "plugins"): PluginsConfig,
    (CacheConfig, "server"): ServerConfig,
    (CacheConfig, "trace"): TraceConfig,
    (ServerConfig, "tcp"): TcpConfig,
}


def find_config(path: str | Path | None, environ: Mapping[str, str]) -> Path | None:
    """The file to read: `path`, else $LMCACHE_CONFIG, else ./lmcache.yaml where there is one, else none."""
    if path is not None:
        return Path(path)
    if environ.get(FILE_VARIABLE):
        return Path(environ[FILE_VARIABLE])
    return Path(DEFAULT_FILE) if os.path.lexists(DEFAULT_FILE) else None


def load_config(path: str | Path | None = None, environ: Mapping[str, str] = os.environ) -> CacheConfig:
    """The effective configuration; ConfigError has one line per problem.  A file that is named must be there."""
    found = find_config(path, environ)
    if found is None:
        return parse_config("", "default", environ)
    try:
        with found.open("rb") as stream:
            raw = stream.read(MAX_TEXT_NBYTES + 1)
    except (OSError, ValueError) as error:
        named = "" if path is not None or not environ.get(FILE_VARIABLE) else f" (named by ${FILE_VARIABLE})"
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{found}: cannot read the configuration{named}: {reason}") from error
    if len(raw) > MAX_TEXT_NBYTES:
        raise ConfigError(f"{found}: larger than the limit of {MAX_TEXT_NBYTES} bytes")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{found}:{line}: not UTF-8 text") from error
    return parse_config(text, str(found), environ)


def parse_config(text: str, source: str = "<string>", environ: Mapping[str, str] = os.environ) -> CacheConfig:
    """The configuration written in `text`, overridden by the `LMCACHE__` variables of `environ`."""
    root = parse_yaml(text, source, environ)
    if root is None:
        root = Table({}, source)
    if not isinstance(root, Table):
        raise ConfigError(f"{root.source}: the configuration must be a mapping (key: value)")
    root = _override(_with_tier_names(root), environ)
    origins: Origins = {}
    config = build(CacheConfig, root, "", origins)
    config.origins.update(origins)
    return config


def _check_plugin_name(key: str, name: str) -> None:
    inline = _INLINE_NAME.fullmatch(name) and key not in ("disable", "hooks")
    if not inline and not _PLUGIN_NAME.fullmatch(name):
        raise FieldError(key, f"{name[:80]!r} is not a plugin name; write name or name@distribution")


def _check_tiers(tiers: tuple[TierConfig, ...]) -> None:
    if not tiers:
        raise FieldError("tiers", "needs at least one tier")
    if len(tiers) > MAX_TIERS:
        raise FieldError("tiers", f"at most {MAX_TIERS} tiers, got {len(tiers)}")
    seen: dict[str, str] = {}
    for index, tier in enumerate(tiers):
        path = f"tiers.{tier.name}"
        folded = _in_variables(tier.name)
        if folded in seen:
            raise FieldError(f"{path}.name", f"two tiers are called {tier.name!r} (- and _ count as the same)")
        seen[folded] = tier.name
        if tier.backend == MEMORY and index > 0:
            first = "must be the first tier" if tiers[0].backend != MEMORY else "may be used by one tier only"
            raise FieldError(f"{path}.backend", f"{MEMORY} is the host memory itself and {first}")


def _with_tier_names(root: Table) -> Table:
    """The default tiers where the file has none; a tier without a name is called like its backend."""
    default = {"name": "host", "backend": MEMORY, "capacity": "1GiB"}
    tiers = root.items.get("tiers")
    if tiers is None:
        entry = Table({key: Scalar(value, "default") for key, value in default.items()}, "default")
        tiers = Sequence((entry,), "default")
    if not isinstance(tiers, Sequence):
        return root
    named = tuple(_named(tier) if isinstance(tier, Table) else tier for tier in tiers.items)
    sources = dict(root.key_sources)
    sources.setdefault("tiers", tiers.source)
    return Table({**root.items, "tiers": Sequence(named, tiers.source)}, root.source, sources)


def _named(tier: Table) -> Table:
    backend = tier.items.get("backend")
    if "name" not in tier.items and isinstance(backend, Scalar) and isinstance(backend.value, str):
        tier = tier.with_item("name", Scalar(re.split("[@:]", backend.value)[0], backend.source))
    if "options" not in tier.items:
        tier = tier.with_item("options", Table({}, tier.source))
    return tier


def _override(root: Table, environ: Mapping[str, str]) -> Table:
    """`root` with the value of each LMCACHE__ variable in its place; ConfigError for one that names nothing."""
    variables = sorted(name for name in environ if name.startswith(PREFIX))
    problems: list[str] = []
    for variable in variables:
        node = Scalar(environ[variable], f"environment variable {shown(variable)}")
        steps = variable.removeprefix(PREFIX).split("__")
        changed = _set(root, steps, node)
        if changed is None:
            known = _known_variables(root, variable)
            problems.append(f"{node.source}: names no setting{did_you_mean(variable, known)}")
        else:
            root = changed
    if problems:
        raise ConfigError("\n".join(problems))
    return root


def _set(root: Table, steps: list[str], node: Scalar) -> Table | None:
    """`root` with `node` at the place that `steps` name, or `None` if there is no such place."""
    head = steps[0].lower()
    rest = [step.lower() for step in steps[1:]]
    if head != "tiers":
        return _set_below(root, CacheConfig, [head, *rest], node)
    tiers = root.items.get("tiers")
    if len(rest) < 2 or not isinstance(tiers, Sequence):
        return None
    for index, tier in enumerate(tiers.items):
        if isinstance(tier, Table) and _in_variables(_name_of(tier)).lower() == rest[0]:
            changed = _set_in_tier(tier, rest[1:], node)
            if changed is None:
                return None
            items = (*tiers.items[:index], changed, *tiers.items[index + 1 :])
            return Table({**root.items, "tiers": Sequence(items, tiers.source)}, root.source, root.key_sources)
    return None


def _set_below(table: Table, kind: type, steps: list[str], node: Scalar) -> Table | None:
    """`table`, of the dataclass `kind`, with `node` at `steps`, which lead through the tables in `_SECTIONS`."""
    section = _SECTIONS.get((kind, steps[0]))
    if section is None or len(steps) == 1:
        return None if section or len(steps) > 1 else _set_field(table, kind, steps[0], node)
    inner = table.items.get(steps[0])
    below = inner if isinstance(inner, Table) else Table({}, node.source)
    changed = _set_below(below, section, steps[1:], node)
    return changed and table.with_item(steps[0], changed)


def _set_in_tier(tier: Table, steps: list[str], node: Scalar) -> Table | None:
    if steps[0] != "options":
        return None if len(steps) > 1 or steps[0] == "name" else _set_field(tier, TierConfig, steps[0], node)
    options = tier.items.get("options")
    if len(steps) != 2 or not steps[1]:
        return None
    inner = options if isinstance(options, Table) else Table({}, node.source)
    # The file may spell the same option with its unit: the environment replaces it, and does not contradict it.
    kept = {key: item for key, item in inner.items.items() if written(key) != written(steps[1])}
    return tier.with_item("options", Table(kept, inner.source, inner.key_sources).with_item(steps[1], node))


def _set_field(table: Table, kind: type, key: str, node: Scalar) -> Table | None:
    for name, described in option_fields(kind).items():
        if key in (name, described.name):
            kept = {k: v for k, v in table.items.items() if k not in (name, described.name)}
            return Table(kept, table.source, table.key_sources).with_item(name, node)
    return None


def _known_variables(root: Table, variable: str) -> list[str]:
    names = list(_variables(CacheConfig))
    tiers = root.items.get("tiers")
    for tier in tiers.items if isinstance(tiers, Sequence) else ():
        if isinstance(tier, Table):
            head = f"tiers__{_in_variables(_name_of(tier))}__"
            names += [f"{head}{name}" for name in option_fields(TierConfig) if name not in ("name", "options")]
            names += [f"{head}options__{variable.rpartition('__')[2]}"]
    return [PREFIX + name.upper() for name in names]


def _variables(kind: type) -> Iterator[str]:
    for name in option_fields(kind):
        section = _SECTIONS.get((kind, name))
        if section is not None:
            yield from (f"{name}__{inner}" for inner in _variables(section))
        elif name != "tiers":
            yield name


def _in_variables(tier: str) -> str:
    return tier.replace("-", "_").upper()


def _name_of(tier: Table) -> str:
    name = tier.items.get("name")
    return name.value if isinstance(name, Scalar) and isinstance(name.value, str) else ""
