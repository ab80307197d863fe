"""The contract of an accelerator: move KV between the engine's pages and host memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from .backend import ApiVersion
from .layout import Layout

Pages = Sequence[Sequence[Any]]
"""The engine's paged KV: `pages[region][layer]` is an array whose first axis is the block and whose other axes hold
`block_nbytes` bytes, with any strides.  Core never looks inside."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What a device found on this machine; `reason` explains a `count` of 0 to a human."""

    count: int
    reason: str = ""


class Fence(Protocol):
    """Completion of copies that were queued on a device."""

    def done(self) -> bool: ...

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether the copies are complete; waits at most `timeout_s`."""
        ...

    def make_stream_wait(self, stream: Any) -> None:
        """Let work queued later on `stream` start only after the copies."""
        ...


class DoneFence:
    """The fence of copies that were complete when the call returned."""

    __slots__ = ()

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        return True

    def make_stream_wait(self, stream: Any) -> None:
        return None


class DeviceRecord(ABC):
    """Memory of a device for one record, as it lies in a store: header page, payload, padding to whole pages."""

    nbytes: int

    @property
    @abstractmethod
    def memory(self) -> Any:
        """All of it, for a library that does I/O: an object with the array interface of its platform."""

    @abstractmethod
    def payload(self, nbytes: int) -> Any:
        """The payload, for `gather` and `scatter` of the same device in the place of host memory; `len` is `nbytes`."""

    @abstractmethod
    def read_header(self) -> memoryview:
        """A copy of the header page in host memory."""

    @abstractmethod
    def write_header(self, page: memoryview) -> None:
        """Copy a header page to the device; it is there when this returns."""


@runtime_checkable
class SupportsStaging(Protocol):
    """Optional for a device: memory of its own in which records wait on their way between pages and a store."""

    def staging(self, nbytes: int, pages: Pages) -> DeviceRecord:
        """Memory for one record where `pages` are, given back with the object.  DeviceError where none is left."""


class Device(ABC):
    """One accelerator family.  The entry-point name ("rocm") identifies it, `torch_type` does not."""

    api_version: ClassVar[ApiVersion]
    torch_type: ClassVar[str]
    """What torch calls it: "cuda" for CUDA, ROCm and MACA alike."""

    @classmethod
    @abstractmethod
    def probe(cls) -> Probe:
        """Look for the hardware.  Never raises and never initialises the device."""

    def register(self, address: int, nbytes: int) -> None:
        """Pin host memory that later copies use, once per extent."""
        return None

    def unregister(self, address: int, nbytes: int) -> None:
        """Inverse of `register`, before the memory is unmapped."""
        return None

    def close(self) -> None:
        """Let go of streams and threads; every copy has ended by then, or was waited for.  Twice is fine."""
        return None

    @abstractmethod
    def gather(
        self,
        pages: Pages,
        block_ids: Sequence[int],
        layout: Layout,
        out: Sequence[memoryview],
        *,
        layers: range | None = None,
        after: Fence | None = None,
    ) -> Fence:
        """Copy blocks out of the engine: `out[i]` (`layout.nbytes` long) gets the i-th run of `block_ids`.

        `block_ids` are in units of the first region's blocks, `chunk_tokens / block_tokens` for each buffer.  An id
        that no page has raises DeviceError before anything is copied.  `after` is the compute fence to wait for.
        """

    @abstractmethod
    def scatter(
        self,
        src: Sequence[memoryview],
        layout: Layout,
        pages: Pages,
        block_ids: Sequence[int],
        *,
        layers: range | None = None,
        skip_blocks: int = 0,
        after: Fence | None = None,
    ) -> Fence:
        """The inverse of `gather`; the first `skip_blocks` blocks of the first buffer are left as they are."""


@runtime_checkable
class SupportsPaths(Protocol):
    """Optional for a device that can copy in several ways: `lmc bench device` measures which is the fastest here."""

    path_names: ClassVar[tuple[str, ...]]
    """The first is used until `use` says otherwise."""

    @classmethod
    def identity(cls) -> Mapping[str, str]:
        """What a measurement is good for: hardware, driver and versions, without initialising the device."""
        ...

    def unusable(self) -> Mapping[str, str]:
        """Paths that cannot be used here, or that no copy could take since the last `use`, each with the reason."""
        ...

    def use(self, *, gather: str, scatter: str) -> None:
        """Copy by these paths from now on, and by the first one what they cannot; DeviceError for one unheard of."""
        ...
