"""Copies that a device does not end in time: their slots are nobody else's until they have, and then they are."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator

import pytest
from daemons import DaemonProcess
from tiny import BLOCKS, RECORD, Engine, chain, open_local, store, until

from lmcache_core import LocalCache, late, pooled
from lmcache_core.client.cache import connect
from lmcache_core.devices.cpu import CpuDevice
from lmcache_core.pooled import Mapped


class Slow:
    """The fence of a copy that ends when it is told to."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def done(self) -> bool:
        return self.ended.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        return self.ended.wait(timeout_s)

    def make_stream_wait(self, stream: object) -> None:
        return None


class SlowDevice(CpuDevice):
    def __init__(self) -> None:
        super().__init__()
        self.fences: list[Slow] = []
        self.registered: set[int] = set()

    def register(self, address: int, nbytes: int) -> None:
        self.registered.add(address)

    def unregister(self, address: int, nbytes: int) -> None:
        self.registered.discard(address)

    def gather(self, *arguments, **options):
        super().gather(*arguments, **options)
        self.fences.append(Slow())
        return self.fences[-1]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDevice]:
    monkeypatch.setattr(pooled, "_FENCE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(pooled, "_LOOK_INTERVAL_S", 0.01)
    yield SlowDevice()
    late._unending.clear()
    gc.collect()  # a closed cache is a cycle, and holds what it could not give back


def slots(cache: LocalCache) -> int:
    """How many are not free."""
    return sum(extent.slots - len(extent.free) for extent in cache._pool.slab.extents.values())


def test_the_slots_of_a_late_copy_come_back_when_it_has_ended_though_nobody_asks_for_anything(device):
    with open_local(chunks=2, device=device) as cache:
        assert store(cache, chain(2)).failed == ((0, 2, "device: not done in 0.05 s"),)
        assert slots(cache) == 2
        assert store(cache, chain(2, seed=1)).failed == ((0, 2, "no room"),)
        device.fences[0].ended.set()
        assert until(lambda: slots(cache) == 0)


def test_whoever_waits_for_a_record_hears_when_its_copy_is_given_up_not_when_it_ends(device):
    with open_local(device=device) as cache:
        prompt, engine = chain(2), Engine()
        shard = prompt.model.shards[0]
        first = cache.store(prompt, shard, range(2), engine.pages, engine.compute(prompt, shard, range(2)))
        assert until(lambda: bool(device.fences))
        hit = cache.lookup(prompt, "r")
        second = cache.retrieve(hit, shard, range(2), engine.pages, list(range(2 * BLOCKS)))
        assert first.wait(10) is not None
        result = second.wait(10)
        assert result is not None, "it waits for a copy that nobody waits for any more"
        assert result.ok_chunks == 0
        assert slots(cache) == 2, "the device may still write there"
        device.fences[0].ended.set()
        assert until(lambda: slots(cache) == 0)


def test_close_waits_for_a_late_copy_before_its_memory_is_unpinned(device):
    with open_local(chunks=2, device=device) as cache:
        store(cache, chain(2))
        assert device.registered
        device.fences[0].ended.set()
    assert not device.registered
    assert not late._unending


def test_memory_that_a_device_never_lets_go_of_stays_pinned_and_mapped(device, caplog):
    with open_local(chunks=2, device=device) as cache:
        store(cache, chain(2))
    assert device.registered
    (copy,) = late._unending
    assert sum(record.nbytes for record in copy.records) < 2 * RECORD
    copy.records[0][:1] = b"x"
    assert "has not ended 1 copies" in caplog.text


def test_a_fence_that_raises_has_not_ended_and_ends_no_thread(device, monkeypatch):
    monkeypatch.setattr(late.log, "disabled", True)  # a log that is kept would keep the memory
    with open_local(chunks=2, device=device) as cache:
        store(cache, chain(1))
        fence, done = device.fences[0], device.fences[0].done
        asked = threading.Event()

        def raises() -> bool:
            asked.set()
            raise RuntimeError("the device is gone")

        fence.done = raises
        assert asked.wait(10)
        assert slots(cache) == 1
        fence.done = done
        fence.ended.set()
        assert until(lambda: slots(cache) == 0)


class KillingDevice(CpuDevice):
    """Its first copy ends when the daemon's memory has been let go of."""

    def __init__(self, kill: Callable[[], None]) -> None:
        super().__init__()
        self.kill = kill
        self.gone = threading.Event()
        self.copies = 0
        self.registered: list[int] = []

    def register(self, address: int, nbytes: int) -> None:
        self.registered.append(address)

    def unregister(self, address: int, nbytes: int) -> None:
        self.registered.remove(address)

    def gather(self, *arguments, **options):
        self.copies += 1
        if self.copies == 1:
            self.kill()
            assert self.gone.wait(60)
        return super().gather(*arguments, **options)


def test_memory_of_a_dead_daemon_is_not_pinned_again_by_what_a_store_still_copies(tmp_path, monkeypatch):
    monkeypatch.setattr(pooled, "_COPY_NBYTES", 1)  # one chunk at a time
    with DaemonProcess(tmp_path / "s") as daemon:
        device = KillingDevice(daemon.kill)
        with connect(tmp_path / "s", device, connect_timeout_s=20.0, call_timeout_s=20.0) as cache:
            drop = cache._pool.on_drop

            def dropped(extent: Mapped) -> None:
                drop(extent)
                device.gone.set()

            cache._pool.on_drop = dropped
            result = store(cache, chain(3))
            assert device.copies == 3
            assert result.ok_chunks == 0
            assert until(lambda: not device.registered)
            assert not cache._registered
            daemon.start()


def test_memory_of_a_dead_daemon_is_unpinned_when_a_late_copy_has_ended(device, tmp_path):
    with (
        DaemonProcess(tmp_path / "s") as daemon,
        connect(tmp_path / "s", device, connect_timeout_s=20.0, call_timeout_s=20.0) as cache,
    ):
        assert store(cache, chain(1)).ok_chunks == 0
        daemon.kill()
        assert until(lambda: all(extent.dropped for extent in cache._registered))
        assert device.registered
        for fence in device.fences:
            fence.ended.set()
        assert until(lambda: not device.registered)
        daemon.start()
