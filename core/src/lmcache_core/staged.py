"""Records in a device's memory, between pages and a store that reads and writes there: batches, and their proof."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from . import frame
from .backend import Backend, DeviceIO, GetResult, SupportsDeviceIO
from .device import DeviceRecord
from .errors import BackendError, BackendUnavailable, CacheError
from .frame import Frame
from .keys import ChunkKey
from .layout import Layout

Record = memoryview | DeviceRecord
"""Where a whole record is: in host memory, or in a device's."""


def header_of(record: Record) -> memoryview:
    """Its header page, in host memory."""
    return record.read_header() if isinstance(record, DeviceRecord) else record


def depth_of(record: Record) -> int:
    return frame.parse(header_of(record)).depth


def in_device(records: Iterable[Record]) -> list[DeviceRecord]:
    return [record for record in records if isinstance(record, DeviceRecord)]


def in_host(records: Iterable[Record]) -> list[memoryview]:
    return [record for record in records if not isinstance(record, DeviceRecord)]


def device_io_of(backend: Backend[Any]) -> DeviceIO | None:
    return backend.device_io() if isinstance(backend, SupportsDeviceIO) else None


def get_many(io: DeviceIO, keys: Sequence[ChunkKey], into: Sequence[DeviceRecord], timeout_s: float) -> list[GetResult]:
    """`get` for each key, in order."""
    deadline = time.monotonic() + timeout_s
    results: list[GetResult] = []
    for key, record in zip(keys, into, strict=True):
        try:
            if time.monotonic() > deadline:
                raise BackendUnavailable(f"not reached in {timeout_s} s")
            results.append(io.get(key, record))
        except BackendError as error:
            results.append(error.plain())
    return results


def put_many(
    io: DeviceIO, keys: Sequence[ChunkKey], data: Sequence[DeviceRecord], timeout_s: float
) -> list[BackendError | None]:
    """`put` for each key, in order."""
    deadline = time.monotonic() + timeout_s
    results: list[BackendError | None] = []
    for key, record in zip(keys, data, strict=True):
        try:
            if time.monotonic() > deadline:
                raise BackendUnavailable(f"not reached in {timeout_s} s")
            io.put(key, record)
            results.append(None)
        except BackendError as error:
            results.append(error.plain())
    return results


def unseal(record: DeviceRecord, nbytes: int, key: ChunkKey, layout: Layout) -> Frame:
    """The frame of the `nbytes` that were read to `record`; CacheError where only host memory can decode them."""
    found = frame.verify_header(record.read_header(), nbytes, key, layout.fingerprint, layout.nbytes)
    if found.codec != "identity":
        raise CacheError(f"{key!r} has codec {found.codec!r}, which works in host memory")
    return found
