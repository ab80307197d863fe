"""The contract of an eviction policy: it decides, the tier deletes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from .backend import ApiVersion
from .keys import ChunkKey


@dataclass(frozen=True, slots=True)
class Item:
    """What a policy is told of a record when it enters a tier."""

    key: ChunkKey
    depth: int
    """Index of the chunk in its prefix: 0 is the head, which every longer prefix needs."""
    nbytes: int
    tenant: bytes = b""


class EvictionPolicy(ABC):
    """Order of leaving for the records of one tier.  Called under the tier's lock, so implementations need none.

    The tier reports a request's chunks deepest first, so that among records touched together the head is the youngest.
    Every call is O(1), `victims` amortised over the records it names or moves.
    """

    api_version: ClassVar[ApiVersion]

    @abstractmethod
    def on_put(self, item: Item) -> None:
        """`item.key` entered the tier (again: its size may have changed)."""

    @abstractmethod
    def on_get(self, key: ChunkKey) -> None:
        """A request used the record; unknown keys are ignored."""

    @abstractmethod
    def on_remove(self, key: ChunkKey) -> None:
        """The record left the tier, for whatever reason; unknown keys are ignored."""

    @abstractmethod
    def victims(self, nbytes: int, is_pinned: Callable[[ChunkKey], bool]) -> list[ChunkKey]:
        """Keys whose removal frees at least `nbytes`, none of them pinned, each once, in the order to remove them;
        empty when that cannot be done.  They stay known until `on_remove`.
        """
