"""Each law of an eviction policy has a policy that breaks it and is caught."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest

from lmcache_core.backend import API_VERSION
from lmcache_core.keys import ChunkKey
from lmcache_core.policies.lru import LRU
from lmcache_core.policy import EvictionPolicy, Item
from lmcache_core.testing.policy_laws import PolicyLaws, run_policy_laws

IsPinned = Callable[[ChunkKey], bool]


class Simple(EvictionPolicy):
    """LRU as one would write it at first, right but slow; the mutants change one thing each."""

    api_version = (1, 0)

    def __init__(self) -> None:
        self.nbytes: OrderedDict[ChunkKey, int] = OrderedDict()

    def on_put(self, item: Item) -> None:
        self.nbytes[item.key] = item.nbytes
        self.nbytes.move_to_end(item.key)

    def on_get(self, key: ChunkKey) -> None:
        if key in self.nbytes:
            self.nbytes.move_to_end(key)

    def on_remove(self, key: ChunkKey) -> None:
        self.nbytes.pop(key, None)

    def victims(self, nbytes: int, is_pinned: IsPinned) -> list[ChunkKey]:
        named = []
        for key, size in self.nbytes.items():
            if nbytes <= 0:
                break
            if not is_pinned(key):
                named.append(key)
                nbytes -= size
        return named if nbytes <= 0 else []


class BorrowsItsVersion(Simple):
    api_version = API_VERSION


class NamesOneMore(Simple):
    def victims(self, nbytes: int, is_pinned: IsPinned) -> list[ChunkKey]:
        named = super().victims(nbytes, is_pinned)
        more = [key for key in self.nbytes if key not in named and not is_pinned(key)]
        return named + more[:1] if named else named


class NamesWhatThereIs(Simple):
    def victims(self, nbytes: int, is_pinned: IsPinned) -> list[ChunkKey]:
        return super().victims(min(nbytes, self._free(is_pinned)), is_pinned)

    def _free(self, is_pinned: IsPinned) -> int:
        return sum(size for key, size in self.nbytes.items() if not is_pinned(key))


class IgnoresPins(Simple):
    def victims(self, nbytes: int, is_pinned: IsPinned) -> list[ChunkKey]:
        return super().victims(nbytes, lambda key: False)


class ForgetsVictims(Simple):
    def victims(self, nbytes: int, is_pinned: IsPinned) -> list[ChunkKey]:
        named = super().victims(nbytes, is_pinned)
        for key in named:
            del self.nbytes[key]
        return named


class NeverForgets(Simple):
    def on_remove(self, key: ChunkKey) -> None:
        pass


class TripsOverUnknownRecords(Simple):
    def on_remove(self, key: ChunkKey) -> None:
        del self.nbytes[key]


class LearnsFromUses(Simple):
    def on_get(self, key: ChunkKey) -> None:
        self.nbytes.setdefault(key, 1000)
        super().on_get(key)


class KeepsTheFirstSize(Simple):
    def on_put(self, item: Item) -> None:
        super().on_put(Item(item.key, item.depth, self.nbytes.get(item.key, item.nbytes)))


class LastInFirstOut(Simple):
    def on_put(self, item: Item) -> None:
        super().on_put(item)
        self.nbytes.move_to_end(item.key, last=False)


class UsedFirst(Simple):
    def on_get(self, key: ChunkKey) -> None:
        if key in self.nbytes:
            self.nbytes.move_to_end(key, last=False)


class PinnedTurnsAround(Simple):
    def victims(self, nbytes: int, is_pinned: IsPinned) -> list[ChunkKey]:
        for key in [key for key in self.nbytes if is_pinned(key)]:
            self.nbytes.move_to_end(key, last=False)
        return super().victims(nbytes, is_pinned)


class LosesThePinned(LRU):
    def victims(self, nbytes: int, is_pinned: IsPinned) -> list[ChunkKey]:
        self._line.look_again = lambda is_pinned: None  # type: ignore[method-assign]
        return super().victims(nbytes, is_pinned)


class RemembersThePinned(LRU):
    """Wrong only about a record that is removed after it was found pinned."""

    def on_remove(self, key: ChunkKey) -> None:
        if key not in self._line._aside:
            super().on_remove(key)


MUTANTS: dict[str, type[EvictionPolicy]] = {
    "test_the_api_version_is_a_literal_that_core_speaks": BorrowsItsVersion,
    "test_victims_free_what_was_asked_for_and_no_more_than_that": NamesOneMore,
    "test_nothing_is_named_when_not_enough_can_be_freed": NamesWhatThereIs,
    "test_a_pinned_record_is_never_named_and_one_let_go_can_be": IgnoresPins,
    "test_victims_stay_known_until_they_are_removed": ForgetsVictims,
    "test_a_removed_record_is_forgotten": NeverForgets,
    "test_unknown_records_are_ignored": TripsOverUnknownRecords,
    "test_a_record_put_again_is_one_record_of_its_new_size": KeepsTheFirstSize,
    "test_the_deepest_leaves_first_of_a_prompt_that_was_stored": LastInFirstOut,
    "test_the_deepest_leaves_first_of_a_prompt_that_was_used": UsedFirst,
    "test_the_deepest_leaves_first_of_a_prompt_that_was_pinned_meanwhile": PinnedTurnsAround,
    "test_most_records_being_pinned_does_not_make_each_call_slow": Simple,
    "test_records_let_go_are_found_again_among_many_that_stay_pinned": LosesThePinned,
    "test_any_history_leaves_every_answer_right": RemembersThePinned,
}


def test_every_law_has_a_mutant() -> None:
    assert set(MUTANTS) == {each.name for each in PolicyLaws.laws()}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught_by_its_law(name: str, record_property: Callable[[str, object], None]) -> None:
    record_property("mutant", f"policy {name}")
    (result,) = run_policy_laws(MUTANTS[name], only=[name])
    assert result.outcome == "failed"
    assert result.detail


def test_what_is_learnt_from_a_use_of_an_unknown_record_is_caught() -> None:
    (result,) = run_policy_laws(LearnsFromUses, only=["test_unknown_records_are_ignored"])
    assert result.outcome == "failed"


def test_the_simple_policy_breaks_only_the_law_of_speed() -> None:
    failed = [result.name for result in run_policy_laws(Simple) if not result.ok]
    assert failed == ["test_most_records_being_pinned_does_not_make_each_call_slow"]


@pytest.mark.parametrize("answer", [(), None, "key"])
def test_an_answer_that_is_no_list_is_named(answer: Any) -> None:
    class Odd(Simple):
        def victims(self, nbytes: int, is_pinned: IsPinned) -> list[ChunkKey]:
            return answer  # type: ignore[no-any-return]

    (result,) = run_policy_laws(Odd, only=["test_nothing_is_named_when_not_enough_can_be_freed"])
    assert result.outcome == "failed"
    assert "not a list" in result.detail
