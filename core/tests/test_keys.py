"""Same tokens, same key, in every process and Python; anything else that matters, another key."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
from array import array
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_core import keys
from lmcache_core.chain import Chain, Group, GroupKind, Model, Shard
from lmcache_core.errors import NamespaceError
from lmcache_core.keys import ChunkKey, Family, chain_digests, pack_extra, pack_tokens, salt_id, shard_id
from lmcache_core.layout import Layout, Region

PLAIN = Family(model="org/model", weights="sha256:0011", kv_dtype="bfloat16", chunk_tokens=16)
FULL = Family(
    model="org/modèle",
    weights="rev-2",
    kv_dtype="fp8_e4m3",
    chunk_tokens=4,
    adapter="lora@ab12",
    tags=(("quant", "awq"), ("rope", "yarn:4")),
    salt_id=salt_id("tenant-1", "s3cret"),
)
GOLDEN_KEY = "941a75090e04beec542c33596e4a7370" + "711099a28ad9b8299b059ee9b5cc3ac33e05f07f78d973cc49be00c1a646d4c6"
CHILD = """
import sys
from lmcache_core.keys import ChunkKey, Family, chain_digests, shard_id
family = Family(model="org/model", weights="sha256:0011", kv_dtype="bfloat16", chunk_tokens=16)
shard = shard_id(family.family_id, bytes(16), layers=(0, 2), heads=(0, 1))
print(ChunkKey(shard + chain_digests(family.family_id, list(range(1, 17)), 16)[0]).text)
print(sorted(name for name in ("numpy", "torch", "yaml", "click", "pluggy") if name in sys.modules))
"""


def golden_key() -> str:
    shard = shard_id(PLAIN.family_id, bytes(16), layers=(0, 2), heads=(0, 1))
    return ChunkKey(shard + chain_digests(PLAIN.family_id, list(range(1, 17)), 16)[0]).text


def pythons() -> list[str]:
    """Every supported Python on this machine that really starts (a version manager's stub may not)."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    found = {sys.version_info[:2]: sys.executable}
    for minor in (11, 12, 13, 14):
        for candidate in (shutil.which(f"python3.{minor}"), *root.glob(f"3.{minor}.*/bin/python")):
            if candidate is None or (3, minor) in found:
                continue
            probe = [str(candidate), "-c", "import hashlib; hashlib.sha256()"]
            if subprocess.run(probe, capture_output=True, timeout=60, check=False).returncode == 0:
                found[3, minor] = str(candidate)
    return list(found.values())


def test_golden_vectors_hold_the_encoding_of_every_part() -> None:
    assert PLAIN.family_id.hex() == "764e6982aaf53338310a413de84cbefc"
    assert FULL.family_id.hex() == "bb511fa87b9620022c0d88d88a566ae8"
    assert salt_id("tenant-1").hex() == "f0cdb578511b08ca0dafcec563f7647a"
    assert salt_id("tenant-1", "s3cret").hex() == "1c4b9b5c3661a0f8ace0b5c47cb684e0"
    shard = shard_id(FULL.family_id, bytes(range(16)), group=3, layers=(8, 16), heads=(4, 8))
    assert shard.hex() == "020b490a5e32ab7d42a908090f638079"
    assert pack_extra([(2, b"ab")]).hex() == "02000000020000006162"
    tokens = [0, 1, 2**32 - 1, 151_643, 7, 8, 9, 10, 11]
    digests = chain_digests(FULL.family_id, tokens, 4, extra={1: pack_extra([(2, b"\x1a\x2b" * 16)])})
    assert [digest.hex() for digest in digests] == [
        "e5982752089ffb227ee7127ed34f72b44683aab52546478c895d973b2a663fd5",
        "7e151ef11c6ddcb10caf6c2a1541f38fcbe9effc2095233736bff847cab910bf",
    ]
    assert golden_key() == GOLDEN_KEY


def test_the_chain_is_what_the_module_says_it_is() -> None:
    tokens, extra = list(range(100, 112)), {1: b"picture"}
    parent, expected = FULL.family_id + bytes(16), []
    for index in range(3):
        more = extra.get(index, b"")
        words = b"".join(token.to_bytes(4, "little") for token in tokens[4 * index : 4 * index + 4])
        parent = hashlib.sha256(parent + len(more).to_bytes(4, "little") + more + words).digest()
        expected.append(parent)
    assert chain_digests(FULL.family_id, tokens, 4, extra=extra) == expected


@pytest.mark.parametrize("hash_seed", [None, "0", "123"])
@pytest.mark.parametrize("python", pythons())
def test_every_process_hash_seed_and_python_computes_the_golden_key(python: str, hash_seed: str | None) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environ["PYTHONPATH"] = str(Path(keys.__file__).parents[1])
    environ["PYTHONDONTWRITEBYTECODE"] = "1"
    if hash_seed is not None:
        environ["PYTHONHASHSEED"] = hash_seed
    child = subprocess.run([python, "-c", CHILD], env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert child.stderr == ""
    assert child.stdout.split("\n")[:2] == [GOLDEN_KEY, "[]"]


@pytest.mark.keeps_running  # multiprocessing's resource tracker, which lives as long as this process
def test_spawned_workers_agree() -> None:
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        results = [pool.apply_async(golden_key) for _ in range(4)]
        assert {result.get(timeout=120) for result in results} == {GOLDEN_KEY}
        pool.close()
        pool.join()


def test_every_field_of_the_identity_changes_the_key() -> None:
    base = replace(PLAIN, adapter="lora@ab12", tags=(("rope", "yarn:4"),), salt_id=salt_id("t1"))
    region = Region(name="kv", layers=2, block_tokens=16, block_nbytes=512, dtype="bfloat16", packing="HND")
    layout = Layout(chunk_tokens=16, regions=(region,))
    families = [
        base,
        replace(base, model="org/model2"),
        replace(base, weights="sha256:0012"),
        replace(base, kv_dtype="float16"),
        replace(base, adapter="lora2@ab12"),
        replace(base, adapter="lora@ab13"),
        replace(base, adapter=""),
        replace(base, tags=(("rope", "yarn:8"),)),
        replace(base, tags=(("rope2", "yarn:4"),)),
        replace(base, tags=()),
        replace(base, salt_id=salt_id("t2")),
        replace(base, salt_id=salt_id("t1", "secret")),
        replace(base, salt_id=b""),
    ]
    layouts = [
        replace(layout, regions=(replace(region, **change),))
        for change in (
            {"name": "k"},
            {"layers": 4},
            {"block_tokens": 8},
            {"block_nbytes": 1024},
            {"dtype": "float16"},
            {"packing": "NHD"},
        )
    ]
    where: dict[str, object] = {"group": 0, "layers": (0, 2), "heads": (0, 2)}
    rectangles = [
        where | change for change in ({"group": 1}, {"layers": (2, 4)}, {"layers": (0, 4)}, {"heads": (2, 4)})
    ]
    shards = [Shard.of(family, layout, **where) for family in families]  # type: ignore[arg-type]
    shards += [Shard.of(base, other, **where) for other in layouts]  # type: ignore[arg-type]
    shards += [Shard.of(base, layout, **other) for other in rectangles]  # type: ignore[arg-type]
    assert len({shard.shard_id for shard in shards}) == len(shards)

    tokens = list(range(32))
    digests = [chain_digests(family.family_id, tokens, 16) for family in families]
    digests += [
        chain_digests(replace(base, chunk_tokens=8).family_id, tokens, 8),
        chain_digests(base.family_id, [9, *tokens[1:]], 16),  # another parent of chunk 1
        chain_digests(base.family_id, tokens, 16, extra={0: pack_extra([(0, b"A" * 32)])}),
        chain_digests(base.family_id, tokens, 16, extra={0: pack_extra([(0, b"B" * 32)])}),
        chain_digests(base.family_id, tokens, 16, extra={0: pack_extra([(1, b"A" * 32)])}),
        chain_digests(base.family_id, tokens, 16, extra={0: b"A" * 32}),
    ]
    every = [digest for chain in digests for digest in chain]
    assert len(set(every)) == len(every)


TEMPTING = [
    "org/model/name", "org/model-SEP-name", "org%2Fmodel/name", "ORG/Model/name", "a@b", "a:b", "a", "b", "..", ".",
    "../../etc/x", "emoji 🦙", "é", "e\u0301", " a", "a ",
]  # fmt: skip


def test_names_that_tempt_a_codec_stay_distinct_and_leave_only_hex_in_the_text() -> None:
    texts = set()
    for name in TEMPTING:
        for family in (replace(PLAIN, model=name), replace(PLAIN, weights=name), replace(PLAIN, adapter=name)):
            shard = shard_id(family.family_id, bytes(16), layers=(0, 1))
            key = ChunkKey(shard + chain_digests(family.family_id, range(16), 16)[0])
            assert not key.text.strip("0123456789abcdef")
            assert ChunkKey.from_text(key.text) == key
            texts.add(key.text)
    assert len(texts) == 3 * len(TEMPTING)


@pytest.mark.parametrize("field", ["model", "weights", "kv_dtype", "adapter"])
@pytest.mark.parametrize("name", ["a\nb", "a\0b", "\x7f", "\udcff", "x" * 1025, 7, None])
def test_an_illegal_name_is_refused_and_its_field_named(field: str, name: object) -> None:
    with pytest.raises(NamespaceError, match=f"^{field}: ") as caught:
        replace(PLAIN, **{field: name})
    assert caught.value.field == field


def test_an_empty_name_is_refused_where_it_would_be_an_identity_of_its_own() -> None:
    for field in ("model", "weights", "kv_dtype"):
        with pytest.raises(NamespaceError, match=field):
            replace(PLAIN, **{field: ""})


def test_tags_out_of_order_or_twice_are_refused() -> None:
    for tags in ((("b", "1"), ("a", "1")), (("a", "1"), ("a", "2")), (("", "1"),)):
        with pytest.raises(NamespaceError, match="tags"):
            replace(PLAIN, tags=tags)


def test_long_but_legal_names_make_keys_of_the_usual_length() -> None:
    for length in (64, 128):
        family = replace(PLAIN, model="/models/" + "m" * 126, salt_id=salt_id("f" * length))
        key = ChunkKey(shard_id(family.family_id, bytes(16), layers=(0, 1)) + bytes(32))
        assert len(key.text) == 96


@pytest.mark.parametrize("salt", ["x" * 129, "a/b", "a@b", "a b", "a\n", "ä", "\udcff", b"\xff\xfe", 7])
def test_a_bad_salt_is_an_error_of_that_request_that_names_the_salt(salt: object) -> None:
    with pytest.raises(NamespaceError, match=r"^salt: ") as caught:
        salt_id(salt)  # type: ignore[arg-type]
    assert caught.value.field == "salt"


def test_an_empty_salt_and_none_are_the_same_no_tenant() -> None:
    assert salt_id("") == salt_id(None) == b""
    assert replace(PLAIN, salt_id=salt_id("")) == PLAIN
    assert salt_id("0") != b""


def test_a_salt_id_of_another_length_is_refused() -> None:
    with pytest.raises(NamespaceError, match="salt_id"):
        replace(PLAIN, salt_id=b"clear text")


def test_images_that_end_alike_share_no_key() -> None:
    chooser = random.Random(6)
    images = [b"\0" * 30 + b"\x1a\x2b", b"\xff" * 30 + b"\x1a\x2b", *(chooser.randbytes(32) for _ in range(10_000))]
    digests = {chain_digests(PLAIN.family_id, range(16), 16, extra={0: pack_extra([(3, i)])})[0] for i in images}
    assert len(digests) == len(images)


def test_arrays_of_every_integer_type_and_lists_agree() -> None:
    tokens = [0, 1, 2, 127, 40_000, 151_643, 2**31 - 1, 5]
    expected = chain_digests(PLAIN.family_id, tokens, 4)
    same = [np.array(tokens, dtype=kind) for kind in ("int64", "int32", "uint32", "uint64", ">i4", ">u4", ">i8")]
    same += [np.array(tokens * 2, dtype="int64")[:8], np.array([tokens, tokens]).T[:, 1], tuple(tokens)]
    same += [array("I", tokens), array("q", tokens), range(0), pack_tokens(tokens)]
    for form in same:
        if len(form):
            assert chain_digests(PLAIN.family_id, form, 4) == expected, form
    large = [2**32 - 1, 2**31, 0, 1]
    for kind in ("int64", "uint32", "uint64"):
        assert pack_tokens(np.array(large, dtype=kind)) == pack_tokens(large)
    assert pack_tokens(np.array([], dtype="int64")) == b""


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1.5], ["1"], [None]])
def test_token_ids_that_are_none_are_refused(tokens: list[object]) -> None:
    with pytest.raises(ValueError, match="token ids must be"):
        pack_tokens(tokens)


def test_arrays_that_hold_no_token_ids_are_refused() -> None:
    for wrong in (
        np.array([-1, 3]),
        np.array([2**32], dtype="int64"),
        np.array([2**63], dtype="uint64"),
        np.array([-1], dtype="int32"),
        np.array([1.0]),
        np.array([[1, 2]]),
        np.array([True]),
        np.array(3),
    ):
        with pytest.raises(ValueError, match=r"token ids must be|flat integer array"):
            pack_tokens(wrong)


@pytest.mark.parametrize("raw", [b"", bytes(47), bytes(49)])
def test_a_key_of_another_length_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match="48 bytes"):
        ChunkKey(raw)


@pytest.mark.parametrize("text", ["", "0" * 95, "A" * 96, "0" * 94 + "/.", " " + "0" * 95, "0" * 97])
def test_text_that_is_no_key_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a chunk key"):
        ChunkKey.from_text(text)


def test_a_key_knows_its_parts() -> None:
    key = ChunkKey(bytes(range(48)))
    assert (key.shard_id, key.digest) == (bytes(range(16)), bytes(range(16, 48)))


def test_extra_and_chunk_sizes_have_bounds() -> None:
    with pytest.raises(ValueError, match="extra of chunk 0"):
        chain_digests(PLAIN.family_id, range(16), 16, extra={0: bytes(keys.MAX_EXTRA_NBYTES + 1)})
    with pytest.raises(ValueError, match="chunk_tokens"):
        chain_digests(PLAIN.family_id, range(16), 0)
    for chunk_tokens in (0, -1, (1 << 20) + 1):
        with pytest.raises(NamespaceError, match="chunk_tokens"):
            replace(PLAIN, chunk_tokens=chunk_tokens)


@pytest.mark.parametrize(("layers", "heads"), [((0, 0), (0, 0)), ((2, 1), (0, 0)), ((-1, 1), (0, 0)), ((0, 1), (2, 1))])
def test_a_rectangle_that_is_none_is_refused(layers: tuple[int, int], heads: tuple[int, int]) -> None:
    with pytest.raises(NamespaceError, match=r"layers|heads"):
        shard_id(PLAIN.family_id, bytes(16), layers=layers, heads=heads)


def model_of(chunk_tokens: int) -> Model:
    region = Region(name="kv", layers=1, block_tokens=1, block_nbytes=8, dtype="u8", packing="")
    family = replace(PLAIN, chunk_tokens=chunk_tokens)
    shard = Shard.of(family, Layout(chunk_tokens=chunk_tokens, regions=(region,)), layers=(0, 1))
    return Model(family, (Group(GroupKind.FULL, (shard,)),))


@settings(max_examples=100, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=4),
    chunk_tokens=st.integers(1, 9),
    extra=st.dictionaries(st.integers(0, 12), st.binary(min_size=1, max_size=8), max_size=3),
)
def test_extending_in_steps_equals_hashing_at_once(
    tokens: list[int], cuts: list[int], chunk_tokens: int, extra: dict[int, bytes]
) -> None:
    model = model_of(chunk_tokens)
    whole = Chain.of(model, tokens, extra)
    edges = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    grown = Chain.of(model, [])
    for start, stop in pairwise(edges):
        grown = grown.extend(tokens[start:stop], extra)
    assert grown == whole
    assert whole.tokens == len(tokens)
    assert len(whole) == len(tokens) // chunk_tokens


@settings(max_examples=100, deadline=None)
@given(tokens=st.lists(st.integers(0, 2**32 - 1), min_size=12, max_size=12), place=st.integers(0, 11))
def test_a_changed_token_changes_every_digest_from_its_chunk_on_and_none_before(tokens: list[int], place: int) -> None:
    changed = [*tokens[:place], tokens[place] ^ 1, *tokens[place + 1 :]]
    before, after = (chain_digests(PLAIN.family_id, version, 3) for version in (tokens, changed))
    assert [a == b for a, b in zip(before, after, strict=True)] == [index < place // 3 for index in range(4)]


NAMES = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=6)
FAMILIES = st.builds(
    Family,
    model=NAMES,
    weights=NAMES,
    kv_dtype=NAMES,
    chunk_tokens=st.integers(1, 200),
    adapter=st.one_of(st.just(""), NAMES),
    tags=st.dictionaries(NAMES, NAMES, max_size=3).map(lambda tags: tuple(sorted(tags.items()))),
    salt_id=st.sampled_from([b"", b"0" * 16, b"1" * 16]),
)


@settings(max_examples=200, deadline=None)
@given(one=FAMILIES, other=FAMILIES)
def test_different_families_have_different_ids(one: Family, other: Family) -> None:
    assert (one.family_id == other.family_id) == (one == other)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=3, max_size=12), data=st.data())
def test_moving_the_border_between_two_fields_changes_the_id(text: str, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(1, len(text) - 1), min_size=2, max_size=2, unique=True))
    ids = {replace(PLAIN, model=text[:cut], weights=text[cut:]).family_id for cut in cuts}
    ids |= {replace(PLAIN, tags=((text[:cut], text[cut:]),)).family_id for cut in cuts}
    assert len(ids) == 4


ITEMS = st.lists(st.tuples(st.integers(0, 300), st.binary(max_size=9)), max_size=4)


@settings(max_examples=200, deadline=None)
@given(one=ITEMS, other=ITEMS)
def test_packing_extra_is_injective(one: list[tuple[int, bytes]], other: list[tuple[int, bytes]]) -> None:
    assert (pack_extra(one) == pack_extra(other)) == (one == other)
    raw, items = pack_extra(one), []
    while raw:
        length = int.from_bytes(raw[4:8], "little")
        items.append((int.from_bytes(raw[:4], "little"), raw[8 : 8 + length]))
        raw = raw[8 + length :]
    assert items == one


def test_extra_is_not_confused_with_tokens() -> None:
    words = pack_tokens([5, 6])
    as_extra = chain_digests(PLAIN.family_id, [7, 8], 2, extra={0: words})
    as_tokens = chain_digests(PLAIN.family_id, [5, 6, 7, 8], 4)
    assert as_extra[0] != as_tokens[0]
