"""The tokens of recent prompts, kept only while hooks listen: a chain has digests and no tokens."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from .chain import Chain

MAX_PROMPTS: Final = 64
Tokens = np.ndarray[Any, np.dtype[np.uint32]]


class Prompts:
    """Thread-safe; the oldest prompt goes first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens: OrderedDict[bytes, Tokens] = OrderedDict()

    def remember(self, chain: Chain, tokens: Sequence[int] | Any) -> None:
        """These are the tokens that `chain` was made of."""
        if not len(chain):
            return
        whole = np.array(tokens[: len(chain) * chain.model.family.chunk_tokens], dtype=np.uint32)
        with self._lock:
            self._tokens.pop(chain.digests[-1], None)
            self._tokens[chain.digests[-1]] = whole
            if len(self._tokens) > MAX_PROMPTS:
                self._tokens.popitem(last=False)

    def tokens(self, chain: Chain) -> Tokens:
        """The tokens of the chain's first chunks, as many as are known: one that was extended has more."""
        with self._lock:
            for digest in reversed(chain.digests):
                found = self._tokens.get(digest)
                if found is not None:
                    return found
        return np.empty(0, np.uint32)
