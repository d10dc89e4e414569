# SPDX-License-Identifier: Apache-2.0
"""A plan as vLLM's SchedulerOutput."""

from typing import TYPE_CHECKING, Any

from tokenspeed_plugin.host.differences import field_names
from tokenspeed_plugin.host.names import CachedRequestData, KVCacheBlockCopy, NewRequestData, SchedulerOutput
from tokenspeed_plugin.scheduler_fsm.encoder_inputs import encoder_statistics, given_up_data

if TYPE_CHECKING:
    from tokenspeed_plugin.host.names import Request
    from tokenspeed_plugin.scheduler_fsm import _core


# Since vLLM 0.33 drafters rest when nobody can use what they would propose.
_CAN_SKIP_DRAFTS = "skip_drafts" in field_names(SchedulerOutput)
# And workers give up the data of an image once its embeddings are in the KV cache.
_CAN_GIVE_UP_DATA = "encoder_input_updates" in field_names(SchedulerOutput)


def scheduler_output(
    plan: "_core.PlanColumns", finished_req_ids: set[str], preempted_req_ids: set[str]
) -> SchedulerOutput:
    """What the workers execute.

    Args:
        plan: the core's plan, column by column.
        finished_req_ids: ended since the last plan; workers drop what they keep of them.
        preempted_req_ids: whose KV was taken since the last plan.
    """
    extras: dict[str, Any] = {"skip_drafts": plan.drafts_are_unused} if _CAN_SKIP_DRAFTS else {}
    if plan.consumed_inputs and _CAN_GIVE_UP_DATA:
        extras["encoder_input_updates"] = given_up_data(plan.consumed_inputs)
    return SchedulerOutput(
        scheduled_new_reqs=[_new_request(*row) for row in plan.new_rows],
        scheduled_cached_reqs=CachedRequestData(
            req_ids=plan.req_ids,
            resumed_req_ids=plan.resumed_req_ids,
            new_token_ids=plan.new_token_ids,
            all_token_ids=plan.all_token_ids,
            new_block_ids=plan.new_block_ids,
            num_computed_tokens=plan.num_computed_tokens,
            num_output_tokens=plan.num_output_tokens,
        ),
        num_scheduled_tokens=plan.num_scheduled_tokens,
        total_num_scheduled_tokens=plan.num_tokens,
        scheduled_spec_decode_tokens=plan.spec_tokens,
        scheduled_encoder_inputs=plan.encoder_inputs or {},
        finished_req_ids=finished_req_ids,
        free_encoder_mm_hashes=plan.evicted_encoder_outputs or [],
        preempted_req_ids=preempted_req_ids,
        has_structured_output_requests=bool(plan.grammar_req_ids),
        pending_structured_output_tokens=plan.waits_for_grammar_tokens,
        new_block_ids_to_zero=plan.blocks_to_zero,
        kv_cache_block_copies=plan.block_copies and [KVCacheBlockCopy(*ends) for ends in plan.block_copies],
        num_spec_tokens_to_schedule=plan.num_next_drafts,
        scheduled_encoder_input_stats=plan.encoder_inputs and encoder_statistics(plan),
        **extras,
    )


def _new_request(
    request: "Request",
    block_ids: tuple[list[int], ...],
    num_computed_tokens: int,
    all_token_ids: list[int] | None,
) -> Any:
    return NewRequestData(
        req_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        mm_features=request.mm_features,
        sampling_params=request.sampling_params,
        pooling_params=request.pooling_params,
        block_ids=block_ids,
        num_computed_tokens=num_computed_tokens,
        lora_request=request.lora_request,
        prompt_embeds=request.prompt_embeds,
        prompt_is_token_ids=request.prompt_is_token_ids,
        prefill_token_ids=all_token_ids,
    )
