"""Layouts: sizes, fingerprints that tell everything apart, and what is refused."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_core.layout import MAX_CHUNK_NBYTES, Layout, Region, page_align

REGION = Region(name="kv", layers=2, block_tokens=4, block_nbytes=64, dtype="bfloat16", packing="HND")
LAYOUT = Layout(chunk_tokens=16, regions=(REGION,))


def test_a_chunk_is_layers_times_blocks_times_their_bytes() -> None:
    state = Region(name="state", layers=3, block_tokens=16, block_nbytes=1000, dtype="float32", packing="raw")
    layout = Layout(chunk_tokens=16, regions=(REGION, state))
    assert layout.blocks(REGION) == 4
    assert layout.nbytes == 2 * 4 * 64 + 3 * 1 * 1000


def test_the_fingerprint_has_its_golden_value() -> None:
    assert LAYOUT.fingerprint.hex() == "d2c1d112c8675a38c2b653c1c9e171d4"


@pytest.mark.parametrize(
    "other",
    [
        Layout(chunk_tokens=32, regions=(REGION,)),
        Layout(chunk_tokens=16, regions=(REGION, REGION)),
        *(
            Layout(chunk_tokens=16, regions=(replace(REGION, **{field: value}),))  # type: ignore[arg-type]
            for field, value in (
                ("name", "k"),
                ("layers", 3),
                ("block_tokens", 8),
                ("block_nbytes", 65),
                ("dtype", "float16"),
                ("packing", "NHD"),
            )
        ),
    ],
)
def test_every_field_is_part_of_the_fingerprint(other: Layout) -> None:
    assert other.fingerprint != LAYOUT.fingerprint


TEXT = st.text(max_size=6)
REGIONS = st.builds(
    Region,
    name=TEXT,
    layers=st.integers(1, 12),
    block_tokens=st.sampled_from((1, 2, 4, 12)),
    block_nbytes=st.integers(1, 300),
    dtype=TEXT,
    packing=TEXT,
)
LAYOUTS = st.builds(
    Layout, chunk_tokens=st.sampled_from((12, 24)), regions=st.lists(REGIONS, min_size=1, max_size=3).map(tuple)
)


@given(LAYOUTS, LAYOUTS)
@settings(deadline=None)
def test_fingerprints_are_equal_exactly_for_equal_layouts(one: Layout, other: Layout) -> None:
    assert (one.fingerprint == other.fingerprint) == (one == other)
    assert copy.deepcopy(one).fingerprint == one.fingerprint


def test_text_does_not_move_between_fields_unnoticed() -> None:
    def fingerprint(**fields: str) -> bytes:
        return Layout(chunk_tokens=16, regions=(replace(REGION, **fields),)).fingerprint  # type: ignore[arg-type]

    assert fingerprint(dtype="ab", packing="c") != fingerprint(dtype="a", packing="bc")
    assert fingerprint(dtype="a\0", packing="b") != fingerprint(dtype="a", packing="\0b")


def test_a_layout_survives_pickling_with_and_without_its_sizes_computed() -> None:
    fresh = Layout(chunk_tokens=16, regions=(REGION,))
    assert pickle.loads(pickle.dumps(fresh)) == LAYOUT
    assert pickle.loads(pickle.dumps(LAYOUT)).fingerprint == LAYOUT.fingerprint
    assert hash(fresh) == hash(LAYOUT)


@pytest.mark.parametrize("field", ["layers", "block_tokens", "block_nbytes"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_region_without_extent_is_refused_by_name(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"'kv': {field} .*{value}"):
        replace(REGION, **{field: value})  # type: ignore[arg-type]


def test_a_layout_needs_a_region() -> None:
    with pytest.raises(ValueError, match="at least one region"):
        Layout(chunk_tokens=16, regions=())


@pytest.mark.parametrize("chunk_tokens", [0, -4, -16])
def test_a_chunk_without_tokens_is_refused(chunk_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"chunk_tokens .*{chunk_tokens}"):
        Layout(chunk_tokens=chunk_tokens, regions=(REGION,))


def test_a_chunk_that_is_not_whole_blocks_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="'kv'.*18.*4"):
        Layout(chunk_tokens=18, regions=(REGION,))


def test_a_chunk_over_the_limit_is_refused_and_one_at_the_limit_is_not() -> None:
    one_block = replace(REGION, layers=1, block_tokens=16)
    Layout(chunk_tokens=16, regions=(replace(one_block, block_nbytes=MAX_CHUNK_NBYTES),))
    with pytest.raises(ValueError, match=str(MAX_CHUNK_NBYTES)):
        Layout(chunk_tokens=16, regions=(replace(one_block, block_nbytes=MAX_CHUNK_NBYTES + 1),))


@pytest.mark.parametrize(("nbytes", "aligned"), [(0, 0), (1, 4096), (4096, 4096), (4097, 8192)])
def test_page_align_rounds_up(nbytes: int, aligned: int) -> None:
    assert page_align(nbytes) == aligned
