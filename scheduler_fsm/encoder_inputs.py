# SPDX-License-Identifier: Apache-2.0
"""Multimodal input in the core's terms: places and embeddings of a prompt, and what a step may encode."""

from typing import TYPE_CHECKING

from tokenspeed_plugin.host.names import MultiModalBudget, ScheduledEncoderInputStats
from tokenspeed_plugin.scheduler_fsm import _core

if TYPE_CHECKING:
    from tokenspeed_plugin.host.names import MultiModalRegistry, Request, VllmConfig

EncoderInput = tuple[str, int, int, list[tuple[int, int]]]


def encoder_inputs_of(request: "Request") -> list[EncoderInput]:
    """(identifier, begin, end, ranges that take an embedding) of each input, in prompt positions, ends exclusive."""
    inputs = []
    for feature in request.mm_features:
        place = feature.mm_position
        embeds = [(first, last + 1) for first, last in place.extract_embeds_range()]
        inputs.append((feature.identifier, place.offset, place.offset + place.length, embeds))
    return inputs


def encoder_limits(vllm_config: "VllmConfig", mm_registry: "MultiModalRegistry") -> _core.EncoderLimits:
    """What vLLM computes from the model, its processor and the scheduler's settings; all 0 for a text model.

    Raises:
        ValueError: from vLLM, when items must not be split and the largest is longer than a step.
    """
    if not vllm_config.model_config.supports_multimodal_inputs:
        return _core.EncoderLimits(step_embeds=0, cache_embeds=0, split_inputs=True)
    budget = MultiModalBudget(vllm_config, mm_registry)
    return _core.EncoderLimits(
        step_embeds=budget.encoder_compute_budget,
        cache_embeds=budget.encoder_cache_size,
        split_inputs=not vllm_config.scheduler_config.disable_chunked_mm_input,
    )


def encoder_statistics(plan: _core.PlanColumns) -> ScheduledEncoderInputStats:
    """What a step encodes, for vLLM's log of iterations."""
    num_inputs = sum(map(len, (plan.encoder_inputs or {}).values()))
    return ScheduledEncoderInputStats(num_inputs=num_inputs, output_tokens=plan.num_run_embeds)


def given_up_data(consumed: "list[tuple[Request, int]]") -> dict[str, dict[int, None]]:
    """Inputs that nobody will encode any more, by request: workers give their data up.

    Data in shared memory goes by the protocol of vLLM's processor cache.
    """
    updates: dict[str, dict[int, None]] = {}
    for request, number in consumed:
        data = request.mm_features[number].data
        if data is not None and "address" not in data:
            updates.setdefault(request.request_id, {})[number] = None
    return updates
