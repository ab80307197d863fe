"""The hook plugin `kv-events`: tells cache-aware routers what a cache has, in vLLM's format."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Final

from lmcache_core import Chain, ChunkKey, JobResult, hookimpl

from .format import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, encode
from .publisher import Publisher

ENDPOINT: Final = "LMCACHE_KV_EVENTS"
TOPIC: Final = "LMCACHE_KV_EVENTS_TOPIC"
DEFAULT_ENDPOINT: Final = "tcp://127.0.0.1:5557"
HOST: Final = "CPU"
"""The medium of the tier `host` (host memory); another tier's is its name in upper case."""
_HOST_TIERS: Final = frozenset(("host", "staging"))
_SHARD_ID_NBYTES: Final = 16
_MAX_HASHES: Final = 4096
"""Of one event; more are split."""


class KvEventHooks:
    """One for each cache, called on its event thread.  `send` takes the batches; by default a `Publisher`'s."""

    api_version = (1, 0)

    def __init__(self, send: Callable[[bytes], None] | None = None, clock: Callable[[], float] = time.time) -> None:
        self._publisher: Publisher | None = None
        self._send = send
        self._clock = clock
        self._stopped = False

    @property
    def endpoint(self) -> str:
        """Where batches are published; empty before that, or if `send` was given."""
        return self._publisher.endpoint if self._publisher is not None else ""

    @hookimpl
    def lmcache_cache_started(self) -> None:
        self._open()

    @hookimpl
    def lmcache_prompt_stored(self, chain: Chain, span: range, tokens: Sequence[int], result: JobResult) -> None:
        failed = {chunk for start, stop, _ in result.failed for chunk in range(start, stop)}
        size = chain.model.family.chunk_tokens
        events: list[BlockStored] = []
        for part in _runs([chunk for chunk in span if chunk not in failed]):
            known = tokens[part.start * size : part.stop * size]
            events.append(
                BlockStored(
                    block_hashes=list(chain.digests[part.start : part.stop]),
                    parent_block_hash=chain.digests[part.start - 1] if part.start else None,
                    token_ids=[int(token) for token in known] if len(known) == len(part) * size else [],
                    block_size=size,
                    lora_id=None,
                    medium=HOST,
                    lora_name=chain.model.family.adapter or None,
                )
            )
        self._publish(events)

    @hookimpl
    def lmcache_chunks_stored(self, tier: str, keys: Sequence[ChunkKey]) -> None:
        hashes = _digests(keys)
        events = [
            BlockStored(hashes[at : at + _MAX_HASHES], None, [], 0, None, _medium(tier), None)
            for at in range(0, len(hashes), _MAX_HASHES)
        ]
        self._publish(events)

    @hookimpl
    def lmcache_chunks_evicted(self, tier: str, keys: Sequence[ChunkKey]) -> None:
        hashes, medium = _digests(keys), _medium(tier)
        self._publish(
            [BlockRemoved(hashes[at : at + _MAX_HASHES], medium) for at in range(0, len(hashes), _MAX_HASHES)]
        )

    @hookimpl
    def lmcache_cleared(self, shard_id: bytes) -> None:
        if not shard_id:
            self._publish([AllBlocksCleared()])

    @hookimpl
    def lmcache_cache_stopping(self) -> None:
        self._stopped = True
        if self._publisher is not None:
            self._publisher.close()

    def _open(self) -> None:
        """Bind the endpoint: not when the plugin is only loaded to be looked at.  One that is taken is tried again."""
        if self._send is None and not self._stopped:
            endpoint = os.environ.get(ENDPOINT) or DEFAULT_ENDPOINT
            self._publisher = Publisher(endpoint, os.environ.get(TOPIC, ""))
            self._send = self._publisher.send

    def _publish(self, events: Sequence[BlockStored | BlockRemoved | AllBlocksCleared]) -> None:
        self._open()
        if events and self._send is not None and not self._stopped:
            self._send(encode(EventBatch(self._clock(), list(events))))


def _medium(tier: str) -> str:
    return HOST if tier in _HOST_TIERS else tier.upper()


def _digests(keys: Sequence[ChunkKey]) -> list[bytes | int]:
    """Each chunk once, whatever number of records it has."""
    return list(dict.fromkeys(bytes(key[_SHARD_ID_NBYTES:]) for key in keys))


def _runs(chunks: Sequence[int]) -> list[range]:
    """Neighbours joined, at most so many at a time."""
    runs: list[range] = []
    for chunk in chunks:
        if runs and runs[-1].stop == chunk and len(runs[-1]) < _MAX_HASHES:
            runs[-1] = range(runs[-1].start, chunk + 1)
        else:
            runs.append(range(chunk, chunk + 1))
    return runs
