"""The specification of an eviction policy, as laws that any plugin's test-suite inherits.

    class TestMyPolicy(PolicyLaws):
        def new_policy(self):
            return MyPolicy()

Without pytest: `run_policy_laws(MyPolicy)` returns one `LawResult` per law.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ..backend import ApiVersion
from ..keys import ChunkKey
from ..policy import EvictionPolicy, Item
from .laws import LawResult, Laws, expect, expect_api_version, law

_SIZE: Final = 1000
_ROUNDS: Final = 400


def policy_key(name: object) -> ChunkKey:
    """The key that laws give a record of that name."""
    return ChunkKey(hashlib.shake_128(repr(name).encode()).digest(48))


class Records:
    """A tier as its policy sees it: what was put into it, how large it is, what is pinned.  Checks every answer."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.nbytes: dict[ChunkKey, int] = {}
        self.pinned: set[ChunkKey] = set()
        self.asked = 0
        """How often a policy wanted to know whether a record is pinned."""

    def put(self, name: object, nbytes: int = _SIZE, depth: int = 0) -> ChunkKey:
        key = policy_key(name)
        self.nbytes[key] = nbytes
        self.policy.on_put(Item(key, depth, nbytes))
        return key

    def put_chain(self, name: str, chunks: int) -> list[ChunkKey]:
        """Store a prompt's chunks as a tier reports them, deepest first; return their keys from the head on."""
        return [self.put((name, depth), depth=depth) for depth in reversed(range(chunks))][::-1]

    def use(self, chain: Sequence[ChunkKey]) -> None:
        for key in reversed(chain):
            self.policy.on_get(key)

    def remove(self, key: ChunkKey) -> None:
        del self.nbytes[key]
        self.pinned.discard(key)
        self.policy.on_remove(key)

    def evict(self, nbytes: int) -> list[ChunkKey]:
        victims = self.victims(nbytes)
        for key in victims:
            self.remove(key)
        return victims

    def victims(self, nbytes: int) -> list[ChunkKey]:
        """What the policy names, checked against all that is known of the records."""
        named = self.policy.victims(nbytes, self._is_pinned)
        expect(isinstance(named, list), f"victims returned {type(named).__name__}, not a list")
        expect(len(set(named)) == len(named), "a record is named twice in one answer")
        unknown = [key for key in named if key not in self.nbytes]
        expect(not unknown, f"{len(unknown)} victims are records that were removed or never put: {unknown[:3]}")
        expect(not self.pinned & set(named), "a pinned record is named as a victim")
        free = sum(size for key, size in self.nbytes.items() if key not in self.pinned)
        freed = sum(self.nbytes[key] for key in named)
        if nbytes > free:
            expect(not named, f"{nbytes} bytes cannot be freed ({free} can), and yet {len(named)} records are named")
        elif nbytes > 0:
            expect(named, f"nothing is named to free {nbytes} bytes, though {free} bytes are not pinned")
            expect(freed >= nbytes, f"the victims free {freed} bytes, {nbytes} were asked for")
            last = self.nbytes[named[-1]]
            expect(freed - last < nbytes, f"more is named than needed: {freed - last} bytes would have been enough")
        else:
            expect(not named, f"{len(named)} records are named to free {nbytes} bytes")
        return named

    def _is_pinned(self, key: ChunkKey) -> bool:
        self.asked += 1
        expect(key in self.nbytes, "the policy asked for the pins of a record that was removed")
        return key in self.pinned


class PolicyLaws(Laws):
    """What the contract in `lmcache_core.policy` promises.  A subclass supplies `new_policy`."""

    records: Records

    def new_policy(self) -> EvictionPolicy:
        """A policy that knows nothing yet."""
        raise NotImplementedError

    def api_version(self) -> ApiVersion:
        version: ApiVersion = self.new_policy().api_version
        return version

    def setup_law(self) -> None:
        self.records = Records(self.new_policy())

    @law(since=(1, 0))
    def test_the_api_version_is_a_literal_that_core_speaks(self) -> None:
        expect_api_version(type(self.records.policy))

    @law(since=(1, 0))
    def test_victims_free_what_was_asked_for_and_no_more_than_that(self) -> None:
        for number in range(20):
            self.records.put(number, nbytes=100 + 37 * number)
        for nbytes in (1, 100, 101, 5000, sum(self.records.nbytes.values()), 0, -5):
            self.records.victims(nbytes)

    @law(since=(1, 0))
    def test_nothing_is_named_when_not_enough_can_be_freed(self) -> None:
        expect(not self.records.victims(1), "an empty tier has victims")
        keys = [self.records.put(number) for number in range(10)]
        self.records.victims(10 * _SIZE + 1)
        self.records.pinned.update(keys[:5])
        self.records.victims(5 * _SIZE + 1)
        self.records.victims(5 * _SIZE)

    @law(since=(1, 0))
    def test_a_pinned_record_is_never_named_and_one_let_go_can_be(self) -> None:
        keys = [self.records.put(number) for number in range(30)]
        self.records.pinned.update(keys[::2])
        self.records.victims(15 * _SIZE)
        self.records.pinned.update(keys)
        self.records.victims(1)
        self.records.victims(1)
        self.records.pinned.clear()
        expect(set(self.records.victims(30 * _SIZE)) == set(keys), "not every record is named once all are let go")

    @law(since=(1, 0))
    def test_victims_stay_known_until_they_are_removed(self) -> None:
        keys = {self.records.put(number) for number in range(10)}
        for _ in range(3):
            expect(set(self.records.victims(10 * _SIZE)) == keys, "a record that was named and kept is not named again")
        self.records.victims(4 * _SIZE)
        self.records.remove(self.records.victims(_SIZE)[0])
        self.records.put("one more")
        expect(len(self.records.victims(10 * _SIZE)) == 10, "a record that was named and kept is not named again")

    @law(since=(1, 0))
    def test_a_removed_record_is_forgotten(self) -> None:
        keys = [self.records.put(number) for number in range(10)]
        for key in keys[1::2]:
            self.records.remove(key)
        expect(set(self.records.victims(5 * _SIZE)) == set(keys[::2]), "the victims are not the records that are left")
        for key in keys[::2]:
            self.records.remove(key)
        self.records.victims(1)

    @law(since=(1, 0))
    def test_unknown_records_are_ignored(self) -> None:
        self.records.policy.on_get(policy_key("never put"))
        self.records.policy.on_remove(policy_key("never put"))
        key = self.records.put("put and removed")
        self.records.remove(key)
        self.records.policy.on_remove(key)
        self.records.policy.on_get(key)
        self.records.victims(1)
        self.records.put("put and removed")
        self.records.victims(_SIZE)

    @law(since=(1, 0))
    def test_a_record_put_again_is_one_record_of_its_new_size(self) -> None:
        for size in (_SIZE, 3 * _SIZE, _SIZE // 2):
            for number in range(5):
                self.records.put(number, nbytes=size)
                self.records.victims(sum(self.records.nbytes.values()))
                self.records.victims(sum(self.records.nbytes.values()) + 1)

    @law(since=(1, 0))
    def test_the_deepest_leaves_first_of_a_prompt_that_was_stored(self) -> None:
        for name in "abc":
            self.records.put_chain(name, 6)
        self._expect_deepest_first([[policy_key((name, depth)) for depth in range(6)] for name in "abc"], "stored")

    @law(since=(1, 0))
    def test_the_deepest_leaves_first_of_a_prompt_that_was_used(self) -> None:
        chains = [self.records.put_chain(name, 6) for name in "abcd"]
        for _ in range(2):
            for chain in (chains[2], chains[0]):
                self.records.use(chain)
        self._expect_deepest_first(chains, "stored and used")

    @law(since=(1, 0))
    def test_the_deepest_leaves_first_of_a_prompt_that_was_pinned_meanwhile(self) -> None:
        chains = [self.records.put_chain(name, 6) for name in "abcd"]
        self.records.pinned.update(chains[0], chains[1])
        for _ in range(3):
            self.records.victims(3 * _SIZE)
        self.records.pinned.clear()
        self._expect_deepest_first(chains, "pinned and let go")

    @law(since=(1, 0))
    def test_most_records_being_pinned_does_not_make_each_call_slow(self) -> None:
        pinned = 5000
        self.records.pinned.update(self.records.put(("pinned", number)) for number in range(pinned))
        for number in range(_ROUNDS):
            self.records.put(("free", number))
            self.records.evict(_SIZE)
        limit = 4 * pinned + 50 * _ROUNDS
        expect(
            self.records.asked <= limit,
            f"{_ROUNDS} victims among {pinned} pinned records: {self.records.asked} questions, {limit} would do",
        )

    @law(since=(1, 0))
    def test_records_let_go_are_found_again_among_many_that_stay_pinned(self) -> None:
        keys = [self.records.put(number) for number in range(2000)]
        self.records.pinned.update(keys)
        self.records.victims(1)
        for key in keys[::100]:
            self.records.pinned.discard(key)
        expect(set(self.records.victims(20 * _SIZE)) == set(keys[::100]), "the victims are not the records let go")

    @law(since=(1, 0))
    def test_any_history_leaves_every_answer_right(self) -> None:
        for seed in range(10):
            self.records = Records(self.new_policy())
            self._random_history(random.Random(seed))

    def _expect_deepest_first(self, chains: Sequence[Sequence[ChunkKey]], what: str) -> None:
        order = self.records.victims(sum(self.records.nbytes.values()))
        for chain in chains:
            depths = [chain.index(key) for key in order if key in chain]
            expect(
                depths == sorted(depths, reverse=True),
                f"of a prompt that was {what} the chunks leave in the order {depths}; the head must be last",
            )

    def _random_history(self, choose: random.Random) -> None:
        records = self.records
        for _ in range(_ROUNDS):
            name = choose.randrange(40)
            key = policy_key(name)
            match choose.randrange(8):
                case 0 | 1:
                    records.put(name, nbytes=choose.choice((1, 10, 100, 1000)), depth=choose.randrange(5))
                case 2:
                    records.policy.on_get(key)
                case 3 if key in records.nbytes:
                    records.remove(key)
                case 4 if key in records.nbytes:
                    records.pinned.add(key)
                case 5:
                    records.pinned.discard(key)
                case 6:
                    records.evict(choose.choice((1, 50, 500, 3000)))
                case _:
                    records.victims(choose.choice((0, 1, 50, 500, 3000, 10**9)))
        free = sum(size for key, size in records.nbytes.items() if key not in records.pinned)
        records.evict(free)


def run_policy_laws(
    new_policy: Callable[[], EvictionPolicy],
    *,
    known_failures: Mapping[str, str] | None = None,
    only: Sequence[str] = (),
    on_result: Callable[[LawResult], None] | None = None,
) -> list[LawResult]:
    """Check every law (or those named in `only`) on the policies that `new_policy` makes.

    `on_result` hears of each law as it has been checked.
    """
    members = {"new_policy": lambda self: new_policy(), "known_failures": dict(known_failures or {})}
    laws: PolicyLaws = type("LawsOfOnePolicy", (PolicyLaws,), members)()
    return laws.results(only, on_result)
