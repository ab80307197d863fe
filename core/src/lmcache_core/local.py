"""The cache of one process, in that process."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from .device import Device
from .errors import CacheError
from .events import Events
from .gauges import add_pool_gauges
from .history import History
from .metrics import Metrics
from .pool import Pool
from .pooled import PooledCache
from .requests import RequestReport
from .tier import TierStatus

_PREFAULT_NBYTES: Final = 2 << 20


@dataclass(frozen=True, slots=True)
class CacheStatus:
    """How a cache is; sizes in bytes."""

    boot_id: str
    device: str
    records: int
    records_in_use: int
    used_nbytes: int
    capacity_nbytes: int
    tiers: tuple[TierStatus, ...]


class LocalCache(PooledCache):
    """Owns its pool, device and events, and closes them.  See `open_cache` for one from a configuration."""

    _pool: Pool

    def __init__(
        self,
        pool: Pool,
        device: Device,
        *,
        metrics: Metrics,
        events: Events,
        device_name: str = "",
        admission: bool = True,
        log_request: Callable[[RequestReport], None] | None = None,
    ) -> None:
        self._prefaults = Prefaults()
        pool.slab.on_grow = self._prefaults.start
        pool.slab.on_drop = self._unregister
        super().__init__(
            pool,
            device,
            metrics=metrics,
            events=events,
            device_name=device_name,
            admission=admission,
            log_request=log_request,
        )
        add_pool_gauges(metrics, pool)

    def status(self) -> CacheStatus:
        """How the cache is now; CacheError in a forked child."""
        if self._forked:
            raise CacheError("this process was forked off one with a cache open, and has none; open another here")
        records, in_use, used = self._pool.usage()
        tiers = tuple(tier.status() for tier in self._pool.tiers)
        capacity = self._pool.slab.capacity_nbytes
        return CacheStatus(self._pool.boot_id, self._device_name, records, in_use, used, capacity, tiers)

    @property
    def history(self) -> History:
        """What became of chunks and lookups lately."""
        return self._pool.history

    def close(self) -> None:
        if not self._forked:
            self._prefaults.join()
        super().close()


class Prefaultable(Protocol):
    """An extent that somebody has mapped."""

    @property
    def nbytes(self) -> int: ...
    def prefault(self, stop: Callable[[], bool]) -> None: ...


class Prefaults:
    """One thread that has new extents backed: touched first by a copy, they would slow that copy tenfold.

    The thread stays: starting another takes as long as the one that is busy with the memory map lets it.  It may be
    `nice` to the machine, where no thread of the process has to wait for its memory map: that would take longer.
    """

    def __init__(self, nice: int = 0) -> None:
        self._nice = nice
        self._wanted: queue.SimpleQueue[Prefaultable | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stopping = False

    def start(self, extent: Prefaultable) -> None:
        """Have it backed soon; returns at once.  Callers are one at a time."""
        if extent.nbytes < _PREFAULT_NBYTES or self._stopping:
            return
        self._wanted.put(extent)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lmcache-prefault", daemon=True)
            self._thread.start()

    def join(self) -> None:
        """End the thread, whatever is not backed yet.  Twice is fine."""
        self._stopping = True
        self._wanted.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        if self._nice:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)  # of this thread alone, on Linux
        while (extent := self._wanted.get()) is not None:
            extent.prefault(lambda: self._stopping)
            del extent  # or its memory would stay until the next one comes
