"""The 4 KiB header page in front of every stored payload: what it is, how long, and its checksum.

0     magic 8s, version u16, checksum kind u8, codec version u8, depth u32
16    key 48s
64    layout fingerprint 16s
80    encoded length u64, raw length u64, stored-at ns u64, payload checksum u64
112   codec name 32s, zero-padded
144   zero
4080  header checksum u64 over bytes 0 to 4080
4088  generation u64: of the slot in memory, not part of the record and not read from a store
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import xxhash

from .errors import ChunkCorrupt
from .keys import ChunkKey
from .layout import MAX_CHUNK_NBYTES, PAGE_NBYTES, page_align

FRAME_VERSION: Final = 1
CHECKSUM_NONE: Final = 0
CHECKSUM_XXH3_64: Final = 1
MAGIC: Final = b"LMCACHE\x00"
_HEAD: Final = struct.Struct("<8sHBBI48s16sQQQQ32s")
_U64: Final = struct.Struct("<Q")
_SUMMED: Final = PAGE_NBYTES - 16
_RECORDED: Final = PAGE_NBYTES - 8
_IDENTITY: Final = struct.Struct("<48s16s8xQ")
_IDENTITY_OFFSET: Final = 16


@dataclass(frozen=True, slots=True)
class Frame:
    """What a header page says.  `encoded_nbytes` bytes of payload follow it; decoded they are `raw_nbytes`."""

    key: ChunkKey
    depth: int
    fingerprint: bytes
    encoded_nbytes: int
    raw_nbytes: int
    stored_at_ns: int
    codec: str = "identity"
    codec_version: int = 1
    checksum_kind: int = CHECKSUM_NONE
    checksum: int = 0


def record_nbytes(payload_nbytes: int) -> int:
    """Bytes of a whole record: header page, payload, padding."""
    return PAGE_NBYTES + page_align(payload_nbytes)


def pack(frame: Frame, page: memoryview) -> None:
    """Write `frame` over the record part of `page`, at once for this process's threads; the generation stays."""
    codec = frame.codec.encode()
    if len(codec) > 32:
        raise ValueError(f"codec name {frame.codec!r} is longer than 32 bytes")
    if len(frame.fingerprint) != 16:  # struct would pad or cut it
        raise ValueError(f"a layout fingerprint has 16 bytes, got {len(frame.fingerprint)}")
    head = _HEAD.pack(
        MAGIC,
        FRAME_VERSION,
        frame.checksum_kind,
        frame.codec_version,
        frame.depth,
        frame.key,
        frame.fingerprint,
        frame.encoded_nbytes,
        frame.raw_nbytes,
        frame.stored_at_ns,
        frame.checksum,
        codec,
    )
    summed = head.ljust(_SUMMED, b"\0")
    page[:_RECORDED] = summed + _U64.pack(xxhash.xxh3_64_intdigest(summed))


def parse(page: memoryview) -> Frame:
    """Read a header page; ChunkCorrupt unless it is one of ours, whole and of a version that we read."""
    if page.nbytes < PAGE_NBYTES:
        raise ChunkCorrupt(f"a record of {page.nbytes} bytes is shorter than its header")
    header = bytes(page[:_RECORDED])  # two tiers may be sealing the slot at once
    fields = _HEAD.unpack_from(header)
    magic, version, kind, codec_version, depth, key, fingerprint, encoded, raw, stored_at, checksum, codec = fields
    if magic != MAGIC:
        raise ChunkCorrupt("not a record: wrong magic")
    if version != FRAME_VERSION:
        raise ChunkCorrupt(f"record version {version}, this core reads {FRAME_VERSION}")
    if xxhash.xxh3_64_intdigest(header[:_SUMMED]) != _U64.unpack_from(header, _SUMMED)[0]:
        raise ChunkCorrupt("header checksum differs")
    if kind not in (CHECKSUM_NONE, CHECKSUM_XXH3_64):
        raise ChunkCorrupt(f"unknown checksum kind {kind}")
    if raw > MAX_CHUNK_NBYTES or encoded > 2 * MAX_CHUNK_NBYTES:
        raise ChunkCorrupt(f"impossible lengths: {encoded} bytes encoded, {raw} raw")
    try:
        name = codec.rstrip(b"\0").decode()
    except UnicodeDecodeError as error:
        raise ChunkCorrupt("codec name is not text") from error
    return Frame(
        key=ChunkKey(key),
        depth=depth,
        fingerprint=fingerprint,
        encoded_nbytes=encoded,
        raw_nbytes=raw,
        stored_at_ns=stored_at,
        codec=name,
        codec_version=codec_version,
        checksum_kind=kind,
        checksum=checksum,
    )


def is_other_version(page: memoryview) -> bool:
    """Whether a whole header says that it is of a version that we do not read, as far as we can tell."""
    _, version, *_ = _HEAD.unpack_from(page)
    if version == FRAME_VERSION:
        return False
    return bool(xxhash.xxh3_64_intdigest(page[:_SUMMED]) == _U64.unpack_from(page, _SUMMED)[0])


def verify(record: memoryview, nbytes: int, key: ChunkKey, fingerprint: bytes, raw_nbytes: int) -> Frame:
    """The frame of a record read from a store, `nbytes` long, proven to be the one asked for; else ChunkCorrupt."""
    frame = verify_header(record, nbytes, key, fingerprint, raw_nbytes)
    if nbytes > record.nbytes:
        raise ChunkCorrupt(f"{key!r}: {nbytes} bytes said to be read into a buffer of {record.nbytes}")
    if frame.checksum_kind == CHECKSUM_XXH3_64:
        actual = payload_checksum(record[PAGE_NBYTES : PAGE_NBYTES + frame.encoded_nbytes])
        if actual != frame.checksum:
            raise ChunkCorrupt(f"{key!r}: payload checksum differs")
    return frame


def verify_header(page: memoryview, nbytes: int, key: ChunkKey, fingerprint: bytes, raw_nbytes: int) -> Frame:
    """What the header page alone can prove of a record of `nbytes`; the payload is not looked at."""
    frame = parse(page)
    if frame.key != key:
        raise ChunkCorrupt(f"asked for {key!r}, the record is {frame.key!r}")
    if frame.fingerprint != fingerprint or frame.raw_nbytes != raw_nbytes:
        raise ChunkCorrupt(f"{key!r}: another layout ({frame.raw_nbytes} bytes raw, expected {raw_nbytes})")
    if nbytes not in (record_nbytes(frame.encoded_nbytes), PAGE_NBYTES + frame.encoded_nbytes):
        raise ChunkCorrupt(f"{key!r}: {nbytes} bytes where the header says {frame.encoded_nbytes} of payload")
    if frame.codec == "identity" and frame.encoded_nbytes != raw_nbytes:
        raise ChunkCorrupt(f"{key!r}: identity with {frame.encoded_nbytes} bytes of payload for {raw_nbytes} raw")
    return frame


def payload_checksum(payload: memoryview) -> int:
    """xxh3-64 of the payload as stored; releases the GIL."""
    state = xxhash.xxh3_64()
    state.update(payload)  # in one call, the GIL would be held before xxhash 4
    return state.intdigest()


def set_generation(page: memoryview, generation: int) -> None:
    """Mark a slot before its reuse, so that a late reader of what it held notices."""
    _U64.pack_into(page, PAGE_NBYTES - 8, generation)


def void(page: memoryview) -> None:
    """Have the page be no header: what a store does not write over it shall not pass for its answer."""
    page[: len(MAGIC)] = bytes(len(MAGIC))


def holds(page: memoryview, key: ChunkKey, fingerprint: bytes, raw_nbytes: int, generation: int) -> bool:
    """Whether a slot in memory still holds this record in this generation."""
    found = _IDENTITY.unpack_from(page, _IDENTITY_OFFSET)
    return found == (key, fingerprint, raw_nbytes) and _U64.unpack_from(page, PAGE_NBYTES - 8)[0] == generation
