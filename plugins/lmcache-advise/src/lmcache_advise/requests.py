"""Requests as arrays: when, how long, and the identity of each of their blocks, all of them or an even sample.

An identity stands for a block and everything before it.  The sample is one of blocks, by their identity (as SHARDS
does): a block is in it each time that it is asked for, or never.  The few blocks that are asked for most of all (the
heads of system prompts) are always in it: with or without one of them, a sample would be far off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Blocks = NDArray[np.uint64]

MAX_BLOCKS: Final = 32 << 20
"""Block references that are kept, some 40 bytes each while they are looked at; of more, a sample."""
_OFTEN: Final = 32
"""A block that was asked for so many times may be one of those that are always kept."""
_OFTEN_SHARE: Final = 4
"""One part in so many of the references that are kept may be of those."""
_FULL: Final = 1 << 24
"""The threshold of a sample that has everything: 24 bits of an identity decide."""
_A, _B, _C = (np.uint64(each) for each in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@dataclass(frozen=True, slots=True)
class Requests:
    """In the order of time.  `blocks[starts[i] : starts[i + 1]]` are those of request i that are in the sample."""

    at: Floats
    """Seconds, from any beginning."""
    starts: Ints
    blocks: Blocks
    input_tokens: Ints
    output_tokens: Ints
    block_tokens: int
    rate: float = 1.0
    """The share of all blocks that is in the sample, but for those of `often`."""
    total_blocks: int = 0
    """Whole blocks asked for, in the sample or not."""
    often: Blocks = field(default_factory=lambda: np.zeros(0, np.uint64))
    """Blocks that are in it in any case, sorted."""

    def __len__(self) -> int:
        return len(self.at)

    @property
    def seconds(self) -> float:
        """From the first to the last."""
        return float(self.at[-1] - self.at[0]) if len(self.at) else 0.0

    @property
    def tokens(self) -> int:
        """Of all prompts."""
        return int(self.input_tokens.sum())

    @property
    def mean_position(self) -> float:
        """Where a token of a prompt stands on average."""
        lengths = self.input_tokens.astype(np.float64)
        return float((lengths * lengths).sum() / 2 / max(1.0, lengths.sum()))

    def weights(self) -> Ints:
        """For how many references each one of the sample stands."""
        if self.rate == 1.0:
            return np.ones(len(self.blocks), np.int64)
        return np.where(_among(self.blocks, self.often), 1, round(1 / self.rate)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class _Batch:
    at: Floats
    counts: Ints
    blocks: Blocks
    inputs: Ints
    outputs: Ints


class Builder:
    """Takes requests batch by batch in bounded memory."""

    def __init__(self, block_tokens: int, max_blocks: int = MAX_BLOCKS) -> None:
        self.block_tokens = block_tokens
        self._max_blocks = max_blocks
        self._threshold = _FULL
        self._batches: list[_Batch] = []
        self._kept = 0
        self._total = 0
        self._often = np.zeros(0, np.uint64)

    def add(
        self,
        at: Sequence[float] | Floats,
        lengths: Sequence[int] | Ints,
        ids: Sequence[int] | Blocks,
        input_tokens: Sequence[int] | Ints,
        output_tokens: Sequence[int] | Ints,
        seeds: Sequence[int] | Blocks | None = None,
    ) -> None:
        """Requests with `lengths` blocks each, whose ids stand one after another in `ids`.

        Requests share nothing where their `seeds` differ.
        """
        counts = np.asarray(lengths, np.int64)
        first = np.zeros(len(counts), np.uint64) if seeds is None else np.asarray(seeds, np.uint64)
        blocks = chained(np.asarray(ids, np.uint64), counts, first)
        self._total += len(blocks)
        inputs, outputs = np.asarray(input_tokens, np.int64), np.asarray(output_tokens, np.int64)
        self._append(_Batch(np.asarray(at, np.float64), counts, blocks, inputs, outputs))
        while self._kept > self._max_blocks and self._threshold > 1:
            every = np.concatenate([batch.blocks for batch in self._batches])
            among = self._often if self._threshold < _FULL else None
            self._often = asked_often(every, self._max_blocks // _OFTEN_SHARE, among)
            self._threshold //= 2
            batches, self._batches, self._kept = self._batches, [], 0
            for each in batches:
                self._append(each)

    def _append(self, batch: _Batch) -> None:
        if self._threshold < _FULL:
            counts, blocks = _thinned(batch.counts, batch.blocks, self._threshold, self._often)
            batch = replace(batch, counts=counts, blocks=blocks)
        self._batches.append(batch)
        self._kept += len(batch.blocks)

    def build(self) -> Requests:
        """Everything that was added, in the order of time."""
        none = np.zeros(0, np.int64)
        found = self._batches or [_Batch(np.zeros(0), none, np.zeros(0, np.uint64), none, none)]
        at = np.concatenate([batch.at for batch in found])
        counts = np.concatenate([batch.counts for batch in found]).astype(np.int64)
        blocks = np.concatenate([batch.blocks for batch in found]).astype(np.uint64)
        inputs = np.concatenate([batch.inputs for batch in found]).astype(np.int64)
        outputs = np.concatenate([batch.outputs for batch in found]).astype(np.int64)
        starts = starts_of(counts)
        if np.any(np.diff(at) < 0):
            order = np.argsort(at, kind="stable")
            at, inputs, outputs = at[order], inputs[order], outputs[order]
            blocks = blocks[spans(starts[:-1][order], counts[order])]
            starts = starts_of(counts[order])
        return Requests(
            at, starts, blocks, inputs, outputs, self.block_tokens, self._threshold / _FULL, self._total, self._often
        )


def starts_of(counts: Ints | NDArray[np.bool_]) -> Ints:
    """Where ranges of those lengths begin that stand one after another, and where the last ends."""
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int64)


def chained(ids: Blocks, lengths: Ints, seeds: Blocks) -> Blocks:
    """An identity for each block that stands for what is before it as well; block 0 follows its request's seed."""
    out = np.empty(len(ids), np.uint64)
    order = np.argsort(-lengths, kind="stable")
    starts = (np.cumsum(lengths) - lengths)[order]
    descending = -lengths[order]
    parents = seeds[order] ^ _C
    for depth in range(int(lengths.max(initial=0))):
        count = int(np.searchsorted(descending, -depth, side="left"))
        at = starts[:count] + depth
        mixed = ids[at] * _A + _B
        mixed ^= mixed >> np.uint64(32)
        mixed += parents[:count]
        mixed *= _B
        mixed ^= mixed >> np.uint64(29)
        mixed *= _C
        mixed ^= mixed >> np.uint64(32)
        out[at] = parents[:count] = mixed
    return out


def spans(starts: Ints, lengths: Ints) -> Ints:
    """The indices of several ranges, one after another."""
    total = int(lengths.sum())
    if not total:
        return np.zeros(0, np.int64)
    offsets = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    return np.asarray(offsets + np.arange(total), np.int64)


def thinned(requests: Requests, max_blocks: int) -> Requests:
    """A smaller sample of the same requests, of about `max_blocks` block references at most."""
    threshold, often = int(_FULL * requests.rate), requests.often
    blocks, counts = requests.blocks, np.diff(requests.starts)
    while len(blocks) > max_blocks and threshold > 1:
        often = asked_often(blocks, max_blocks // _OFTEN_SHARE, often if threshold < _FULL else None)
        threshold //= 2
        counts, blocks = _thinned(counts, blocks, threshold, often)
    return replace(requests, starts=starts_of(counts), blocks=blocks, rate=threshold / _FULL, often=often)


def asked_often(blocks: Blocks, limit: int, among: Blocks | None) -> Blocks:
    """The blocks that are asked for most, sorted, with `limit` references together at most; `among` those if given."""
    found, counts = np.unique(blocks, return_counts=True)
    wanted = counts >= _OFTEN if among is None else _among(found, among)
    found, counts = found[wanted], counts[wanted]
    order = np.argsort(-counts, kind="stable")
    return np.sort(found[order[np.cumsum(counts[order]) <= limit]])


def _among(blocks: Blocks, some: Blocks) -> NDArray[np.bool_]:
    if not len(some):
        return np.zeros(len(blocks), np.bool_)
    places = np.minimum(np.searchsorted(some, blocks), len(some) - 1)
    return np.asarray(some[places] == blocks, np.bool_)


def _thinned(counts: Ints, blocks: Blocks, threshold: int, often: Blocks) -> tuple[Ints, Blocks]:
    kept = ((blocks >> np.uint64(40)) < np.uint64(threshold)) | _among(blocks, often)
    before = starts_of(kept)
    ends = np.cumsum(counts)
    return before[ends] - before[ends - counts], blocks[kept]
