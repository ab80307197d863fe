"""Hands of the fuzz tests: seeded cases that can be run again one by one, mutations, and a bound on what they take.

A few thousand cases, the same each time; with LMCACHE_SOAK set, `soak` cases that nobody has seen.  LMCACHE_FUZZ_SEED
begins with the case of that seed.
"""

from __future__ import annotations

import os
import random
import tracemalloc
from collections.abc import Callable, Sequence

SOAK = bool(os.environ.get("LMCACHE_SOAK"))
MEASURED = 400
"""Cases whose allocations are measured, which makes them several times as slow."""


def run_cases(one: Callable[[random.Random], int], *, cases: int, soak: int, per_byte: int, fixed: int) -> None:
    """`one(rng)` many times; it returns how many bytes its input had, and asserts what must hold.

    What it allocates at its most is bounded by `fixed` bytes and `per_byte` for each byte of input.
    """
    count = soak if SOAK else cases
    first = int(os.environ.get("LMCACHE_FUZZ_SEED") or (random.randrange(1 << 40) if SOAK else 1))
    for number in range(count):
        measured = number % max(1, count // MEASURED) == 0
        if measured:
            tracemalloc.start()
        try:
            nbytes = one(random.Random(first + number))
            if measured:
                _, peak = tracemalloc.get_traced_memory()
                assert peak <= fixed + per_byte * nbytes, f"{peak} bytes allocated for {nbytes} of input"
        except BaseException as error:
            raise AssertionError(f"LMCACHE_FUZZ_SEED={first + number}: {error!r}") from error
        finally:
            if measured:
                tracemalloc.stop()
    print(f"{count} cases from seed {first} on")


def mutate(rng: random.Random, data: bytes, tokens: Sequence[bytes] = (), most: int = 5) -> bytes:
    """`data` with a few bytes flipped, removed, doubled, moved, made up, or replaced by one of `tokens`."""
    out = bytearray(data)
    for _ in range(rng.randrange(1, most)):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(7 if tokens else 6):
            case 0 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 1:
                del out[at : at + rng.randrange(1, 9)]
            case 2:
                out[at:at] = out[at : at + rng.randrange(1, 40)]
            case 3:
                out[at:at] = rng.randbytes(rng.randrange(1, 6))
            case 4 if rng.random() < 0.2:
                del out[at:]
            case 5:
                start = rng.randrange(len(out) + 1)
                piece = out[start : start + rng.randrange(1, 20)]
                out[at : at + len(piece)] = piece
            case 6:
                token = rng.choice(tokens)
                out[at : at + rng.choice((0, len(token)))] = token
    return bytes(out)
