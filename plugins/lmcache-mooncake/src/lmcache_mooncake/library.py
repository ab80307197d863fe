"""Mooncake's own client: found where the user installed it, in whichever variant, and told what we know of time."""

from __future__ import annotations

import importlib
import importlib.metadata
import math
import os
from types import MappingProxyType
from typing import Any, Final

from lmcache_core import ConfigError

from .options import MooncakeOptions

VARIANTS: Final = MappingProxyType(
    {
        "mooncake-transfer-engine": "beside CUDA 12",
        "mooncake-transfer-engine-cuda13": "beside CUDA 13",
        "mooncake-transfer-engine-non-cuda": "no GPU needed",
        "mooncake-transfer-engine-npu": "Ascend",
        "mooncake-transfer-engine-musa": "Moore Threads",
        "mooncake-transfer-engine-efa": "CUDA 12 and EFA",
        "mooncake-transfer-engine-efa-non-cuda": "EFA",
    }
)
RPC_TIMEOUT_MS: Final = "MC_RPC_TIMEOUT_MS"
_LOG_LEVEL: Final = "MC_LOG_LEVEL"


def load() -> Any:
    """The module `mooncake.store`; ConfigError says what to install."""
    # It tells stderr about each client in twenty lines; whoever wants them sets this himself.
    os.environ.setdefault(_LOG_LEVEL, "ERROR")
    try:
        return importlib.import_module("mooncake.store")
    except ModuleNotFoundError as error:
        if error.name not in ("mooncake", "mooncake.store"):
            raise ConfigError(f"mooncake: its package needs {error.name}, which is not installed") from error
        offered = ", ".join(f"{name} ({what})" for name, what in VARIANTS.items())
        raise ConfigError(f"mooncake: its client is not installed; pip install one of: {offered}") from error
    except ImportError as error:
        raise ConfigError(
            f"mooncake: its client is installed but cannot be loaded: {error}. It needs libibverbs1, libnuma1 and "
            "libcurl4 (Debian's names) of the system, also without RDMA, and the variant must fit this machine: "
            "the one whose name ends in -non-cuda needs no GPU"
        ) from error


def installed() -> dict[str, str]:
    """The variants that are installed, each with its version."""
    found: dict[str, str] = {}
    for name in VARIANTS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def bound_waiting(timeout_s: float) -> float:
    """Have the library give up within half of `timeout_s` where it would wait for 30 s; how long a call can take now.

    It takes these from the environment only, so they hold for the process: the shortest timeout of its tiers counts,
    and what the user has set stays.
    """
    half_s = timeout_s / 2  # a read, for instance, asks the master and then waits for a node
    _lower(RPC_TIMEOUT_MS, max(1, round(half_s * 1000)))
    for name in ("MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC"):
        _lower(name, max(1, math.ceil(half_s)))
    given = os.environ[RPC_TIMEOUT_MS]
    return int(given) / 1000 if given.isdigit() else math.inf


def _lower(name: str, value: int) -> None:
    given = os.environ.get(name)
    if given is None or (given == _ours.get(name) and value < int(given)):
        os.environ[name] = _ours[name] = str(value)


_ours: Final[dict[str, str]] = {}
"""What was set here."""


def replication(library: Any, options: MooncakeOptions, own_segment: str) -> Any:
    """The store's own object for how a record is kept; ConfigError for what this version does not have."""
    config = library.ReplicateConfig()
    config.replica_num = options.replicas
    if options.prefer_local:
        config.preferred_segment = own_segment
    if not options.soft_pin:
        return config
    if hasattr(config, "soft_pin_action"):
        config.soft_pin_action = library.SoftPinAction.ENABLE
        if options.soft_pin_ttl_s is not None:
            config.soft_pin_ttl_ms = max(1, round(options.soft_pin_ttl_s * 1000))
    elif hasattr(config, "with_soft_pin") and options.soft_pin_ttl_s is None:
        config.with_soft_pin = True
    else:
        what = "soft_pin_ttl" if hasattr(config, "with_soft_pin") else "soft_pin"
        raise ConfigError(f"mooncake: {what}: the installed version ({installed()}) does not have it")
    return config
