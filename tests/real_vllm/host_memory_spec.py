# SPDX-License-Identifier: Apache-2.0
"""An offloading spec for vLLM's OffloadingConnector whose worker copies KV blocks to host memory on a CPU-only machine."""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostMemoryWorker(OffloadingWorker):
    """Copies at once; a job is reported with the next `get_finished`.

    Args:
        kv_caches: vLLM's view of its KV tensors, one row a block.
        num_chunks: blocks that host memory holds.
    """

    def __init__(self, kv_caches: Any, num_chunks: int) -> None:
        self._kv_caches = kv_caches
        self._device = [data.tensor.view(data.tensor.shape[0], -1) for data in kv_caches.tensors]
        self._host = [torch.zeros((num_chunks, rows.shape[1]), dtype=rows.dtype) for rows in self._device]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, is_store=False)

    def _copy(self, job_id: int, device_spec: Any, host_spec: Any, *, is_store: bool) -> bool:
        start_s = time.perf_counter()
        first = num_bytes = 0
        for group, count in enumerate(device_spec.group_sizes):
            last = first + int(count)
            blocks = torch.tensor([int(block) for block in device_spec.block_ids[first:last]], dtype=torch.long)
            chunks = torch.tensor([int(chunk) for chunk in host_spec.block_ids[first:last]], dtype=torch.long)
            first = last
            for layer in self._kv_caches.group_data_refs[group] if count else ():
                device, host = self._device[layer.tensor_idx], self._host[layer.tensor_idx]
                num_bytes += len(blocks) * layer.page_size_bytes
                if is_store:
                    host[chunks] = device[blocks]
                else:
                    device[blocks] = host[chunks]
        self._finished.append(TransferResult(job_id, True, num_bytes, max(time.perf_counter() - start_s, 1e-6)))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Every job ended when it was submitted."""


class HostMemorySpec(CPUOffloadingSpec):
    """vLLM's manager of host memory, with the worker above."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if self._worker is None:
            assert self.blocks_per_chunk == 1
            self._worker = HostMemoryWorker(kv_caches, self.num_chunks)
        return self._worker
