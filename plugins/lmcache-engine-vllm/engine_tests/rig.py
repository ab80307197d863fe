"""vLLM's real scheduler and both halves of the connector, around a worker that writes a pattern instead of computing.

The pattern of a token's KV says which tokens came before it.  Before each step every token that counts as computed
must hold its own: what is loaded into a wrong block, too late or not at all is found in the step that would use it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from lmcache_engine_vllm.connector import LMCacheCoreConnector

LAYERS: Final = 3
TIMEOUT_S: Final = 30.0
_numbers = itertools.count()


def config_folder(folder: Path) -> Path:
    """A model that is a config alone: nothing of it is ever loaded."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
        "num_hidden_layers": LAYERS, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 8192,
        "vocab_size": 65536, "torch_dtype": "float32", "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Rig:
    """One engine without a model.  Two with the same `weights` on the same daemon share what they store."""

    def __init__(
        self,
        model: Path,
        config: Path,
        *,
        weights: str = "",
        block_tokens: int = 16,
        blocks: int = 256,
        batched_tokens: int = 512,
        prefix_caching: bool = False,
        policy: str = "recompute",
        windows: Sequence[int] = (),
        ahead: bool = False,
        events: bool = False,
        drafts: int = 0,
        role: str = "kv_both",
        **extra: Any,
    ) -> None:
        model_config = ModelConfig(
            model=str(model), dtype="float32", seed=0, skip_tokenizer_init=True, max_model_len=4096
        )
        transfer = KVTransferConfig(
            kv_connector="LMCacheCoreConnector",
            kv_connector_module_path="lmcache_engine_vllm",
            kv_role=role,
            kv_load_failure_policy=policy,
            kv_connector_extra_config={
                "config": str(config), "weights": weights or f"rig{next(_numbers)}", "lookup_timeout_s": 5, **extra
            },
        )  # fmt: skip
        parallel = ParallelConfig()
        speculative = SpeculativeConfig(
            method="ngram", num_speculative_tokens=drafts, prompt_lookup_max=3, target_model_config=model_config,
            target_parallel_config=parallel,
        ) if drafts else None  # fmt: skip
        self.vllm_config = VllmConfig(
            speculative_config=speculative,
            model_config=model_config,
            cache_config=CacheConfig(
                block_size=block_tokens, gpu_memory_utilization=0.5, enable_prefix_caching=prefix_caching
            ),
            parallel_config=parallel,
            device_config=DeviceConfig("cpu"),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8, max_num_batched_tokens=batched_tokens, max_model_len=4096,
                enable_chunked_prefill=True, is_encoder_decoder=False, async_scheduling=ahead,
            ),
            kv_transfer_config=transfer,
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null") if events else None,
        )  # fmt: skip
        self.vllm_config.cache_config.num_gpu_blocks = blocks
        self.block_tokens = block_tokens
        self.windows = (0, *windows)
        page = block_tokens * 8
        shape: Any = {"block_size": block_tokens, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
        specs: list[Any] = [FullAttentionSpec(**shape)]
        specs += [SlidingWindowSpec(sliding_window=window, **shape) for window in windows]
        groups = [
            KVCacheGroupSpec([f"model.layers.{index * LAYERS + layer}.attn" for layer in range(LAYERS)], spec)
            for index, spec in enumerate(specs)
        ]
        size = LAYERS * blocks * page
        tensors = [KVCacheTensor(size, list(group.layer_names), blocks * page, page) for group in groups]
        kv_config = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)
        self.memory = torch.zeros(LAYERS, blocks, 1, block_tokens, 2, dtype=torch.float32)
        caches = {name: self.memory[layer] for group in groups for layer, name in enumerate(group.layer_names)}
        self.kv = self.memory.numpy().view(np.int64).reshape(LAYERS, blocks, block_tokens)

        self.worker = LMCacheCoreConnector(self.vllm_config, KVConnectorRole.WORKER, kv_config)
        self.worker.register_kv_caches(caches)
        kind = AsyncScheduler if ahead else Scheduler
        self.scheduler = kind(
            vllm_config=self.vllm_config,
            kv_cache_config=kv_config,
            structured_output_manager=StructuredOutputManager(self.vllm_config),
            block_size=block_tokens,
            log_stats=True,
        )
        self.connector = self.scheduler.connector
        self.published: list[Any] = []
        """Events for routers."""
        if events:
            self.scheduler.kv_event_publisher = SimpleNamespace(
                publish=lambda batch: self.published.extend(batch.events), shutdown=lambda: None
            )
        card = self.worker.get_handshake_metadata()
        self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): card})
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(block_tokens, sha256)
        self.history: dict[str, list[int]] = {}
        """Request -> tokens scheduled for it, step by step."""
        self.cached: dict[str, int] = {}
        """Request -> tokens that vLLM counts as cached."""
        self.finishes: dict[str, str] = {}
        self.answers: dict[str, list[int]] = {}
        self._running_ahead: list[tuple[Any, Any]] = []
        self._ahead = ahead
        self._drafts = drafts
        self._counted: dict[str, float] = {}
        self.loads: list[Any] = []
        self.stores: list[Any] = []
        """What the scheduler asked the worker for, in order."""

    # Requests.

    def add(
        self, tokens: Sequence[int], *, answer_tokens: int = 1, name: str = "", anew: bool = False, **fields: Any
    ) -> str:
        params = SamplingParams(max_tokens=answer_tokens, ignore_eos=True, skip_reading_prefix_cache=anew)
        params.update_from_generation_config({}, 1)
        request = Request(
            request_id=name or f"r{next(_numbers)}",
            prompt_token_ids=list(tokens),
            sampling_params=params,
            pooling_params=None,
            block_hasher=self._hasher,
            **fields,
        )
        self.scheduler.add_request(request)
        return str(request.request_id)

    def ask(self, tokens: Sequence[int], **fields: Any) -> str:
        """Add a request and run until nothing is left."""
        name = self.add(tokens, **fields)
        self.run()
        return name

    def run(self, timeout_s: float = TIMEOUT_S) -> None:
        """Step until there is nothing left to do, also for the connector."""
        deadline = time.monotonic() + timeout_s
        while self.scheduler.has_requests() or self._running_ahead:
            assert time.monotonic() < deadline, f"not done: {self.scheduler.requests.keys()}"
            self.step()

    def steps_until(self, condition: Any, timeout_s: float = TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline
            self.step()

    def step(self) -> Any:
        """One step; with `ahead` the scheduler hears of a step only after it has planned the next one."""
        output = self.scheduler.schedule()
        self.loads += output.kv_connector_metadata.loads
        self.stores += output.kv_connector_metadata.stores
        self._running_ahead.append((output, self.compute(output)))
        while len(self._running_ahead) > (1 if self._ahead and output.total_num_scheduled_tokens else 0):
            for answers in self.scheduler.update_from_output(*self._running_ahead.pop(0)).values():
                for answer in answers.outputs:
                    if answer.finish_reason is not None:
                        self.finishes[answer.request_id] = str(answer.finish_reason)
        if self._drafts:
            self.scheduler.update_draft_token_ids(self._guess())
        return output

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def counted(self) -> dict[str, float]:
        """What the worker counted so far."""
        self._count()
        return self._counted

    # The worker.

    def compute(self, output: Any) -> ModelRunnerOutput:
        """What a model runner does with a step, in its order of calls."""
        worker, result = self.worker, KVConnectorOutput()
        worker.handle_preemptions(output.kv_connector_metadata)
        worker.bind_connector_metadata(output.kv_connector_metadata)
        sampled = self._forward(output)
        worker.start_load_kv(None)
        worker.wait_for_save()
        found = worker.get_transfer_results(output.finished_req_ids)
        result.finished_sending, result.finished_recving = found.finished_sending, found.finished_recving
        result.failed_recving = found.failed_recving
        result.invalid_block_ids = worker.get_block_ids_with_load_errors()
        self._count()
        result.kv_connector_worker_meta = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        names = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[sampled[name] for name in names],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=result,
        )

    def _forward(self, output: Any) -> dict[str, list[int]]:
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sampled = {}
        for name, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            tokens = [*request.prompt_token_ids, *self.answers.get(name, ())]  # what the worker itself sampled
            done = computed[name]
            guesses = output.scheduled_spec_decode_tokens.get(name, [])
            patterns = pattern([*tokens, *guesses])
            for group, window in enumerate(self.windows):
                blocks = self.scheduler.kv_cache_manager.get_block_ids(name)[group]
                first = max(0, done - window + 1) if window else 0
                self._check(name, blocks, patterns, first, done, group)
                for position in range(done, min(done + count, len(patterns))):
                    block, offset = divmod(position, self.block_tokens)
                    for layer in range(LAYERS):
                        self.kv[layer, blocks[block], offset] = patterns[position] + group * LAYERS + layer
            self.history.setdefault(name, []).append(count)
            self.cached.setdefault(name, done)
            sampled[name] = self._sample(tokens, guesses) if done + count >= len(tokens) else []
            self.answers.setdefault(name, []).extend(sampled[name])
        return sampled

    def _sample(self, tokens: Sequence[int], guesses: Sequence[int]) -> list[int]:
        """The guesses that are right, and the token after them."""
        said = list(tokens)
        for guess in [*guesses, -1]:
            said.append(answer_to(said))
            if said[-1] != guess:
                break
        return said[len(tokens) :]

    def _guess(self) -> DraftTokenIds:
        """For each request that is being answered: one guess that is right, then wrong ones."""
        names, guesses = [], []
        for name, request in self.scheduler.requests.items():
            if self.answers.get(name) and not request.is_finished():
                said = [*request.prompt_token_ids, *self.answers[name]]
                names.append(name)
                guesses.append([answer_to(said), *([1] * (self._drafts - 1))])
        return DraftTokenIds(names, guesses)

    def _check(self, name: str, blocks: Sequence[int], patterns: Any, first: int, stop: int, group: int) -> None:
        for position in range(first, stop):
            block, offset = divmod(position, self.block_tokens)
            for layer in range(LAYERS):
                found = self.kv[layer, blocks[block], offset]
                assert found == patterns[position] + group * LAYERS + layer, (
                    f"{name}: token {position} of group {group}, layer {layer} does not hold its KV"
                )

    def _count(self) -> None:
        found = self.worker.get_kv_connector_stats()
        for name, count in found.data.items() if found is not None else ():
            self._counted[name] = self._counted.get(name, 0) + count

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()


def pattern(tokens: Sequence[int]) -> Any:
    """For each token a number that all tokens up to it decide."""
    values = np.empty(len(tokens), np.int64)
    state = hashlib.blake2b(digest_size=7)
    for position, token in enumerate(tokens):
        state.update(int(token).to_bytes(4, "little"))
        values[position] = int.from_bytes(state.digest(), "little")
    return values


def answer_to(tokens: Sequence[int]) -> int:
    """The token that this model says next."""
    return int(pattern(tokens)[-1]) % 60_000 + 2


def prompt(tokens: int, seed: int = 0) -> list[int]:
    """Tokens that no other seed shares a prefix with."""
    return [int(token) for token in np.random.default_rng(seed).integers(100, 60_000, tokens)]
