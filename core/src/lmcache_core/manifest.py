"""A record per shard that says in clear text what its keys belong to; a tenant appears as its salt_id only."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, Final

from . import frame
from .chain import Model
from .errors import ChunkCorrupt
from .frame import CHECKSUM_XXH3_64, Frame
from .keys import FAMILY_ID_NBYTES, SALT_ID_NBYTES, SHARD_ID_NBYTES, ChunkKey
from .layout import PAGE_NBYTES

DIGEST: Final = hashlib.sha256(b"lmcache manifest").digest()
"""Takes the place of a chunk's digest: no prompt hashes to it."""
_FINGERPRINT: Final = b"lmcache manifest"
MAX_NBYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one shard_id stands for."""

    shard_id: bytes
    tenant: bytes
    described: dict[str, Any]
    """Model, weights, dtype and so on, and the layout, as they entered the key."""

    @property
    def family_id(self) -> bytes:
        """The family that the shard is of."""
        return bytes.fromhex(self.described["family"]["family_id"])


def key_of(shard_id: bytes) -> ChunkKey:
    return ChunkKey(shard_id[:SHARD_ID_NBYTES] + DIGEST)


def is_manifest(key: bytes) -> bool:
    return key[SHARD_ID_NBYTES:] == DIGEST


def of(model: Model, shard_id: bytes) -> Manifest:
    """The manifest of one of a model's shards."""
    family = asdict(model.family)
    family["salt_id"] = model.family.salt_id.hex()
    family["family_id"] = model.family.family_id.hex()
    group, shard = next((g, s) for g in model.groups for s in g.shards if s.shard_id == shard_id)
    described = {"family": family, "group": group.kind.value, "layout": asdict(shard.layout)}
    return Manifest(shard_id, model.family.salt_id, described)


def pack(manifest: Manifest, stored_at_ns: int) -> bytes:
    """The whole record."""
    payload = json.dumps(manifest.described, sort_keys=True).encode()
    record = bytearray(frame.record_nbytes(len(payload)))
    record[PAGE_NBYTES : PAGE_NBYTES + len(payload)] = payload
    view = memoryview(record)
    checksum = frame.payload_checksum(view[PAGE_NBYTES : PAGE_NBYTES + len(payload)])
    head = Frame(
        key_of(manifest.shard_id),
        0,
        _FINGERPRINT,
        len(payload),
        len(payload),
        stored_at_ns,
        checksum_kind=CHECKSUM_XXH3_64,
        checksum=checksum,
    )
    frame.pack(head, view[:PAGE_NBYTES])
    return bytes(record)


def parse(record: memoryview, nbytes: int, key: ChunkKey) -> Manifest:
    """Read a manifest; ChunkCorrupt if it is not whole."""
    raw = frame.parse(record).raw_nbytes
    found = frame.verify(record, nbytes, key, _FINGERPRINT, raw)
    try:
        described = json.loads(bytes(record[PAGE_NBYTES : PAGE_NBYTES + found.encoded_nbytes]))
        tenant = bytes.fromhex(described["family"]["salt_id"])
        family_id = bytes.fromhex(described["family"]["family_id"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ChunkCorrupt(f"{key!r} is not a manifest: {str(error)[:200]}") from error
    if len(tenant) not in (0, SALT_ID_NBYTES) or len(family_id) != FAMILY_ID_NBYTES:
        raise ChunkCorrupt(f"{key!r} is not a manifest: a tenant of {len(tenant)}, a family of {len(family_id)} bytes")
    return Manifest(key.shard_id, tenant, described)
