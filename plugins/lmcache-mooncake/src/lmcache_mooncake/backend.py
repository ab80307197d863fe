"""The backend `mooncake`: records as objects of Mooncake Store, from and to memory that it knows."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Final

from lmcache_core import (
    ApiVersion,
    Backend,
    BackendError,
    BackendUnavailable,
    ChunkKey,
    Context,
    Diagnosis,
    GetResult,
    Traits,
)

from . import library, sharing
from .options import P2P_HANDSHAKE, MooncakeOptions
from .transfers import Transfers

logger = logging.getLogger(__name__)

_BATCH_NBYTES: Final = 256 << 20
"""The library moves the records of a call at the same time; calls beside one another slow each other down."""
_DIAGNOSE_S: Final = 1.0
_RDMA_DEVICES: Final = Path("/sys/class/infiniband")
_ANYWHERE: Final = ("0.0.0.0", "::")


class MooncakeBackend(Backend[MooncakeOptions]):
    """Records in Mooncake Store, under `prefix` and the key in hexadecimal.

    The store bounds itself (its nodes' segments and the master's eviction), so no capacity is kept here.  Nothing
    connects before it is needed, unless memory of this process is to be part of the store.  A record in registered
    memory is moved without a copy; other memory goes through a buffer.
    """

    api_version: ClassVar[ApiVersion] = (1, 0)
    traits: ClassVar[Traits] = Traits(persistent=True, shared=True, io_threads=4, batch_nbytes=_BATCH_NBYTES)
    Options: ClassVar[type] = MooncakeOptions

    def __init__(self, options: MooncakeOptions, context: Context) -> None:
        if context.capacity_nbytes is not None:
            logger.info("mooncake: capacity bounds what each process keeps; the store's total is that of its segments")
        super().__init__(options, replace(context, capacity_nbytes=None))
        # What lies in our own segment goes with us.
        self.traits = replace(  # type: ignore[misc]
            type(self).traits, io_threads=options.threads, persistent=not options.segment_nbytes
        )
        self._session = sharing.acquire(options, context.timeout_s)
        self._lock = threading.Lock()
        self._closed = False
        self._registered: set[int] = set()
        self._transfers = Transfers(self._session, options.prefix)
        if not self._session.master.is_local:
            logger.warning(
                "mooncake: records go to the nodes of %s unencrypted, and this process opens ports on all interfaces "
                "that ask nobody for a password: keep the store's network closed",
                options.master,
            )
        if options.segment_nbytes:
            self._session.start()

    def contains(self, key: ChunkKey) -> bool:
        return self._transfers.count_present([key], self._deadline()) == 1

    def get(self, key: ChunkKey, into: memoryview) -> int | None:
        (result,) = self._transfers.get([key], [into], self._deadline())
        if isinstance(result, BackendError):
            raise result
        return result

    def put(self, key: ChunkKey, data: memoryview) -> None:
        (error,) = self._transfers.put([key], [data], self._deadline())
        if error is not None:
            raise error

    def remove(self, key: ChunkKey) -> bool:
        return self._transfers.remove(key, self._deadline())

    def contains_prefix(self, keys: Sequence[ChunkKey], *, timeout_s: float) -> int:
        return self._transfers.count_present(keys, self._deadline(timeout_s))

    def get_many(self, keys: Sequence[ChunkKey], into: Sequence[memoryview], *, timeout_s: float) -> list[GetResult]:
        return self._transfers.get(keys, into, self._deadline(timeout_s))

    def put_many(
        self, keys: Sequence[ChunkKey], data: Sequence[memoryview], *, timeout_s: float
    ) -> list[BackendError | None]:
        return self._transfers.put(keys, data, self._deadline(timeout_s))

    def register(self, address: int, nbytes: int) -> None:
        """Returns at once: the store is told with the next call."""
        with self._lock:
            if not self._closed:
                self._registered.add(address)
                self._session.register(address, nbytes)

    def unregister(self, address: int, nbytes: int) -> None:
        """Before that memory is unmapped."""
        with self._lock:
            if address in self._registered:
                self._registered.remove(address)
                self._session.unregister(address)

    def diagnose(self) -> Iterator[Diagnosis]:
        options, master = self.options, self._session.master
        for name, version in library.installed().items():
            yield Diagnosis("ok", f"the client is {name} {version}")
        try:
            master.knock(_DIAGNOSE_S)
        except OSError as error:
            remedy = "start mooncake_master there, or correct the option master"
            yield Diagnosis("error", f"the master {master} accepts no connection: {error}", remedy)
        else:
            yield Diagnosis("ok", f"the master {master} accepts connections")
        if options.protocol == "rdma" and not (_RDMA_DEVICES.is_dir() and os.listdir(_RDMA_DEVICES)):
            yield Diagnosis("error", "protocol is rdma, and this host has no RDMA device", "set protocol: tcp")
        if options.protocol == "tcp" and not master.is_local:
            yield Diagnosis(
                "note", "records go over TCP, which costs a core some GB/s", "protocol: rdma where there is"
            )
        if not master.is_local:
            yield Diagnosis(
                "warning",
                "the store asks nobody for a password and listens on all interfaces",
                "let only its own nodes reach the ports of the master and of the clients",
            )
        if options.metadata != P2P_HANDSHAKE and any(host in options.metadata for host in _ANYWHERE):
            yield Diagnosis("error", f"metadata is {options.metadata}, which is no address", "write the server's own")

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for address in self._registered:
                self._session.unregister(address)
        sharing.release(self._session)

    def _deadline(self, timeout_s: float | None = None) -> float:
        if self._closed:
            raise BackendUnavailable("mooncake: it is closed")
        return time.monotonic() + (self.context.timeout_s if timeout_s is None else timeout_s)
