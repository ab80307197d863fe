"""The rule of reuse, against its definition spelled out token by token."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lmcache_core.chain import Group, GroupKind, Shard
from lmcache_core.groups import restorable, window_chunks
from lmcache_core.layout import Layout, Region

CHUNK = 4
LAYOUT = Layout(
    chunk_tokens=CHUNK,
    regions=(Region(name="kv", layers=1, block_tokens=CHUNK, block_nbytes=8, dtype="float16", packing="HND"),),
)
SHARDS = (Shard(bytes(16), LAYOUT),)
FULL = Group(GroupKind.FULL, SHARDS)
STATE = Group(GroupKind.STATE, SHARDS)


def window(tokens: int) -> Group:
    return Group(GroupKind.WINDOW, SHARDS, tokens)


def needed_by_definition(group: Group, length: int, chunk_tokens: int) -> set[int]:
    """The chunks that the token after `length` chunks cannot do without."""
    next_token = length * chunk_tokens
    if group.kind is GroupKind.FULL:
        return set(range(length))
    if group.kind is GroupKind.STATE:
        return {length - 1}
    attended = range(max(0, next_token - group.window_tokens + 1), next_token)  # besides itself
    return {token // chunk_tokens for token in attended}


def by_definition(groups: list[Group], present: list[list[bool]], chunk_tokens: int) -> tuple[int, ...]:
    return tuple(
        length
        for length in range(1, len(present[0]) + 1)
        if all(
            there[chunk]
            for group, there in zip(groups, present, strict=True)
            for chunk in needed_by_definition(group, length, chunk_tokens)
        )
    )


GROUPS = st.lists(
    st.one_of(st.just(FULL), st.just(STATE), st.integers(1, 40).map(window)),
    min_size=1,
    max_size=4,
)


@given(data=st.data(), groups=GROUPS, chunks=st.integers(0, 12), chunk_tokens=st.integers(1, 9))
@settings(max_examples=600, deadline=None)
def test_restorable_is_its_definition(data: st.DataObject, groups: list[Group], chunks: int, chunk_tokens: int) -> None:
    mostly = st.sampled_from((True, True, True, False))
    present = [data.draw(st.lists(mostly, min_size=chunks, max_size=chunks)) for _ in groups]
    assert restorable(groups, present, chunk_tokens) == by_definition(groups, present, chunk_tokens)


@given(tokens=st.integers(1, 200), chunk_tokens=st.integers(1, 50))
@example(tokens=1, chunk_tokens=4)
@settings(deadline=None)
def test_window_chunks_is_how_many_chunks_the_next_token_attends_to(tokens: int, chunk_tokens: int) -> None:
    far = 1000
    assert window_chunks(window(tokens), chunk_tokens) == len(needed_by_definition(window(tokens), far, chunk_tokens))


@pytest.mark.parametrize(
    ("tokens", "chunks"),
    [
        (1, 0),
        (2, 1),
        (CHUNK, 1),
        (CHUNK + 1, 1),
        (CHUNK + 2, 2),
        (2 * CHUNK, 2),
        (2 * CHUNK + 1, 2),
        (2 * CHUNK + 2, 3),
    ],
)
def test_a_window_needs_the_chunks_before_the_next_token(tokens: int, chunks: int) -> None:
    assert window_chunks(window(tokens), CHUNK) == chunks


def test_a_prompt_shorter_than_the_window_needs_all_of_it() -> None:
    assert restorable([window(100)], [[True, True, True]], CHUNK) == (1, 2, 3)
    assert restorable([window(100)], [[False, True, True]], CHUNK) == ()


def test_a_gap_ends_a_full_prefix_but_not_a_window_or_a_state() -> None:
    gap = [True, True, False, True, True]
    assert restorable([FULL], [gap], CHUNK) == (1, 2)
    assert restorable([window(CHUNK)], [gap], CHUNK) == (1, 2, 4, 5)
    assert restorable([STATE], [gap], CHUNK) == (1, 2, 4, 5)
    assert restorable([window(2 * CHUNK)], [gap], CHUNK) == (1, 2, 5)


def test_each_group_limits_the_others() -> None:
    every = [True] * 5
    assert restorable([FULL, STATE], [every, [False, True, False, False, True]], CHUNK) == (2, 5)
    assert restorable([FULL, STATE], [[True] * 3 + [False] * 2, [False, True, False, False, True]], CHUNK) == (2,)
    assert restorable([window(CHUNK), STATE], [[False] * 4 + [True], every], CHUNK) == (5,)


def test_nothing_stored_and_no_chunks_at_all_restore_nothing() -> None:
    assert restorable([FULL], [[]], CHUNK) == ()
    assert restorable([FULL, window(1)], [[False], [False]], CHUNK) == ()


def test_a_window_of_one_token_needs_no_chunk() -> None:
    assert restorable([window(1)], [[False, False]], CHUNK) == (1, 2)
