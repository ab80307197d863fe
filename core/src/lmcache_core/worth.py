"""What a restored token is worth: what the engine takes to compute it, less what we take to copy it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from .chain import Chain, Model
from .costs import Costs
from .keys import Family

MAX_FAMILIES: Final = 64


@dataclass(slots=True)
class _Family:
    computing: Costs = field(default_factory=Costs)
    copying: Costs = field(default_factory=Costs)


class Worth:
    """Thread-safe.  Both are measured, by model: nothing is known before there are samples enough."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._families: OrderedDict[Family, _Family] = OrderedDict()

    def computed(self, model: Model, tokens: int, seconds: float, context_tokens: int = 0) -> None:
        """The engine took so long for `tokens` tokens after `context_tokens`."""
        self._of(model).computing.sample(tokens, seconds, context_tokens)

    def copied(self, model: Model, chunks: int, seconds: float) -> None:
        """Copying so many chunks from host memory into the engine took so long."""
        self._of(model).copying.sample(chunks * model.family.chunk_tokens, seconds)

    def token_s(self, chain: Chain) -> float:
        """Seconds that one restored token of a prompt of this length is worth, negative if copying takes longer; 0 for
        not known."""
        found = self._families.get(chain.model.family) if self._families else None
        tokens = len(chain) * chain.model.family.chunk_tokens
        computing = found.computing.estimate(tokens) if found is not None else None
        if found is None or computing is None:
            return 0.0
        return (computing - (found.copying.estimate(tokens) or 0.0)) / tokens

    def _of(self, model: Model) -> _Family:
        with self._lock:
            found = self._families.setdefault(model.family, _Family())
            self._families.move_to_end(model.family)
            if len(self._families) > MAX_FAMILIES:
                self._families.popitem(last=False)
        return found
