"""Chains: the same digests however a prompt is fed in, frozen and picklable; models that make no sense are refused."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_core.chain import Chain, Group, GroupKind, Model, Shard
from lmcache_core.keys import Family
from lmcache_core.layout import Layout, Region

CHUNK = 4
FAMILY = Family(model="org/model", weights="sha256:0", kv_dtype="float16", chunk_tokens=CHUNK)


def layout(chunk_tokens: int = CHUNK, dtype: str = "float16") -> Layout:
    region = Region(name="kv", layers=1, block_tokens=CHUNK, block_nbytes=8, dtype=dtype, packing="HND")
    return Layout(chunk_tokens=chunk_tokens, regions=(region,))


FIRST = Shard.of(FAMILY, layout(), layers=(0, 2))
SECOND = Shard.of(FAMILY, layout(), layers=(2, 4))
MODEL = Model(FAMILY, (Group(GroupKind.FULL, (FIRST, SECOND)),))
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=30)


@given(TOKENS, st.lists(st.integers(0, 30), max_size=4), st.dictionaries(st.integers(0, 6), st.binary(max_size=5)))
@settings(deadline=None)
def test_a_prompt_fed_in_pieces_has_the_same_chain(tokens: list[int], cuts: list[int], extra: dict[int, bytes]) -> None:
    chunks = len(tokens) // CHUNK
    extra = {index: value for index, value in extra.items() if index < chunks}
    whole = Chain.of(MODEL, tokens, extra)
    bounds = sorted({0, *(min(cut, len(tokens)) for cut in cuts), len(tokens)})
    grown = Chain.of(MODEL, [])
    for start, stop in pairwise(bounds):
        done, reached = len(grown), stop // CHUNK
        grown = grown.extend(tokens[start:stop], {i: v for i, v in extra.items() if done <= i < reached})
        assert grown.tokens == stop
    assert grown == whole
    assert grown.digests == whole.digests
    assert grown.tail == whole.tail
    assert (len(whole), whole.tokens) == (chunks, len(tokens))


@given(TOKENS)
@settings(deadline=None)
def test_lists_arrays_of_any_width_and_strided_arrays_are_one_prompt(tokens: list[int]) -> None:
    wide = np.array(tokens, np.int64)
    strided = np.repeat(wide, 2)[::2]
    assert Chain.of(MODEL, tokens) == Chain.of(MODEL, wide) == Chain.of(MODEL, wide.astype(np.uint32))
    assert Chain.of(MODEL, strided) == Chain.of(MODEL, tokens)


def test_a_chain_is_frozen_and_survives_pickling() -> None:
    chain = Chain.of(MODEL, range(10))
    assert pickle.loads(pickle.dumps(chain)) == chain
    assert pickle.loads(pickle.dumps(chain)).extend([10, 11]) == Chain.of(MODEL, range(12))
    with pytest.raises(FrozenInstanceError):
        chain.tail = b""  # type: ignore[misc]


def test_extending_leaves_the_chain_as_it_was() -> None:
    chain = Chain.of(MODEL, range(10))
    digests, tail = chain.digests, chain.tail
    chain.extend(range(50))
    assert (chain.digests, chain.tail) == (digests, tail)


def test_one_changed_token_changes_its_chunk_and_all_that_follow() -> None:
    before, after = list(range(20)), list(range(20))
    after[9] += 1
    one, other = Chain.of(MODEL, before).digests, Chain.of(MODEL, after).digests
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, True, False, False, False]


def test_what_is_not_a_token_enters_at_its_chunk() -> None:
    plain = Chain.of(MODEL, range(20)).digests
    marked = Chain.of(MODEL, range(20), {3: b"image"}).digests
    assert [a == b for a, b in zip(plain, marked, strict=True)] == [True, True, True, False, False]


def test_tokens_of_the_tail_are_in_no_digest_and_not_shown() -> None:
    short, long = Chain.of(MODEL, range(8)), Chain.of(MODEL, [*range(8), 1234567])
    assert short.digests == long.digests
    assert "tail" not in repr(long)


def test_keys_are_the_shards_identity_and_the_digest() -> None:
    chain = Chain.of(MODEL, range(12))
    keys = chain.keys(SECOND)
    assert [key.shard_id for key in keys] == [SECOND.shard_id] * 3
    assert tuple(key.digest for key in keys) == chain.digests
    assert chain.keys(SECOND, range(1, 2)) == keys[1:2]
    assert chain.keys(SECOND, range(0)) == []
    assert not set(keys) & set(chain.keys(FIRST))


@pytest.mark.parametrize("layers", [(0, 4), (1, 2)])
def test_a_shards_identity_depends_on_its_coordinates_and_layout(layers: tuple[int, int]) -> None:
    other = [
        Shard.of(FAMILY, layout(), layers=layers),
        Shard.of(FAMILY, layout(), layers=(0, 2), group=1),
        Shard.of(FAMILY, layout(), layers=(0, 2), heads=(0, 1)),
        Shard.of(FAMILY, layout(dtype="bfloat16"), layers=(0, 2)),
    ]
    identities = {shard.shard_id for shard in (FIRST, *other)}
    assert len(identities) == 5


def test_a_models_shards_are_those_of_all_groups_in_order() -> None:
    state = Group(GroupKind.STATE, (Shard.of(FAMILY, layout(), layers=(0, 1), group=1),))
    model = Model(FAMILY, (MODEL.groups[0], state))
    assert model.shards == (FIRST, SECOND, state.shards[0])


@pytest.mark.parametrize(
    ("kind", "tokens"), [(GroupKind.FULL, 1), (GroupKind.STATE, 5), (GroupKind.WINDOW, 0), (GroupKind.WINDOW, -1)]
)
def test_a_window_belongs_to_window_groups_only(kind: GroupKind, tokens: int) -> None:
    with pytest.raises(ValueError, match=f"{tokens} does not fit a {kind.value} group"):
        Group(kind, (FIRST,), tokens)


def test_groups_and_models_are_not_empty() -> None:
    with pytest.raises(ValueError, match="at least one shard"):
        Group(GroupKind.FULL, ())
    with pytest.raises(ValueError, match="at least one layer group"):
        Model(FAMILY, ())


def test_a_layout_of_another_chunk_size_does_not_fit_the_family() -> None:
    shard = Shard.of(FAMILY, layout(2 * CHUNK), layers=(0, 2))
    with pytest.raises(ValueError, match="8 tokens in a family of 4"):
        Model(FAMILY, (Group(GroupKind.FULL, (shard,)),))
