"""Everything this package raises.  A miss is a value (`None`), never an exception.

CacheError
├── ConfigError             the configuration is wrong; says file, line, path and what to write
├── NamespaceError          a model, adapter or salt cannot be part of a key; that request is not cached
├── CapacityError           more memory was asked for than the host or its limits have
├── PluginError
│   ├── PluginNotFound      no installed distribution offers that name
│   ├── PluginConflict      two distributions offer it
│   ├── PluginImportFailed  its entry point would not import (the cause is chained)
│   └── PluginIncompatible  written for an API that this core does not speak
├── BackendError            a store failed; `retryable` says whether trying again can help
│   ├── BackendUnavailable  refused, timed out, disconnected       retryable
│   ├── BackendFull         no room for the record                 not retryable
│   └── ChunkCorrupt        length, identity or checksum is wrong  not retryable
└── DeviceError             a device plugin failed
"""

from __future__ import annotations

from typing import ClassVar, Self, TypeVar

ErrorT = TypeVar("ErrorT", bound=BaseException)


class CacheError(Exception):
    """Base of every error raised by lmcache_core and its plugins."""


class ConfigError(CacheError):
    """A wrong configuration; the message carries file, line, key path and what to write instead."""


class NamespaceError(CacheError):
    """`field` cannot be part of a key: it is illegal or could not be determined."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class CapacityError(CacheError):
    """More memory was asked for than there is."""


class PluginError(CacheError):
    """A plugin could not be used."""


class PluginNotFound(PluginError):
    """No installed distribution offers the name."""


class PluginConflict(PluginError):
    """More than one installed distribution offers the name."""


class PluginImportFailed(PluginError):
    """The entry point's target would not import."""


class PluginIncompatible(PluginError):
    """The plugin was written for an API that this core does not speak."""


def without_frames(error: ErrorT) -> ErrorT:
    """The same error, for keeping: its traceback and those of its causes would keep what the frames hold."""
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error


class BackendError(CacheError):
    """A store failed to do what was asked; raised by backends, caught by the tier."""

    retryable: ClassVar[bool] = False

    def plain(self) -> Self:
        """The error without the frames that it came through, which hold the buffers of whoever called."""
        return without_frames(self)


class BackendUnavailable(BackendError):
    """Refused, timed out or disconnected."""

    retryable = True


class BackendFull(BackendError):
    """No room for the record."""


class ChunkCorrupt(BackendError):
    """A record's length, identity or checksum is wrong."""


class DeviceError(CacheError):
    """A device plugin failed."""
