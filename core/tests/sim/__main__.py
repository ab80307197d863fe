"""`python -m sim SEED [SEED]`: simulate one seed, or a range of them, and say what was found."""

from __future__ import annotations

import sys
import time

from .runs import run


def main(arguments: list[str]) -> int:
    first, last = int(arguments[0]), int(arguments[-1])
    failed = 0
    for seed in range(first, last + 1):
        began = time.perf_counter()
        try:
            outcome = run(seed)
        except Exception as error:
            if first == last:
                raise
            failed += 1
            print(f"{seed}: {type(error).__name__}: {str(error).splitlines()[0]}")
        else:
            if first == last:
                print(f"{outcome} in {time.perf_counter() - began:.3f} s")
    print(f"{last - first + 1} seeds, {failed} failed")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
