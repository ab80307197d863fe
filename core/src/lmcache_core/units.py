"""Sizes and durations as people write them: "16GiB" to bytes, "500ms" to seconds, and back."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

MAX_NBYTES: Final = (1 << 63) - 1
MAX_SECONDS: Final = 10 * 365 * 86400.0

_NUMBER: Final = re.compile(r"((?:0|[1-9][0-9]*)(?:\.[0-9]+)?) ?([A-Za-zµ]*)")
_SIZE_UNITS: Final[dict[str, int]] = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("kMGTP", start=1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGTP", start=1)},
    "KB": 1000,
}
_TIME_UNITS: Final[dict[str, float]] = {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


def parse_nbytes(text: str) -> int:
    """Bytes in `text`: "16GiB" is 16 * 2**30, "1GB" is 10**9, a bare "1000" is 1,000 bytes.

    ValueError says what to write for anything else: "1G" and "1gb" could mean either and are refused.
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{_quote(text)} is not a size; write e.g. 16GiB, 1GB or a number of bytes")
    number, unit = match.groups()
    if unit not in _SIZE_UNITS:
        raise ValueError(f"{_quote(text)} has the unknown unit {unit!r}{_size_hint(unit)}")
    whole, _, fraction = number.partition(".")
    if len(number) > 40:
        raise ValueError(f"{_quote(text)} has too many digits")
    scaled = int(whole + fraction) * _SIZE_UNITS[unit]
    divisor: int = 10 ** len(fraction)
    nbytes, rest = divmod(scaled, divisor)
    if rest:
        raise ValueError(f"{_quote(text)} is not a whole number of bytes")
    if nbytes > MAX_NBYTES:
        raise ValueError(f"{_quote(text)} is more than {MAX_NBYTES} bytes")
    return nbytes


def parse_seconds(text: str) -> float:
    """Seconds in `text`: "500ms", "10s", "5min", "1h"; a bare number is seconds.  ValueError says what to write."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{_quote(text)} is not a duration; write e.g. 500ms, 10s, 5min or a number of seconds")
    number, unit = match.groups()
    if unit not in _TIME_UNITS:
        raise ValueError(f"{_quote(text)} has the unknown unit {unit!r}; durations end in us, ms, s, min or h")
    seconds = float(number) * _TIME_UNITS[unit]
    if seconds > MAX_SECONDS:
        raise ValueError(f"{_quote(text)} is more than ten years")
    return seconds


def format_nbytes(nbytes: int) -> str:
    """The shortest exact spelling that `parse_nbytes` reads back: 1 << 34 is "16GiB", 1000 is "1000"."""
    for power, letter in reversed(list(enumerate("KMGTP", start=1))):
        if nbytes and nbytes % 1024**power == 0:
            return f"{nbytes // 1024**power}{letter}iB"
    return str(nbytes)


def format_seconds(seconds: float) -> str:
    """An exact spelling that `parse_seconds` reads back: 60.0 is "60s"."""
    return f"{int(seconds)}s" if seconds == int(seconds) else f"{Decimal(repr(seconds)):f}s"


def _size_hint(unit: str) -> str:
    letter = unit[:1].upper()
    if letter in "KMGTP" and letter:
        decimal = "kB" if letter == "K" else f"{letter}B"
        return f"; write {letter}iB for powers of 1024 or {decimal} for powers of 1000"
    return "; sizes end in KiB, MiB, GiB, TiB (powers of 1024) or kB, MB, GB, TB (powers of 1000)"


def _quote(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:60] + "…")
