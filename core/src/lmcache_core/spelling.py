"""Words in error messages: the nearest spelling of one that is not known, and how one is shown that may be anything."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Either "; did you mean 'capacity'?", or nothing when no known word is near."""
    by_folded = {name.casefold(): name for name in known}
    close = difflib.get_close_matches(word[:200].casefold(), by_folded, n=1)
    return f"; did you mean {by_folded[close[0]]!r}?" if close else ""


def printable(word: str) -> str:
    """`word` with escapes for what is no text, as a name that is not UTF-8 has it: it could not be printed."""
    return word.encode("utf-8", "backslashreplace").decode()


def shown(word: str) -> str:
    """`word` as a message shows it: printable, and cut if it is too long."""
    text = printable(word)
    return text if len(text) <= 100 else f"{text[:100]}…"
