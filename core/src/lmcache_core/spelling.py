"""The nearest spelling of a word that is not known, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Either "; did you mean 'capacity'?", or nothing when no known word is near."""
    by_folded = {name.casefold(): name for name in known}
    close = difflib.get_close_matches(word[:200].casefold(), by_folded, n=1)
    return f"; did you mean {by_folded[close[0]]!r}?" if close else ""
