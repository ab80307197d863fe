"""The cache of one process, in the node's daemon."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ..device import Device
from ..events import Events
from ..local import CacheStatus
from ..metrics import Metrics
from ..pooled import PooledCache
from ..requests import RequestReport
from .remote import RemotePool


class RemoteCache(PooledCache):
    """Like a LocalCache, only that its memory and tiers are the daemon's.  See `connect`."""

    _pool: RemotePool

    def __init__(
        self,
        pool: RemotePool,
        device: Device,
        *,
        metrics: Metrics,
        events: Events,
        device_name: str = "",
        admission: bool = True,
        log_request: Callable[[RequestReport], None] | None = None,
    ) -> None:
        super().__init__(
            pool,
            device,
            metrics=metrics,
            events=events,
            device_name=device_name,
            admission=admission,
            log_request=log_request,
        )
        pool.on_drop = self._unregister_later

    @property
    def connected(self) -> bool:
        """Whether the daemon is there now."""
        return bool(self._pool.boot_id)

    def status(self) -> CacheStatus:
        """How the cache is now: what the daemon says of its memory and tiers; empty if it does not answer."""
        found = self.daemon_status()
        if found is None:
            return CacheStatus("", self._device_name, 0, 0, 0, 0, ())
        return msgspec.convert({**found, "device": self._device_name}, CacheStatus)

    def daemon_status(self) -> dict[str, Any] | None:
        """The daemon's account of itself, as `lmc status --json` prints it; None if it does not answer."""
        return None if self._forked else self._pool.status()


def connect(
    path: str | Path,
    device: Device | None = None,
    *,
    device_name: str = "",
    connect_timeout_s: float = 1.0,
    call_timeout_s: float = 0.25,
    load_timeout_s: float = 30.0,
    metrics: Metrics | None = None,
    events: Events | None = None,
    admission: bool = True,
    log_request: Callable[[RequestReport], None] | None = None,
) -> RemoteCache:
    """A cache in the daemon that serves `path`; returns when it is there, or after `connect_timeout_s` without it.

    Without a daemon every lookup is a miss and every store is dropped, until there is one.
    """
    if device is None:
        from ..devices.cpu import CpuDevice

        device = CpuDevice()
    pool = RemotePool(
        Path(path), call_timeout_s=call_timeout_s, connect_timeout_s=connect_timeout_s, load_timeout_s=load_timeout_s
    )
    pool.wait_connected(connect_timeout_s)
    return RemoteCache(
        pool,
        device,
        metrics=metrics or Metrics(),
        events=events or Events(None),
        device_name=device_name,
        admission=admission,
        log_request=log_request,
    )
