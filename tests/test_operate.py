"""The commands for operators with real packages behind them: a store of fsspec's, compressed, and a tokenizer."""

from __future__ import annotations

import json
import random
import uuid
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from click.testing import CliRunner, Result

from lmcache_core import Chain, Family, Group, GroupKind, Layout, Model, Region, Shard, open_cache
from lmcache_core.cli import main

CHUNKS, CHUNK_TOKENS, BLOCK_NBYTES = 6, 64, 32_768
REGION = Region(
    name="kv", layers=1, block_tokens=CHUNK_TOKENS, block_nbytes=BLOCK_NBYTES, dtype="bfloat16", packing="test"
)
LAYOUT = Layout(chunk_tokens=CHUNK_TOKENS, regions=(REGION,))
FAMILY = Family(model="org/tiny", weights="w1", kv_dtype="bfloat16", chunk_tokens=CHUNK_TOKENS)
SHARD = Shard.of(FAMILY, LAYOUT, layers=(0, 1))
MODEL = Model(FAMILY, (Group(GroupKind.FULL, (SHARD,)),))
TOKENS = list(range(CHUNKS * CHUNK_TOKENS))
CHAIN = Chain.of(MODEL, TOKENS)
PROMPT = "<|im_start|>system\nYou are a careful assistant.\n" + "- a tool, with care\n" * 40 + "<|im_end|>\n"


def lmc(*arguments: object) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """A configuration, and the URL of its store, in which a prompt is stored, compressed."""
    url = f"file://{tmp_path}/cold" if request.param == "file" else f"memory://{uuid.uuid4().hex}"
    config = tmp_path / "lmcache.yaml"
    tier = {"name": "cold", "backend": "fsspec", "codec": "zstd", "options": {"url": url}}
    host = {"name": "host", "backend": "memory", "capacity": "16MiB"}
    config.write_text(json.dumps({"chunk_tokens": CHUNK_TOKENS, "tiers": [host, tier]}))
    config.chmod(0o600)
    pages = [[np.zeros((CHUNKS, BLOCK_NBYTES), np.uint8)]]
    pages[0][0][:, ::7] = np.arange(CHUNKS, dtype=np.uint8)[:, None] + 1
    with open_cache(config) as cache:
        result = cache.store(CHAIN, SHARD, range(CHUNKS), pages, list(range(CHUNKS))).wait(30)
        assert result is not None
        assert result.ok_chunks == CHUNKS
        assert cache.drain(30)
    return config, url


def records(url: str) -> dict[str, bytes]:
    filesystem, path = fsspec.core.url_to_fs(url)
    return {str(name): filesystem.cat_file(name) for name in filesystem.find(path)}


def write(url: str, name: str, data: bytes) -> None:
    filesystem, _ = fsspec.core.url_to_fs(url)
    filesystem.pipe_file(name, data)


def test_a_seeded_bit_flip_in_a_compressed_record_is_found_and_repaired(store: tuple[Path, str]) -> None:
    config, url = store
    before = records(url)
    assert lmc("verify", "--config", config).exit_code == 0
    key = CHAIN.keys(SHARD)[2].text
    (name,) = [name for name in before if name.endswith(key[32:])]
    data = bytearray(before[name])
    payload = int.from_bytes(data[80:88], "little")
    data[4096 + random.Random(7).randrange(payload)] ^= 0x10
    write(url, name, bytes(data))
    result = lmc("verify", "--config", config, "--json")
    assert result.exit_code == 1
    (found,) = json.loads(result.stdout)["stores"]
    assert [(f["key"], f["kind"]) for f in found["findings"]] == [(key, "damaged")]
    assert found["sound"] == len(before) - 1
    assert lmc("repair", "--config", config).exit_code == 0
    assert set(before) - set(records(url)) == {name}
    assert lmc("verify", "--config", config).exit_code == 0


def test_the_store_is_counted_explained_and_examined(store: tuple[Path, str], tmp_path: Path) -> None:
    config, url = store
    (counted,) = json.loads(lmc("du", "--config", config, "--json").stdout)["stores"]
    assert counted["records"] == CHUNKS
    assert counted["nbytes"] == sum(map(len, records(url).values()))
    other = [*TOKENS]
    other[130] += 1
    (tmp_path / "a").write_text(json.dumps(TOKENS))
    (tmp_path / "b").write_text(json.dumps(other))
    found = json.loads(lmc("explain", tmp_path / "a", tmp_path / "b", "--config", config, "--json").stdout)
    if url.startswith("memory:"):  # it outlives nobody, so nothing in it says whose it is
        assert found["stored"]["problems"] == ["cold: 6 records without a manifest that says whose they are"]
    else:
        assert [(n["store"], n["chunks"]) for n in found["stored"]["namespaces"]] == [("cold", [6, 2])]
    before = records(url)
    result = lmc("doctor", "--config", config)
    assert result.exit_code == 0, result.output
    assert "cold: answers in" in result.stdout
    assert records(url) == before, "the doctor leaves a store as it was"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE with one special token for each marker, made here."""
    tokenizers: Any = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([PROMPT], trainer)
    folder = tmp_path_factory.mktemp("model")
    made.save(str(folder / "tokenizer.json"))
    return folder


def test_one_space_is_found_in_tokens_and_in_characters(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a").write_text(PROMPT)
    (tmp_path / "b").write_text(PROMPT.replace("assistant.\n", "assistant. \n"))
    prompts = (tmp_path / "a", tmp_path / "b")
    found = json.loads(lmc("explain", *prompts, "--tokenizer", tokenizer, "--chunk-tokens", 4, "--json").stdout)
    difference = found["difference"]
    assert difference["at"]["line"] == 2
    assert 0 < difference["common_tokens"] < 60
    assert difference["common_chunks"] == difference["common_tokens"] // 4
    assert difference["lost_chunks"] == found["prompts"][1]["tokens"] // 4 - difference["common_chunks"]
    text = lmc("explain", *prompts, "--tokenizer", tokenizer / "tokenizer.json", "--chunk-tokens", 4).stdout
    assert "B has one character more: «·»" in text
    assert f"token {difference['common_tokens']} " in text


def test_files_of_ids_are_decoded_so_that_markers_are_seen(tokenizer: Path, tmp_path: Path) -> None:
    tokenizers: Any = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    (tmp_path / "a").write_text(json.dumps(made.encode(PROMPT).ids))
    (tmp_path / "b").write_text(json.dumps(made.encode(PROMPT.replace("<|im_start|>", "<s>", 1)).ids))
    text = lmc("explain", tmp_path / "a", tmp_path / "b", "--tokenizer", tokenizer).stdout
    assert "⟦<|im_start|>⟧" in text
    assert "a template marker differs" in text
    (tmp_path / "c").write_text(json.dumps([*made.encode("You").ids, *made.encode(" are").ids]))
    (tmp_path / "d").write_text(json.dumps([i for char in "You are" for i in made.encode(char).ids]))
    text = lmc("explain", tmp_path / "c", tmp_path / "d", "--tokenizer", tokenizer).stdout
    assert "the text is the same, cut into other tokens" in text


def test_a_tokenizer_that_is_none_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(PROMPT)
    (tmp_path / "tokenizer.json").write_text("{}")
    result = lmc("explain", tmp_path / "a", "--tokenizer", tmp_path)
    assert result.exit_code == 2
    assert "--tokenizer" in result.output
