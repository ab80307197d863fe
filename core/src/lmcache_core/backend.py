"""The contract of a storage backend: four verbs on bytes, and batches of them under a deadline."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, Generic, Protocol, Self, TypeVar, runtime_checkable

from .errors import BackendError, BackendUnavailable
from .keys import ChunkKey

if TYPE_CHECKING:
    from .device import DeviceRecord

ApiVersion = tuple[int, int]
API_VERSION: Final[ApiVersion] = (1, 0)
"""The plugin API that this core speaks, as (major, minor).  Independent of the package's version."""

GetResult = int | None | BackendError
"""Bytes written, or `None` for a miss, or the error that hit this one key of a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a backend promises; the tier and the conformance kit both read it."""

    persistent: bool = False
    """Records outlive the process."""
    shared: bool = False
    """Other processes see our records, and we see theirs."""
    alignment: int = 1
    """Buffers start at a multiple of this many bytes and are as long (4096 for O_DIRECT); a power of two."""
    io_threads: int = 4
    """Useful number of concurrent calls; the tier sizes its pool with it."""
    max_nbytes: int | None = None
    """Largest record that the store can hold; `None` for no limit."""
    batch_nbytes: int | None = None
    """How much one call of `get_many` or `put_many` is best given; for stores that do better with one large call at a
    time.  None: 8 MiB, and loads in parts that keep all threads at work."""
    may_tear: bool = False
    """After a crash of the machine a record may be there in part, and only its checksum tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoOptions:
    """For backends without settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What the tier tells its backend about itself."""

    capacity_nbytes: int | None = None
    """The tier's total; `None` when the store bounds itself.  A `put` beyond it raises BackendFull.

    A backend whose store bounds itself (a server with a limit of its own) sets its `context` to one without: the tier
    still holds the total by what it knows.
    """
    timeout_s: float = 10.0
    """The tier's deadline for one operation on one record."""
    record_nbytes: int | None = None
    """Size of the records to come where it is known in advance."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored record, as listed by a backend."""

    key: ChunkKey
    nbytes: int
    stored_at: float
    """Seconds since the epoch."""


OptionsT = TypeVar("OptionsT")


class Backend(ABC, Generic[OptionsT]):
    """A flat store of records.

    The tier above owns everything else: concurrency, eviction, codecs, checksums, breaker, metrics.  All methods are
    synchronous and are called from several threads at once.  Buffers are flat byte memoryviews owned by the caller,
    valid only during the call.  `__init__` validates and prepares but must not wait for a remote end.

    A miss is a value, a fault raises BackendError, anything else is a bug of the backend and opens its tier's breaker.
    """

    api_version: ClassVar[ApiVersion]
    """A literal, e.g. `(1, 0)`: the API this class was written against.  There is nothing to inherit."""
    traits: ClassVar[Traits] = Traits()
    Options: ClassVar[type] = NoOptions
    """Frozen dataclass that mirrors the YAML `options:` mapping; secrets are `field(repr=False)`."""

    def __init__(self, options: OptionsT, context: Context) -> None:
        self.options = options
        self.context = context

    @abstractmethod
    def contains(self, key: ChunkKey) -> bool:
        """Whether `get` would likely hit; may be stale."""

    @abstractmethod
    def get(self, key: ChunkKey, into: memoryview) -> int | None:
        """Copy the record into the front of `into`; return its length, or `None` on a miss.

        A record longer than `into` raises ChunkCorrupt before anything is written.  `into` beyond the record is left
        as it was, up to the next multiple of `traits.alignment`; all of it after a miss, unless the record was removed
        while it was read.
        """

    @abstractmethod
    def put(self, key: ChunkKey, data: memoryview) -> None:
        """Store a copy of `data`; readers see all of it or none of it, whatever happens to the writer.

        Keys are content hashes, so a second put stores the same bytes: either may win.  Raises BackendFull beyond the
        capacity, having stored nothing.
        """

    @abstractmethod
    def remove(self, key: ChunkKey) -> bool:
        """Forget the record; return whether it was there."""

    # Override these when the store has something better than a loop.  They return in about `timeout_s`, whatever the
    # store does, and one key's failure does not spoil the others.

    def contains_prefix(self, keys: Sequence[ChunkKey], *, timeout_s: float) -> int:
        """How many leading `keys` are present; raises BackendUnavailable at the deadline."""
        deadline = time.monotonic() + timeout_s
        for count, key in enumerate(keys):
            if time.monotonic() > deadline:
                raise BackendUnavailable(f"contains_prefix: {count} of {len(keys)} keys asked in {timeout_s} s")
            if not self.contains(key):
                return count
        return len(keys)

    def get_many(self, keys: Sequence[ChunkKey], into: Sequence[memoryview], *, timeout_s: float) -> list[GetResult]:
        """`get` for each key, in order."""
        deadline = time.monotonic() + timeout_s
        results: list[GetResult] = []
        for key, buffer in zip(keys, into, strict=True):
            if time.monotonic() > deadline:
                results.append(BackendUnavailable(f"get_many: not reached in {timeout_s} s"))
                continue
            results.append(self._get_answer(key, buffer))
        return results

    def put_many(
        self, keys: Sequence[ChunkKey], data: Sequence[memoryview], *, timeout_s: float
    ) -> list[BackendError | None]:
        """`put` for each key, in order."""
        deadline = time.monotonic() + timeout_s
        results: list[BackendError | None] = []
        for key, buffer in zip(keys, data, strict=True):
            if time.monotonic() > deadline:
                results.append(BackendUnavailable(f"put_many: not reached in {timeout_s} s"))
                continue
            results.append(self._put_answer(key, buffer))
        return results

    # An answer keeps no frames: they would keep it, and the buffers in them, until a garbage collection.

    def _get_answer(self, key: ChunkKey, into: memoryview) -> GetResult:
        try:
            return self.get(key, into)
        except BackendError as error:
            return error.plain()

    def _put_answer(self, key: ChunkKey, data: memoryview) -> BackendError | None:
        try:
            self.put(key, data)
        except BackendError as error:
            return error.plain()
        return None

    def close(self) -> None:
        """Release everything: no socket, descriptor or thread is left.  Called twice it does nothing more."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


# A capability is a method, not a flag: having it is the promise, and the kit tests it.


@runtime_checkable
class SupportsListing(Protocol):
    def entries(self, shard_id: bytes | None = None) -> Iterator[Entry]:
        """Every stored record (of one shard), in no particular order; records that vanish meanwhile may be missing."""


@runtime_checkable
class SupportsRegistration(Protocol):
    def register(self, address: int, nbytes: int) -> None:
        """Memory that buffers passed later lie in (RDMA, GDS); called once per extent, before it is used.

        Returns at once, since others wait meanwhile: what takes long is done with the next call.  Buffers elsewhere,
        such as those of a codec, come too.
        """


@runtime_checkable
class SupportsUnregistration(Protocol):
    def unregister(self, address: int, nbytes: int) -> None:
        """Inverse of `register`, before the memory is unmapped; no buffer of it is in use."""


class DeviceIO(Protocol):
    """Records between the store and a device's memory.  As `get` and `put` of a backend otherwise, on the same threads.

    Nothing but the header page is seen by the host: payloads that come this way are not compared with their checksum,
    and those that go have none.
    """

    def get(self, key: ChunkKey, into: DeviceRecord) -> int | None: ...

    def put(self, key: ChunkKey, data: DeviceRecord) -> None: ...


@runtime_checkable
class SupportsDeviceIO(Protocol):
    def device_io(self) -> DeviceIO | None:
        """How records go past host memory on this machine; `None` where they cannot.  Asked once, at start.

        It is used by a cache in an engine's process that has no tier in host memory and this one store below.
        """


@runtime_checkable
class SupportsDescription(Protocol):
    def description(self) -> str:
        """How the store is used on this machine, and why not in a better way: one line for `lmc status`.  No I/O."""
