"""What lies in a store may be anything: nothing is taken for a record that was not written, nothing but our errors."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest
from disk_helpers import NBYTES, holds, open_disk, put, record
from fuzz_corpus import HEADERS, MANIFESTS, TEMPS, USAGES
from fuzzing import mutate, run_cases
from tiny import RECORD, chain, load, model, open_local, store

from lmcache_core import frame, manifest
from lmcache_core.backends._files import MAX_NBYTES, Writer, parse_temp
from lmcache_core.errors import BackendError, ChunkCorrupt
from lmcache_core.frame import CHECKSUM_XXH3_64, Frame
from lmcache_core.keys import ChunkKey
from lmcache_core.layout import MAX_CHUNK_NBYTES, PAGE_NBYTES

SUMMED = PAGE_NBYTES - 16
HEADER = PAGE_NBYTES - 8
"""Bytes of the page that are part of the record: the rest is the generation."""
FINGERPRINT = bytes(range(16))


def written(number: int) -> bytes:
    """A record of a store."""
    key = ChunkKey(number.to_bytes(48, "little"))
    payload = bytes([number]) * (700 + number)
    head = Frame(
        key, number, FINGERPRINT, len(payload), len(payload), 10**18 + number, "identity", 1, CHECKSUM_XXH3_64,
        frame.payload_checksum(memoryview(payload)),
    )  # fmt: skip
    out = bytearray(frame.record_nbytes(len(payload)))
    out[PAGE_NBYTES : PAGE_NBYTES + len(payload)] = payload
    frame.pack(head, memoryview(out)[:PAGE_NBYTES])
    return bytes(out)


RECORDS = [written(number) for number in range(8)]
HEADERS_WRITTEN = {each[:HEADER] for each in RECORDS}
PAYLOADS_WRITTEN = {each[16:64]: each[: PAGE_NBYTES + 700 + n] for n, each in enumerate(RECORDS)}


def resummed(page: bytes) -> bytes:
    """The page with the checksum that belongs to it, as by somebody who knows the format."""
    if len(page) < HEADER:
        return page
    return page[:SUMMED] + frame.payload_checksum(memoryview(page)[:SUMMED]).to_bytes(8, "little") + page[HEADER:]


def damaged(rng: random.Random) -> bytes:
    """A record that was damaged, of which most of the damage is where there is something to damage."""
    original = rng.choice(RECORDS)
    if rng.random() < 0.7:
        return mutate(rng, original[:144]).ljust(144, b"\0")[:144] + original[144:]
    if rng.random() < 0.2:
        other = rng.choice(RECORDS)
        return original[:PAGE_NBYTES] + other[PAGE_NBYTES:]
    return mutate(rng, original)


def test_a_header_that_was_damaged_is_refused_and_costs_no_memory() -> None:
    def one(rng: random.Random) -> int:
        page = damaged(rng)
        try:
            frame.parse(memoryview(page))
        except ChunkCorrupt:
            pass
        else:
            assert page[:HEADER] in HEADERS_WRITTEN, f"accepted {page[:144].hex()}"
        return len(page)

    run_cases(one, cases=3000, soak=1_000_000, per_byte=2, fixed=1 << 16)


def test_a_record_that_was_damaged_is_refused_or_is_one_that_was_written() -> None:
    def one(rng: random.Random) -> int:
        data = damaged(rng)
        asked = ChunkKey(data[16:64]) if len(data) > 64 and rng.random() < 0.8 else ChunkKey(rng.choice(RECORDS)[16:64])
        raw = rng.choice((700 + asked[0], rng.randrange(2000)))
        view = memoryview(data + bytes(PAGE_NBYTES))
        try:
            found = frame.verify(view, rng.choice((len(data), rng.randrange(10_000))), asked, FINGERPRINT, raw)
        except ChunkCorrupt:
            return len(data)
        whole = data[: PAGE_NBYTES + found.encoded_nbytes]
        original = PAYLOADS_WRITTEN[asked]
        assert whole[:HEADER] == original[:HEADER]
        assert whole[PAGE_NBYTES:] == original[PAGE_NBYTES:]
        return len(data)

    run_cases(one, cases=3000, soak=1_000_000, per_byte=2, fixed=1 << 16)


def test_a_header_made_by_somebody_who_knows_the_format_has_lengths_within_the_bounds_or_is_refused() -> None:
    def one(rng: random.Random) -> int:
        page = resummed(damaged(rng))
        try:
            found = frame.parse(memoryview(page))
        except ChunkCorrupt:
            return len(page)
        assert 0 <= found.raw_nbytes <= MAX_CHUNK_NBYTES
        assert 0 <= found.encoded_nbytes <= 2 * MAX_CHUNK_NBYTES
        assert found.key == page[16:64]
        assert len(found.codec.encode()) <= 32
        return len(page)

    run_cases(one, cases=3000, soak=200_000, per_byte=2, fixed=1 << 16)


@pytest.mark.parametrize("head", HEADERS)
def test_a_header_of_the_corpus_is_refused(head: bytes) -> None:
    for page in (head.ljust(PAGE_NBYTES, b"\0"), resummed(head.ljust(PAGE_NBYTES, b"\0")), head):
        with pytest.raises(ChunkCorrupt):
            frame.parse(memoryview(page))


# Manifests: JSON behind a header.


SHARD = model().shards[0].shard_id
MANIFEST = manifest.of(model(salt_id=bytes(range(16))), model(salt_id=bytes(range(16))).shards[0].shard_id)
DESCRIBED = json.dumps(MANIFEST.described, sort_keys=True).encode()
JSON_TOKENS = [
    *(b"null", b"{}", b"[]", b"1e999", b"NaN", b"-1", b'""', b'"', b"{", b"}", b"[", b"]", b":", b","),
    *(b'"salt_id"', b'"family"', b'"family_id"', b"\\ud800", b"\xff", b"0" * 5000, b"[" * 3000, b'{"family":' * 50),
]


def sealed(payload: bytes, key: ChunkKey) -> bytes:
    """A record with that payload, whatever it is, and checksums that are right."""
    out = bytearray(frame.record_nbytes(len(payload)))
    out[PAGE_NBYTES : PAGE_NBYTES + len(payload)] = payload
    head = Frame(key, 0, manifest._FINGERPRINT, len(payload), len(payload), 1, checksum_kind=CHECKSUM_XXH3_64,
                 checksum=frame.payload_checksum(memoryview(payload)))  # fmt: skip
    frame.pack(head, memoryview(out)[:PAGE_NBYTES])
    return bytes(out)


def parsed(payload: bytes, key: ChunkKey) -> manifest.Manifest | None:
    data = sealed(payload, key)
    try:
        found = manifest.parse(memoryview(data), len(data), key)
    except ChunkCorrupt:
        return None
    assert found.shard_id == key.shard_id
    assert len(found.tenant) in (0, 16)
    assert len(found.family_id) == 16
    return found


def test_any_text_in_place_of_a_manifest_is_one_or_is_refused_and_costs_no_more_than_its_length() -> None:
    key = manifest.key_of(MANIFEST.shard_id)
    found = parsed(DESCRIBED, key)
    assert found is not None
    assert (found.tenant, found.family_id) == (MANIFEST.tenant, MANIFEST.family_id)

    def one(rng: random.Random) -> int:
        payload = mutate(rng, DESCRIBED, JSON_TOKENS)
        parsed(payload, key)
        return len(payload)

    run_cases(one, cases=3000, soak=200_000, per_byte=200, fixed=1 << 18)


@pytest.mark.parametrize("payload", MANIFESTS)
def test_a_manifest_of_the_corpus_is_refused(payload: bytes) -> None:
    assert parsed(payload, manifest.key_of(SHARD)) is None


# Files of the disk store.


def test_a_usage_file_of_any_content_is_a_backend_error_or_a_total_and_is_mended_by_the_next_opening(
    tmp_path: Path,
) -> None:
    with open_disk(tmp_path, 4 * NBYTES) as backend:
        (key,) = put(backend)
        good = (tmp_path / "v1" / "usage").read_bytes()
    path = tmp_path / "v1" / "usage"
    tokens = [b"LMCuse\x01\n", b"\xff" * 8, b"\xff" * 7 + b"\x7f", b"\n", b"\r\n", good[24:], b"host-1.1.2.3.9999"]

    def one(rng: random.Random) -> int:
        content = mutate(rng, good, tokens) if rng.random() < 0.9 else rng.randbytes(rng.randrange(200))
        with open_disk(tmp_path, 4 * NBYTES) as backend:
            path.write_bytes(content)
            try:
                backend.put(key, record(key))
                assert backend.used_nbytes >= 0
                backend.remove(key)
                backend.put(key, record(key))
            except BackendError:
                pass
            assert holds(backend, key)
            with open_disk(tmp_path, 3 * NBYTES) as other:
                limit = other._total.read()[1]
                assert limit is not None
                assert limit <= 3 * NBYTES, f"a limit of {limit} bytes"
        with open_disk(tmp_path, 4 * NBYTES) as backend:
            assert backend.used_nbytes == NBYTES
        return len(content)

    run_cases(one, cases=500, soak=20_000, per_byte=100, fixed=2 << 20)


@pytest.mark.parametrize("content", USAGES)
def test_a_usage_file_of_the_corpus_is_mended_by_whoever_opens_next(tmp_path: Path, content: bytes) -> None:
    with open_disk(tmp_path, 4 * NBYTES) as backend:
        (key,) = put(backend)
        (tmp_path / "v1" / "usage").write_bytes(content)
        try:
            put(backend)
        except BackendError:
            pass
        with open_disk(tmp_path, 2 * NBYTES) as other:
            assert other._total.read()[1] == 2 * NBYTES
            assert holds(other, key)


def test_a_name_is_that_of_a_temporary_file_only_if_a_writer_could_have_made_it() -> None:
    name = Writer.current().temp_name(10**15).encode()

    def one(rng: random.Random) -> int:
        text = mutate(rng, name, [b".", b"0", b"/", b"..", b"\n", "٣".encode()]).decode("utf-8", "replace")
        found = parse_temp(text)
        if found is not None:
            writer, nbytes = found
            assert "/" not in text
            assert len(text) < 255
            assert writer.pid >= 0
            assert 0 <= nbytes <= MAX_NBYTES
            assert writer.is_dead(Writer.current()) in (True, False)
        return len(text)

    run_cases(one, cases=3000, soak=100_000, per_byte=20, fixed=1 << 16)


@pytest.mark.parametrize("name", TEMPS)
def test_a_name_of_the_corpus_is_no_temporary_file(name: str) -> None:
    assert parse_temp(name) is None


def test_a_writer_finds_the_temporary_files_of_the_largest_records_and_limits_again() -> None:
    writer = Writer("host-1", 1, 2)
    for nbytes in (0, 10**15, MAX_NBYTES):
        assert parse_temp(writer.temp_name(nbytes)) == (writer, nbytes)


def contents(rng: random.Random, whole: list[tuple[Path, bytes]]) -> bytes:
    """Something to lie in the place of a record."""
    match rng.randrange(6):
        case 0:
            return b""
        case 1:
            return rng.randbytes(rng.choice((1, 4095, 4096, RECORD - 1, RECORD, RECORD + 1)))
        case 2:
            return rng.choice(whole)[1]
        case 3:
            return sealed(mutate(rng, DESCRIBED, JSON_TOKENS), manifest.key_of(SHARD))
        case 4:
            return resummed(mutate(rng, rng.choice(whole)[1]))
    return mutate(rng, rng.choice(whole)[1])


def test_a_store_full_of_damaged_files_opens_serves_what_is_right_and_takes_new_records(tmp_path: Path) -> None:
    prompt, numbers = chain(4), itertools.count()

    def fill(root: Path) -> list[tuple[Path, bytes]]:
        with open_local([open_disk(root)]) as cache:
            store(cache, prompt)
            assert cache.drain(10)
        found = sorted(path for path in (root / "v1").rglob("*") if path.is_file() and len(path.name) == 64)
        return [(path, path.read_bytes()) for path in found]

    def one(rng: random.Random) -> int:
        root = tmp_path / str(next(numbers))
        whole = fill(root)
        assert len(whole) == 5, "four records and their manifest"
        for path, data in whole:
            if rng.random() < 0.7:
                path.write_bytes(contents(rng, whole))
            if rng.random() < 0.3:
                stranger = path.with_name(path.name[:2] + rng.randbytes(31).hex())
                stranger.write_bytes(data if rng.random() < 0.5 else contents(rng, whole))
        with open_local([open_disk(root)]) as cache:
            load(cache, prompt)  # which compares every byte that it was given
            assert store(cache, prompt).failed == ()
            assert cache.drain(10)
        with open_local([open_disk(root)]) as cache:
            assert load(cache, prompt)[1].ok_chunks == 4
        return 1 << 20

    run_cases(one, cases=60, soak=2_000, per_byte=64, fixed=64 << 20)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Warnings of thousands of cases are not kept."""
    caplog.set_level("CRITICAL")
