"""What work takes, learned from samples: seconds for so many bytes or tokens, and no guess without a measurement."""

from __future__ import annotations

import statistics
import threading
from collections import deque
from typing import Final

MIN_SAMPLES: Final = 20
"""In all, before there is any estimate."""
_IN_BUCKET: Final = 3
_KEPT: Final = 15
"""Samples of a bucket that count; their median, so that one stall changes nothing."""
_MAX_BITS: Final = 48


class _Bucket:
    __slots__ = ("rate", "samples")

    def __init__(self) -> None:
        self.samples: deque[float] = deque(maxlen=_KEPT)
        self.rate = 0.0
        """Median seconds for one byte or token."""


class Costs:
    """Thread-safe.  Buckets are powers of two of the amount, and of what went before it (`context`): a fixed number."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buckets: dict[tuple[int, int], _Bucket] = {}
        self._count = 0

    def sample(self, amount: int, seconds: float, context: int = 0) -> None:
        """It took `seconds` to do `amount`, after `context`."""
        if amount <= 0 or not 0 <= seconds < 1e6:
            return
        with self._lock:
            bucket = self._buckets.setdefault((_bits(amount), _bits(context)), _Bucket())
            bucket.samples.append(seconds / amount)
            bucket.rate = statistics.median(bucket.samples)
            self._count += 1

    def estimate(self, amount: int, context: int = 0) -> float | None:
        """Seconds that `amount` would take; None before there are samples enough, of about this size."""
        if self._count < MIN_SAMPLES or amount <= 0:
            return None
        size, before = _bits(amount), _bits(context)
        for near in ((size, before), (size + 1, before), (size - 1, before)):
            bucket = self._buckets.get(near)
            if bucket is not None and len(bucket.samples) >= _IN_BUCKET:
                return bucket.rate * amount
        return None


def _bits(number: int) -> int:
    return min(number.bit_length(), _MAX_BITS)
