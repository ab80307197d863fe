"""Conversations as token ids that only ever grow, and the place where two prompts part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_SHOWN_CHARACTERS = 30


@dataclass(frozen=True, slots=True)
class Parting:
    """Where two texts begin to differ, and what that costs in chunks."""

    token: int
    """The first token that differs."""
    chunks_kept: int
    chunks_lost: int
    before: str
    """The place in the first text, with its spaces made visible."""
    after: str


def opening(tokenizer: Any, system: str, question: str) -> list[int]:
    """The prompt of a first turn."""
    return _ids(tokenizer, f"<|im_start|>system\n{system}<|im_end|>\n") + _turn(tokenizer, question)


def next_turn(tokenizer: Any, prompt: Sequence[int], answer: Sequence[int], question: str) -> list[int]:
    """The prompt of the turn after `answer`, whose tokens are kept as they were generated."""
    end = _ids(tokenizer, "<|im_end|>")
    closing = [] if list(answer[-len(end) :]) == end else end
    return [*prompt, *answer, *closing, *_ids(tokenizer, "\n"), *_turn(tokenizer, question)]


def parting(one: Sequence[int], other: Sequence[int], text: str, changed: str, chunk_tokens: int) -> Parting:
    """Compare two prompts, which differ, and the texts they came from."""
    token = next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    place = next(i for i, (a, b) in enumerate(zip(text, changed, strict=False)) if a != b)
    kept = token // chunk_tokens
    return Parting(
        token,
        kept,
        len(other) // chunk_tokens - kept,
        _visible(text, place, place),
        _visible(changed, place, place + 1),
    )


def _turn(tokenizer: Any, question: str) -> list[int]:
    return _ids(tokenizer, f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _visible(text: str, start: int, stop: int) -> str:
    """The characters around `start`..`stop`, spaces as middle dots."""
    shown = text[max(0, start - _SHOWN_CHARACTERS) : stop + _SHOWN_CHARACTERS]
    return shown.replace(" ", "·").replace("\n", "⏎")
