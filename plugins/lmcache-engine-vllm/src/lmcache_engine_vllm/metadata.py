"""What the halves of the connector tell each other through vLLM: plain data that is pickled with every step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from lmcache_core import Chain, Hit

from .geometry import Rectangle
from .identity import Identity


@dataclass(frozen=True, slots=True)
class Part:
    """One layer group's share of a transfer: chunks from `start` on, into or out of these blocks."""

    group: int
    start: int
    stop: int
    block_ids: tuple[int, ...]
    skip_blocks: int = 0
    """Leading blocks of the first chunk that are not touched."""


@dataclass(frozen=True, slots=True)
class Load:
    """Chunks that a request waits for."""

    request_id: str
    hit: Hit
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Store:
    """Chunks that are complete after this step; their blocks stay as they are until every rank has let them go."""

    store_id: int
    request_id: str
    chain: Chain
    parts: tuple[Part, ...]


@dataclass(slots=True)
class StepMetadata(KVConnectorMetadata):
    """From the scheduler to the workers, once per step."""

    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    idle_s: float = 0.0
    """This step computes nothing: the worker may wait so long for a transfer to end."""


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """From the workers back, merged over the ranks."""

    stored: dict[int, int] = field(default_factory=dict)
    """store_id -> ranks that are done with its blocks."""
    dropped: set[int] = field(default_factory=set)
    """Stores of which not everything is there."""
    failed: dict[str, int] = field(default_factory=dict)
    """Request -> the first chunk that could not be loaded."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        assert isinstance(other, WorkerReport)
        for store_id, ranks in other.stored.items():
            self.stored[store_id] = self.stored.get(store_id, 0) + ranks
        self.dropped |= other.dropped
        for request_id, chunk in other.failed.items():
            self.failed[request_id] = min(chunk, self.failed.get(request_id, chunk))
        return self


@dataclass(frozen=True, slots=True)
class RankCard(KVConnectorHandshakeMetadata):
    """What a rank says of itself once, after its KV was allocated; `problem` says why it cannot be cached."""

    identity: Identity | None
    rectangles: tuple[Rectangle, ...]
    problem: str = ""
