"""What a store holds, record by record: counted, read, checked, and removed where it is broken.

Works on any backend that lists (`SupportsListing`), beside whoever else uses the store.  Memory does not grow with the
number of records.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, Literal

from . import frame, manifest
from .backend import Backend, Entry, GetResult, SupportsListing
from .errors import BackendError, BackendUnavailable, CacheError, ChunkCorrupt
from .keys import ChunkKey
from .layout import PAGE_NBYTES, Layout, Region, page_align
from .manifest import Manifest

Kind = Literal["truncated", "foreign", "damaged", "misplaced", "layout", "other version", "too large", "unreadable"]
BROKEN: Final[frozenset[Kind]] = frozenset(("truncated", "foreign", "damaged", "misplaced", "layout"))
"""What a cache that read it would take for corrupt.  The other kinds could not be judged, and are never removed."""
MAX_RECORD_NBYTES: Final = 1 << 30
"""Longer records are not read here."""
MAX_SHARDS: Final = 65_536
_BATCH_NBYTES: Final = 32 << 20
_BATCH_RECORDS: Final = 64
_MAX_FAULTS: Final = 16
"""A store that fails so many reads in a row is not asked again."""


@dataclass(slots=True)
class ShardUse:
    """What one shard of a store takes."""

    shard_id: bytes
    manifest: Manifest | None = None
    layout: Layout | None = None
    records: int = 0
    nbytes: int = 0
    """Of its records, as the store lists them; manifests are counted apart."""
    oldest: float = 0.0
    newest: float = 0.0
    """Seconds since the epoch, of the store's own clock."""

    def add(self, entry: Entry) -> None:
        self.oldest = min(self.oldest, entry.stored_at) if self.records else entry.stored_at
        self.newest = max(self.newest, entry.stored_at)
        self.records += 1
        self.nbytes += entry.nbytes


@dataclass(slots=True)
class Survey:
    """A store by shard, from one listing and the manifests."""

    shards: dict[bytes, ShardUse] = field(default_factory=dict)
    manifests: int = 0
    manifest_nbytes: int = 0
    ages: list[int] = field(default_factory=list)
    """Bytes of records by age, as `survey` was asked for."""

    def layout_of(self, shard_id: bytes) -> Layout | None:
        """As its manifest says, where there is one that we read."""
        use = self.shards.get(shard_id)
        return use.layout if use is not None else None

    @property
    def records(self) -> int:
        return sum(use.records for use in self.shards.values())

    @property
    def nbytes(self) -> int:
        """Of records and manifests."""
        return sum(use.nbytes for use in self.shards.values()) + self.manifest_nbytes


@dataclass(frozen=True, slots=True)
class Finding:
    """A record that is not as it should be, or could not be judged."""

    key: ChunkKey
    nbytes: int
    kind: Kind
    detail: str

    @property
    def broken(self) -> bool:
        return self.kind in BROKEN


@dataclass(slots=True)
class Progress:
    """How far a check is; changed as it goes."""

    checked: int = 0
    checked_nbytes: int = 0
    sound: int = 0
    without_checksum: int = 0
    """Sound as far as their headers say."""
    gone: int = 0
    """Removed by somebody else meanwhile."""


def survey(backend: Backend[Any], *, now: float, age_limits_s: Sequence[float] = ()) -> Survey:
    """List the store once and read its manifests.  A store that does not list raises CacheError.

    `Survey.ages` has the bytes of records up to each of `age_limits_s` seconds old, ascending, and those of older ones.
    """
    found = Survey(ages=[0] * (len(age_limits_s) + 1))
    for entry in _listed(backend):
        shard_id = entry.key.shard_id
        use = found.shards.get(shard_id)
        if use is None:
            if len(found.shards) >= MAX_SHARDS:
                raise CacheError(f"the store has more than {MAX_SHARDS} namespaces, which is the limit here")
            use = found.shards[shard_id] = ShardUse(shard_id)
        if manifest.is_manifest(entry.key):
            found.manifests += 1
            found.manifest_nbytes += entry.nbytes
            use.manifest = read_manifest(backend, entry)
            use.layout = _layout_of(use.manifest)
            continue
        use.add(entry)
        age = now - entry.stored_at
        found.ages[sum(age > limit for limit in age_limits_s)] += entry.nbytes
    return found


def read_manifest(backend: Backend[Any], entry: Entry) -> Manifest | None:
    """A manifest that is whole, or None: `check` says what is wrong with one that is not."""
    if entry.nbytes > manifest.MAX_NBYTES:
        return None
    staged = aligned_buffer(entry.nbytes, backend)
    try:
        nbytes = backend.get(entry.key, staged)
        return None if nbytes is None else manifest.parse(staged, nbytes, entry.key)
    except BackendError:
        return None


def check(
    backend: Backend[Any],
    known: Survey,
    *,
    timeout_s: float,
    progress: Progress,
    on_progress: Callable[[], None] = lambda: None,
) -> Iterator[Finding]:
    """Read every record and say which are not sound; `on_progress` is called after each batch.

    BackendUnavailable if the store stops answering.
    """
    faults = 0
    memory = _Memory(backend)
    for batch in _batches(_listed(backend), known):
        wanted = [entry for entry, nbytes in batch if nbytes <= MAX_RECORD_NBYTES]
        views = memory.views([nbytes for _, nbytes in batch if nbytes <= MAX_RECORD_NBYTES])
        results = iter(_read(backend, [entry.key for entry in wanted], views, timeout_s)) if wanted else iter(())
        buffers = iter(views)
        for entry, nbytes in batch:
            progress.checked += 1
            progress.checked_nbytes += entry.nbytes
            if nbytes > MAX_RECORD_NBYTES:
                yield _oversized(entry, known)
                continue
            view, result = next(buffers), next(results)
            finding = _judge(entry, view, result, known, progress)
            faults = faults + 1 if finding is not None and finding.kind == "unreadable" else 0
            if finding is not None:
                yield finding
            if faults >= _MAX_FAULTS:
                assert finding is not None
                raise BackendUnavailable(f"{faults} reads in a row failed, the last one so: {finding.detail}")
        on_progress()


def remove(backend: Backend[Any], finding: Finding, known: Survey, *, timeout_s: float) -> str:
    """Remove a record that is broken, having read it again: "removed", "gone", or "sound" if it is so by now.

    BackendError if it can be neither read nor removed.
    """
    if not finding.broken:
        raise ValueError(f"{finding.kind} is no reason to remove a record")
    entry = Entry(finding.key, finding.nbytes, 0.0)
    nbytes = _room(entry, known.layout_of(finding.key.shard_id))
    if nbytes <= MAX_RECORD_NBYTES:
        view = aligned_buffer(nbytes, backend)
        (result,) = _read(backend, [finding.key], [view], timeout_s)
        if result is None:
            return "gone"
        again = _judge(entry, view, result, known, Progress())
        if again is None:
            return "sound"
        if not again.broken:
            raise BackendUnavailable(f"{finding.key!r}: {again.detail}")
    return "removed" if backend.remove(finding.key) else "gone"


def examine(record: memoryview, nbytes: int, key: ChunkKey, layout: Layout | None) -> tuple[Kind, str] | None:
    """What is wrong with a record of `nbytes` found under `key`; None if nothing is.

    Without the layout of its shard, its length and checksum are held against its own header.
    """
    begins = bytes(record[: min(nbytes, len(frame.MAGIC))])
    if begins and not frame.MAGIC.startswith(begins):
        return "foreign", "not a record: it does not begin as one"
    if nbytes < PAGE_NBYTES:
        return "truncated", f"{nbytes} bytes are less than a header"
    page = record[:PAGE_NBYTES]
    try:
        found = frame.parse(page)
    except ChunkCorrupt as error:
        if frame.is_other_version(page):
            return "other version", str(error)
        return "damaged", str(error)
    if found.key != key:
        return "misplaced", f"it is the record of {found.key!r}"
    if layout is not None and found.raw_nbytes != layout.nbytes:
        return "layout", f"{found.raw_nbytes} bytes raw, where the layout in its manifest has {layout.nbytes}"
    if layout is not None and found.fingerprint != layout.fingerprint:
        return "layout", "another layout than that in its manifest"
    whole = PAGE_NBYTES + found.encoded_nbytes
    if nbytes not in (whole, frame.record_nbytes(found.encoded_nbytes)):
        return "truncated" if nbytes < whole else "damaged", f"{nbytes} bytes where the header says {whole}"
    try:
        frame.verify(record, nbytes, key, found.fingerprint, found.raw_nbytes)
    except ChunkCorrupt as error:
        return "damaged", str(error)
    return None


def _judge(entry: Entry, view: memoryview, result: GetResult, known: Survey, progress: Progress) -> Finding | None:
    key = entry.key
    if result is None:
        progress.gone += 1
        return None
    if isinstance(result, ChunkCorrupt):
        return Finding(key, entry.nbytes, "damaged", str(result))
    if isinstance(result, BackendError):
        return Finding(key, entry.nbytes, "unreadable", str(result))
    if manifest.is_manifest(key):
        problem = _examine_manifest(view, result, key)
    else:
        problem = examine(
            view, result, key, known.shards[key.shard_id].layout if key.shard_id in known.shards else None
        )
    if problem is not None:
        return Finding(key, entry.nbytes, *problem)
    progress.sound += 1
    progress.without_checksum += frame.parse(view).checksum_kind == frame.CHECKSUM_NONE
    return None


def _examine_manifest(view: memoryview, nbytes: int, key: ChunkKey) -> tuple[Kind, str] | None:
    problem = examine(view, nbytes, key, None)
    if problem is None:
        try:
            manifest.parse(view, nbytes, key)
        except ChunkCorrupt as error:
            return "damaged", str(error)
    return problem


def _oversized(entry: Entry, known: Survey) -> Finding:
    layout = known.layout_of(entry.key.shard_id)
    limit = 2 * layout.nbytes if layout is not None else None
    if manifest.is_manifest(entry.key):
        limit = manifest.MAX_NBYTES
    if limit is not None and entry.nbytes > frame.record_nbytes(limit):
        return Finding(entry.key, entry.nbytes, "layout", f"{entry.nbytes} bytes are more than its record can have")
    return Finding(entry.key, entry.nbytes, "too large", f"more than {MAX_RECORD_NBYTES} bytes are not read here")


def _room(entry: Entry, layout: Layout | None) -> int:
    """Bytes to have ready for a record: it may be stored again, in another codec, between listing and reading."""
    return page_align(max(entry.nbytes, frame.record_nbytes(layout.nbytes) if layout is not None else 0, PAGE_NBYTES))


def _batches(entries: Iterable[Entry], known: Survey) -> Iterator[list[tuple[Entry, int]]]:
    """Entries with the room that each needs, as many as are read in one call."""
    batch: list[tuple[Entry, int]] = []
    total = 0
    for entry in entries:
        nbytes = _room(entry, known.layout_of(entry.key.shard_id))
        if batch and (total + nbytes > _BATCH_NBYTES or len(batch) == _BATCH_RECORDS):
            yield batch
            batch, total = [], 0
        batch.append((entry, nbytes))
        total += nbytes
    if batch:
        yield batch


def _listed(backend: Backend[Any]) -> Iterator[Entry]:
    if not isinstance(backend, SupportsListing):
        raise CacheError("this store cannot list what it holds, so its records are checked only when they are used")
    return backend.entries()


def _read(
    backend: Backend[Any], keys: Sequence[ChunkKey], into: Sequence[memoryview], timeout_s: float
) -> Sequence[GetResult]:
    try:
        return backend.get_many(keys, into, timeout_s=timeout_s)
    except BackendError as error:
        return [error] * len(keys)


def _layout_of(found: Manifest | None) -> Layout | None:
    if found is None:
        return None
    try:
        described = found.described["layout"]
        regions = tuple(Region(**region) for region in islice(described["regions"], 4096))
        return Layout(chunk_tokens=described["chunk_tokens"], regions=regions)
    except (KeyError, TypeError, ValueError):  # of a core that describes more
        return None


class _Memory:
    """One buffer for all batches, as large as the largest so far."""

    def __init__(self, backend: Backend[Any]) -> None:
        self._backend = backend
        self._view = memoryview(b"")

    def views(self, sizes: Sequence[int]) -> list[memoryview]:
        step = max(PAGE_NBYTES, self._backend.traits.alignment)
        aligned = [-(-size // step) * step for size in sizes]
        if self._view.nbytes < sum(aligned):
            self._view = aligned_buffer(sum(aligned), self._backend)
        starts = [sum(aligned[:index]) for index in range(len(aligned))]
        return [self._view[start : start + size] for start, size in zip(starts, aligned, strict=True)]


def aligned_buffer(nbytes: int, backend: Backend[Any]) -> memoryview:
    """Fresh memory, aligned as the backend wants it."""
    step = max(PAGE_NBYTES, backend.traits.alignment)
    size = max(step, -(-nbytes // step) * step)
    view = memoryview(mmap.mmap(-1, size + step - PAGE_NBYTES))
    if step == PAGE_NBYTES:
        return view
    import numpy as np

    skip = -np.frombuffer(view, np.uint8).ctypes.data % step
    return view[skip : skip + size]
