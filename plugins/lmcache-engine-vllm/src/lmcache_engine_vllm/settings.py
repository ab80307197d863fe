"""What the operator says in `kv_connector_extra_config`, checked, with the configuration file that it names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from lmcache_core import CacheConfig, ConfigError, load_config

_EXTRA: Final = "kv_connector_extra_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The fields are the keys of `kv_connector_extra_config`."""

    config: str | None = None
    """The YAML file; without it $LMCACHE_CONFIG or ./lmcache.yaml, else the defaults."""
    socket: str | None = None
    """Of the node's daemon, or "auto"; without it the file's `socket`, else a daemon of the engine's own."""
    lookup_timeout_s: float = 0.2
    """How long a request waits in vLLM's queue, in all, to learn what slower tiers have of it."""
    lookup_grace_s: float = 0.01
    """How long a step may stand still, in all, for first answers: on a busy machine the daemon needs some ms."""
    load_timeout_s: float = 10.0
    """After this long without its chunks a load has failed, and they are computed."""
    save_decode: bool = False
    """Store generated tokens too, for the next turn of a conversation."""
    weights: str = ""
    """A revision of the weights that the operator vouches for, instead of a digest of the files."""

    def __post_init__(self) -> None:
        for name, kinds in _KINDS.items():
            if type(getattr(self, name)) not in kinds:
                raise ConfigError(f"{_EXTRA}: {name}: {getattr(self, name)!r} is not {_WANTED[kinds]}")
        for name in ("lookup_timeout_s", "lookup_grace_s", "load_timeout_s"):
            if not 0 <= getattr(self, name) <= 600:
                raise ConfigError(f"{_EXTRA}: {name}: must be 0 to 600, got {getattr(self, name)}")


_TEXT, _OPTIONAL, _NUMBER, _SWITCH = (str,), (str, type(None)), (int, float), (bool,)
_WANTED: Final[dict[tuple[type, ...], str]] = {
    _TEXT: "text",
    _OPTIONAL: "text",
    _NUMBER: "a number of seconds",
    _SWITCH: "true or false",
}
_KINDS: Final[dict[str, tuple[type, ...]]] = {
    "config": _OPTIONAL,
    "socket": _OPTIONAL,
    "lookup_timeout_s": _NUMBER,
    "lookup_grace_s": _NUMBER,
    "load_timeout_s": _NUMBER,
    "save_decode": _SWITCH,
    "weights": _TEXT,
}


def read_settings(extra: Mapping[str, Any]) -> Settings:
    """The settings in vLLM's mapping; ConfigError names an unknown key and the nearest one that there is."""
    known = [field.name for field in fields(Settings)]
    for key in extra:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"
            raise ConfigError(f"{_EXTRA}: unknown key {key!r}{hint}")
    return Settings(**extra)


def read_config(settings: Settings) -> CacheConfig:
    """The configuration of the cache that the settings name."""
    return load_config(settings.config)
