"""Exact LRU stack distances of a whole trace at once: what an LRU of any size would hit.

The blocks of a prompt that were last used by the same earlier request lie in one piece, in the prompt and in the
stack: a prompt is a few such segments.  Whoever asks for a block asks for all before it, so that the last use never
becomes later towards the end of a prompt.  The distance of a segment's first block is one more than what was used since
that earlier request; the next block's is one more than its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .requests import Floats, Ints, Requests, starts_of


@dataclass(frozen=True, slots=True)
class Segments:
    """Pieces of prompts that an earlier request used last; lengths in blocks, for those outside the sample too."""

    request: Ints
    before: Ints
    """The request that used it last."""
    length: Ints
    base: Ints
    """Blocks that lie above it in the stack."""


@dataclass(frozen=True, slots=True)
class Curve:
    """How many tokens an LRU of so many tokens hits."""

    segments: Segments
    requests: int
    block_tokens: int
    tokens: int
    missing_blocks: int
    """References that a sample falls short of; taken for hits of the shortest distance, like most that are asked for
    more often than others."""

    def hit_tokens(self, capacity_tokens: float) -> float:
        """Of all prompts, in an LRU of `capacity_tokens`."""
        room = capacity_tokens / self.block_tokens
        parts = self.segments
        found = float(np.minimum(np.maximum(room - parts.base, 0), parts.length).sum()) if room >= 1 else 0.0
        found = max(0.0, found + self.missing_blocks) if found else 0.0
        return min(found * self.block_tokens, float(self.tokens))

    def share(self, capacity_tokens: float) -> float:
        """Hits as a share of all prompt tokens."""
        return self.hit_tokens(capacity_tokens) / self.tokens if self.tokens else 0.0

    def requests_between(self, low_tokens: float, high_tokens: float) -> int:
        """Requests with a block that an LRU of the larger size hits and one of the smaller does not."""
        low, high = low_tokens / self.block_tokens, high_tokens / self.block_tokens
        parts = self.segments
        found = np.zeros(self.requests, np.bool_)
        found[parts.request[(parts.base < high) & (parts.base + parts.length > low)]] = True
        return int(found.sum())

    @property
    def best(self) -> float:
        """The share that a cache without limit would hit."""
        return self.share(float("inf"))

    def size_for(self, part: float) -> float:
        """Tokens of the smallest LRU that has `part` of all hits there are."""
        wanted = self.hit_tokens(float("inf")) * part
        if not wanted:
            return 0.0
        low, high = 0.0, float(self.largest)
        for _ in range(60):
            if high - low <= max(1.0, high / 1000):
                break
            middle = (low + high) / 2
            low, high = (low, middle) if self.hit_tokens(middle) >= wanted else (middle, high)
        return high

    @property
    def largest(self) -> int:
        """Tokens beyond which a larger LRU hits nothing more."""
        return int((self.segments.base + self.segments.length).max(initial=0)) * self.block_tokens


def curve_of(requests: Requests) -> Curve:
    """The curve of a trace."""
    missing = requests.total_blocks - int(requests.weights().sum()) if requests.rate < 1 else 0
    return Curve(segments_of(requests), len(requests), requests.block_tokens, requests.tokens, missing)


def segments_of(requests: Requests) -> Segments:
    """The segments of a trace, in the order of requests and depths."""
    starts, blocks = requests.starts, requests.blocks
    count = len(blocks)
    request = np.repeat(np.arange(len(requests), dtype=np.int32), np.diff(starts))
    order = np.argsort(blocks, kind="stable")
    same = blocks[order[1:]] == blocks[order[:-1]]
    last = np.full(count, -1, np.int32)
    last[order[1:][same]] = request[order[:-1][same]]
    del order, same
    begins = np.ones(count, np.bool_)
    begins[1:] = (last[1:] != last[:-1]) | (request[1:] != request[:-1])
    first = np.flatnonzero(begins)
    ends = np.append(first[1:], count)
    used = last[first] >= 0
    first, ends = first[used], ends[used]
    now, before = request[first].astype(np.int64), last[first].astype(np.int64)
    if requests.rate < 1:
        sums = starts_of(requests.weights())
        starts, first, ends = sums[starts], sums[first], sums[ends]
    length, depth = ends - first, first - starts[now]
    # What was used since is what the requests in between had, less what later ones of them took over.
    taken = greater_before(before, length, len(requests)) - depth
    base = starts[now] - starts[before + 1] - taken
    return Segments(now, before, length, base)


def greater_before(values: Ints, weights: Ints, limit: int) -> Ints:
    """For each position the weights of all earlier ones with a greater value; values are 0 to `limit`.

    Bit by bit from the top, as in a wavelet tree: two values part at one bit, and there the greater has a 1.
    """
    count = len(values)
    out = np.zeros(count, np.int64)
    order = np.arange(count)
    for bit in range(max(0, int(limit).bit_length() - 1), -1, -1):
        value, weight = values[order], weights[order]
        high = ((value >> bit) & 1).astype(np.bool_)
        group = value >> (bit + 1)
        begins = np.ones(count, np.bool_)
        begins[1:] = group[1:] != group[:-1]
        first = np.flatnonzero(begins)
        each = np.diff(first, append=count)
        sums = np.concatenate(([0], np.cumsum(np.where(high, weight, 0))))
        in_group = sums[:-1] - np.repeat(sums[first], each)
        out[order] += np.where(high, 0, in_group)
        lows = np.concatenate(([0], np.cumsum(~high)))
        lows_before = lows[:-1] - np.repeat(lows[first], each)
        start = np.repeat(first, each)
        highs_before = np.arange(count) - start - lows_before
        lows_in_group = np.repeat(lows[np.append(first[1:], count)] - lows[first], each) if count else lows_before
        place = start + np.where(high, lows_in_group + highs_before, lows_before)
        moved = np.empty(count, np.int64)
        moved[place] = order
        order = moved
    return out


def working_set(requests: Requests, segments: Segments, times: Floats, window_s: float) -> Floats:
    """Tokens that were used within `window_s` before each of `times`: what is worth keeping for so long."""
    sums = starts_of(requests.weights())
    lengths = np.diff(sums[requests.starts]).astype(np.float64)
    left = lengths - np.bincount(segments.before, weights=segments.length, minlength=len(requests))
    until = requests.at + window_s
    ends: Floats = np.concatenate((np.minimum(requests.at[segments.request], until[segments.before]), until))
    gone: Floats = np.concatenate((segments.length.astype(np.float64), left))
    total = _sum_until(requests.at, lengths, times) - _sum_until(ends, gone, times)
    return np.asarray(total * requests.block_tokens, np.float64)


def _sum_until(at: Floats, weights: Floats, times: Floats) -> Floats:
    order = np.argsort(at, kind="stable")
    sums = np.concatenate(([0.0], np.cumsum(weights[order])))
    return np.asarray(sums[np.searchsorted(at[order], times, side="right")], np.float64)
