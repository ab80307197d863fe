"""The eviction policies: they keep the laws, and each does what it is chosen for."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lmcache_core.keys import ChunkKey
from lmcache_core.policies._line import Line
from lmcache_core.policies.arc import ARC
from lmcache_core.policies.fifo import FIFO
from lmcache_core.policies.lfu import LFU
from lmcache_core.policies.lru import LRU
from lmcache_core.policies.s3fifo import S3FIFO
from lmcache_core.policy import EvictionPolicy, Item
from lmcache_core.testing.policy_laws import PolicyLaws, Records, policy_key

EACH = pytest.mark.parametrize("policy", [ARC, FIFO, LFU, LRU, S3FIFO])
NewPolicy = Callable[[], EvictionPolicy]


class TestLRU(PolicyLaws):
    def new_policy(self) -> EvictionPolicy:
        return LRU()


class TestARC(PolicyLaws):
    def new_policy(self) -> EvictionPolicy:
        return ARC()


class TestFIFO(PolicyLaws):
    def new_policy(self) -> EvictionPolicy:
        return FIFO()


class TestLFU(PolicyLaws):
    def new_policy(self) -> EvictionPolicy:
        return LFU()


class TestS3FIFO(PolicyLaws):
    def new_policy(self) -> EvictionPolicy:
        return S3FIFO()


def order(policy: EvictionPolicy, count: int, pinned: Sequence[ChunkKey] = ()) -> list[ChunkKey]:
    return policy.victims(count, lambda key: key in pinned)


def put(policy: EvictionPolicy, *names: object) -> list[ChunkKey]:
    keys = [policy_key(name) for name in names]
    for key in keys:
        policy.on_put(Item(key, 0, 1))
    return keys


# LRU.


def test_lru_names_the_longest_unused_first() -> None:
    policy = LRU()
    a, b, c, d = put(policy, *"abcd")
    policy.on_get(a)
    put(policy, "b")
    assert order(policy, 4) == [c, d, a, b]


@EACH
def test_asking_for_victims_changes_nothing(policy: NewPolicy) -> None:
    asked, left_alone = policy(), policy()
    choose = random.Random(5)
    for each in (asked, left_alone):
        put(each, *range(50))
    for _ in range(30):
        pinned = [policy_key(number) for number in choose.sample(range(50), 25)]
        order(asked, choose.randrange(1, 20), pinned)
    assert set(order(asked, 50)) == set(order(left_alone, 50))
    assert order(asked, 50) == order(left_alone, 50)  # the first of them found what had been set aside


def test_a_pinned_record_keeps_its_place_among_the_others() -> None:
    policy = LRU()
    a, b, c, d = put(policy, *"abcd")
    assert order(policy, 2, [a, c]) == [b, d]
    assert order(policy, 2, [b, d]) == [a, c]
    assert order(policy, 4) == [a, b, c, d]


def test_a_record_let_go_waits_behind_all_that_are_older() -> None:
    policy = LRU()
    keys = put(policy, *"abcdef")
    assert order(policy, 5, [keys[4]]) == [key for key in keys if key != keys[4]]
    assert order(policy, 6) == keys


def test_records_let_go_are_named_before_younger_ones_once_a_few_were_taken() -> None:
    policy = LRU()
    records = Records(policy)
    old = [records.put(("old", number)) for number in range(40)]
    records.pinned.update(old)
    young = [records.put(("young", number)) for number in range(100)]
    records.evict(1000)  # sets the old ones aside
    records.pinned.clear()
    taken: list[ChunkKey] = []
    while old[0] not in taken:
        taken += records.evict(1000)
    assert len(taken) <= 12
    assert taken[:-1] == young[1 : len(taken)]
    assert records.evict(39_000) == old[1:]


# S3-FIFO.


def hits(policy: EvictionPolicy, capacity: int, trace: Sequence[object]) -> int:
    """How many requests of a trace find their record in a tier of `capacity` equal records."""
    there: set[ChunkKey] = set()
    found = 0
    for name in trace:
        key = policy_key(name)
        if key in there:
            found += 1
            policy.on_get(key)
            continue
        if len(there) == capacity:
            (victim,) = policy.victims(1, lambda key: False)
            policy.on_remove(victim)
            there.remove(victim)
        policy.on_put(Item(key, 0, 1))
        there.add(key)
    return found


def with_scans(rounds: int = 12) -> list[object]:
    """60 hot records in random order, with a scan of 300 that nobody asks for again between the rounds."""
    choose = random.Random(1)
    trace: list[object] = []
    for number in range(rounds):
        for _ in range(2):
            trace += choose.sample([("hot", index) for index in range(60)], 60)
        trace += [("scan", number, index) for index in range(300)]
    return trace


def test_s3fifo_keeps_what_is_hot_through_scans_and_lru_does_not() -> None:
    trace = with_scans()
    scan_resistant, recent = hits(S3FIFO(), 100, trace), hits(LRU(), 100, trace)
    possible = 12 * 120 - 60
    assert recent <= 12 * 60
    assert scan_resistant > 0.9 * possible


def test_s3fifo_gives_a_record_that_comes_back_soon_a_place_in_the_main_queue() -> None:
    policy = S3FIFO()
    (returning,) = put(policy, "returning")
    policy.on_remove(returning)
    put(policy, "returning")  # remembered: it goes to the main queue
    scan = put(policy, *range(20))
    assert order(policy, 18) == scan[:18]
    assert returning not in order(policy, 18)


def test_s3fifo_forgets_the_keys_it_remembers_in_the_end() -> None:
    policy = S3FIFO()
    for number in range(10_000):
        (key,) = put(policy, number)
        policy.on_remove(key)
    assert len(policy._ghost) <= 64


def test_s3fifo_lets_even_the_most_used_records_go_when_nothing_else_is_left() -> None:
    policy = S3FIFO()
    keys = put(policy, *range(10))
    for _ in range(100):
        for key in keys:
            policy.on_get(key)
    assert set(order(policy, 10)) == set(keys)


def test_s3fifo_asks_no_more_for_records_that_were_used_a_thousand_times() -> None:
    policy = S3FIFO()
    records = Records(policy)
    for _ in range(2):  # the second time they are remembered and go to the main queue
        keys = [records.put(number) for number in range(10)]
        if not policy._main:
            for key in keys:
                records.remove(key)
    for _ in range(1000):
        records.use(keys)
    records.victims(10_000)
    assert records.asked <= 5 * 10


# FIFO, LFU, ARC.


def test_fifo_names_what_was_stored_first_whatever_is_used() -> None:
    policy = FIFO()
    a, b, c = put(policy, *"abc")
    policy.on_get(a)
    put(policy, "a")
    assert order(policy, 3) == [a, b, c]


def test_lfu_names_what_was_used_least_and_of_equals_the_longest_unused() -> None:
    policy = LFU()
    a, b, c, d = put(policy, *"abcd")
    for key in (a, b, a, b, d):
        policy.on_get(key)
    put(policy, "c")
    assert order(policy, 4) == [c, d, a, b]


def test_lfu_lets_old_fame_fade_as_others_leave() -> None:
    policy, records = LFU(), Records(LFU())
    records.policy = policy
    famous = records.put("famous")
    for _ in range(1000):
        policy.on_get(famous)
    left_after = 0
    while famous in records.nbytes:
        left_after += 1
        key = records.put(("newer", left_after))
        policy.on_get(key)
        policy.on_get(key)
        records.evict(1000)
    assert 5 < left_after < 50


def test_lfu_counts_no_further_than_its_limit() -> None:
    policy = LFU()
    once, often = put(policy, "once", "often")
    for _ in range(1000):
        policy.on_get(often)
    assert set(policy._lines) == {0, 15}
    policy.on_remove(once)
    assert set(policy._lines) == {15}


def test_arc_keeps_what_is_hot_through_scans() -> None:
    possible = 12 * 120 - 60
    assert hits(ARC(), 100, with_scans()) > 0.9 * possible


def test_arc_gives_room_to_whichever_line_was_too_short() -> None:
    policy = ARC()
    policy_records = Records(policy)
    for name in range(10):
        policy_records.put(name)
    for key in policy_records.evict(5000):
        policy_records.put(key)  # comes back under another name: not remembered
    assert policy._target == 0
    returning = policy_records.evict(1000)
    policy.on_put(Item(returning[0], 0, 1000))
    assert policy._target > 0
    assert returning[0] in policy._again._waiting
    policy.on_remove(returning[0])
    policy.on_put(Item(returning[0], 0, 1000))  # left the second line and comes back: that one was too short
    assert policy._target == 0


@pytest.mark.parametrize("used", [False, True])
def test_arc_remembers_no_more_keys_than_it_has_records(used: bool) -> None:
    policy = ARC()
    for number in range(10_000):
        (key,) = put(policy, number)
        if used:
            policy.on_get(key)
        policy.on_remove(key)
    assert len(policy._left_once) + len(policy._left_again) == 64


# Each, against a model.


def lines_of(policy: Any) -> list[Line]:
    match policy:
        case ARC():
            return [policy._once, policy._again]
        case LFU():
            assert all(len(line) for line in policy._lines.values())
            return list(policy._lines.values())
        case S3FIFO():
            return [policy._small, policy._main]
        case _:
            return [policy._line]


class PolicyMachine(RuleBasedStateMachine):
    """Any history; `Records` knows what an answer may be."""

    names = st.integers(0, 12)

    @initialize(policy=st.sampled_from((ARC, FIFO, LFU, LRU, S3FIFO)))
    def open(self, policy: type[EvictionPolicy]) -> None:
        self.records = Records(policy())
        self.recency: OrderedDict[ChunkKey, None] = OrderedDict()

    @rule(name=names, nbytes=st.integers(0, 9), depth=st.integers(0, 3))
    def put(self, name: int, nbytes: int, depth: int) -> None:
        key = self.records.put(name, nbytes=nbytes, depth=depth)
        self._touch(key)

    @rule(name=names)
    def get(self, name: int) -> None:
        key = policy_key(name)
        self.records.policy.on_get(key)
        if key in self.recency:
            self._touch(key)

    @rule(name=names)
    def remove(self, name: int) -> None:
        key = policy_key(name)
        if key in self.records.nbytes:
            self.records.remove(key)
            del self.recency[key]
        else:
            self.records.policy.on_remove(key)

    @rule(name=names)
    def pin(self, name: int) -> None:
        if policy_key(name) in self.records.nbytes:
            self.records.pinned.add(policy_key(name))

    @rule(name=names)
    def unpin(self, name: int) -> None:
        self.records.pinned.discard(policy_key(name))

    @rule(nbytes=st.integers(-1, 60), removed=st.booleans())
    def victims(self, nbytes: int, removed: bool) -> None:
        named = self.records.victims(nbytes)
        if removed:
            for key in named:
                self.records.remove(key)
                del self.recency[key]

    @invariant()
    def everything_that_is_free_can_be_named(self) -> None:
        if not hasattr(self, "records"):
            return
        records = self.records
        policy = records.policy
        for line in lines_of(policy):
            assert line.nbytes == sum(node.nbytes for node in (*line._waiting.values(), *line._aside.values()))
        free = [key for key in self.recency if key not in records.pinned]
        nbytes = sum(records.nbytes[key] for key in free)
        named = records.victims(nbytes)
        if isinstance(records.policy, LRU):
            assert named == free[: len(named)]

    def _touch(self, key: ChunkKey) -> None:
        self.recency[key] = None
        self.recency.move_to_end(key)


TestHistories = PolicyMachine.TestCase
TestHistories.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
