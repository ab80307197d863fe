"""A cache in one process: what is found, held, evicted and written below."""

from __future__ import annotations

import pickle
import threading

import pytest
from daemons import counted, held, open_remote, pool_of
from tiny import (
    BLOCKS,
    CHUNK,
    LAYOUT,
    RECORD,
    Engine,
    chain,
    family,
    load,
    model,
    open_local,
    store,
    until,
)

from lmcache_core import (
    CacheError,
    CapacityError,
    Chain,
    Fence,
    Group,
    GroupKind,
    Hit,
    Layout,
    Model,
    Region,
    Shard,
    Traits,
    leases,
)
from lmcache_core.client import remote
from lmcache_core.devices.cpu import CpuDevice
from lmcache_core.policies.s3fifo import S3FIFO
from lmcache_core.server import session
from lmcache_core.testing.dict_backend import DictBackend


@pytest.fixture(params=[open_local, open_remote], ids=["local", "daemon"])
def opening(request):
    """Opens a cache in this process, or the same one in a daemon: an engine adapter cannot tell which it has."""
    return request.param


def test_what_was_stored_is_restored_byte_for_byte_into_other_blocks(opening):
    with opening() as cache:
        prompt = chain(6)
        assert load(cache, prompt)[0] == 0
        assert store(cache, prompt).ok_chunks == 6
        chunks, result = load(cache, prompt)
        assert (chunks, result.ok_chunks, result.failed) == (6, 6, ())


def test_a_longer_prompt_hits_the_prefix_and_a_different_one_nothing(opening):
    with opening() as cache:
        store(cache, chain(4))
        assert load(cache, chain(9))[0] == 4
        assert load(cache, chain(9, seed=1))[0] == 0


def test_a_second_store_is_skipped_and_counted(opening):
    with opening() as cache:
        store(cache, chain(4))
        again = store(cache, chain(6))
        assert (again.ok_chunks, again.skipped, again.failed) == (2, 4, ())
        assert counted(cache, "stores", result="ok") == 6
        assert counted(cache, "stores", result="skipped") == 4


def test_a_span_in_the_middle_is_stored_and_only_whole_prefixes_hit(opening):
    with opening() as cache:
        prompt = chain(6)
        store(cache, prompt, range(2, 6))
        assert load(cache, prompt)[0] == 0
        store(cache, prompt, range(2))
        assert load(cache, prompt)[0] == 6


def test_every_rectangle_of_a_chunk_is_needed_for_a_hit(opening):
    with opening() as cache:
        two = model(shards=2)
        prompt = chain(4, of=two)
        store(cache, prompt, shard=two.shards[0])
        assert cache.lookup(prompt, "a").chunks == 0
        store(cache, prompt, range(3), shard=two.shards[1])
        assert cache.lookup(prompt, "b").chunks == 3


def test_a_hit_and_a_chain_cross_processes_as_plain_data(opening):
    with opening() as cache:
        prompt = chain(3)
        store(cache, prompt)
        hit = cache.lookup(prompt, "r")
        assert pickle.loads(pickle.dumps(hit)) == hit
        assert isinstance(hit, Hit)


def test_asked_again_the_same_hit(opening):
    with opening() as cache:
        prompt = chain(4)
        store(cache, prompt)
        first = cache.lookup(prompt, "r")
        assert cache.lookup(prompt, "r") == first
        assert counted(cache, "lookups") == 1


def test_release_gives_back_exactly_what_that_request_took(opening):  # S10
    with opening() as cache:
        prompt = chain(4, of=model(salt_id=b"t1t1t1t1t1t1t1t1"))
        store(cache, prompt)
        cache.lookup(prompt, "one")
        cache.lookup(prompt, "two")
        assert held(cache) == 4
        cache.release("one")
        cache.release("one")
        cache.release("never asked")
        assert held(cache) == 4
        cache.release("two")
        assert held(cache) == 0


@pytest.mark.parametrize("step", ["after lookup", "during load", "after load", "during store"])
def test_thousands_of_aborts_leave_nothing_held(opening, step):  # S22
    with opening() as cache:
        prompt, other = chain(2), chain(2, seed=1)
        store(cache, prompt)
        shard = prompt.model.shards[0]
        engine = Engine()
        ids = engine.compute(prompt, shard, range(2))
        keeper = cache.lookup(prompt, "keeper")
        jobs = []
        for n in range(2_000 if opening is open_remote else 10_000):
            request = f"r{n}"
            hit = cache.lookup(prompt, request)
            if step == "during store":
                jobs.append(cache.store(other, shard, range(2), engine.pages, ids, request=request))
            elif step != "after lookup":
                jobs.append(cache.retrieve(hit, shard, range(2), engine.pages, ids))
                if step == "after load":
                    jobs[-1].wait(5)
            cache.release(request)
        assert all(job.wait(5) for job in jobs)
        assert held(cache) == keeper.chunks == 2
        cache.release("keeper")
        assert held(cache) == 0
        assert pool_of(cache).usage()[0] == (4 if step == "during store" else 2)


def test_filled_to_the_brim_it_never_exceeds_its_capacity_and_never_evicts_what_is_leased(opening):  # S23
    with opening(chunks=10, extent_nbytes=RECORD) as cache:
        pinned = chain(9, seed=1)
        store(cache, pinned)
        hit = cache.lookup(pinned, "keeper")
        for seed in range(2, 102):
            store(cache, chain(1, seed=seed))
            assert pool_of(cache).slab.used_nbytes <= 10 * RECORD
        refused = store(cache, chain(3, seed=200))
        assert refused.ok_chunks == 1
        assert refused.failed == ((1, 3, "no room"),)
        assert cache.lookup(pinned, "keeper") == hit
        assert load(cache, pinned, "again")[1].ok_chunks == 9
        cache.release("keeper")
        assert store(cache, chain(10, seed=300)).ok_chunks == 10


def test_drops_happen_only_when_every_victim_is_held_and_are_counted(opening):
    with opening(chunks=8) as cache:
        for seed in range(80):
            assert store(cache, chain(2, seed=seed)).ok_chunks == 2
        assert counted(cache, "drops") == 0
        cache.lookup(chain(2, seed=79), "r")
        cache.lookup(chain(2, seed=78), "r2")
        cache.lookup(chain(2, seed=77), "r3")
        cache.lookup(chain(2, seed=76), "r4")
        assert store(cache, chain(5, seed=100)).failed == ((0, 5, "no room"),)
        assert counted(cache, "drops", reason="no room") == 5


def test_a_record_larger_than_the_whole_capacity_is_refused_at_once(opening):  # S23
    big = Layout(
        chunk_tokens=CHUNK,
        regions=(Region(name="kv", layers=2, block_tokens=4, block_nbytes=8192, dtype="f", packing="p"),),
    )
    fam = family()
    shard = Shard.of(fam, big, layers=(0, 2))
    huge = Model(fam, (Group(GroupKind.FULL, (shard,)),))
    with opening(chunks=4) as cache:
        store(cache, chain(2))
        prompt = Chain.of(huge, list(range(CHUNK)))
        import numpy as np

        pages = [[np.zeros((4, 8192), np.uint8) for _ in range(2)]]
        result = cache.store(prompt, shard, range(1), pages, [0, 1, 2, 3]).wait(5)
        assert result.failed == ((0, 1, "no room"),)
        assert load(cache, chain(2))[0] == 2, "what was there stays"


def test_a_second_model_of_another_size_takes_the_coldest_extent_of_the_first(opening):
    big = Layout(
        chunk_tokens=CHUNK,
        regions=(Region(name="kv", layers=2, block_tokens=4, block_nbytes=1024, dtype="f", packing="p"),),
    )
    fam = family(model="org/big")
    shard = Shard.of(fam, big, layers=(0, 2))
    second = Model(fam, (Group(GroupKind.FULL, (shard,)),))
    with opening(chunks=12, extent_nbytes=4 * RECORD) as cache:
        for seed in range(12):
            store(cache, chain(1, seed=seed))
        for seed in range(4, 12):
            load(cache, chain(1, seed=seed))
        import numpy as np

        pages = [[np.full((4, 1024), 7, np.uint8) for _ in range(2)]]
        prompt = Chain.of(second, list(range(CHUNK)))
        assert cache.store(prompt, shard, range(1), pages, [0, 1, 2, 3]).wait(5).ok_chunks == 1
        assert [load(cache, chain(1, seed=seed))[0] for seed in range(12)] == [0] * 4 + [1] * 8
        assert pool_of(cache).slab.used_nbytes <= 12 * RECORD


def test_a_prompt_longer_than_the_cache_keeps_its_head(opening):
    with opening(chunks=8) as cache:
        prompt = chain(20)
        for start in range(0, 20, 2):
            store(cache, prompt, range(start, start + 2))
        assert load(cache, prompt)[0] == 8


def test_under_pressure_the_tail_of_a_prefix_goes_before_its_head(opening):
    for policy in (None, S3FIFO):
        settings = {"policy": policy} if policy else {}
        with opening(chunks=8, **settings) as cache:
            store(cache, chain(6))
            store(cache, chain(4, seed=1))
            assert load(cache, chain(6))[0] == 4


def test_all_rectangles_of_a_chunk_leave_together(opening):
    with opening(chunks=8) as cache:
        two = model(shards=2)
        prompt = chain(4, of=two)
        for shard in two.shards:
            store(cache, prompt, shard=shard)
        store(cache, chain(1, seed=9))
        entries = pool_of(cache)._index.entries
        left = [[key in entries for key in prompt.keys(shard)] for shard in two.shards]
        assert left[0] == left[1] == [True, True, True, False]


def test_a_window_group_needs_its_last_window_only_and_its_old_chunks_leave_alone(opening):
    fam = family()
    full = Shard.of(fam, LAYOUT, group=0, layers=(0, 2))
    window = Shard.of(fam, LAYOUT, group=1, layers=(2, 4))
    hybrid = Model(fam, (Group(GroupKind.FULL, (full,)), Group(GroupKind.WINDOW, (window,), window_tokens=CHUNK + 1)))
    with opening() as cache:
        prompt = chain(6, of=hybrid)
        store(cache, prompt, shard=full)
        store(cache, prompt, range(3, 5), shard=window)
        hit = cache.lookup(prompt, "r")
        assert hit.restorable == (4, 5)
        assert hit.resident == 5
        assert hit.at_most(4 * CHUNK + 3) == 4
        cache.release("r")
        store(cache, prompt, range(1), shard=window)
        assert cache.lookup(prompt, "s").restorable == (1, 4, 5)


def test_a_state_group_needs_exactly_the_last_state(opening):
    fam = family()
    full = Shard.of(fam, LAYOUT, group=0, layers=(0, 2))
    state = Shard.of(fam, LAYOUT, group=1, layers=(2, 4))
    hybrid = Model(fam, (Group(GroupKind.FULL, (full,)), Group(GroupKind.STATE, (state,))))
    with opening() as cache:
        prompt = chain(6, of=hybrid)
        store(cache, prompt, shard=full)
        store(cache, prompt, range(2, 3), shard=state)
        assert cache.lookup(prompt, "r").restorable == (3,)


def test_a_pinned_chain_stays_until_it_is_unpinned(opening):
    with opening(chunks=4) as cache:
        prompt = chain(2)
        store(cache, prompt)
        assert cache.pin(prompt) == 2
        for seed in range(1, 20):
            store(cache, chain(2, seed=seed))
        assert load(cache, prompt)[0] == 2
        cache.unpin(prompt)
        cache.unpin(prompt)
        for seed in range(20, 40):
            store(cache, chain(2, seed=seed))
        assert load(cache, prompt)[0] == 0


def test_no_number_of_requests_ends_a_pin(opening, monkeypatch):
    for module in (leases, session, remote):
        for name in {"MAX_LEASES", "MAX_REQUESTS"} & set(vars(module)):
            monkeypatch.setattr(module, name, 4)
    with opening() as cache:
        prompt = chain(2)
        store(cache, prompt)
        assert cache.pin(prompt) == 2
        for number in range(10):
            assert cache.lookup(chain(1, seed=1), f"r{number}").chunks == 0
        assert cache.evict(prompt) == 0
        cache.unpin(prompt)
        for number in range(10):
            cache.release(f"r{number}")
        assert cache.evict(prompt) == 2


def test_more_pins_than_there_may_be_are_refused_and_end_no_other(monkeypatch):
    monkeypatch.setattr(leases, "MAX_PINS", 2)
    with open_local() as cache:
        for seed in range(3):
            store(cache, chain(1, seed=seed))
        assert [cache.pin(chain(1, seed=seed)) for seed in (0, 1, 1)] == [1, 1, 1]
        with pytest.raises(CapacityError, match="2 prompts are pinned"):
            cache.pin(chain(1, seed=2))
        assert [cache.evict(chain(1, seed=seed)) for seed in range(3)] == [0, 0, 1]
        cache.unpin(chain(1, seed=0))
        store(cache, chain(1, seed=2))
        assert cache.pin(chain(1, seed=2)) == 1


def test_more_pins_than_a_daemon_has_room_for_pin_nothing(monkeypatch):
    monkeypatch.setattr(leases, "MAX_PINS", 1)
    with open_remote() as cache:
        for seed in range(2):
            store(cache, chain(1, seed=seed))
        assert [cache.pin(chain(1, seed=seed)) for seed in range(2)] == [1, 0]
        assert [cache.evict(chain(1, seed=seed)) for seed in range(2)] == [0, 1]


def test_what_a_request_was_told_is_in_a_lower_tier_is_not_removed_from_there(opening):
    backend = DictBackend()
    with opening([backend], chunks=2) as cache:
        prompt = chain(2)
        store(cache, prompt)
        assert cache.drain(60)  # what is still being written below makes no room
        store(cache, chain(2, seed=1))
        assert cache.drain(5)
        hit = cache.lookup(prompt, "r")
        assert (hit.resident, hit.chunks) == (0, 2)
        cache.evict(prompt)
        assert cache.drain(5)
        assert len(backend.store.records) == 4
        assert load(cache, prompt, "r")[1].ok_chunks == 2
        cache.evict(prompt)
        assert cache.drain(5)
        assert len(backend.store.records) == 2


@pytest.mark.parametrize("times", [1, 100])
def test_a_lookup_does_not_report_what_leaves_a_lower_tier_while_it_looks(times, monkeypatch):
    with open_local([DictBackend()], chunks=2) as cache:
        prompt = chain(2)
        store(cache, prompt)
        assert cache.drain(60)  # what is still being written below makes no room
        store(cache, chain(2, seed=1))
        assert cache.drain(60)
        tier, pin, left = cache._pool.tiers[0], cache._pool.tiers[0].pin, iter(range(times))

        def leaves_first(keys: list[bytes]) -> bool:
            if next(left, None) is not None:
                tier.ledger.forget(keys[-1])
            return pin(keys)

        monkeypatch.setattr(tier, "pin", leaves_first)
        assert cache.lookup(prompt, "r").chunks == (1 if times == 1 else 0)
        assert load(cache, prompt, "r")[1].failed == ()
        assert not tier.ledger._pins


def test_a_lookup_that_no_tier_takes_up_is_answered_once(monkeypatch):
    class Shared(DictBackend):
        api_version = (1, 0)
        traits = Traits(shared=True)

    with open_local([Shared()]) as cache:
        monkeypatch.setattr(cache._pool.tiers[0], "probe", lambda *question: False)
        told: list[bool] = []
        found = cache._pool.lookup(chain(2), "r", lambda: told.append(True))
        assert (found.pending, told) == (False, []), "it says all there is, so nothing is said later"
        assert cache.prefetch(chain(2)).wait(10) is not None
        cache.release("r")


def test_evict_removes_a_chain_from_every_tier_but_not_what_is_in_use(opening):
    backend = DictBackend()
    with opening([backend]) as cache:
        prompt, used = chain(3), chain(2, seed=1)
        store(cache, prompt)
        store(cache, used)
        assert cache.drain(5)
        cache.lookup(used, "r")
        assert cache.evict(prompt) == 3
        assert cache.evict(used) == 0
        assert cache.drain(5)
        assert load(cache, prompt)[0] == 0
        assert load(cache, used, "again")[1].ok_chunks == 2


def test_leases_of_requests_that_stopped_asking_expire_when_room_is_needed(opening):  # S21
    now = [0.0]
    with opening(chunks=4, lease_timeout_s=60, clock=lambda: now[0]) as cache:
        store(cache, chain(4))
        hit = cache.lookup(chain(4), "forgotten")
        assert store(cache, chain(1, seed=1)).ok_chunks == 0
        now[0] = 7200.0
        assert store(cache, chain(1, seed=1)).ok_chunks == 1
        engine = Engine()
        result = cache.retrieve(hit, chain(4).model.shards[0], range(4), engine.pages, list(range(16))).wait(5)
        assert result.ok_chunks == 3
        assert result.failed == ((3, 4, "miss"),)


def test_a_job_tells_its_callbacks_and_poll_once(opening):
    with opening() as cache:
        told = []
        prompt = chain(2)
        engine = Engine()
        ids = engine.compute(prompt, prompt.model.shards[0], range(2))
        job = cache.store(prompt, prompt.model.shards[0], range(2), engine.pages, ids)
        job.add_done_callback(told.append)
        assert job.wait(5) is not None
        assert until(lambda: len(told) == 1)
        job.add_done_callback(told.append)
        assert job.gathered
        assert told == [job.wait(0)] * 2
        assert cache.poll() == told[:1]
        assert cache.poll() == []


def test_skip_tokens_leaves_the_first_blocks_as_they_are(opening):
    with opening() as cache:
        prompt = chain(3)
        store(cache, prompt)
        shard = prompt.model.shards[0]
        hit = cache.lookup(prompt, "r")
        engine = Engine(12)
        assert cache.retrieve(hit, shard, range(3), engine.pages, list(range(12)), skip_tokens=8).wait(5).ok_chunks == 3
        assert (engine.pages[0][0][:2] == 0xA5).all()
        assert engine.holds(prompt, shard, 1, BLOCKS)
        with pytest.raises(ValueError, match="skip_tokens 3"):
            cache.retrieve(hit, shard, range(3), engine.pages, list(range(12)), skip_tokens=3)


@pytest.mark.parametrize(
    ("span", "ids", "says"),
    [
        (range(9), 36, "not a span"),
        (range(2, 1), 0, "not a span"),
        (range(0, 4, 2), 8, "not a span"),
        (range(2), 7, "7 block ids for 2 chunks of 4 blocks"),
    ],
)
def test_a_wrong_call_is_refused_before_anything_moves(opening, span, ids, says):
    with opening() as cache:
        prompt = chain(4)
        engine = Engine()
        with pytest.raises(ValueError, match=says):
            cache.store(prompt, prompt.model.shards[0], span, engine.pages, list(range(ids)))
        assert pool_of(cache).usage()[0] == 0


def test_a_block_that_the_engine_does_not_have_fails_the_job_and_frees_the_slots(opening):
    with opening(chunks=2) as cache:
        prompt = chain(2)
        engine = Engine(4)
        result = cache.store(prompt, prompt.model.shards[0], range(2), engine.pages, list(range(8))).wait(5)
        assert result.ok_chunks == 0
        assert "block ids 0 to 7" in result.failed[0][2]
        assert store(cache, prompt).ok_chunks == 2


def test_after_close_every_call_says_so_and_every_job_has_ended(opening):
    with opening() as cache:
        prompt = chain(4)
        engine = Engine()
        ids = engine.compute(prompt, prompt.model.shards[0], range(4))
        jobs = [
            cache.store(chain(4, seed=seed), prompt.model.shards[0], range(4), engine.pages, ids) for seed in range(50)
        ]
        cache.close()
        cache.close()
        assert all(job.done() for job in jobs)
        with pytest.raises(CacheError, match="closed"):
            cache.store(prompt, prompt.model.shards[0], range(4), engine.pages, ids)


def test_prefetch_brings_a_chain_from_below(opening):
    backend = DictBackend()
    with opening([backend]) as cache:
        store(cache, chain(5))
        assert cache.drain(5)
    again = DictBackend(store=backend.store)
    with opening([again]) as cache:
        assert cache.lookup(chain(5), "r").resident == 0
        cache.release("r")
        result = cache.prefetch(chain(7)).wait(5)
        assert (result.kind, result.ok_chunks, result.failed) == ("prefetch", 5, ())
        assert cache.lookup(chain(5), "r").resident == 5
        cache.release("r")
        assert held(cache) == 0


def test_a_hit_below_is_promoted_to_host_memory_and_to_the_tiers_between(opening):
    far = DictBackend()
    with opening([far]) as cache:
        store(cache, chain(5))
        assert cache.drain(5)
    near = DictBackend()
    with opening([near, DictBackend(store=far.store)]) as cache:
        assert load(cache, chain(5))[1].ok_chunks == 5
        assert cache.lookup(chain(5), "r").resident == 5
        assert cache.drain(5)
        assert len(near.store.records) == 5


def test_a_load_that_two_requests_want_is_done_once(opening):
    far = DictBackend()
    with opening([far]) as cache:
        store(cache, chain(4))
        assert cache.drain(5)
    reads = []

    class Counting(DictBackend):
        api_version = (1, 0)

        def get(self, key, into):
            reads.append(key)
            return super().get(key, into)

    with opening([Counting(store=far.store)]) as cache:
        shard = chain(4).model.shards[0]
        engines = [Engine(16) for _ in range(8)]
        hits = [cache.lookup(chain(4), f"r{n}") for n in range(8)]
        jobs = [
            cache.retrieve(hit, shard, range(4), engine.pages, list(range(16)))
            for hit, engine in zip(hits, engines, strict=True)
        ]
        assert all(job.wait(5).ok_chunks == 4 for job in jobs)
        assert all(engine.holds(chain(4), shard, n, n * BLOCKS) for engine in engines for n in range(4))
        assert len(reads) == 4


def test_through_writes_at_once_second_use_only_what_was_used_again(opening):
    backend = DictBackend()
    with opening([backend], write="second_use") as cache:
        store(cache, chain(3))
        store(cache, chain(3, seed=1))
        assert until(lambda: not pool_of(cache).tiers[0].status().queued_stores)
        assert len(backend.store.records) == 0
        load(cache, chain(3))
        assert until(lambda: len(backend.store.records) == 3)
        assert cache.drain(5), "drain saves the rest"
        assert len(backend.store.records) == 6


def test_on_evict_saves_what_leaves_and_nothing_is_lost(opening):
    backend = DictBackend()
    with opening([backend], write="on_evict", chunks=16) as cache:
        for seed in range(40):
            store(cache, chain(1, seed=seed))
            assert pool_of(cache).tiers[0].drain(5)
        assert counted(cache, "drops") == 0
        assert all(load(cache, chain(1, seed=seed))[1].ok_chunks == 1 for seed in range(40))


def test_two_caches_that_share_a_store_see_each_others_records_after_they_were_asked_for(opening):
    class Shared(DictBackend):
        api_version = (1, 0)
        traits = DictBackend.traits.__class__(shared=True)

    first = Shared()
    with opening([first]) as ours, open_local([Shared(store=first.store)]) as theirs:
        store(ours, chain(5))
        assert ours.drain(5)
        hit = theirs.lookup(chain(8), "r")
        assert hit.pending
        assert hit.chunks == 0
        hit = theirs.lookup_answered(chain(8), "r", timeout_s=5)
        assert (hit.pending, hit.chunks) == (False, 5)
        theirs.release("r")
        assert load(theirs, chain(8))[1].ok_chunks == 5
        assert counted(theirs, "lookups", result="partial") == 2


def test_stores_leave_a_share_of_the_slots_to_loads():
    far = DictBackend()
    with open_local([far]) as cache:
        store(cache, chain(2, seed=5))
        assert cache.drain(5)
    with open_local([DictBackend(store=far.store)], chunks=40, extent_nbytes=RECORD) as cache:
        for seed in range(100, 140):
            prompt = chain(1, seed=seed)
            store(cache, prompt)
            cache.lookup(prompt, f"keeps {seed}")
        assert cache._pool.usage()[1] == 38
        assert cache.metrics.count("drops", reason="no room") == 2
        assert load(cache, chain(2, seed=5))[1].ok_chunks == 2


class Sluggish(CpuDevice):
    """Its next copies have not ended when they should have."""

    api_version = (1, 0)

    def __init__(self):
        super().__init__()
        self.late = 1
        self.ended = threading.Event()

    def gather(self, *args, **settings):
        return self._fence(super().gather(*args, **settings))

    def scatter(self, *args, **settings):
        return self._fence(super().scatter(*args, **settings))

    def _fence(self, fence):
        if not self.late:
            return fence
        self.late -= 1
        ended = self.ended

        class Late(Fence):
            def done(self):
                return ended.is_set()

            def wait(self, timeout_s=None):
                return False

            def make_stream_wait(self, stream):
                return None

        return Late()


@pytest.mark.parametrize("kind", ["store", "retrieve"])
def test_slots_of_a_copy_that_a_device_does_not_end_are_nobodys_until_it_does(opening, kind):
    device = Sluggish()
    with opening(chunks=4) as cache:
        if kind == "retrieve":
            store(cache, chain(3))
        real, cache._device = cache._device, device
        engine = Engine()
        shard = chain(3).model.shards[0]
        ids = engine.compute(chain(3), shard, range(3))
        if kind == "store":
            result = cache.store(chain(3), shard, range(3), engine.pages, ids).wait(5)
        else:
            hit = cache.lookup(chain(3), "r")
            result = cache.retrieve(hit, shard, range(3), engine.pages, ids).wait(5)
            cache.release("r")
        assert result.ok_chunks == 0
        assert "not done in" in result.failed[0][2]
        assert store(cache, chain(4, seed=1)).ok_chunks == 1, "three are not for others"
        device.ended.set()
        store(cache, chain(1, seed=2))
        assert held(cache) == 0
        assert store(cache, chain(4, seed=3)).ok_chunks == 4
        cache._device = real


def test_a_drain_behind_a_full_queue_writes_what_found_no_room_in_it(monkeypatch):
    """What is queued goes first: tried at once, the rest would be refused, and the drain take that for a fault."""
    go = threading.Event()

    class Gated(DictBackend):
        def put(self, key, data):
            assert go.wait(10)
            super().put(key, data)

    backend = Gated()
    with open_local([backend], max_queued_nbytes=2 * RECORD) as cache:
        for n in range(12):
            store(cache, chain(12), range(n, n + 1))
        (tier,) = cache._pool.tiers
        wait = tier.drain

        def drain(timeout_s):
            go.set()
            return wait(timeout_s)

        monkeypatch.setattr(tier, "drain", drain)
        assert cache.drain(10)
        assert not set(chain(12).keys(chain(12).model.shards[0])) - set(backend.store.records)


def test_what_is_being_removed_is_not_found_again_before_it_is_gone():
    """A probe of a shared store sees records that wait for their deletion: learnt from it, they would stay for good."""
    hold, asked = threading.Event(), threading.Event()

    class Shared(DictBackend):
        traits = Traits(shared=True)

        def remove(self, key):
            assert asked.wait(10)
            return super().remove(key)

        def contains_prefix(self, keys, *, timeout_s):
            try:
                return super().contains_prefix(keys, timeout_s=timeout_s)
            finally:
                hold.set()

    backend = Shared()
    with open_local([backend]) as cache:
        prompt = chain(4)
        store(cache, prompt)
        assert cache.drain(10)
        cache._pool.clear(b"")
        assert cache.lookup_answered(prompt, "r", timeout_s=10).chunks == 0
        assert hold.is_set(), "the store was asked while the records were in it"
        asked.set()
        assert cache.drain(10)
        assert not set(prompt.keys(prompt.model.shards[0])) & set(backend.store.records)
        assert store(cache, prompt).ok_chunks == 4  # and it can be stored again
        assert cache.drain(10)
        assert set(prompt.keys(prompt.model.shards[0])) <= set(backend.store.records)
