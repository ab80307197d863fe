"""Stack distances, samples and replays, against a stack and tiers that are kept by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_advise.distances import curve_of, greater_before, working_set
from lmcache_advise.replay import CORES, hit_blocks, policy_named, shares_of
from lmcache_advise.requests import Builder, Requests, asked_often, chained, thinned
from lmcache_advise.workload import Workload, requests_of

Prompt = tuple[int, ...]
INFINITE = float("inf")


def requests(prompts: Sequence[Prompt], max_blocks: int = 1 << 30, at: Sequence[float] | None = None) -> Requests:
    builder = Builder(1, max_blocks)
    for index, prompt in enumerate(prompts):
        when = float(index) if at is None else at[index]
        builder.add([when], [len(prompt)], prompt, [len(prompt)], [0])
    return builder.build()


def by_hand(prompts: Sequence[Prompt], capacity: int) -> int:
    """Blocks that an LRU hits: a list of prefixes, the youngest first; of a prompt the head is the youngest."""
    stack: list[Prompt] = []
    hits = 0
    for prompt in prompts:
        mine = [prompt[: end + 1] for end in range(len(prompt))]
        there = set(stack[:capacity])
        hits += next((index for index, prefix in enumerate(mine) if prefix not in there), len(mine))
        stack = [*mine, *(each for each in stack if each not in set(mine))]
    return hits


BRANCHES = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 6), st.lists(st.integers(0, 3), max_size=4)), max_size=30
)


def grown(branches: list[tuple[int, int, list[int]]]) -> list[Prompt]:
    """Prompts that go on from earlier ones, as conversations do."""
    prompts: list[Prompt] = []
    for earlier, kept, new in branches:
        begin = prompts[earlier % len(prompts)][:kept] if prompts else ()
        prompts.append((*begin, *new))
    return prompts


@settings(deadline=None)
@given(BRANCHES)
def test_every_size_of_lru_hits_what_a_stack_kept_by_hand_hits(branches: list[tuple[int, int, list[int]]]) -> None:
    prompts = grown(branches)
    curve = curve_of(requests(prompts))
    for capacity in (1, 2, 3, 5, 8, 13, 1000):
        assert curve.hit_tokens(capacity) == by_hand(prompts, capacity)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), max_size=60))
def test_the_sum_of_what_is_greater_and_earlier_is_that_of_two_loops(pairs: list[tuple[int, int]]) -> None:
    values = np.array([value for value, _ in pairs], np.int64)
    weights = np.array([weight for _, weight in pairs], np.int64)
    expected = [
        sum(weight for other, weight in pairs[:index] if other > value) for index, (value, _) in enumerate(pairs)
    ]
    assert greater_before(values, weights, 9).tolist() == expected


def test_requests_between_two_sizes_are_those_with_a_block_there() -> None:
    curve = curve_of(requests([(1, 2), (5, 6, 7), (1, 2), (8,), (8,)]))
    assert curve.hit_tokens(5) == 3
    assert curve.requests_between(0, 1) == 1
    assert curve.requests_between(1, 5) == 1
    assert curve.requests_between(0, 5) == 2
    assert curve.requests_between(5, 100) == 0
    assert curve.largest == 5
    assert curve.size_for(1.0) == pytest.approx(5, abs=1)
    assert curve.size_for(0.3) == pytest.approx(1, abs=1)


def test_an_identity_stands_for_what_is_before_it_and_for_the_seed() -> None:
    ids = np.array([0, 0, 7, 0, 7, 7, 0, 0, 7], np.uint64)
    seeds = np.array([0, 0, 1], np.uint64)
    blocks = chained(ids, np.array([3, 3, 3]), seeds)
    assert len(set(blocks.tolist())) == 8
    assert blocks[0] == blocks[3]


def test_requests_that_come_out_of_order_are_sorted_with_their_blocks() -> None:
    prompts = [(1, 2, 3), (4,), (), (1, 2)]
    straight, mixed = requests(prompts), requests([prompts[i] for i in (3, 0, 2, 1)], at=[3.0, 0.0, 2.0, 1.0])
    for name in ("at", "starts", "blocks", "input_tokens"):
        assert getattr(straight, name).tolist() == getattr(mixed, name).tolist()
    empty = Builder(16).build()
    assert (len(empty), empty.seconds, curve_of(empty).best) == (0, 0.0, 0.0)


def chats(count: int = 20_000, seed: int = 0) -> Requests:
    work = Workload(
        users=300, prompt_tokens=4096, turns=8, turn_tokens=512, shared_tokens=1024, requests_per_s=count / 3600,
        seed=seed,
    )  # fmt: skip
    return requests_of(work, 256)


@pytest.mark.parametrize("seed", range(4))
def test_a_sample_is_within_two_points_of_every_block(seed: int) -> None:
    every = chats(seed=seed)
    assert every.rate == 1.0
    exact = curve_of(every)
    assert exact.best > 0.7
    for part in (2, 4, 8):
        sample = thinned(every, len(every.blocks) // part)
        assert len(sample.blocks) <= len(every.blocks) // part
        assert sample.rate < 1
        curve = curve_of(sample)
        for capacity in (100_000, 300_000, 600_000, 1_000_000, 1e9):
            assert abs(curve.share(capacity) - exact.share(capacity)) < 0.02, (part, capacity)
        assert curve.size_for(0.95) == pytest.approx(exact.size_for(0.95), rel=0.1)


def test_a_builder_that_runs_full_keeps_a_sample_within_its_bound() -> None:
    rng = np.random.default_rng(3)
    builder = Builder(1, 20_000)
    for index in range(2000):
        prompt = (0, 1, *rng.integers(100, 1_000_000, 48).tolist())
        builder.add([float(index)], [len(prompt)], prompt, [len(prompt)], [0])
    found = builder.build()
    assert len(found.blocks) <= 20_000
    assert found.rate < 0.5
    assert len(found.often) == 2
    assert np.isin(found.blocks, found.often).sum() == 4000, "what every prompt begins with is there each time"
    assert found.total_blocks == 2000 * 50
    assert int(found.weights().sum()) == pytest.approx(found.total_blocks, rel=0.05)
    assert curve_of(found).best == pytest.approx(1999 * 2 / (2000 * 50), abs=0.02)


def test_what_is_asked_for_most_stays_in_every_sample_up_to_a_share_of_it() -> None:
    blocks = np.repeat(np.arange(10, dtype=np.uint64), [100, 50, 40, 32, 31, 1, 1, 1, 1, 1])
    assert asked_often(blocks, 1000, None).tolist() == [0, 1, 2, 3]
    assert asked_often(blocks, 160, None).tolist() == [0, 1]
    assert asked_often(blocks, 1000, np.array([1, 4], np.uint64)).tolist() == [1, 4]


def test_the_working_set_is_what_was_asked_for_within_the_window() -> None:
    found = requests([(1, 2), (1, 2, 3), (9,)], at=[0.0, 10.0, 25.0])
    times = np.array([-1.0, 0.0, 5.0, 10.0, 12.0, 19.0, 21.0, 25.0, 100.0])
    segments = curve_of(found).segments
    assert working_set(found, segments, times, 10.0).tolist() == [0, 2, 2, 3, 3, 3, 0, 1, 0]
    assert working_set(found, segments, times, 5.0).tolist() == [0, 2, 0, 3, 3, 0, 0, 1, 0]
    assert working_set(found, segments, times, 1e6).tolist() == [0, 2, 2, 3, 3, 3, 3, 4, 4]


def test_a_replayed_lru_hits_about_what_the_stack_says() -> None:
    """In a tier a prompt's new chunks are younger than its head, which was used before they were stored."""
    every = chats(4000)
    curve = curve_of(every)
    for capacity in (200_000, 500_000, 1_500_000):
        hits = hit_blocks(every, policy_named("lru")(), capacity // 256) * 256 / every.tokens
        assert hits == pytest.approx(curve.share(capacity), abs=0.015), capacity


@settings(deadline=None, max_examples=40)
@given(BRANCHES)
def test_a_replay_that_never_runs_full_hits_all_that_was_there(branches: list[tuple[int, int, list[int]]]) -> None:
    prompts = grown(branches)
    for name in CORES:
        assert hit_blocks(requests(prompts), policy_named(name)(), 1000) == by_hand(prompts, 1000)


def test_a_replay_in_miniature_says_what_the_whole_replay_says() -> None:
    every = chats(3000)
    curve = curve_of(every)
    whole = shares_of(every, curve, 500_000.0, max_blocks=1 << 30)
    small = shares_of(every, curve, 500_000.0, max_blocks=len(every.blocks) // 4)
    assert whole["lru"] == pytest.approx(curve.share(500_000), abs=0.001)
    assert set(whole) == set(CORES)
    for name in CORES:
        assert small[name] == pytest.approx(whole[name], abs=0.03), name
    assert set(shares_of(every, curve, 10.0).values()) == {0.0}


def test_no_policy_is_said_to_hit_more_than_there_is() -> None:
    every = chats(2000)
    curve = curve_of(every)
    assert max(shares_of(every, curve, 1e12).values()) <= curve.best
    assert curve.share(INFINITE) == curve.best == curve.share(curve.largest)
    assert replace(curve, tokens=0).share(100) == 0.0
