"""What the configuration of an LMCache 0.5 (in-process) becomes here, and what of it has no counterpart."""

from __future__ import annotations

import os
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from lmcache_core.errors import ConfigError
from lmcache_core.nodes import NOT_TEXT
from lmcache_core.spelling import did_you_mean, shown
from lmcache_core.units import format_nbytes

GIB: Final = 1 << 30
ALIASES: Final = {
    "enable_xpyd": "enable_pd",
    "nixl_peer_host": "pd_peer_host",
    "nixl_peer_init_port": "pd_peer_init_port",
    "nixl_peer_alloc_port": "pd_peer_alloc_port",
    "nixl_proxy_host": "pd_proxy_host",
    "nixl_proxy_port": "pd_proxy_port",
    "nixl_role": "pd_role",
    "controller_url": "controller_pull_url",
    "lmcache_worker_port": "lmcache_worker_ports",
    "plugin_locations": "runtime_plugin_locations",
    "external_backends": "storage_plugins",
}
"""Older spellings that it still reads."""
_SHOWN_CHARACTERS: Final = 200
_POLICIES: Final = {"LRU": "lru", "LFU": "lfu", "FIFO": "fifo"}
_SECRETS: Final = ("password", "secret", "token", "access_key", "accesskey", "account_key", "connection_string")

# Why a key has no counterpart.  The first pattern that matches the whole key gives the reason.
_NO_COUNTERPART: Final = (
    (r"save_unfull_chunk", "only whole chunks are stored; the tail of a prompt is computed again"),
    (r"save_decode_cache", "what is stored is decided by the engine's adapter, not here"),
    (r"use_layerwise|use_gpu_connector_v3", "how KV is copied is decided by the engine's adapter and the device"),
    (r"pre_caching_hash_algorithm", "keys are always the same chain of SHA-256, in every process and Python"),
    (r"enable_blending|blend_.*", "hits are prefixes; reuse in other places is not part of the cache"),
    (r"enable_p2p|p2p_.*", "nodes share a store: name one as a tier (redis, s3, fsspec), or run one daemon per node"),
    (r"mp_host|mp_port", "the daemon is `lmc serve`, reached by a Unix socket: see `server` in docs/config.md"),
    (r"enable_controller|controller_.*|lmcache_instance_id|lmcache_worker_.*",
     "there is no controller; `lmc status` and the metrics of each daemon tell how it is"),
    (r"enable_pd|pd_.*|nixl_.*|transfer_channel", "handing KV from prefill to decode nodes is not part of this file"),
    (r"use_gds|gds_.*|maru_.*", "a store that reads into the GPU is a backend plugin of its own: name it as a tier"),
    (r"audit_actual_remote_url", "every record is checked when it is read; there is no auditing store"),
    (r"internal_api_server_.*", "health and metrics: `server: {http: 127.0.0.1:9464}` with `lmc serve`"),
    (r"run_script_api_enabled|script_allowed_imports", "nothing that comes over a network is ever run"),
    (r"external_lookup_client|lookup_.*|enable_scheduler_bypass_lookup|hit_miss_ratio",
     "a lookup answers from memory at once and never waits for a store"),
    (r"retrieve_locations|store_location",
     "records are read from the nearest tier that has them, written as `write` says"),
    (r"py_enable_gc", "the interpreter's garbage collection is left alone"),
    (r"numa_mode|local_cpu_use_hugepages", "huge pages are used where the system has them; placement is the system's"),
    (r"reserve_local_cpu_size|enable_lazy_memory_allocator|lazy_memory_.*",
     "host memory is taken extent by extent as it fills, up to `capacity`"),
    (r"enable_async_loading", "loads are always asynchronous"),
    (r"priority_limit|min_retrieve_tokens", "there is no such threshold"),
    (r"runtime_plugin_locations", "plugins are installed packages; for one file of hooks see `plugins.inline`"),
    (r"storage_plugins|remote_storage_plugins",
     "they implement another interface; `lmc new backend NAME` begins one of ours"),
    (r"enable_chunk_statistics|chunk_statistics_.*", "see `lmc status` and the metrics"),
    (r"enable_kv_events", "hook plugins hear what is stored and evicted: see docs/hooks.md"),
    (r"enable_hidden_state_cache|max_hidden_state_cpu_size|hidden_state.*", "only KV is cached"),
    (r"pin_check_interval_sec", "there is nothing to check at intervals"),
    (r"remote_config_url|app_id", "the configuration is a file and variables of the environment"),
    (r"local_disk_path_sharding", "one directory serves every process; records are spread over its folders"),
    (r"nixl_peer_port", "handing KV from prefill to decode nodes is not part of this file"),
)  # fmt: skip
_FROM_EXTRA: Final = frozenset(("username", "password", "s3_region", "aws_access_key_id", "aws_secret_access_key"))
_TIERS: Final = frozenset(
    [
        "chunk_size",
        "local_cpu",
        "max_local_cpu_size",
        "local_disk",
        "max_local_disk_size",
        "remote_url",
        "remote_serde",
        "cache_policy",
        "blocking_timeout_secs",
        "pin_timeout_sec",
        "extra_config",
    ]
)


@dataclass(frozen=True, slots=True)
class Note:
    """One key that was not carried over, or not as it was."""

    key: str
    value: str
    why: str


@dataclass(slots=True)
class Migration:
    """`config` is for `yaml` to write; `environ` names the variables that must be set, since secrets left the file."""

    config: dict[str, Any] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    environ: list[str] = field(default_factory=list)


def migrate(theirs: Mapping[str, Any]) -> Migration:
    """Our configuration for theirs; each key that does not map has a note."""
    made = Migration()
    values: dict[str, Any] = {}
    for key, value in theirs.items():
        name = ALIASES.get(key, key)
        if name in _TIERS:
            values[name] = value if name == "extra_config" else _one_value(key, value)
        else:
            made.notes.append(Note(shown(key), _shown(key, value), _why_not(name)))
    made.config["chunk_tokens"] = _number(values, "chunk_size", int, 256)
    if not 1 <= made.config["chunk_tokens"] <= 1 << 20:
        raise ConfigError(f"chunk_size: must be 1 to 1,048,576, got {made.config['chunk_tokens']}")
    timeout_s = _seconds(values, made, "blocking_timeout_secs")
    policy = _policy(values, made)
    extra = values.get("extra_config") or {}
    if not isinstance(extra, Mapping):
        raise ConfigError("extra_config: expected a mapping")
    extra = {k: _one_value(f"extra_config.{k}", v) if k in _FROM_EXTRA else v for k, v in extra.items()}
    used: set[str] = set()
    tiers = [*_memory(values, made), *_disk(values, made), *_remote(values, made, extra, used)]
    for tier in tiers:
        if timeout_s and tier["backend"] != "memory":
            tier["timeout"] = f"{timeout_s}s"
        if policy:
            tier["policy"] = policy
    made.config["tiers"] = tiers
    lease_timeout_s = _seconds(values, made, "pin_timeout_sec")
    if lease_timeout_s:
        made.config["lease_timeout"] = f"{lease_timeout_s}s"
    for key, value in extra.items():
        if key not in used:
            why = "belongs to a part that does not map, or has no counterpart"
            made.notes.append(Note(f"extra_config.{shown(_text(key))}", _shown(str(key), value), why))
    if not tiers:
        made.config["tiers"] = [{"name": "host", "backend": "memory", "capacity": "1GiB"}]
        made.notes.append(Note("local_cpu", "false", "a cache needs a tier: a small one in host memory was put in"))
    return made


def _memory(values: Mapping[str, Any], made: Migration) -> list[dict[str, Any]]:
    nbytes = _gib(values, "max_local_cpu_size", 5.0)
    below = values.get("local_disk") or values.get("remote_url")
    if values.get("local_cpu", True) and nbytes:
        return [{"name": "host", "backend": "memory", "capacity": format_nbytes(nbytes)}]
    if below:
        staging = min(max(nbytes, 64 << 20), GIB)
        made.config["staging"] = format_nbytes(staging)
        why = f"without a tier in host memory, transfers go through staging memory ({format_nbytes(staging)})"
        made.notes.append(Note("local_cpu", "false", why))
    return []


def _disk(values: Mapping[str, Any], made: Migration) -> list[dict[str, Any]]:
    written = values.get("local_disk")
    if not written or not isinstance(written, (str, list)):
        return []
    paths = [part.strip() for part in (written.split(",") if isinstance(written, str) else map(str, written))]
    first, *others = [part.removeprefix("file://") for part in paths if part] or [""]
    if others:
        why = "one directory serves every process; join disks below the file system, or name one tier for each"
        made.notes.append(Note("local_disk", shown(", ".join(others)), why))
    tier = {"name": "disk", "backend": "disk"}
    nbytes = _gib(values, "max_local_disk_size", 0.0)
    if nbytes:
        tier["capacity"] = format_nbytes(nbytes)
    else:
        made.notes.append(Note("max_local_disk_size", "0", "state a capacity, or the tier fills the file system"))
    if not first.startswith(("/", "~")):
        made.notes.append(
            Note("local_disk", shown(first), "a store needs an absolute path: this one is from the working directory")
        )
        first = os.path.abspath(first)
    return [{**tier, "options": {"path": first}}]


def _remote(
    values: Mapping[str, Any], made: Migration, extra: Mapping[str, Any], used: set[str]
) -> list[dict[str, Any]]:
    url = values.get("remote_url")
    serde = values.get("remote_serde")
    if serde not in (None, "naive"):
        why = "a lossy codec changes what the model says; `codec: zstd` (lmcache-codec-zstd) loses nothing"
        made.notes.append(Note("remote_serde", _shown("remote_serde", serde), why))
    if not url:
        return []
    if not isinstance(url, str):
        raise ConfigError(f"remote_url: {_shown('remote_url', url)!r} is not a URL")
    scheme, _, rest = url.partition("://")
    if scheme in ("redis", "rediss", "unix", "valkey", "redis-cluster", "resp"):
        return [_redis(scheme, str(url), made, extra, used)]
    if scheme == "s3":
        return [_s3(rest, made, extra, used)]
    if scheme == "fs":
        path = "/" + rest.partition("/")[2].lstrip("/")
        made.notes.append(
            Note(
                "remote_url",
                _shown("remote_url", url),
                "a directory that several nodes see is a disk tier; state a capacity",
            )
        )
        return [{"name": "shared", "backend": "disk", "options": {"path": path}}]
    if scheme == "azure":
        container = rest.strip("/")
        made.notes.append(
            Note(
                "remote_url",
                _shown("remote_url", url),
                "credentials go under `options: {secrets: ...}`: see lmcache-fsspec",
            )
        )
        return [{"name": "remote", "backend": "fsspec", "options": {"url": f"az://{container}"}}]
    unknown = _shown("remote_url", scheme)
    why = {
        "redis-sentinel": "write the backend redis with `url: redis://SENTINEL,SENTINEL` and `master: NAME`",
        "lm": "its own server has no counterpart: `lmc serve` is one cache for a node, a store joins nodes",
    }.get(
        scheme,
        f"no backend here is known to speak {unknown}; `lmc plugins` lists the installed ones",
    )
    made.notes.append(Note("remote_url", _shown("remote_url", url), why))
    return []


def _redis(scheme: str, url: str, made: Migration, extra: Mapping[str, Any], used: set[str]) -> dict[str, Any]:
    backend = "valkey" if scheme == "valkey" else "redis"
    options: dict[str, Any] = {}
    if scheme == "unix":
        options["url"] = url
        user = password = None
    else:
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise ConfigError(f"remote_url: {_shown('remote_url', url)!r} is not a URL: {error}") from error
        user, password = parts.username, parts.password
        place = parts.netloc.rpartition("@")[2] + parts.path.rstrip("/")
        options["url"] = f"{'redis' if scheme in ('redis-cluster', 'resp') else scheme}://{place}"
        if scheme == "redis-cluster":
            options["cluster"] = True
    user = extra.get("username") or user
    password = extra.get("password") or password
    used.update({"username", "password"} & set(extra))
    if user:
        options["username"] = unquote(str(user)).replace("$${", "${").replace("${", "$${")
    if password:
        options["password"] = _variable(f"{backend}_password", made)
    return {"name": "remote", "backend": backend, "options": options}


def _s3(rest: str, made: Migration, extra: Mapping[str, Any], used: set[str]) -> dict[str, Any]:
    host, _, prefix = rest.partition("/")
    bucket, _, domain = host.partition(".s3")
    options: dict[str, Any] = {"bucket": bucket}
    region = extra.get("s3_region") or (
        match[1] if (match := re.match(r"[.-]([a-z0-9-]+)\.amazonaws", domain)) else None
    )
    used.update({"s3_region"} & set(extra))
    if region:
        options["region"] = region
    if prefix.strip("/"):
        options["prefix"] = prefix.strip("/")
    if domain and "amazonaws" not in domain:
        options["endpoint"] = f"https://s3{domain}"
    for theirs, ours in (("aws_access_key_id", "access_key_id"), ("aws_secret_access_key", "secret_access_key")):
        if extra.get(theirs):
            options[ours] = _variable(theirs, made)
        used.update({theirs} & set(extra))
    return {"name": "remote", "backend": "s3", "options": options}


def _variable(name: str, made: Migration) -> str:
    made.environ.append(name.upper())
    return f"${{{name.upper()}}}"


def _policy(values: Mapping[str, Any], made: Migration) -> str:
    theirs = values.get("cache_policy")
    if theirs is None:
        return ""
    if str(theirs).upper() not in _POLICIES:
        made.notes.append(
            Note("cache_policy", _shown("cache_policy", theirs), "no such policy; the default s3fifo resists scans")
        )
    return _POLICIES.get(str(theirs).upper(), "")


def _one_value(key: str, value: Any) -> Any:
    """What becomes a value of ours: `${` is not the beginning of a variable there, as it would be here."""
    if isinstance(value, (Mapping, list, tuple, set)):
        raise ConfigError(f"{key}: expected one value")
    odd = NOT_TEXT.search(value) if isinstance(value, str) else None
    if odd is not None:
        raise ConfigError(f"{key}: character U+{ord(odd[0]):04X} is not allowed")
    return value.replace("${", "$${") if isinstance(value, str) else value


def _number(values: Mapping[str, Any], key: str, kind: type[Any], default: float) -> Any:
    value = values.get(key)
    if value is None:
        return default
    try:
        number = kind(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{key}: {_text(value)!r} is not a number") from error
    if abs(number) >= 1 << 63:
        raise ConfigError(f"{key}: {_text(value)!r} is too large")
    return number


def _seconds(values: Mapping[str, Any], made: Migration, key: str) -> int:
    """0 for the default: the key is not there, or has a note."""
    number: int = _number(values, key, int, 0)
    if number <= 0 and values.get(key) is not None:
        made.notes.append(Note(key, str(number), "a time here is above zero; ours was left at its default"))
    return max(0, number)


def _gib(values: Mapping[str, Any], key: str, default: float) -> int:
    """Bytes, in whole MiB."""
    number = _number(values, key, float, default)
    if not 0 <= number < 1 << 30:
        raise ConfigError(f"{key}: {number} is not a size in GiB")
    return int(number * 1024) << 20


def _why_not(key: str) -> str:
    for pattern, why in _NO_COUNTERPART:
        if re.fullmatch(pattern, key):
            return why
    known = [*_TIERS, *ALIASES]
    return f"not a setting of LMCache 0.5{did_you_mean(key, known)}"


def _shown(key: str, value: Any) -> str:
    if any(word in key.lower() for word in _SECRETS):
        return "***"
    text = _clean_url(_text(value))
    return text if len(text) <= 60 else f"{text[:60]}…"


def _text(value: Any) -> str:
    """Bounded: a file of a page can name a list of billions, and a number without end."""
    if isinstance(value, (Mapping, list, tuple, set)):
        return reprlib.repr(value)
    if isinstance(value, int) and abs(value) >= 1 << 63:
        return "a number of many digits"
    text = str(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _clean_url(text: str) -> str:
    return re.sub(r":(?!//)[^@/\s]+(?=@)", ":***", text)
