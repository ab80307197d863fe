"""Bugs to plant, one at a time: what core would do if one line of it were wrong.  The simulation must notice each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import pytest

from lmcache_core import frame, transfer
from lmcache_core.breaker import Breaker, BreakerState
from lmcache_core.cache import Job
from lmcache_core.events import Events
from lmcache_core.index import Index
from lmcache_core.leases import Found, Leases
from lmcache_core.ledger import Ledger
from lmcache_core.metrics import Metrics
from lmcache_core.pool import Pool
from lmcache_core.pooled import PooledCache
from lmcache_core.tier import Tier
from lmcache_core.transfer import Task, TransferPool

Patch = pytest.MonkeyPatch


@dataclass(frozen=True, slots=True)
class Mutant:
    """`plant` breaks core; the simulation of `seed` is one that notices."""

    plant: Callable[[Patch], None]
    seed: int


def a_fault_of_a_write_leaves_its_record_held(patch: Patch) -> None:
    def stored(self: Any, item: Any, reason: str, in_use: bool) -> None:
        if not reason:
            real(self, item, reason, in_use)

    real = Pool._stored
    patch.setattr(Pool, "_stored", stored)


def a_write_that_returns_late_leaves_its_record_held(patch: Patch) -> None:
    patch.setattr(Pool, "_returned", lambda self, item: None)


def a_circuit_never_half_opens(patch: Patch) -> None:
    patch.setattr(Breaker, "allow", lambda self: self.state is BreakerState.CLOSED)


def a_trial_is_used_up_by_what_tries_nothing(patch: Patch) -> None:
    patch.setattr(Breaker, "untried", lambda self: None)


def a_slot_is_reused_while_a_backend_reads_into_it(patch: Patch) -> None:
    def loaded(self: Any, item: Any, found: Any, reason: str, in_use: bool) -> None:
        real(self, item, found, reason, False)

    real = Pool._loaded
    patch.setattr(Pool, "_loaded", loaded)
    patch.setattr(Pool, "_load_returned", lambda self, item: None)


def a_slot_is_reused_while_a_backend_writes_it(patch: Patch) -> None:
    def stored(self: Any, item: Any, reason: str, in_use: bool) -> None:
        real(self, item, reason, False)

    real = Pool._stored
    patch.setattr(Pool, "_stored", stored)
    patch.setattr(Pool, "_returned", lambda self, item: None)


def a_slot_is_reused_while_the_device_copies_it(patch: Patch) -> None:
    def give_up(self: Any, entries: Any, reason: str) -> Callable[[], None]:
        self.abort(entries, reason)
        return lambda: None

    patch.setattr(Pool, "give_up", give_up)


def a_late_copy_is_noticed_at_the_next_call_only(patch: Patch) -> None:
    patch.setattr(PooledCache, "_next_item", lambda self: self._ready.get())


def what_is_leased_may_be_evicted(patch: Patch) -> None:
    patch.setattr(Pool, "_is_held", lambda self, key: False)
    patch.setattr(Pool, "_evict_together", lambda self, chosen: _evict_all(self, chosen))


def _evict_all(pool: Pool, chosen: Any) -> int:
    pool._evict([pool._index.entries[key] for key in chosen])
    return len(chosen)


def a_pin_ends_like_the_oldest_lease(patch: Patch) -> None:
    def hold_resident(self: Any, chain: Any, request: str) -> int:
        with self._lock:
            self._end(request)
            lease = self._open(chain, request)
            lease.touched, lease.probed, lease.counted = float("inf"), True, True
            resident, lengths = self._find(lease)
            lease.found = Found(resident, lengths, False, lease.lease_id)
            return int(resident)

    patch.setattr(Leases, "hold_resident", hold_resident)


def a_refused_store_is_not_counted(patch: Patch) -> None:
    def add(self: Any, name: str, count: int = 1, **labels: str) -> None:
        if labels.get("reason") != "no room":
            real(self, name, count, **labels)

    real = Metrics.add
    patch.setattr(Metrics, "add", add)


def a_failed_load_is_counted_as_one_that_went_well(patch: Patch) -> None:
    def add(self: Any, name: str, count: int = 1, **labels: str) -> None:
        if name == "loads" and labels["result"] == "failed":
            labels["result"] = "ok"
        real(self, name, count, **labels)

    real = Metrics.add
    patch.setattr(Metrics, "add", add)


def an_eviction_below_has_no_event(patch: Patch) -> None:
    def report(self: Any, keys: list[Any], reason: str) -> None:
        if keys:
            self._metrics.add("evictions", len(keys), tier=self.name, reason=reason)

    patch.setattr(Tier, "_report_evicted", report)


def a_queued_load_has_no_deadline(patch: Patch) -> None:
    def watch_for(watched: Any, task: Task) -> None:
        if task.queued_nbytes:  # a store
            real(watched, task)

    real = transfer._watch_for
    patch.setattr(transfer, "_watch_for", watch_for)


def an_idle_watch_sleeps_longer_than_a_deadline(patch: Patch) -> None:
    def watch(self: Any) -> None:
        wait = self._wake_watch.wait
        self._wake_watch.wait = lambda timeout: wait(10 * timeout)
        real(self)

    real = TransferPool._watch
    patch.setattr(TransferPool, "_watch", watch)


def a_queue_of_stores_has_no_bound(patch: Patch) -> None:
    def init(self: Any, *arguments: Any, **options: Any) -> None:
        real(self, *arguments, **options | {"max_store_nbytes": 1 << 40})

    real = TransferPool.__init__
    patch.setattr(TransferPool, "__init__", init)


def stuck_threads_are_replaced_without_end(patch: Patch) -> None:
    patch.setattr(TransferPool, "_replace", lambda self, loads_only: self._spawn(loads_only=loads_only))


def close_forgets_what_is_queued(patch: Patch) -> None:
    def close(self: Any, timeout_s: float) -> bool:
        self._loads.clear()
        self._stores.clear()
        return bool(real(self, timeout_s))

    real = TransferPool.close
    patch.setattr(TransferPool, "close", close)


def whoever_waits_for_a_record_is_not_told_that_it_failed(patch: Patch) -> None:
    def fail(self: Any, entry: Any, reason: str, *, give_slot: bool) -> None:
        with self._lock:
            entry.waiters = entry.waiters[:1]
        real(self, entry, reason, give_slot=give_slot)

    real = Pool._fail
    patch.setattr(Pool, "_fail", fail)


def whoever_asked_is_not_told_that_a_probe_was_answered(patch: Patch) -> None:
    def answered(self: Any, lease: Any) -> None:
        lease.on_answered = None
        real(self, lease)

    real = Leases._probe_answered
    patch.setattr(Leases, "_probe_answered", answered)


def the_blocks_of_a_store_are_given_back_before_they_are_copied(patch: Patch) -> None:
    def store(self: Any, *arguments: Any, **options: Any) -> Job:
        job = real(self, *arguments, **options)
        job._set_gathered()
        return job

    real = PooledCache.store
    patch.setattr(PooledCache, "store", store)


def a_payload_is_not_verified(patch: Patch) -> None:
    patch.setattr(frame, "payload_checksum", lambda payload: 0)


def a_record_of_another_key_is_taken(patch: Patch) -> None:
    def verify(record: Any, nbytes: int, key: Any, fingerprint: bytes, raw_nbytes: int) -> Any:
        return real(record, nbytes, frame.parse(record).key, fingerprint, raw_nbytes)

    real = frame.verify
    patch.setattr(frame, "verify", verify)


def no_room_is_kept_for_what_is_being_written(patch: Patch) -> None:
    def reserve(self: Any, nbytes: int, *arguments: Any) -> Any:
        gone, fits = real_reserve(self, nbytes, *arguments)
        if fits and nbytes:
            real_written(self, nbytes, *arguments[:1])
        return gone, fits

    real_reserve, real_written, real_learn = Ledger.reserve, Ledger.written, Ledger.learn_manifest
    patch.setattr(Ledger, "reserve", reserve)
    patch.setattr(Ledger, "written", lambda self, nbytes, *rest: real_written(self, 0, *rest))
    patch.setattr(
        Ledger, "learn_manifest", lambda self, shard_id, nbytes, reserved=0: real_learn(self, shard_id, nbytes)
    )


def writes_at_once_have_a_quota_each(patch: Patch) -> None:
    class Nothing(Counter[bytes]):
        def items(self) -> Any:
            return ()

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        real(self, *arguments, **options)
        self._coming = Nothing()

    real = Ledger.__init__
    patch.setattr(Ledger, "__init__", init)


def a_manifest_takes_no_room(patch: Patch) -> None:
    def make_room(self: Any, nbytes: int, shard_id: bytes = b"", at_least: int = 0) -> bool:
        if nbytes and not shard_id:
            self.ledger.used_nbytes += nbytes
            self.ledger._coming[b""] += nbytes
            return True
        return bool(real(self, nbytes, shard_id, at_least))

    real = Tier._make_room
    patch.setattr(Tier, "_make_room", make_room)


def a_lease_that_ends_keeps_its_pins_below(patch: Patch) -> None:
    def let_go(self: Any, lease: Any) -> None:
        self._index.unhold(lease.entries)
        lease.entries, lease.below = [], []

    patch.setattr(Leases, "_let_go", let_go)


def a_prefetch_keeps_its_lease(patch: Patch) -> None:
    def end(self: Any, transfer: Any) -> None:
        kind, transfer.kind = transfer.kind, "" if transfer.kind == "prefetch" else transfer.kind
        real(self, transfer)
        transfer.kind = kind

    real = PooledCache._end
    patch.setattr(PooledCache, "_end", end)


def an_evictable_record_is_counted_twice(patch: Patch) -> None:
    def unhold(self: Any, entries: Any) -> None:
        entries = list(entries)
        real(self, entries)
        for entry in entries:
            if not entry.holds and entry.alone:
                self._evictable[entry.slot.nbytes] += 1

    real = Index.unhold
    patch.setattr(Index, "unhold", unhold)


def events_are_lost_when_many_come(patch: Patch) -> None:
    def init(self: Any, *arguments: Any) -> None:
        real(self, *arguments)
        self._queue._maxsize = 1

    real = Events.__init__
    patch.setattr(Events, "__init__", init)


MUTANTS: Final = (
    Mutant(a_circuit_never_half_opens, 1),
    Mutant(a_failed_load_is_counted_as_one_that_went_well, 0),
    Mutant(a_fault_of_a_write_leaves_its_record_held, 0),
    Mutant(a_late_copy_is_noticed_at_the_next_call_only, 7),
    Mutant(a_lease_that_ends_keeps_its_pins_below, 8),
    Mutant(a_manifest_takes_no_room, 54),
    Mutant(a_payload_is_not_verified, 19),
    Mutant(a_pin_ends_like_the_oldest_lease, 57),
    Mutant(a_prefetch_keeps_its_lease, 4),
    Mutant(a_queue_of_stores_has_no_bound, 0),
    Mutant(a_queued_load_has_no_deadline, 19),
    Mutant(a_record_of_another_key_is_taken, 21),
    Mutant(a_refused_store_is_not_counted, 7),
    Mutant(a_slot_is_reused_while_a_backend_reads_into_it, 19),
    Mutant(a_slot_is_reused_while_a_backend_writes_it, 46),
    Mutant(a_slot_is_reused_while_the_device_copies_it, 8),
    Mutant(a_trial_is_used_up_by_what_tries_nothing, 1),
    Mutant(a_write_that_returns_late_leaves_its_record_held, 18),
    Mutant(an_evictable_record_is_counted_twice, 0),
    Mutant(an_eviction_below_has_no_event, 0),
    Mutant(an_idle_watch_sleeps_longer_than_a_deadline, 19),
    Mutant(close_forgets_what_is_queued, 30),
    Mutant(events_are_lost_when_many_come, 0),
    Mutant(no_room_is_kept_for_what_is_being_written, 212),
    Mutant(stuck_threads_are_replaced_without_end, 44),
    Mutant(the_blocks_of_a_store_are_given_back_before_they_are_copied, 0),
    Mutant(what_is_leased_may_be_evicted, 8),
    Mutant(whoever_asked_is_not_told_that_a_probe_was_answered, 3),
    Mutant(whoever_waits_for_a_record_is_not_told_that_it_failed, 19),
    Mutant(writes_at_once_have_a_quota_each, 212),
)
