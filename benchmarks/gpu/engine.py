# SPDX-License-Identifier: Apache-2.0
"""Builds vLLM's engine for one system, stock or ours, in or out of process."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.control.systems import SCHEDULER_CLASSES

SYSTEMS = ("stock", "ours")
MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm",
}
"""NVLink multicast stays off: one H200 driver hangs in it. FlashInfer's ``mnnvl``, vLLM's first choice, needs it."""


@dataclass(frozen=True)
class EngineOptions:
    """What an engine process is asked to build."""

    system: str
    model_folder: str
    kv_cache_bytes: int
    device: str
    in_process: bool = False
    varied_weights: bool = False
    """Weights that make the output depend on the whole context; vLLM's own dummy weights do not."""
    max_requests: int = 512
    max_model_tokens: int = 2048
    budget_tokens: int = 8192
    """Tokens of a step, vLLM's `max_num_batched_tokens`."""
    serve_flags: tuple[str, ...] = ()
    """Further flags of `vllm serve`; the last of two wins."""
    llm_settings: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `LLM`; they win over the benchmark's own."""
    environment: dict[str, str] = field(default_factory=dict)
    """Further environment variables of the engine."""

    @property
    def is_stock(self) -> bool:
        """Whether vLLM runs without plugins: the system is `stock` or a variant of it, such as `stock-experts`."""
        return self.system.partition("-")[0] == "stock"

    def as_json(self) -> dict[str, Any]:
        """Return the options as a JSON object."""
        return asdict(self)


def prepare_environment(options: EngineOptions) -> None:
    """Set what vLLM reads when it is imported; call before the first import of vLLM."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if options.in_process else "1"
    os.environ.update(options.environment)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_NO_USAGE_STATS"):
        os.environ.setdefault(name, "1")
    if options.is_stock:
        os.environ["VLLM_PLUGINS"] = ""
    if options.device == "cpu":
        os.environ["VLLM_TARGET_DEVICE"] = "cpu"
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    else:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")


def build_engine(options: EngineOptions) -> Any:
    """Return a `vllm.LLM` with the scheduler of the system and vLLM's defaults for everything else."""
    from vllm import LLM

    if options.varied_weights:
        vary_dummy_weights()
    settings: dict[str, Any] = {
        "model": options.model_folder,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_num_seqs": options.max_requests,
        "max_num_batched_tokens": options.budget_tokens,
        "max_model_len": options.max_model_tokens,
        "kv_cache_memory_bytes": options.kv_cache_bytes,
        "gpu_memory_utilization": 0.3,  # two engines stand side by side
        "disable_log_stats": False,  # as a server runs
        "seed": 0,
    }
    if options.device == "cpu":
        settings |= {"enforce_eager": True}
    if options.system == "ours":
        settings["scheduler_cls"] = SCHEDULER_CLASSES["ours"]
    return LLM(**{**settings, **options.llm_settings})


def describe(llm: Any) -> dict[str, Any]:
    """Return what was really built: versions, runner, async scheduling, scheduler class."""
    import torch
    import vllm

    config = llm.llm_engine.vllm_config
    scheduler = config.scheduler_config
    return {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "v2_model_runner": bool(getattr(config, "use_v2_model_runner", False)),
        "async_scheduling": bool(scheduler.async_scheduling),
        "scheduler_class": str(scheduler.scheduler_cls or "vLLM's default"),
        "block_tokens": config.cache_config.block_size,
        "num_blocks": config.cache_config.num_gpu_blocks,
        "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        "batch_invariant": os.environ.get("VLLM_BATCH_INVARIANT", "0"),
    }


def vary_dummy_weights(scale: float = 0.08) -> None:
    """Make vLLM's dummy loader draw wide weights, a seed per tensor, in load order."""
    import vllm.model_executor.model_loader.dummy_loader as loader

    original = loader.initialize_single_dummy_weight
    num_tensors = 0

    def varied(tensor: Any, **options: Any) -> None:
        nonlocal num_tensors
        num_tensors += 1
        low, high = (0.8, 1.2) if tensor.dim() <= 1 else (-scale, scale)
        original(tensor, low=low, high=high, seed=100 + num_tensors, **options)

    loader.initialize_single_dummy_weight = varied
