# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU worker in a pipeline. A worker that is spawned sees no patch of its parent, so the class brings it along."""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from real_vllm.cpu_host import make_pipeline_tensors


class PipelineWorker(CPUWorker):
    """A worker of one pipeline stage."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        make_pipeline_tensors()
        super().__init__(*args, **kwargs)
