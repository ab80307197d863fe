"""From a slot to a stored record and back: checksum, codec, and the proof that what came back is what was asked for."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from . import frame
from .buffers import copy_bytes
from .codec import Codec
from .errors import CacheError, ChunkCorrupt
from .frame import CHECKSUM_NONE, CHECKSUM_XXH3_64, Frame
from .keys import ChunkKey
from .layout import PAGE_NBYTES, Layout, page_align


@dataclass(frozen=True)
class Sealer:
    """One tier's codec and each of its threads' staging memory.  The identity codec copies nothing."""

    codec: Codec
    codec_name: str
    codec_named: Callable[[str], Codec | None]
    """Finds the codec of a record that was stored under another configuration."""
    checksums: bool = True
    """Whether payloads are stored with one.  Those that come back with one are held against it in any case."""
    _threads: threading.local = field(default_factory=threading.local)

    def seal(self, record: memoryview, layout: Layout) -> memoryview:
        """What to store for the record in a slot: the slot itself with its checksum, or this thread's staging memory.

        Staged bytes stay until this thread's next call.
        """
        if self.codec_name == "identity" and not self.checksums:
            return record
        found = frame.parse(record)
        if self.codec_name == "identity":
            if found.checksum_kind != CHECKSUM_XXH3_64:
                self._write(record, found, found.encoded_nbytes)
            return record
        bound = self.codec.max_nbytes(layout)
        (staged,) = self.staging([frame.record_nbytes(bound)])
        raw = record[PAGE_NBYTES : PAGE_NBYTES + layout.nbytes]
        nbytes = self.codec.encode(raw, layout, staged[PAGE_NBYTES : PAGE_NBYTES + bound])
        self._write(staged, found, nbytes, self.codec_name, self.codec.version)
        return staged[: frame.record_nbytes(nbytes)]

    def targets(self, records: list[memoryview], layouts: list[Layout]) -> list[memoryview]:
        """Where to read stored records to: the slots themselves, or staging where they arrive encoded."""
        if self.codec_name == "identity":
            return records
        bounds = [frame.record_nbytes(self.codec.max_nbytes(layout)) for layout in layouts]
        return self.staging([max(n, record.nbytes) for n, record in zip(bounds, records, strict=True)])

    def unseal(self, read: memoryview, nbytes: int, key: ChunkKey, layout: Layout, record: memoryview) -> Frame:
        """Verify the `nbytes` that were read to `read` and bring them, decoded, into the slot `record`.

        ChunkCorrupt if they are not what was stored under `key`; CacheError if their codec is not installed.  The
        record's header decides about its codec, not the configuration.
        """
        found = frame.verify(read, nbytes, key, layout.fingerprint, layout.nbytes)
        if found.codec == "identity":
            if found.encoded_nbytes != layout.nbytes:
                raise ChunkCorrupt(f"{key!r}: {found.encoded_nbytes} bytes that should be {layout.nbytes} raw ones")
            if read is not record:
                copy_bytes(read[: record.nbytes], record)
            return found
        codec = self.codec if found.codec == self.codec_name else self.codec_named(found.codec)
        if codec is None or found.codec_version > codec.version:
            raise CacheError(
                f"{key!r} needs codec {found.codec!r} version {found.codec_version}, which is not installed"
            )
        payload = read[PAGE_NBYTES : PAGE_NBYTES + found.encoded_nbytes]
        if read is record:
            (staged,) = self.staging([found.encoded_nbytes])
            copy_bytes(payload, staged[: found.encoded_nbytes])
            payload = staged[: found.encoded_nbytes]
        codec.decode(payload, layout, record[PAGE_NBYTES : PAGE_NBYTES + layout.nbytes])
        raw = Frame(key, found.depth, found.fingerprint, layout.nbytes, layout.nbytes, found.stored_at_ns)
        frame.pack(raw, record[:PAGE_NBYTES])
        return raw

    def staging(self, sizes: list[int]) -> list[memoryview]:
        """Page-aligned buffers of this thread, kept and reused: fresh memory costs more than the copy."""
        aligned = [page_align(size) for size in sizes]
        buffer: mmap.mmap | None = getattr(self._threads, "buffer", None)
        if buffer is None or len(buffer) < sum(aligned):
            buffer = self._threads.buffer = mmap.mmap(-1, max(sum(aligned), PAGE_NBYTES))
        whole = memoryview(buffer)
        starts = [sum(aligned[:index]) for index in range(len(aligned))]
        return [whole[start : start + size] for start, size in zip(starts, aligned, strict=True)]

    def _write(
        self, record: memoryview, found: Frame, nbytes: int, codec: str = "identity", codec_version: int = 1
    ) -> None:
        sealed = Frame(
            found.key,
            found.depth,
            found.fingerprint,
            nbytes,
            found.raw_nbytes,
            found.stored_at_ns,
            codec,
            codec_version,
            CHECKSUM_XXH3_64 if self.checksums else CHECKSUM_NONE,
            frame.payload_checksum(record[PAGE_NBYTES : PAGE_NBYTES + nbytes]) if self.checksums else 0,
        )
        frame.pack(sealed, record[:PAGE_NBYTES])
