"""KV events as a subscriber of vLLM's would read them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from lmcache_core import (
    Chain,
    ChunkKey,
    Family,
    Group,
    GroupKind,
    JobResult,
    Layout,
    LocalCache,
    Model,
    Region,
    Shard,
    open_cache,
)
from lmcache_kv_events import ENDPOINT, TOPIC, KvEventHooks
from lmcache_kv_events.publisher import Publisher

WAIT_S = 60.0
LAYOUT = Layout(
    chunk_tokens=16,
    regions=(Region(name="kv", layers=1, block_tokens=16, block_nbytes=64, dtype="uint8", packing="test"),),
)
FAMILY = Family(model="told", weights="1", kv_dtype="uint8", chunk_tokens=16)
SHARD = Shard.of(FAMILY, LAYOUT, layers=(0, 1))
MODEL = Model(FAMILY, (Group(GroupKind.FULL, (SHARD,)),))


class Told:
    """What was published, as plain msgpack: the arrays that any subscriber sees."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []

    def __call__(self, batch: bytes) -> None:
        self.batches.append(msgspec.msgpack.decode(batch))

    @property
    def events(self) -> list[list[Any]]:
        return [event for batch in self.batches for event in batch[1]]


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def hooks(told: Told) -> KvEventHooks:
    return KvEventHooks(told, clock=lambda: 12.5)


def test_a_stored_prompt_is_told_with_hashes_parent_and_tokens(hooks: KvEventHooks, told: Told) -> None:
    chain = Chain.of(MODEL, range(50))
    hooks.lmcache_prompt_stored(chain, range(1, 3), np.arange(50, dtype=np.uint32), JobResult(1, "r", "store", 2))
    digests = chain.digests
    assert told.batches == [
        [12.5, [["BlockStored", [digests[1], digests[2]], digests[0], list(range(16, 48)), 16, None, "CPU", None]]]
    ]


def test_what_was_not_stored_is_not_told_and_tokens_only_where_they_are_known(hooks: KvEventHooks, told: Told) -> None:
    chain = Chain.of(MODEL, range(16 * 5))
    result = JobResult(1, "r", "store", 4, failed=((2, 3, "no room"),))
    hooks.lmcache_prompt_stored(chain, range(5), np.arange(32, dtype=np.uint32), result)
    first, second = told.events
    assert first[1:4] == [list(chain.digests[:2]), None, list(range(32))]
    assert second[1:4] == [list(chain.digests[3:]), chain.digests[2], []]


def test_records_of_one_chunk_are_one_hash_and_a_tier_is_a_medium(hooks: KvEventHooks, told: Told) -> None:
    digest, other = b"d" * 32, b"e" * 32
    keys = [ChunkKey(bytes([shard]) * 16 + d) for d in (digest, other) for shard in range(4)]
    hooks.lmcache_chunks_stored("disk", keys)
    hooks.lmcache_chunks_evicted("disk", keys[:4])
    hooks.lmcache_chunks_evicted("host", keys)
    assert told.events == [
        ["BlockStored", [digest, other], None, [], 0, None, "DISK", None],
        ["BlockRemoved", [digest], "DISK"],
        ["BlockRemoved", [digest, other], "CPU"],
    ]


def test_only_a_clear_of_everything_is_told_as_one(hooks: KvEventHooks, told: Told) -> None:
    hooks.lmcache_cleared(b"s" * 16)
    assert told.events == []
    hooks.lmcache_cleared(b"")
    assert told.events == [["AllBlocksCleared"]]


def test_no_event_is_larger_than_its_bound(hooks: KvEventHooks, told: Told) -> None:
    keys = [ChunkKey(bytes(16) + number.to_bytes(32, "big")) for number in range(10_000)]
    hooks.lmcache_chunks_evicted("host", keys)
    assert [len(event[1]) for event in told.events] == [4096, 4096, 1808]


@pytest.fixture
def subscriber() -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
        socket.setsockopt(zmq.LINGER, 0)
        yield socket


def subscribe(socket: zmq.Socket[bytes], publisher: Publisher, topic: bytes) -> None:
    """Connect, and return when the publisher knows of it."""
    socket.connect(publisher.endpoint)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.setsockopt(zmq.RCVTIMEO, 20)
    while True:
        publisher.send(b"hello")
        try:
            socket.recv_multipart()
            break
        except zmq.Again:
            continue
    while True:  # the hellos that are still on their way
        try:
            socket.recv_multipart()
        except zmq.Again:
            break
    socket.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))


def test_a_subscriber_hears_what_a_cache_stores_evicts_and_clears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subscriber: zmq.Socket[bytes]
) -> None:
    monkeypatch.setenv(ENDPOINT, "tcp://127.0.0.1:*")
    monkeypatch.setenv(TOPIC, "kv")
    made: list[KvEventHooks] = []
    real = KvEventHooks.__init__

    def remembering(self: KvEventHooks, *args: Any) -> None:
        real(self, *args)
        made.append(self)

    monkeypatch.setattr(KvEventHooks, "__init__", remembering)
    file = tmp_path / "lmcache.yaml"
    tiers = "tiers: [{backend: memory, name: host, capacity: 1MiB}]"
    file.write_text(f"{{chunk_tokens: 16, device: cpu, plugins: {{hooks: [kv-events]}}, {tiers}}}")
    with open_cache(file) as cache:
        assert isinstance(cache, LocalCache)
        deadline = time.monotonic() + WAIT_S
        while not made[0].endpoint:  # it is opened on the event thread
            assert time.monotonic() < deadline
        publisher = made[0]._publisher
        assert publisher is not None
        subscribe(subscriber, publisher, b"kv")
        chain = cache.chain(range(40), MODEL)
        pages = [[np.zeros((2, 64), np.uint8)]]
        assert cache.store(chain, SHARD, range(2), pages, range(2)).wait(WAIT_S) is not None
        cache.evict(chain)
        cache._pool.clear(b"")
        messages = [subscriber.recv_multipart() for _ in range(3)]
        assert {topic for topic, _, _ in messages} == {b"kv"}
        numbers = [int.from_bytes(number, "big") for _, number, _ in messages]
        assert numbers == list(range(numbers[0], numbers[0] + 3))
        events = [event for _, _, batch in messages for event in msgspec.msgpack.decode(batch)[1]]
        assert events == [
            ["BlockStored", list(chain.digests), None, list(range(32)), 16, None, "CPU", None],
            ["BlockRemoved", list(chain.digests), "CPU"],
            ["AllBlocksCleared"],
        ]


def test_without_a_subscriber_nothing_is_kept_and_nobody_waits() -> None:
    publisher = Publisher("tcp://127.0.0.1:*")
    try:
        for _ in range(5000):
            publisher.send(bytes(1000))
    finally:
        publisher.close()
        publisher.close()


def test_a_plugin_that_is_only_loaded_binds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENDPOINT, "tcp://127.0.0.1:*")
    hooks = KvEventHooks()
    assert hooks.endpoint == ""
    hooks.lmcache_cache_started()
    assert hooks.endpoint.startswith("tcp://127.0.0.1:")
    hooks.lmcache_cache_stopping()
    hooks.lmcache_cleared(b"")  # what is told after the end goes nowhere
    hooks.lmcache_cache_stopping()


def test_an_endpoint_that_is_taken_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = Publisher("tcp://127.0.0.1:*")
    try:
        monkeypatch.setenv(ENDPOINT, publisher.endpoint)
        hooks = KvEventHooks()
        with pytest.raises(zmq.ZMQError):
            hooks.lmcache_cleared(b"")
    finally:
        publisher.close()
    hooks.lmcache_cleared(b"")
    assert hooks.endpoint
    hooks.lmcache_cache_stopping()


def test_an_endpoint_that_is_taken_is_an_error_at_once() -> None:
    publisher = Publisher("tcp://127.0.0.1:*")
    try:
        with pytest.raises(zmq.ZMQError):
            Publisher(publisher.endpoint)
    finally:
        publisher.close()
