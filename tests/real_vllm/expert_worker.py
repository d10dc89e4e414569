# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU worker with expert parallelism. A worker that is spawned sees no patch of its parent, so the class brings it along."""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from real_vllm.cpu_host import map_experts


class ExpertWorker(CPUWorker):
    """A worker that may hold some of the experts only."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        map_experts()
        super().__init__(*args, **kwargs)


def model_class(worker: Any) -> str:
    """Name of the class that a worker runs; sent to workers by `collective_rpc`."""
    return type(worker.get_model()).__name__


def open_linears(worker: Any) -> int:
    """Linear layers that leave their product to the reduction behind them."""
    return sum(type(module).__name__ == "OpenRowLinear" for module in worker.get_model().modules())
