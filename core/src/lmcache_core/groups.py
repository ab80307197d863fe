"""The rule of reuse: from which lengths of a prefix the engine can go on, given what is stored of each layer group."""

from __future__ import annotations

from collections.abc import Sequence

from .chain import Group, GroupKind


def window_chunks(group: Group, chunk_tokens: int) -> int:
    """How many last chunks a sliding-window group needs.

    The next token attends to itself and the `window_tokens - 1` tokens before it.
    """
    return -(-(group.window_tokens - 1) // chunk_tokens)


def restorable(groups: Sequence[Group], present: Sequence[Sequence[bool]], chunk_tokens: int) -> tuple[int, ...]:
    """Every length, in chunks and ascending, at which each group has all that it needs.

    `present[g][i]` says whether chunk i of group g is there in every shard; what is beyond a list is not.  A length n
    needs chunks 0 to n-1 of a full group, the last ones that hold its window of a window group, exactly chunk n-1 of a
    state group.
    """
    chunks = min(map(len, present))
    bounds: list[tuple[Sequence[bool], int]] = []
    for group, there in zip(groups, present, strict=True):
        if group.kind is GroupKind.FULL:
            chunks = there.index(False, 0, chunks) if not all(there[:chunks]) else chunks
        elif group.kind is GroupKind.WINDOW:
            bounds.append((there, window_chunks(group, chunk_tokens)))
        else:
            bounds.append((there, 1))
    if not bounds:
        return tuple(range(1, chunks + 1))
    runs = [0] * len(bounds)
    lengths = []
    for n in range(1, chunks + 1):
        fits = True
        for g, (there, needed) in enumerate(bounds):
            runs[g] = runs[g] + 1 if there[n - 1] else 0
            fits = fits and runs[g] >= min(needed, n)
        if fits:
            lengths.append(n)
    return tuple(lengths)
