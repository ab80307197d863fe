"""Chunk identity: namespaces and chained chunk keys, equal in every process, Python and node.

    family_id = blake2b-128(canonical encoding of everything but the tokens that decides the bytes)
    digest_i  = sha256(parent || u32le(len extra_i) || extra_i || tokens_i as u32le)
    shard_id  = blake2b-128(family_id || layout fingerprint || group || layer range || head range)
    ChunkKey  = shard_id (16 bytes) || digest (32 bytes)

The parent of chunk 0 is the family_id, zero-padded to 32 bytes.
"""

from __future__ import annotations

import hashlib
import re
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .errors import NamespaceError

FORMAT_VERSION: Final = 1
FAMILY_ID_NBYTES: Final = 16
SHARD_ID_NBYTES: Final = 16
SALT_ID_NBYTES: Final = 16
DIGEST_NBYTES: Final = 32
KEY_NBYTES: Final = SHARD_ID_NBYTES + DIGEST_NBYTES
MAX_NAME_NBYTES: Final = 1024
MAX_EXTRA_NBYTES: Final = 1 << 20
_SALT: Final = re.compile(r"[A-Za-z0-9._~+=-]{1,128}")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")


class ChunkKey(bytes):
    """48 opaque bytes; `text` (96 lower-case hex digits) is what enters file names, Redis keys, object names."""

    __slots__ = ()

    def __new__(cls, raw: bytes) -> ChunkKey:
        if len(raw) != KEY_NBYTES:
            raise ValueError(f"a chunk key has {KEY_NBYTES} bytes, got {len(raw)}")
        return bytes.__new__(cls, raw)

    @classmethod
    def from_text(cls, text: str) -> ChunkKey:
        """Inverse of `text`; raises ValueError for anything but 96 lower-case hex digits."""
        if len(text) != 2 * KEY_NBYTES or text.strip("0123456789abcdef"):
            raise ValueError(f"not a chunk key: {text[:120]!r} (96 lower-case hex digits)")
        return cls(bytes.fromhex(text))

    @property
    def shard_id(self) -> bytes:
        return self[:SHARD_ID_NBYTES]

    @property
    def digest(self) -> bytes:
        return self[SHARD_ID_NBYTES:]

    @property
    def text(self) -> str:
        return self.hex()

    def __repr__(self) -> str:
        return f"ChunkKey({self[:4].hex()}…/{self[16:20].hex()}…)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Everything but the tokens that decides the bytes of a KV cache, for one model and one tenant.

    Each field is part of the key.  Illegal values raise NamespaceError when the family is built.
    """

    model: str
    """Name or path of the model, 1 to 1,024 bytes of UTF-8 without control characters; never empty."""
    weights: str
    """Revision or digest of the weights; never empty, since another set of weights means other bytes."""
    kv_dtype: str
    """Element type of the KV as the engine names it, e.g. "bfloat16" or "fp8_e4m3"."""
    chunk_tokens: int
    adapter: str = ""
    """Name and content digest of a LoRA adapter; empty for none."""
    tags: tuple[tuple[str, str], ...] = ()
    """Whatever else changes the bytes, as sorted pairs: rope scaling, quantisation, attention kernel quirks."""
    salt_id: bytes = b""
    """`salt_id(salt)` of the tenant; empty for none.  The clear salt never gets here."""

    def __post_init__(self) -> None:
        for name, value, may_be_empty in (
            ("model", self.model, False),
            ("weights", self.weights, False),
            ("kv_dtype", self.kv_dtype, False),
            ("adapter", self.adapter, True),
        ):
            _check_name(name, value, may_be_empty)
        names = [_check_name("tags", part, False) for pair in self.tags for part in pair][::2]
        if names != sorted(set(names)):
            raise NamespaceError("tags", f"names must be sorted and distinct, got {names}")
        if not 1 <= self.chunk_tokens <= 1 << 20:
            raise NamespaceError("chunk_tokens", f"must be 1 to 1,048,576, got {self.chunk_tokens}")
        if len(self.salt_id) not in (0, SALT_ID_NBYTES):
            raise NamespaceError("salt_id", "must be the 16 bytes of salt_id() or empty")

    @property
    def family_id(self) -> bytes:
        """16 bytes over the canonical, injective encoding of every field."""
        fields: list[bytes] = [
            self.model.encode(),
            self.weights.encode(),
            self.kv_dtype.encode(),
            str(self.chunk_tokens).encode(),
            self.adapter.encode(),
            self.salt_id,
            *(part.encode() for pair in self.tags for part in pair),
        ]
        return _digest16(b"lmcache family", fields)


def salt_id(salt: str | None, key_secret: str = "") -> bytes:
    """16 bytes that stand for a tenant's salt, keyed by `key_secret` (the same on every node that shares a store).

    `None` and "" are the same: no tenant, no bytes.  Anything but 1 to 128 characters of `A-Za-z0-9._~+=-` raises
    NamespaceError, which costs that one request its caching.
    """
    if salt is None or salt == "":
        return b""
    if not isinstance(salt, str) or not _SALT.fullmatch(salt):
        kind = f"{len(salt)} characters" if isinstance(salt, str) else type(salt).__name__
        raise NamespaceError("salt", f"a tenant salt is 1 to 128 characters of A-Z a-z 0-9 . _ ~ + = -; got {kind}")
    try:
        secret = hashlib.blake2b(key_secret.encode(), digest_size=32).digest() if key_secret else b""
    except UnicodeEncodeError as error:
        raise NamespaceError("key_secret", f"must be valid Unicode: {error.reason}") from None  # it would be shown
    return hashlib.blake2b(salt.encode(), digest_size=SALT_ID_NBYTES, key=secret, person=b"lmcache salt").digest()


def shard_id(
    family_id: bytes,
    layout_fingerprint: bytes,
    *,
    group: int = 0,
    layers: tuple[int, int],
    heads: tuple[int, int] = (0, 0),
) -> bytes:
    """16 bytes naming one rectangle (layer range x head range) of one layer group; no rank, no world size.

    `heads` of (0, 0) means "not split by heads" (MLA latents, recurrent states).
    """
    for name, (start, stop) in (("layers", layers), ("heads", heads)):
        if not 0 <= start <= stop or (name == "layers" and start == stop):
            raise NamespaceError(name, f"must be a range start < stop, got {start}..{stop}")
    numbers = (group, *layers, *heads)
    fields = [family_id, layout_fingerprint, *(str(number).encode() for number in numbers)]
    return _digest16(b"lmcache shard", fields)


def chain_digests(
    parent: bytes,
    tokens: Sequence[int] | Any,
    chunk_tokens: int,
    *,
    extra: Mapping[int, bytes] | None = None,
    first_chunk: int = 0,
) -> list[bytes]:
    """The digest of each whole chunk of `tokens`, in order; the ragged tail has none.

    `parent` is a family_id (16 bytes) or the digest before `first_chunk` (32 bytes).  `tokens` is a sequence of ints or
    a flat integer array; values outside 0..2**32-1 raise ValueError.  `extra` maps a chunk's index in the
    prefix to what enters there and is not a token: full image and audio hashes with their offsets, see `pack_extra`.
    """
    if chunk_tokens <= 0:
        raise ValueError(f"chunk_tokens must be positive, got {chunk_tokens}")
    packed = pack_tokens(tokens)
    sha256 = hashlib.sha256
    step = 4 * chunk_tokens
    digest = parent.ljust(DIGEST_NBYTES, b"\0")
    digests: list[bytes] = []
    append = digests.append
    if not extra:
        for start in range(0, len(packed) - step + 1, step):
            state = sha256(digest + b"\0\0\0\0")
            state.update(packed[start : start + step])
            digest = state.digest()
            append(digest)
        return digests
    for index in range(len(packed) // step):
        more = extra.get(first_chunk + index, b"")
        if len(more) > MAX_EXTRA_NBYTES:
            raise ValueError(f"extra of chunk {first_chunk + index} has {len(more)} bytes, at most {MAX_EXTRA_NBYTES}")
        start = index * step
        state = sha256(digest + len(more).to_bytes(4, "little") + more)
        state.update(packed[start : start + step])
        digest = state.digest()
        append(digest)
    return digests


def pack_extra(items: Iterable[tuple[int, bytes]]) -> bytes:
    """Injective encoding of (offset in the chunk, full content hash) pairs, for `extra`."""
    out = b""
    for offset, content in items:
        out += offset.to_bytes(4, "little") + len(content).to_bytes(4, "little") + content
    return out


def pack_tokens(tokens: Sequence[int] | Any) -> memoryview:
    """Token ids as u32 little-endian bytes, which `bytes` and memoryviews are taken to be already.

    ValueError for an id outside 0..2**32-1 or an array that is not flat integers.  The view may be of the array itself.
    """
    if isinstance(tokens, (bytes, memoryview)):
        return memoryview(tokens)
    if hasattr(tokens, "__array_interface__"):
        return _pack_array(tokens)
    try:
        packed = array("I", tokens)
    except OverflowError as error:
        raise ValueError(f"token ids must be 0 to 4,294,967,295: {error}") from error
    except TypeError as error:
        raise ValueError(f"token ids must be integers: {error}") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return memoryview(packed).cast("B")


def _pack_array(tokens: Any) -> memoryview:
    """A numpy array, without importing numpy: this module needs the standard library only."""
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(f"tokens must be a flat integer array, got {tokens.ndim} dimensions of {tokens.dtype}")
    if not tokens.size:
        return memoryview(b"")
    if tokens.dtype.str != "<u4":
        unsigned = tokens.view(tokens.dtype.str.replace("i", "u"))  # a negative id is a huge one: one pass finds both
        if int(unsigned.max()) > 0xFFFFFFFF or (tokens.itemsize <= 4 and int(tokens.min()) < 0):
            raise ValueError(f"token ids must be 0 to 4,294,967,295, got {tokens.min()} to {tokens.max()}")
        tokens = tokens.astype("<u4")
    elif not tokens.flags.c_contiguous:
        tokens = tokens.copy()
    return memoryview(tokens).cast("B")


def _check_name(field: str, value: str, may_be_empty: bool) -> str:
    if not isinstance(value, str):
        raise NamespaceError(field, f"must be text, got {type(value).__name__}")
    if not value and not may_be_empty:
        raise NamespaceError(field, "must not be empty")
    try:
        nbytes = len(value.encode())
    except UnicodeEncodeError as error:
        raise NamespaceError(field, f"must be valid Unicode: {error.reason}") from error
    if nbytes > MAX_NAME_NBYTES:
        raise NamespaceError(field, f"must be at most {MAX_NAME_NBYTES} bytes, got {nbytes}")
    if _CONTROL.search(value):
        raise NamespaceError(field, f"must not contain control characters, got {value[:80]!r}")
    return value


def _digest16(domain: bytes, fields: Sequence[bytes]) -> bytes:
    """blake2b-128 over a versioned encoding in which every field carries its length: no two inputs read the same."""
    encoded = b"".join(len(field).to_bytes(4, "little") + field for field in fields)
    head = FORMAT_VERSION.to_bytes(2, "little") + len(fields).to_bytes(2, "little")
    return hashlib.blake2b(head + encoded, digest_size=16, person=domain).digest()
