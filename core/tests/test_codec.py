"""The identity codec."""

from __future__ import annotations

import pytest

from lmcache_core.codec import Identity
from lmcache_core.errors import ChunkCorrupt
from lmcache_core.layout import Layout, Region

LAYOUT = Layout(
    chunk_tokens=4,
    regions=(Region(name="kv", layers=3, block_tokens=2, block_nbytes=50, dtype="float16", packing="HND"),),
)
RAW = bytes(range(256)) + bytes(range(44))


def test_it_stores_raw_bytes_and_gives_them_back() -> None:
    codec = Identity()
    encoded = bytearray(b"\xa5" * (codec.max_nbytes(LAYOUT) + 8))
    nbytes = codec.encode(memoryview(RAW), LAYOUT, memoryview(encoded))
    assert nbytes == LAYOUT.nbytes == len(RAW)
    assert encoded == RAW + b"\xa5" * 8
    out = bytearray(b"\xa5" * LAYOUT.nbytes)
    codec.decode(memoryview(encoded)[:nbytes], LAYOUT, memoryview(out))
    assert out == RAW


@pytest.mark.parametrize("nbytes", [0, 1, 299, 301, 600])
def test_data_of_any_other_length_is_corrupt_and_nothing_is_written(nbytes: int) -> None:
    out = bytearray(b"\xa5" * LAYOUT.nbytes)
    with pytest.raises(ChunkCorrupt, match=f"{nbytes} bytes where the layout has 300"):
        Identity().decode(memoryview(bytes(nbytes)), LAYOUT, memoryview(out))
    assert out == b"\xa5" * LAYOUT.nbytes


@pytest.mark.parametrize("nbytes", [1, 299, 301])
def test_raw_bytes_of_another_length_are_a_bug_of_the_caller(nbytes: int) -> None:
    with pytest.raises(ValueError, match=f"{nbytes} bytes over 300"):
        Identity().encode(memoryview(bytes(nbytes)), LAYOUT, memoryview(bytearray(300)))
