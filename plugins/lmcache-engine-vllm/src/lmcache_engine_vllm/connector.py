"""vLLM's connector interface, and nothing else: each call goes to the half that lives in this process."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA

from lmcache_core import LocalCache, NamespaceError, RemoteCache, open_cache

from .fences import fence_now
from .geometry import check_groups, fitting_chunk, rectangles_of
from .identity import identity_of
from .kv_events import KVEvents
from .metadata import RankCard, StepMetadata, WorkerReport
from .metrics import ConnectorStats, PrometheusMetrics
from .pages import pages_of
from .private import PrivateDaemon, private_socket, wait_for_socket
from .scheduler import SchedulerHalf, cards_in_order
from .settings import read_config, read_settings
from .worker import Arrivals, WorkerHalf, report_of

log = logging.getLogger("vllm.lmcache")

_NOTHING: Final = Arrivals(set(), {}, set())


class LMCacheCoreConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps the KV of prompts in the node's daemon, or in one of the engine's own; see the README for its settings."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = read_settings(self._kv_transfer_config.kv_connector_extra_config or {})
        self._config = read_config(self._settings)
        self._daemon: PrivateDaemon | None = None
        self._worker: WorkerHalf | None = None
        self._scheduler: SchedulerHalf | None = None
        self._card: RankCard | None = None
        self._device = torch.device("cpu")
        self._arrivals = _NOTHING
        self._several_groups = len(kv_cache_config.kv_cache_groups) > 1
        self._socket = self._settings.socket or self._config.socket
        self._own_socket: Path | None = None
        if self._socket is None:
            self._own_socket = private_socket(str(self._kv_transfer_config.engine_id))
            self._socket = str(self._own_socket)
            if role == KVConnectorRole.WORKER and vllm_config.parallel_config.rank == 0:
                self._daemon = PrivateDaemon(self._own_socket, self._settings.config)
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(
                self._open_cache(),
                self._settings,
                key_secret=self._config.key_secret,
                prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
                speculative=vllm_config.speculative_config is not None,
                loads=self._kv_transfer_config.kv_role != "kv_producer",
                stores=self._kv_transfer_config.kv_role != "kv_consumer",
                events=_events_of(vllm_config, kv_cache_config),
            )
            if getattr(self._kv_transfer_config, "kv_load_failure_policy", "recompute") == "fail":
                log.warning('set "kv_load_failure_policy": "recompute", or a load that fails ends its request')

    # Both.

    @property
    def requires_kv_delivery(self) -> bool:
        """A store that is dropped costs a recompute, no more."""
        return False

    def shutdown(self) -> None:
        halves, self._worker, self._scheduler = (self._worker, self._scheduler), None, None
        for half in halves:
            if half is not None:
                half.close()
        if self._daemon is not None:
            self._daemon.close()
            self._daemon = None

    def _open_cache(self) -> LocalCache | RemoteCache:
        """The node's daemon, if the settings or the configuration name one, else the engine's own."""
        if self._own_socket is not None:
            wait_for_socket(self._own_socket)
        return open_cache(self._config, socket=self._socket, load_timeout_s=self._settings.load_timeout_s)

    # The worker's side.

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        self._card = self._take_card(kv_caches)
        if not self._card.problem:
            groups = self._kv_cache_config.kv_cache_groups
            num_blocks = self._kv_cache_config.num_blocks
            try:
                pages = {
                    own.group: pages_of(kv_caches, groups[own.group].layer_names, own.layout, num_blocks)
                    for own in self._card.rectangles
                }
            except NamespaceError as error:
                self._card = RankCard(None, (), str(error))
                return
            cache = self._open_cache()
            self._device = next(iter(kv_caches.values())).device
            if self._device.type != "cpu" and cache.status().device == "cpu":
                cache.close()
                self._card = RankCard(None, (), f"no device plugin for {self._device.type} is installed")
                return
            self._worker = WorkerHalf(cache, self._card.rectangles, pages)

    def get_handshake_metadata(self) -> RankCard | None:
        return self._card

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            for load in self._step.loads:
                self._worker.load(load)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return None

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        return None

    def wait_for_save(self) -> None:
        """Nothing is waited for: the scheduler keeps the blocks until `build_connector_worker_meta` lets them go."""
        stores = self._step.stores
        if self._worker is not None and stores:
            after = fence_now(self._device)
            for store in stores:
                self._worker.store(store, after)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self._end_step()
        return None, self._arrivals.requests or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        self._end_step()
        failed = set(self._arrivals.failed) if self._several_groups else set()
        return base.KVConnectorTransferResults(finished_recving=self._arrivals.requests, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._several_groups else self._arrivals.failed_blocks

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        counts: dict[str, float] = {}
        if self._worker is not None:
            counts = self._worker.counted()
        elif self._scheduler is not None:
            counts = self._scheduler.stats.take()
        return ConnectorStats(data=dict(counts)) if counts else None

    def build_connector_worker_meta(self) -> WorkerReport | None:
        return report_of(self._worker, self._arrivals.failed) if self._worker is not None else None

    def _end_step(self) -> None:
        if self._worker is None:
            self._arrivals = _NOTHING
            return
        if self._step.idle_s:
            self._worker.wait(self._step.idle_s)
        self._arrivals = self._worker.arrivals()

    @property
    def _step(self) -> StepMetadata:
        meta = self._connector_metadata
        assert isinstance(meta, StepMetadata)
        return meta

    def _take_card(self, kv_caches: Mapping[str, torch.Tensor]) -> RankCard:
        config, groups = self._vllm_config, self._kv_cache_config.kv_cache_groups
        try:
            check_groups(self._kv_cache_config)
            specs = [group.kv_cache_spec for group in groups]
            wanted = self._config.chunk_tokens
            chunk = fitting_chunk(wanted, [spec.block_size for spec in specs])
            if chunk != wanted:
                log.warning("chunk_tokens %d is not a whole number of blocks: using %d", wanted, chunk)
            cache_dtype = str(config.cache_config.cache_dtype)
            dtypes = sorted({str(spec.dtype).removeprefix("torch.") for spec in specs})
            identity = identity_of(
                config,
                kv_dtype=f"{cache_dtype} {' '.join(dtypes)}",
                chunk_tokens=chunk,
                weights=self._settings.weights,
            )
            rectangles = rectangles_of(
                self._kv_cache_config,
                chunk_tokens=chunk,
                packing=[self._packing(group.layer_names) for group in groups],
                tp_rank=config.parallel_config.rank % config.parallel_config.tensor_parallel_size,
                tp_size=config.parallel_config.tensor_parallel_size,
                kv_heads=config.model_config.get_total_num_kv_heads(),
            )
        except NamespaceError as error:
            return RankCard(None, (), str(error))
        return RankCard(identity, rectangles)

    def _packing(self, layer_names: Iterable[str]) -> str:
        """What decides how the attention kernel arranges the bytes of a block, which no view of it shows."""
        layers = self._vllm_config.compilation_config.static_forward_context
        kernels = set()
        for name in layer_names:
            layer = layers.get(name)
            if layer is not None and hasattr(layer, "get_attn_backend"):
                kernels.add(f"{layer.get_attn_backend().get_name()} {getattr(layer, 'isa', '')}".strip())
        layout = getattr(self._kv_cache_config, "kv_cache_layout", None)
        version = ".".join(vllm.__version__.split(".")[:2])
        return f"vllm {version} {' '.join(sorted(kernels)) or 'unknown kernel'} {layout}"

    # The scheduler's side.

    @property
    def _half(self) -> SchedulerHalf:
        assert self._scheduler is not None
        return self._scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._half.bind(kv_cache_manager)

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, RankCard]) -> None:
        self._half.meet(cards_in_order(metadata))

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], RankCard]) -> None:
        self._half.meet(cards_in_order(metadata))

    def on_new_request(self, request: Any) -> None:
        self._half.add(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._half.matched(request, num_computed_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        resident = min(self._half.resident_tokens(request), num_external_tokens)
        found = {CacheHitSource.HOST: resident, self._cache_hit_source: num_external_tokens - resident}
        return {source: tokens for source, tokens in found.items() if tokens}

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._half.allocated(request, blocks.get_block_ids() if num_external_tokens else (), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        return self._half.step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        assert report is None or isinstance(report, WorkerReport)
        self._half.heard(report, list(connector_output.finished_recving or ()))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._half.finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._half.finished(request)
        return False, None

    def take_events(self) -> Iterable[Any]:
        return self._half.events.take() if self._half.events is not None else ()

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.storing

    def has_pending_block_frees(self) -> bool:
        return self._scheduler is not None and self._scheduler.storing

    def reset_cache(self) -> bool:
        self._half.reset()
        return True

    # The front end's.

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        return ConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> PrometheusMetrics:
        return PrometheusMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _events_of(vllm_config: Any, kv_cache_config: Any) -> KVEvents | None:
    """Events, where they are wanted and vLLM has hashes to name blocks by."""
    wanted = vllm_config.kv_events_config
    if wanted is None or not wanted.enable_kv_cache_events:
        return None
    default = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
    return KVEvents(getattr(kv_cache_config, "hash_block_size", None) or default)
