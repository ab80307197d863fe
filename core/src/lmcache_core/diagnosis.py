"""What a plugin may tell `lmc doctor` about itself: one line each, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

Level = Literal["ok", "note", "warning", "error"]
"""A note costs something at most; a warning will hurt some day; with an error it does not work, or is not safe."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One line for people."""

    level: Level
    text: str
    remedy: str = ""
    """What to do; empty where there is nothing to do."""


@runtime_checkable
class SupportsDiagnosis(Protocol):
    """Optional for a backend, which is asked when it is open, and for a device class, as a classmethod.

    Quick, without side effects; a device is not initialised for it.
    """

    def diagnose(self) -> Iterable[Diagnosis]: ...
