"""The index: what is evictable is counted right through every change of state, and siblings leave together."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmcache_core.buffers import Slot
from lmcache_core.index import Entry, Index, Siblings, State
from lmcache_core.keys import ChunkKey
from lmcache_core.layout import Layout, Region

LAYOUT = Layout(
    chunk_tokens=4,
    regions=(Region(name="kv", layers=1, block_tokens=4, block_nbytes=8, dtype="float16", packing="HND"),),
)


def key(shard: int, digest: int) -> ChunkKey:
    return ChunkKey(shard.to_bytes(16, "big") + digest.to_bytes(32, "big"))


def entry(number: int, *, extent: int = 0, nbytes: int = 8192, state: State = State.RESERVED) -> Entry:
    return Entry(key(0, number), Slot(extent, number * nbytes, nbytes), LAYOUT, 0, state, number)


def publish(index: Index, of: Entry) -> None:
    of.state = State.READY
    index.unhold([of])


def test_an_entry_is_evictable_when_it_is_ready_and_nobody_holds_it() -> None:
    index = Index()
    one = entry(1)
    index.add(one)
    assert index.evictable(8192) == 0
    publish(index, one)
    assert index.evictable(8192) == 1
    assert index.evictable(4096) == 0
    index.hold([one])
    index.hold([one])
    index.unhold([one])
    assert index.evictable(8192) == 0
    index.unhold([one])
    assert index.evictable(8192) == 1
    index.remove(one)
    assert index.evictable(8192) == 0
    assert (one.state, index.entries) == (State.GONE, {})


def test_letting_go_of_what_is_gone_makes_nothing_evictable() -> None:
    index = Index()
    one = entry(1)
    index.add(one)
    publish(index, one)
    index.hold([one])
    index.remove(one)
    index.unhold([one])
    assert index.evictable(8192) == 0


def test_extents_that_come_and_go_leave_nothing_behind() -> None:
    index = Index()
    for number in range(1000):
        one = entry(number, extent=number)
        index.add(one)
        assert index.in_extent(number) == {one}
        index.remove(one)
        assert not index.in_extent(number)
    assert all(not value for name, value in vars(index).items() if name != "siblings")
    assert not vars(index.siblings)["_keys"]


def test_siblings_are_the_keys_of_one_digest() -> None:
    siblings = Siblings()
    for shard in (1, 2, 3):
        for digest in (7, 8):
            siblings.add(key(shard, digest))
            siblings.add(key(shard, digest))
    assert siblings.expand([key(2, 7), key(1, 7)]) == [key(1, 7), key(2, 7), key(3, 7)]
    assert [len(keys) for keys in siblings._keys.values()] == [3, 3]
    siblings.remove(key(1, 7))
    siblings.remove(key(1, 7))
    assert siblings.expand([key(2, 7), key(3, 8)]) == [
        key(2, 7), key(3, 7), key(1, 8), key(2, 8), key(3, 8),
    ]  # fmt: skip
    assert siblings.expand([key(9, 9)]) == [key(9, 9)]
    assert siblings.expand([]) == []


class IndexMachine(RuleBasedStateMachine):
    """Any order of adding, publishing, holding and removing, against a count by search."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Index()
        self.here: list[Entry] = []
        self.held: list[Entry] = []
        self.number = 0

    @rule(extent=st.integers(0, 3), pages=st.integers(1, 2), state=st.sampled_from((State.RESERVED, State.LOADING)))
    def add(self, extent: int, pages: int, state: State) -> None:
        self.number += 1
        one = entry(self.number, extent=extent, nbytes=pages * 4096, state=state)
        self.index.add(one)
        self.here.append(one)

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.here))
        if one.state in (State.RESERVED, State.LOADING):
            publish(self.index, one)

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.here))
        self.index.hold([one])
        self.held.append(one)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def unhold(self, data: st.DataObject) -> None:
        self.index.unhold([self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))])

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        self.index.remove(self.here.pop(data.draw(st.integers(0, len(self.here) - 1))))

    @invariant()
    def everything_is_counted_right(self) -> None:
        assert self.index.entries == {one.key: one for one in self.here}
        for nbytes in (4096, 8192):
            free = [e for e in self.here if e.state is State.READY and not e.holds and e.slot.nbytes == nbytes]
            assert self.index.evictable(nbytes) == len(free)
        for extent in range(4):
            assert self.index.in_extent(extent) == {e for e in self.here if e.slot.extent_id == extent}


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
