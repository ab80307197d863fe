"""`vllm serve` with the connector found by its name alone, as in the README, and an OpenAI client's view of it."""

from __future__ import annotations

from pathlib import Path

from conftest import CHUNK_TOKENS
from engine import transfer_config
from models import tiny_llama
from serving import serve

PROMPT = "".join(chr(97 + (i * i + i // 7) % 26) for i in range(1000))
"""A thousand tokens: the tokenizer of the model has one for each byte."""


def test_the_second_request_says_how_much_of_it_was_loaded_and_so_does_the_log(node: Path, tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model", seed=17)
    named = transfer_config(node)
    del named["kv_connector_module_path"]
    memory = ("--kv-cache-memory-bytes", str(64 << 20), "--max-model-len", "2048", "--block-size", str(CHUNK_TOKENS))
    arguments = ("--dtype", "float32", "--no-enable-prefix-caching", *memory)
    whole = 1000 // CHUNK_TOKENS * CHUNK_TOKENS
    with serve(model, tmp_path / "serve.log", *arguments, transfer=named) as server:
        first = server.complete(PROMPT)
        assert (first.prompt_tokens, first.cached_tokens) == (1000, 0)
        second = server.complete(PROMPT)
        assert (second.text, second.cached_tokens) == (first.text, whole)
        assert f"{whole} tokens loaded" in server.log.read_text()
        other = server.complete(PROMPT, cache_salt="another tenant")
        assert (other.text, other.cached_tokens) == (first.text, 0)
        longer = server.complete(PROMPT[:500] + "!" * 500)
        assert longer.cached_tokens == 500 // CHUNK_TOKENS * CHUNK_TOKENS
        hits = {name: value for name, value in server.metrics().items() if "external_prefix_cache_hits_total" in name}
        assert sum(hits.values()) == whole + longer.cached_tokens
