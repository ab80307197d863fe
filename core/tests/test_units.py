"""Sizes and durations mean what they say, and nothing else is taken for one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_core.units import MAX_NBYTES, format_nbytes, format_seconds, parse_nbytes, parse_seconds


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1000", 1000),
        ("0", 0),
        ("1B", 1),
        ("1kB", 1000),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("1MB", 10**6),
        ("1GB", 10**9),
        ("1GiB", 2**30),
        ("16 GiB", 16 << 30),
        ("1.5GiB", 3 << 29),
        ("0.001kB", 1),
        ("2TiB", 2 << 40),
        ("1PB", 10**15),
        (" 1MiB ", 1 << 20),
    ],
)
def test_a_size_is_read(text: str, nbytes: int) -> None:
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1G", "write GiB for powers of 1024 or GB"),
        ("1gb", "write GiB"),
        ("1gib", "write GiB"),
        ("5k", "write KiB for powers of 1024 or kB"),
        ("1Gb", "write GiB"),
        ("1GiBs", "write GiB"),
        ("3 apples", "sizes end in"),
        ("-1", "is not a size"),
        ("", "is not a size"),
        ("GiB", "is not a size"),
        ("017", "is not a size"),
        ("1_000", "is not a size"),
        ("0x10", "is not a size"),
        ("1e9", "is not a size"),
        ("1e", "unknown unit"),
        (".5GiB", "is not a size"),
        ("nan", "is not a size"),
        ("inf", "is not a size"),
        ("1.5", "whole number of bytes"),
        ("0.3KiB", "whole number of bytes"),
        ("9999999PiB", "more than"),
        ("9" * 41, "too many digits"),
        ("١GiB", "is not a size"),
    ],
)
def test_what_is_no_size_is_refused_with_what_to_write(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_nbytes(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("10", 10.0), ("0.5", 0.5), ("500ms", 0.5), ("10s", 10.0), ("2min", 120.0), ("1h", 3600.0), ("20us", 2e-5)],
)
def test_a_duration_is_read(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "-1", "1m", "1d", "inf", "nan", "10 years", "1e3", "00:01", "999999h", "ms"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"duration|more than ten years"):
        parse_seconds(text)


@given(st.one_of(st.integers(0, MAX_NBYTES), st.integers(0, 8191).map(lambda n: n << 40)))
def test_a_written_size_reads_back(nbytes: int) -> None:
    assert parse_nbytes(format_nbytes(nbytes)) == nbytes


@given(st.one_of(st.integers(0, 10**8).map(float), st.floats(0, 1e6)))
def test_a_written_duration_reads_back(seconds: float) -> None:
    assert parse_seconds(format_seconds(seconds)) == seconds


def test_sizes_and_durations_are_written_briefly() -> None:
    assert [format_nbytes(n) for n in (0, 1000, 1024, 1 << 34, 3 << 29)] == ["0", "1000", "1KiB", "16GiB", "1536MiB"]
    assert [format_seconds(s) for s in (60.0, 0.5, 1e-6)] == ["60s", "0.5s", "0.000001s"]
