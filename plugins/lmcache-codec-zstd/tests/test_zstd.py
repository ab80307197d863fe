"""zstd keeps the laws of a codec, takes numbers apart, and believes nothing that its data says of itself."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import zstandard

from lmcache_codec_zstd import BLOCK_NBYTES, ZstdCodec
from lmcache_core import ChunkCorrupt, Layout, Region
from lmcache_core.testing import CodecLaws


class TestZstd(CodecLaws):
    def open_codec(self) -> ZstdCodec:
        return ZstdCodec()


def layout(nbytes: int, dtype: str = "bfloat16") -> Layout:
    region = Region(name="kv", layers=1, block_tokens=16, block_nbytes=nbytes, dtype=dtype, packing="p")
    return Layout(chunk_tokens=16, regions=(region,))


def encoded(raw: bytes, of: Layout) -> bytes:
    codec = ZstdCodec()
    out = bytearray(codec.max_nbytes(of))
    return bytes(out[: codec.encode(memoryview(raw), of, memoryview(out))])


def kv(nbytes: int) -> bytes:
    """Numbers as a model's keys are: channels of different scale, in bfloat16."""
    rng = np.random.default_rng(1)
    floats = rng.normal(0, 1, (nbytes // 256, 128)) * np.exp(rng.normal(0, 0.8, 128))
    return (floats.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()


def test_what_a_model_computes_takes_less_room() -> None:
    raw = kv(1 << 20)
    apart, together = len(encoded(raw, layout(1 << 20))), len(encoded(raw, layout(1 << 20, "unknown")))
    assert apart < 0.78 * len(raw)
    assert apart < 0.95 * together


def test_noise_costs_eight_bytes_per_block_and_no_more() -> None:
    nbytes = 2 * BLOCK_NBYTES + 100
    raw = np.random.default_rng(0).bytes(nbytes)
    assert len(encoded(raw, layout(nbytes))) == nbytes + 3 * 8


# Written by version 1; what it reads must stay readable.
GOLDEN = bytes.fromhex(
    "140100000200000028b52ffd6000015508001410000102030405060708090a0b0c0d0e0f101112131415161718191a1b"
    "1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b"
    "4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b"
    "7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaab"
    "acadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadb"
    "dcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff000100017c0a4c01"
)


def test_a_record_of_version_1_stays_readable() -> None:
    raw = np.arange(256, dtype="<u2").tobytes()
    out = bytearray(len(raw))
    ZstdCodec().decode(memoryview(GOLDEN), layout(len(raw)), memoryview(out))
    assert bytes(out) == raw


def test_a_frame_that_promises_a_terabyte_is_refused_before_anything_is_allocated() -> None:
    frame = bytearray(zstandard.ZstdCompressor().compress(bytes(300)))
    bomb = b"\x28\xb5\x2f\xfd\xe0" + (1 << 40).to_bytes(8, "little") + bytes(frame[6:])
    assert zstandard.get_frame_parameters(bomb).content_size == 1 << 40
    data = len(bomb).to_bytes(4, "little") + b"\x02\0\0\0" + bomb
    tracemalloc.start()
    with pytest.raises(ChunkCorrupt, match="1099511627776 bytes, not 300"):
        ZstdCodec().decode(memoryview(data), layout(300), memoryview(bytearray(300)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_frame_that_holds_more_than_it_says_is_refused() -> None:
    long = zstandard.ZstdCompressor(write_content_size=True).compress(bytes(200_000))
    header = zstandard.frame_header_size(long)
    lying = b"\x28\xb5\x2f\xfd\x60" + (300 - 256).to_bytes(2, "little") + long[header:]
    assert zstandard.get_frame_parameters(lying).content_size == 300
    data = len(lying).to_bytes(4, "little") + b"\x02\0\0\0" + lying
    with pytest.raises(ChunkCorrupt):
        ZstdCodec().decode(memoryview(data), layout(300), memoryview(bytearray(300)))


@pytest.mark.parametrize("width", [3, 16, 255])
def test_an_element_of_another_width_is_refused(width: int) -> None:
    data = bytearray(encoded(bytes(300), layout(300)))
    data[4] = width
    with pytest.raises(ChunkCorrupt, match=f"elements of {width} bytes"):
        ZstdCodec().decode(memoryview(data), layout(300), memoryview(bytearray(300)))
