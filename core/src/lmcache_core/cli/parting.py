"""Where two prompts part: the first difference, what is around it made visible, and what kind of change it is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

T = TypeVar("T")
CONTEXT: Final = 32
"""Characters, or tokens, that are shown before and after."""
_REACH: Final = 200
_ANCHOR: Final = 12
_SEEN: Final = {" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍", "\u00a0": "⍽", "\u200b": "<U+200B>", "\ufeff": "<U+FEFF>"}
_MARKER: Final = re.compile(r"<[|/]?[A-Za-z_][\w|./-]{0,40}>|\[/?[A-Z_]{3,20}\]")
_VARYING: Final = re.compile(r"[\d:./,TZ +-]*\d[\d:./,TZ +-]*")
_DATE: Final = re.compile(r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}:\d{2}|\b(19|20)\d{2}\b")
_RANDOM: Final = re.compile(r"[0-9a-fA-F-]{6,}")


@dataclass(frozen=True, slots=True)
class Change:
    """What the one has at the difference and the other has not, up to where both go on alike."""

    a: str
    b: str
    rejoined: bool
    """Both go on alike after it; otherwise `a` and `b` are merely what comes next."""
    ends: bool = False
    """One of them ends there."""


@dataclass(frozen=True, slots=True)
class Place:
    """A character of a text, for people: counted from 1."""

    offset: int
    line: int
    column: int


def common(a: Sequence[T], b: Sequence[T]) -> int:
    """How many leading items are equal."""
    limit = min(len(a), len(b))
    low, high = 0, limit
    while low < high:  # slices compare in C, however long the prompts are
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def place(text: str, offset: int) -> Place:
    before = text[:offset]
    return Place(offset, before.count("\n") + 1, offset - (before.rfind("\n") + 1) + 1)


def change(a: str, b: str, at: int) -> Change:
    """What differs from `at` on, where the texts part; whole words, dates and markers where these differ."""
    if at == min(len(a), len(b)):
        return Change(a[at:], b[at:], True, ends=True)
    start = _start_of_word(a, b, at)
    skip = rejoin(a[at : at + _REACH + _ANCHOR], b[at : at + _REACH + _ANCHOR])
    if skip is None:
        return Change(a[start : at + CONTEXT], b[start : at + CONTEXT], False)
    first, second = skip
    return Change(a[start : at + first], b[start : at + second], True)


def _start_of_word(a: str, b: str, at: int) -> int:
    if at >= min(len(a), len(b)) or a[at].isspace() or b[at].isspace():
        return at
    start = at
    while start and at - start < CONTEXT and (a[start - 1].isalnum() or a[start - 1] in "-:._|<[/"):
        start -= 1
    return start


def rejoin(a: Sequence[T], b: Sequence[T]) -> tuple[int, int] | None:
    """How much of each to skip, as little as can be, so that both go on alike; None if they do not within reach."""
    for total in range(1, min(2 * _REACH, len(a) + len(b)) + 1):
        for first in range(max(0, total - len(b)), min(total, len(a)) + 1):
            second = total - first
            rest_a, rest_b = a[first : first + _ANCHOR], b[second : second + _ANCHOR]
            ends = max(len(a), len(b)) <= _REACH and (rest_a or total <= CONTEXT or not first or not second)
            if rest_a == rest_b and (len(rest_a) == _ANCHOR or ends):
                return first, second
    return None


def visible(text: str) -> str:
    """Every character seen: spaces, line ends, what does not print; template markers in double brackets."""
    shown: list[str] = []
    start = 0
    for match in _MARKER.finditer(text):
        shown += [_seen(text[start : match.start()]), f"⟦{match[0]}⟧"]
        start = match.end()
    return "".join([*shown, _seen(text[start:])])


def describe(found: Change) -> str:
    """One sentence on a change, with what to do where that is known."""
    if not found.rejoined:
        return "they do not go on alike after it"
    if found.a and found.b:
        what = f"A has {_quoted(found.a)} where B has {_quoted(found.b)}"
    else:
        name, more = ("A", found.a) if found.a else ("B", found.b)
        if found.ends:
            other = "AB".replace(name, "")
            return f"{other} is the beginning of {name}, which goes on for {_count(more)}: {_quoted(more)}"
        what = f"{name} has {_count(more)} more: {_quoted(more)}"
    hint = _hint(found)
    return f"{what}; {hint}" if hint else what


def _hint(found: Change) -> str:
    both = found.a + found.b
    if not both.strip():
        return "only white space differs: one of them was trimmed, or another template was used"
    if any(_MARKER.search(f"{part}>") for part in (found.a, found.b)):
        return "a template marker differs: another chat template, or another place for it"
    varying = found.a and found.b and _VARYING.fullmatch(found.a) and _VARYING.fullmatch(found.b)
    if varying or _DATE.search(found.a) or _DATE.search(found.b):
        return "it looks like a date, time or counter: what changes from request to request belongs after what does not"
    if found.a and found.b and _RANDOM.fullmatch(found.a) and _RANDOM.fullmatch(found.b):
        return "it looks like a random id: what changes from request to request belongs after what does not"
    if found.a.casefold() == found.b.casefold():
        return "only upper and lower case differ"
    return ""


def _quoted(text: str) -> str:
    return f"«{visible(text if len(text) <= 80 else text[:80] + '…')}»"


def _count(text: str) -> str:
    return "one character" if len(text) == 1 else f"{len(text)} characters"


def _seen(text: str) -> str:
    return "".join(_SEEN.get(c) or (c if c.isprintable() else f"<U+{ord(c):04X}>") for c in text)
