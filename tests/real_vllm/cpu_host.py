# SPDX-License-Identifier: Apache-2.0
"""What vLLM 0.32 switches off or lacks on CPU, put back for tests. Each function patches one thing in the calling process."""

import functools
import os
from typing import Any


@functools.cache
def keep_async_scheduling() -> None:
    """vLLM's CPU platform sets `async_scheduling` to False. Nothing overlaps on CPU, but the order of calls is the same."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    @functools.wraps(original)
    def check_and_update_config(cls: type, config: Any) -> None:
        wanted = config.scheduler_config.async_scheduling
        original(cls, config)
        config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


@functools.cache
def fork_workers() -> None:
    """vLLM's CPU platform has workers spawned, each of which imports vLLM again. A process of one thread can as well be forked."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    @functools.wraps(original)
    def check_and_update_config(cls: type, config: Any) -> None:
        original(cls, config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


@functools.cache
def make_pipeline_tensors() -> None:
    """Without warm-up the CPU runner never makes the buffers that a later pipeline stage receives into."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = GPUModelRunner.sync_and_gather_intermediate_tensors

    @functools.wraps(original)
    def sync_and_gather_intermediate_tensors(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return original(self, *args, **kwargs)

    GPUModelRunner.sync_and_gather_intermediate_tensors = sync_and_gather_intermediate_tensors


@functools.cache
def vary_dummy_weights() -> None:
    """vLLM's dummy weights lie within 0.001 of zero, so that answers depend on the last token alone. The same in every engine."""
    from vllm.model_executor.model_loader import dummy_loader

    original_load = dummy_loader.DummyModelLoader.load_weights
    original_fill = dummy_loader.initialize_single_dummy_weight
    num_filled = 0

    @functools.wraps(original_load)
    def load_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_filled
        num_filled = 0
        return original_load(self, *args, **kwargs)

    def fill(parameter: Any) -> None:
        nonlocal num_filled
        num_filled += 1
        low, high = (0.8, 1.2) if parameter.dim() <= 1 else (-0.2, 0.2)
        original_fill(parameter, low, high, num_filled)

    dummy_loader.DummyModelLoader.load_weights = load_weights
    dummy_loader.initialize_single_dummy_weight = fill


@functools.cache
def map_experts() -> None:
    """The CPU kernel ignores which experts a rank holds and reads beyond its weights; here the others' share gets weight zero."""
    import inspect

    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    original = CPUUnquantizedExperts.apply
    signature = inspect.signature(original)

    @functools.wraps(original)
    def apply(*args: Any, **kwargs: Any) -> None:
        call = signature.bind(*args, **kwargs)
        given = call.arguments
        held = given["expert_map"]
        if held is not None:
            local = held[given["topk_ids"].long()]
            elsewhere = local < 0
            given["topk_weights"] = given["topk_weights"].masked_fill(elsewhere, 0.0)
            given["topk_ids"] = local.masked_fill(elsewhere, 0).to(given["topk_ids"].dtype)
            given["expert_map"] = None
        original(*call.args, **call.kwargs)

    CPUUnquantizedExperts.apply = apply


@functools.cache
def leave_sockets_open() -> None:
    """Connectors of vLLM's own scheduler are not shut down; a thread of MooncakeStoreConnector then keeps a socket that zmq waits for."""
    import zmq

    zmq.Context.__del__ = lambda _: None
