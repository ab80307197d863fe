"""The header page: golden bytes of version 1, every flipped bit refused, nothing but ChunkCorrupt for foreign bytes."""

from __future__ import annotations

import hashlib
import sys
import threading
from dataclasses import replace

import pytest
from gil_probe import releases_gil
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_core import frame
from lmcache_core.errors import ChunkCorrupt
from lmcache_core.frame import CHECKSUM_NONE, CHECKSUM_XXH3_64, Frame, parse, record_nbytes, verify
from lmcache_core.keys import ChunkKey
from lmcache_core.layout import MAX_CHUNK_NBYTES
from lmcache_core.testing import in_threads

PAGE = 4096
SUMMED = 4080
KEY = ChunkKey(bytes(range(48)))
FINGERPRINT = bytes(range(64, 80))
PAYLOAD = hashlib.shake_128(KEY).digest(1000)

GOLDEN = Frame(
    key=KEY,
    depth=0x01020304,
    fingerprint=FINGERPRINT,
    encoded_nbytes=1000,
    raw_nbytes=2000,
    stored_at_ns=1_700_000_000_123_456_789,
    codec="zstd",
    codec_version=7,
    checksum_kind=CHECKSUM_XXH3_64,
    checksum=0x351EF1FF946DB3F,
)
GOLDEN_HEAD = bytes.fromhex(
    "4c4d4341434845000100010704030201"
    "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f"
    "404142434445464748494a4b4c4d4e4f"
    "e803000000000000d00700000000000015cd853dfe9c97173fdb46f91fef5103"
    "7a73746400000000000000000000000000000000000000000000000000000000"
)
GOLDEN_HEADER_SUM = bytes.fromhex("e432ecc6921bd386")


def packed(of: Frame) -> bytearray:
    page = bytearray(b"\xa5" * PAGE)
    frame.pack(of, memoryview(page))
    return page


def record_of(payload: bytes, kind: int = CHECKSUM_XXH3_64, **changes: object) -> bytearray:
    """A whole record with `payload`, sealed."""
    checksum = frame.payload_checksum(memoryview(payload)) if kind else 0
    fields = {"encoded_nbytes": len(payload), "raw_nbytes": len(payload), "checksum_kind": kind, "checksum": checksum}
    described = replace(GOLDEN, codec="identity", codec_version=1, **{**fields, **changes})  # type: ignore[arg-type]
    return packed(described) + payload + bytes(record_nbytes(len(payload)) - PAGE - len(payload))


def check(record: bytes | bytearray, **changes: object) -> Frame:
    """`verify` of a record that was read whole, for the record that `record_of(PAYLOAD)` is."""
    asked = {"nbytes": len(record), "key": KEY, "fingerprint": FINGERPRINT, "raw_nbytes": len(PAYLOAD), **changes}
    return verify(memoryview(record), **asked)  # type: ignore[arg-type]


# Format version 1, for ever.


def test_a_version_1_header_has_its_golden_bytes() -> None:
    page = packed(GOLDEN)
    assert page[:144].hex() == GOLDEN_HEAD.hex()
    assert page[144:SUMMED] == bytes(SUMMED - 144)
    assert page[SUMMED:4088].hex() == GOLDEN_HEADER_SUM.hex()


def test_a_golden_version_1_header_is_read() -> None:
    page = GOLDEN_HEAD.ljust(SUMMED, b"\0") + GOLDEN_HEADER_SUM + bytes(8)
    assert parse(memoryview(page)) == GOLDEN


def test_the_golden_payload_has_its_golden_checksum() -> None:
    assert frame.payload_checksum(memoryview(PAYLOAD)) == GOLDEN.checksum


# Damage.


def test_every_single_flipped_bit_of_a_header_is_refused() -> None:
    page = packed(GOLDEN)
    for bit in range(8 * 4088):
        page[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ChunkCorrupt):
            parse(memoryview(page))
        page[bit // 8] ^= 1 << bit % 8
    assert parse(memoryview(page)) == GOLDEN


def test_every_single_flipped_bit_of_a_payload_is_refused() -> None:
    record = record_of(PAYLOAD)
    for bit in range(8 * PAGE, 8 * (PAGE + len(PAYLOAD))):
        record[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ChunkCorrupt, match="payload checksum"):
            check(record)
        record[bit // 8] ^= 1 << bit % 8
    assert check(record).key == KEY


def test_the_generation_and_the_padding_are_no_part_of_a_record() -> None:
    record = record_of(PAYLOAD)
    record[4088:PAGE] = b"\xff" * 8
    record[PAGE + len(PAYLOAD) :] = b"\xff" * (len(record) - PAGE - len(PAYLOAD))
    assert check(record).encoded_nbytes == len(PAYLOAD)


@pytest.mark.parametrize("nbytes", [0, 1, 8, 16, 144, 4079, 4088, 4095])
def test_a_record_shorter_than_its_header_is_refused(nbytes: int) -> None:
    with pytest.raises(ChunkCorrupt, match="shorter than its header"):
        parse(memoryview(record_of(PAYLOAD))[:nbytes])


def test_a_record_of_any_other_length_than_its_header_says_is_refused() -> None:
    record = record_of(PAYLOAD)
    whole, bare = len(record), PAGE + len(PAYLOAD)
    buffer = memoryview(bytes(record) + bytes(3 * PAGE))
    for nbytes in (0, 1, PAGE, bare // 2, bare - 1, bare + 1, whole - 1, whole + 1, whole + PAGE):
        with pytest.raises(ChunkCorrupt, match=f"{nbytes} bytes"):
            check(buffer, nbytes=nbytes)
    for nbytes in (bare, whole):
        assert check(buffer, nbytes=nbytes).raw_nbytes == len(PAYLOAD)


def test_what_an_empty_read_leaves_in_a_reused_buffer_is_not_taken_for_the_record() -> None:
    with pytest.raises(ChunkCorrupt):
        check(record_of(PAYLOAD), nbytes=0)


@pytest.mark.parametrize("kind", [CHECKSUM_NONE, CHECKSUM_XXH3_64])
def test_a_length_beyond_the_buffer_that_was_read_into_is_refused(kind: int) -> None:
    record = memoryview(record_of(PAYLOAD, kind))[: PAGE + 500]
    with pytest.raises(ChunkCorrupt):
        verify(record, PAGE + len(PAYLOAD), KEY, FINGERPRINT, len(PAYLOAD))


@pytest.mark.parametrize(
    "foreign", [b"", b"\0" * 9000, b"\xff" * 9000, b"%PDF-1.7" * 1000, PAYLOAD * 9, GOLDEN_HEAD * 40]
)
def test_foreign_bytes_are_refused(foreign: bytes) -> None:
    with pytest.raises(ChunkCorrupt):
        check(foreign)


# Another record than was asked for.


@pytest.mark.parametrize(
    "asked",
    [
        {"key": ChunkKey(bytes(48))},
        {"key": ChunkKey(bytes(16) + KEY[16:])},
        {"key": ChunkKey(KEY[:16] + bytes(32))},
        {"fingerprint": bytes(16)},
        {"raw_nbytes": len(PAYLOAD) + 1},
    ],
    ids=["key", "shard", "digest", "layout", "length"],
)
def test_a_whole_record_of_another_identity_is_refused_by_its_header_though_its_size_fits(
    asked: dict[str, object],
) -> None:
    with pytest.raises(ChunkCorrupt, match=r"asked for|another layout"):
        check(record_of(PAYLOAD), **asked)


def test_an_identity_record_whose_payload_is_not_the_whole_chunk_is_refused() -> None:
    record = record_of(PAYLOAD, raw_nbytes=2 * len(PAYLOAD))
    with pytest.raises(ChunkCorrupt, match="identity"):
        check(record, raw_nbytes=2 * len(PAYLOAD))


def resummed(page: bytearray) -> memoryview:
    """A page that was changed on purpose by somebody who knows the format."""
    page[SUMMED:4088] = frame.payload_checksum(memoryview(page)[:SUMMED]).to_bytes(8, "little")
    return memoryview(page)


@pytest.mark.parametrize("version", [0, 2, 255, 65535])
def test_an_unknown_version_is_named(version: int) -> None:
    page = packed(GOLDEN)
    page[8:10] = version.to_bytes(2, "little")
    with pytest.raises(ChunkCorrupt, match=f"version {version}"):
        parse(resummed(page))


def test_another_magic_is_no_record_of_ours_whatever_its_checksum_says() -> None:
    page = packed(GOLDEN)
    page[7] = ord("2")
    with pytest.raises(ChunkCorrupt, match="wrong magic"):
        parse(resummed(page))


@pytest.mark.parametrize("kind", [2, 3, 255])
def test_an_unknown_checksum_kind_is_named(kind: int) -> None:
    page = packed(GOLDEN)
    page[10] = kind
    with pytest.raises(ChunkCorrupt, match=f"checksum kind {kind}"):
        parse(resummed(page))


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(80, 2 * MAX_CHUNK_NBYTES + 1), (88, MAX_CHUNK_NBYTES + 1), (88, 2**64 - 1)]
)
def test_lengths_that_no_chunk_has_are_refused(offset: int, nbytes: int) -> None:
    page = packed(GOLDEN)
    page[offset : offset + 8] = nbytes.to_bytes(8, "little")
    with pytest.raises(ChunkCorrupt, match="impossible lengths"):
        parse(resummed(page))


def test_a_codec_name_that_is_not_text_is_refused() -> None:
    page = packed(GOLDEN)
    page[112:114] = b"\xff\xfe"
    with pytest.raises(ChunkCorrupt, match="not text"):
        parse(resummed(page))


@pytest.mark.parametrize("name", ["x" * 33, "é" * 17, "a" * 1000])
def test_a_codec_name_that_does_not_fit_is_refused_and_nothing_is_written(name: str) -> None:
    page = bytearray(b"\xa5" * PAGE)
    with pytest.raises(ValueError, match="codec name"):
        frame.pack(replace(GOLDEN, codec=name), memoryview(page))
    assert page == b"\xa5" * PAGE


@pytest.mark.parametrize("name", ["x" * 32, "é" * 16, ""])
def test_a_codec_name_that_just_fits_comes_back(name: str) -> None:
    assert parse(memoryview(packed(replace(GOLDEN, codec=name)))).codec == name


def test_a_fingerprint_of_another_length_is_refused_instead_of_padded() -> None:
    for fingerprint in (b"", FINGERPRINT[:-1], FINGERPRINT + b"\0"):
        with pytest.raises(ValueError, match="fingerprint"):
            packed(replace(GOLDEN, fingerprint=fingerprint))


# Any frame, any bytes.

FRAMES = st.builds(
    Frame,
    key=st.binary(min_size=48, max_size=48).map(ChunkKey),
    depth=st.integers(0, 2**32 - 1),
    fingerprint=st.binary(min_size=16, max_size=16),
    encoded_nbytes=st.integers(0, 2 * MAX_CHUNK_NBYTES),
    raw_nbytes=st.integers(0, MAX_CHUNK_NBYTES),
    stored_at_ns=st.integers(0, 2**64 - 1),
    codec=st.text("abcdefghijklmnopqrstuvwxyz0123456789_-é", max_size=16),
    codec_version=st.integers(0, 255),
    checksum_kind=st.sampled_from((CHECKSUM_NONE, CHECKSUM_XXH3_64)),
    checksum=st.integers(0, 2**64 - 1),
)


@given(FRAMES, st.binary(min_size=16, max_size=16).map(lambda some: some * (PAGE // 16)))
@settings(deadline=None)
def test_any_frame_comes_back_over_any_earlier_page_whose_generation_stays(described: Frame, earlier: bytes) -> None:
    page = bytearray(earlier)
    frame.pack(described, memoryview(page))
    assert parse(memoryview(page)) == described
    assert page[4088:] == earlier[4088:]


@given(st.binary(max_size=5000))
@settings(deadline=None)
def test_arbitrary_bytes_raise_nothing_but_chunk_corrupt(data: bytes) -> None:
    with pytest.raises(ChunkCorrupt):
        parse(memoryview(data))


@given(head=st.binary(min_size=136, max_size=136), version=st.sampled_from((0, 1, 2)))
@settings(deadline=None)
def test_arbitrary_fields_under_a_valid_checksum_give_a_frame_or_chunk_corrupt(head: bytes, version: int) -> None:
    page = bytearray((b"LMCACHE\0" + version.to_bytes(2, "little") + head[2:]).ljust(PAGE, b"\0"))
    page[10] %= 3
    try:
        found = parse(resummed(page))
    except ChunkCorrupt:
        return
    assert version == 1
    assert found.key == page[16:64]


def test_the_payload_checksum_releases_the_gil() -> None:
    payload = memoryview(bytearray(64 << 20))
    assert releases_gil(lambda: frame.payload_checksum(payload))


# In memory.


def slot(generation: int) -> memoryview:
    page = memoryview(packed(GOLDEN))
    frame.set_generation(page, generation)
    return page


def test_a_slot_holds_its_record_in_its_generation_only() -> None:
    page = slot(5)
    assert frame.holds(page, KEY, FINGERPRINT, 2000, 5)
    for key, fingerprint, raw, generation in (
        (ChunkKey(bytes(48)), FINGERPRINT, 2000, 5),
        (KEY, bytes(16), 2000, 5),
        (KEY, FINGERPRINT, 1999, 5),
        (KEY, FINGERPRINT, 2000, 4),
        (KEY, FINGERPRINT, 2000, 6),
    ):
        assert not frame.holds(page, key, fingerprint, raw, generation)


def test_a_new_record_in_a_slot_keeps_the_generation_and_the_header_does_not_cover_it() -> None:
    page = slot(2**64 - 1)
    frame.pack(replace(GOLDEN, depth=9), page)
    assert frame.holds(page, KEY, FINGERPRINT, 2000, 2**64 - 1)
    frame.set_generation(page, 3)
    assert parse(page).depth == 9


@pytest.mark.parametrize(("payload", "record"), [(0, PAGE), (1, 2 * PAGE), (PAGE, 2 * PAGE), (PAGE + 1, 3 * PAGE)])
def test_a_record_is_whole_pages(payload: int, record: int) -> None:
    assert record_nbytes(payload) == record


def test_a_header_that_is_read_while_another_thread_seals_it_is_the_one_or_the_other():
    page = memoryview(packed(GOLDEN))
    both = (GOLDEN, replace(GOLDEN, checksum_kind=CHECKSUM_NONE, checksum=0))
    enough = threading.Event()

    def seal() -> None:
        while not enough.is_set():
            for described in both:
                frame.pack(described, page)

    def read() -> None:
        try:
            for _ in range(20_000):
                assert parse(page) in both
        finally:
            enough.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        in_threads(seal, read)
    finally:
        sys.setswitchinterval(interval)
