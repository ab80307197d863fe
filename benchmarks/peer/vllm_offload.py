"""vLLM's own offloading on its CPU engine, where as shipped it refuses to run: a spec with a worker that copies.

The manager, the policy, the scheduling of transfers and the connector are vLLM's; only the copy is ours, on the step as
vLLM submits it.  Loaded by `spec_module_path` in vLLM's processes, never by ours.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class CopyingSpec(CPUOffloadingSpec):
    """`spec_name` in the connector's configuration."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if self._worker is None:
            self._worker = CopyingWorker(kv_caches, self.num_chunks)
        return self._worker


class CopyingWorker(OffloadingWorker):
    """Blocks between the engine's cache and ordinary memory, in one indexed copy per layer."""

    def __init__(self, kv_caches: Any, chunks: int) -> None:
        self.engine = [each.tensor.view(torch.int8).view(-1, each.page_size_bytes) for each in kv_caches.tensors]
        self.memory = [torch.zeros(chunks, each.shape[1], dtype=torch.int8) for each in self.engine]
        self.done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self.engine, src_spec.block_ids, self.memory, dst_spec.block_ids)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self.memory, src_spec.block_ids, self.engine, dst_spec.block_ids)

    def get_finished(self) -> list[TransferResult]:
        done, self.done = self.done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Copies have ended when they were submitted."""

    def _copy(self, job: int, sources: Any, from_ids: Any, targets: Any, to_ids: Any) -> bool:
        if len(from_ids) != len(to_ids):
            raise ValueError("an offloaded chunk has to be one block of the engine")
        began = time.perf_counter()
        nbytes = 0
        for source, target in zip(sources, targets, strict=True):
            target.numpy()[to_ids] = source.numpy()[from_ids]
            nbytes += len(to_ids) * source.shape[1]
        self.done.append(TransferResult(job, True, nbytes, time.perf_counter() - began))
        return True
