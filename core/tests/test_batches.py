"""How a tier groups records into calls of its backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from test_sealing import Inverted
from tiny import RECORD, chain, load, open_local, store

from lmcache_core import BackendError, ChunkKey, GetResult, tier
from lmcache_core.testing.dict_backend import DictBackend


class Counting(DictBackend):
    """Says how many records each call had."""

    def __init__(self, batch_nbytes: int | None) -> None:
        super().__init__()
        self.traits = replace(type(self).traits, batch_nbytes=batch_nbytes, io_threads=1)  # type: ignore[misc]
        self.gets: list[int] = []
        self.puts: list[int] = []

    def get_many(self, keys: Sequence[ChunkKey], into: Sequence[memoryview], *, timeout_s: float) -> list[GetResult]:
        self.gets.append(len(keys))
        return super().get_many(keys, into, timeout_s=timeout_s)

    def put_many(
        self, keys: Sequence[ChunkKey], data: Sequence[memoryview], *, timeout_s: float
    ) -> list[BackendError | None]:
        self.puts.append(len(keys))
        return super().put_many(keys, data, timeout_s=timeout_s)


def calls(batch_nbytes: int | None, **settings: Any) -> tuple[list[int], list[int]]:
    """Records of each put and of each get, of 10 chunks that are stored and then loaded from the backend."""
    backend = Counting(batch_nbytes)
    with open_local([backend], chunks=10, **settings) as cache:
        store(cache, chain(10))
        assert cache.drain(10)
        store(cache, chain(10, seed=1))  # memory has room for one of them
        assert cache.drain(10)
        assert load(cache, chain(10))[1].ok_chunks == 10
        return sorted(backend.puts[: len(backend.puts) // 2], reverse=True), sorted(backend.gets, reverse=True)


def test_a_call_has_as_many_records_as_the_backend_likes() -> None:
    assert calls(4 * RECORD) == ([4, 4, 2], [4, 4, 2])
    assert calls(1 << 30) == ([10], [10])


def test_loads_are_in_parts_for_all_threads_where_the_backend_does_not_care(monkeypatch: pytest.MonkeyPatch) -> None:
    assert calls(None) == ([10], [10])  # too little for parts
    monkeypatch.setattr(tier, "_LEAST_PART_NBYTES", RECORD)
    monkeypatch.setattr(tier, "_PARTS_PER_THREAD", 3)
    assert calls(None) == ([10], [3, 3, 3, 1])
    monkeypatch.setattr(tier, "_BATCH_NBYTES", 2 * RECORD)
    assert calls(None) == ([2] * 5, [2] * 5)


def test_a_record_that_is_larger_than_a_batch_has_a_call_of_its_own() -> None:
    assert calls(RECORD - 1) == ([1] * 10, [1] * 10)


def test_a_group_of_stores_is_a_quarter_of_what_may_wait_lest_it_is_refused_as_a_whole() -> None:
    puts, gets = calls(1 << 30, max_queued_nbytes=20 * RECORD)
    assert puts == [5, 5]
    assert gets == [10]


def test_encoded_records_are_read_in_groups_of_what_a_thread_has_staging_memory_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tier, "_STAGED_NBYTES", 3 * RECORD)
    puts, gets = calls(1 << 30, codec=Inverted(), codec_name="inverted")
    assert puts == [1] * 10  # each is encoded in its turn
    assert gets == [3, 3, 3, 1]
