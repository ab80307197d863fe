"""When generate() chose its first new token, in every generation mode and without a streamer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.generation.stopping_criteria import StoppingCriteria


class FirstToken(StoppingCriteria):
    """A stopping criterion that stops nothing: generate() asks it after each token."""

    def __init__(self, clock: Callable[[], float], on_token: Callable[[], None] | None = None) -> None:
        self._clock = clock
        self._on_token = on_token
        self._at: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if self._at is None:
            self._at = self._clock()
        if self._on_token is not None:
            self._on_token()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def after(self, start: float) -> float:
        """Seconds from `start` to the first token; 0 if there was none."""
        return self._at - start if self._at is not None else 0.0
