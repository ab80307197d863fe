"""Counters of the connector, for vLLM's log line and its Prometheus metrics."""

from __future__ import annotations

from typing import Final

COUNTERS: Final = {
    "lookups": "Requests that were looked up.",
    "lookup_tokens": "Prompt tokens that were looked up.",
    "late_lookups": "Lookups that were not answered in time: taken for misses.",
    "hits": "Requests for which something was loaded.",
    "hit_tokens": "Tokens that were loaded instead of computed.",
    "failed_loads": "Loads of which a part failed and was computed.",
    "load_seconds": "Time from the allocation of blocks to the end of loads.",
    "loaded_bytes": "Bytes copied into the engine's KV cache.",
    "stored_chunks": "Chunks stored by this engine.",
    "skipped_chunks": "Chunks that were there already.",
    "dropped_chunks": "Chunks that were not stored: no room, or no daemon.",
    "stored_bytes": "Bytes copied out of the engine's KV cache.",
}


class Stats:
    """What was counted since the last `take`."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}

    def add(self, **counts: float) -> None:
        for name, count in counts.items():
            if count:
                self._counts[name] = self._counts.get(name, 0) + count

    def take(self) -> dict[str, float]:
        counts, self._counts = self._counts, {}
        return counts
