"""LMCache Core: a KV cache for LLM inference that lives outside the engine.

The names below are the whole public interface; plugins import nothing else (and `lmcache_core.testing` in their tests).
Each loads its module on first use, so that `import lmcache_core` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .backend import (
        API_VERSION,
        ApiVersion,
        Backend,
        Context,
        DeviceIO,
        Entry,
        GetResult,
        NoOptions,
        SupportsDescription,
        SupportsDeviceIO,
        SupportsListing,
        SupportsRegistration,
        SupportsUnregistration,
        Traits,
    )
    from .backends.disk import DiskBackend, DiskOptions, RecordFile
    from .blocks import check_targets, checked_block_ids
    from .buffers import copy_bytes
    from .cache import Cache, Hit, Job, JobResult
    from .chain import Chain, Group, GroupKind, Model, Shard
    from .client.cache import RemoteCache, connect
    from .codec import Codec, Identity
    from .config import CacheConfig, TierConfig, load_config
    from .device import Device, DeviceRecord, DoneFence, Fence, Pages, Probe, SupportsPaths, SupportsStaging
    from .devices.cpu import CpuDevice
    from .diagnosis import Diagnosis, SupportsDiagnosis
    from .errors import (
        BackendError,
        BackendFull,
        BackendUnavailable,
        CacheError,
        CapacityError,
        ChunkCorrupt,
        ConfigError,
        DeviceError,
        NamespaceError,
        PluginConflict,
        PluginError,
        PluginImportFailed,
        PluginIncompatible,
        PluginNotFound,
    )
    from .hookspecs import hookimpl
    from .keys import ChunkKey, Family, pack_extra, salt_id
    from .layout import Layout, Region
    from .local import CacheStatus, LocalCache
    from .opening import open_cache
    from .options import RawOptions
    from .policy import EvictionPolicy, Item
    from .requests import RequestReport

__version__: Final = "0.1.0"

__all__ = [
    "API_VERSION",
    "ApiVersion",
    "Backend",
    "BackendError",
    "BackendFull",
    "BackendUnavailable",
    "Cache",
    "CacheConfig",
    "CacheError",
    "CacheStatus",
    "CapacityError",
    "Chain",
    "ChunkCorrupt",
    "ChunkKey",
    "Codec",
    "ConfigError",
    "Context",
    "CpuDevice",
    "Device",
    "DeviceError",
    "DeviceIO",
    "DeviceRecord",
    "Diagnosis",
    "DiskBackend",
    "DiskOptions",
    "DoneFence",
    "Entry",
    "EvictionPolicy",
    "Family",
    "Fence",
    "GetResult",
    "Group",
    "GroupKind",
    "Hit",
    "Identity",
    "Item",
    "Job",
    "JobResult",
    "Layout",
    "LocalCache",
    "Model",
    "NamespaceError",
    "NoOptions",
    "Pages",
    "PluginConflict",
    "PluginError",
    "PluginImportFailed",
    "PluginIncompatible",
    "PluginNotFound",
    "Probe",
    "RawOptions",
    "RecordFile",
    "Region",
    "RemoteCache",
    "RequestReport",
    "Shard",
    "SupportsDescription",
    "SupportsDeviceIO",
    "SupportsDiagnosis",
    "SupportsListing",
    "SupportsPaths",
    "SupportsRegistration",
    "SupportsStaging",
    "SupportsUnregistration",
    "TierConfig",
    "Traits",
    "__version__",
    "check_targets",
    "checked_block_ids",
    "connect",
    "copy_bytes",
    "hookimpl",
    "load_config",
    "open_cache",
    "pack_extra",
    "salt_id",
]

_MODULES: Final = {
    "backend": "API_VERSION ApiVersion Backend Context DeviceIO Entry GetResult NoOptions SupportsDescription "
    "SupportsDeviceIO SupportsListing SupportsRegistration SupportsUnregistration Traits",
    "backends.disk": "DiskBackend DiskOptions RecordFile",
    "blocks": "check_targets checked_block_ids",
    "buffers": "copy_bytes",
    "cache": "Cache Hit Job JobResult",
    "chain": "Chain Group GroupKind Model Shard",
    "client.cache": "RemoteCache connect",
    "codec": "Codec Identity",
    "config": "CacheConfig TierConfig load_config",
    "device": "Device DeviceRecord DoneFence Fence Pages Probe SupportsPaths SupportsStaging",
    "diagnosis": "Diagnosis SupportsDiagnosis",
    "devices.cpu": "CpuDevice",
    "errors": "BackendError BackendFull BackendUnavailable CacheError CapacityError ChunkCorrupt ConfigError "
    "DeviceError NamespaceError PluginConflict PluginError PluginImportFailed PluginIncompatible PluginNotFound",
    "hookspecs": "hookimpl",
    "keys": "ChunkKey Family pack_extra salt_id",
    "layout": "Layout Region",
    "local": "CacheStatus LocalCache",
    "opening": "open_cache",
    "options": "RawOptions",
    "policy": "EvictionPolicy Item",
    "requests": "RequestReport",
}
_HOME: Final = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    module = _HOME.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
