"""Two requests of the past, from the file that `trace:` in the configuration keeps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from lmcache_core import trace
from lmcache_core.errors import ConfigError
from lmcache_core.trace import Traced

from .display import ago, clean
from .explain import Prompt
from .explain_stores import FIELDS, value_of
from .tokenizing import Tokenizer


def traced(path: Path, requests: Sequence[str], tokenizer: Tokenizer | None) -> tuple[list[Prompt], list[str], int]:
    """The prompts of those requests, what else is known of them, and the chunk size of the last."""
    found = trace.read(path, requests)
    missing = [request for request in requests if request not in found]
    if missing:
        raise ConfigError(f"{path}: no request {', '.join(map(repr, missing))} in it (any more)")
    entries = [found[request] for request in requests]
    prompts = []
    for request, entry in zip(requests, entries, strict=True):
        if entry.tokens is None:
            raise ConfigError(_no_tokens(path, request, entries))
        prompts.append(Prompt(request, tokenizer.decode(entry.tokens) if tokenizer else None, entry.tokens))
    told = [line for label, entry in zip("AB", entries, strict=False) for line in _told(label, entry)]
    told += _differing(entries)
    return prompts, told, int(entries[-1].family.get("chunk_tokens", 256))


def _no_tokens(path: Path, request: str, entries: Sequence[Traced]) -> str:
    text = f"{path}: it has no tokens of request {request!r}; `trace: {{tokens: true}}` writes them, of later requests"
    if len(entries) < 2:
        return text
    pairs = enumerate(zip(entries[0].digests, entries[1].digests, strict=False))
    equal = next((index for index, (a, b) in pairs if a != b), min(entry.chunks for entry in entries))
    return f"{text}. By their hashes the first {equal} chunks are equal, of {entries[0].chunks} and {entries[1].chunks}"


def _told(label: str, entry: Traced) -> list[str]:
    when = ago(max(0.0, time.time() - entry.at))
    assert entry.tokens is not None
    lines = [f"{label}  {when} ago: {entry.hit_chunks:,} of {entry.chunks:,} chunks were hit"]
    if not entry.complete:
        lines.append(f"{label}  was extended piece by piece: only its first {len(entry.tokens):,} tokens are known")
    return lines


def _differing(entries: Sequence[Traced]) -> list[str]:
    """In which fields two requests were of namespaces that share nothing."""
    if len(entries) < 2 or entries[0].family.get("family_id") == entries[1].family.get("family_id"):
        return []
    a, b = entries[0].family, entries[1].family
    fields = [field for field in ("model", *FIELDS) if value_of(a, field) != value_of(b, field)]
    parts = "; ".join(f"{field}: {value_of(a, field)} | {value_of(b, field)}" for field in fields)
    return [f"their namespaces share nothing, since they differ in {clean(parts)}"]
