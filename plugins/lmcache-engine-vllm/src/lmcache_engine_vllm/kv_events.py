"""What routers are told of stored chunks: vLLM's own events, in vLLM's own block hashes."""

from __future__ import annotations

from typing import Any, Final

from vllm.distributed.kv_events import AllBlocksCleared, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

MEDIUM: Final = "CPU"
MAX_EVENTS: Final = 65_536


class KVEvents:
    """Of one scheduler; told on when vLLM next asks.  What leaves the cache later is not announced: it is a hint."""

    def __init__(self, hash_tokens: int) -> None:
        self._hash_tokens = hash_tokens
        self._pending: dict[int, Any] = {}
        self._events: list[Any] = []

    def storing(self, store_id: int, request: Any, start: int, stop: int) -> None:
        """The tokens from `start` to `stop` of a request are being stored."""
        hashes = request.block_hashes
        first, last = start // self._hash_tokens, stop // self._hash_tokens
        if last > len(hashes):
            return
        lora = request.lora_request
        self._pending[store_id] = BlockStored(
            block_hashes=[maybe_convert_block_hash(each) for each in hashes[first:last]],
            parent_block_hash=maybe_convert_block_hash(hashes[first - 1]) if first else None,
            token_ids=list(request.all_token_ids[start:stop]),
            block_size=self._hash_tokens,
            lora_id=lora.adapter_id if lora is not None else None,
            medium=MEDIUM,
            lora_name=lora.name if lora is not None else None,
        )

    def stored(self, store_id: int, *, whole: bool) -> None:
        """That store has ended on every rank; it is announced if nothing of it was dropped."""
        event = self._pending.pop(store_id, None)
        if whole and event is not None and len(self._events) < MAX_EVENTS:
            self._events.append(event)

    def cleared(self) -> None:
        self._events.append(AllBlocksCleared())

    def take(self) -> list[Any]:
        events, self._events = self._events, []
        return events
