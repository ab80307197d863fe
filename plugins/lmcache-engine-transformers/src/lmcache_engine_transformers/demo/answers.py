"""One answer of the model with its logits and its time to first token: with the cache, without it, and compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..prefix import PrefixCache, Report
from ..timing import FirstToken

Tick = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Answer:
    """Greedy tokens and the logits that each was chosen from."""

    tokens: list[int]
    logits: np.ndarray[Any, np.dtype[np.float32]]

    def save(self, path: Path) -> None:
        np.savez(path, tokens=np.asarray(self.tokens), logits=self.logits)

    @classmethod
    def load(cls, path: Path) -> Answer:
        with np.load(path, allow_pickle=False) as arrays:
            return cls(arrays["tokens"].tolist(), arrays["logits"])


@dataclass(frozen=True, slots=True)
class Plain:
    """What transformers does by itself."""

    answer: Answer
    ttft_s: float
    hidden: torch.Tensor
    """The last hidden state of every token of the prompt, from which the logits of earlier turns follow."""


@dataclass(slots=True)
class Agreement:
    """How far all comparisons together are apart."""

    compared: int = 0
    tokens_equal: bool = True
    max_logit_diff: float = 0.0

    def add(self, one: Answer, other: Answer) -> None:
        """Compare two computations of the same answer."""
        self.compared += 1
        self.tokens_equal &= one.tokens == other.tokens
        if one.logits.shape != other.logits.shape:
            self.tokens_equal = False
            return
        self.max_logit_diff = max(self.max_logit_diff, float(np.abs(one.logits - other.logits).max()))


def with_cache(
    prefix: PrefixCache, prompt: Sequence[int], tokens: int, tick: Tick, *, salt: str
) -> tuple[Answer, Report]:
    """Answer from the longest stored prefix; what is new is on every tier when this returns."""
    with _each_layer(prefix.model, tick):
        output, report = prefix.generate(list(prompt), salt=salt, **_options(tokens, tick))
    prefix.cache.drain(60)
    return _answer(output, len(prompt)), report


def without_cache(model: Any, prompt: Sequence[int], tokens: int, tick: Tick) -> Plain:
    """The same with nothing of ours in the way."""
    hidden: list[torch.Tensor] = []

    def keep(module: Any, arguments: Any, output: Any) -> None:
        if not hidden:
            hidden.append(output.last_hidden_state[0])

    ids = torch.tensor([list(prompt)])
    first = FirstToken(time.perf_counter)
    options = _options(tokens, tick)
    options["stopping_criteria"].append(first)
    hook = model.base_model.register_forward_hook(keep)
    try:
        with _each_layer(model, tick):
            start = time.perf_counter()
            output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    finally:
        hook.remove()
    return Plain(_answer(output, len(prompt)), first.after(start), hidden[0])


def earlier_answer(model: Any, plain: Plain, prompt_tokens: int, tokens: int) -> Answer:
    """The answer to an earlier turn, as the prefill of a later one sees it: no cache was involved in it."""
    with torch.no_grad():
        logits = model.lm_head(plain.hidden[prompt_tokens - 1 : prompt_tokens - 1 + tokens]).float()
    return Answer(logits.argmax(dim=-1).tolist(), logits.numpy())


def warm_up(model: Any) -> None:
    """Let torch load and choose its kernels, so that the first figure does not pay for that."""
    ids = torch.arange(3, 99)[None]
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)


def ticks(model: Any, tokens: int) -> int:
    """How often one answer ticks: once a layer while the prompt is computed, then once a token."""
    return int(model.config.num_hidden_layers) + tokens


def _answer(output: Any, prompt_tokens: int) -> Answer:
    return Answer(output.sequences[0, prompt_tokens:].tolist(), torch.cat(output.logits).float().numpy())


def _options(tokens: int, tick: Tick) -> dict[str, Any]:
    from transformers.generation.stopping_criteria import StoppingCriteriaList

    return {
        "max_new_tokens": tokens,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
        "stopping_criteria": StoppingCriteriaList([FirstToken(time.perf_counter, tick)]),
    }


@contextmanager
def _each_layer(model: Any, tick: Tick) -> Iterator[None]:
    """Tick after each layer of the first pass, which is the long one."""
    hooks: list[Any] = []

    def passed(last: bool) -> None:
        tick()
        if last:
            for hook in hooks:
                hook.remove()

    layers = list(model.base_model.layers)
    for layer in layers:
        hooks.append(layer.register_forward_hook(lambda *_, last=layer is layers[-1]: passed(last)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
