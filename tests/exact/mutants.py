# SPDX-License-Identifier: Apache-2.0
"""Faults planted between a right scheduler and the worker, to show that the exact worker notices each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Mutant:
    """One fault.

    Attributes:
        name: what goes wrong.
        needs: knobs that give the fault a chance to occur, over the scenario's own.
        plan: changes a SchedulerOutput in place; returns whether it did.
        outputs: changes EngineCoreOutputs in place; returns whether it did.
        scheduler: changes the scheduler before the run.
    """

    name: str
    needs: dict[str, Any] = field(default_factory=dict)
    plan: Callable[[Any, Any], bool] | None = None
    outputs: Callable[[list[Any]], bool] | None = None
    scheduler: Callable[[Any], None] | None = None

    def __repr__(self) -> str:
        return self.name


def _cached_with_blocks(plan: Any) -> list[int]:
    cached = plan.scheduled_cached_reqs
    fresh = [i for i, ids in enumerate(cached.new_block_ids) if ids is not None and any(ids)]
    return [i for i in fresh if cached.req_ids[i] not in cached.resumed_req_ids]


def swap_two_blocks(plan: Any, _: Any) -> bool:
    for new in plan.scheduled_new_reqs:
        table = new.block_ids[0]
        if len(table) > 1 and new.num_computed_tokens:
            table[0], table[1] = table[1], table[0]
            return True
    return False


def drop_new_block(plan: Any, _: Any) -> bool:
    for index in _cached_with_blocks(plan):
        plan.scheduled_cached_reqs.new_block_ids[index] = None
        return True
    return False


def other_requests_block(plan: Any, worker: Any) -> bool:
    cached = plan.scheduled_cached_reqs
    for index in _cached_with_blocks(plan):
        others = [row for row in worker.rows.values() if row.request_id != cached.req_ids[index]]
        victims = [row for row in others if row.request_id in plan.num_scheduled_tokens]
        if victims:
            ids = cached.new_block_ids[index]
            cached.new_block_ids[index] = ([victims[0].tables[0][-1]], *ids[1:])
            return True
    return False


def block_out_of_range(plan: Any, worker: Any) -> bool:
    for new in plan.scheduled_new_reqs:
        new.block_ids[0][-1] = worker.memory.num_blocks
        return True
    return False


def null_block_in_full_group(plan: Any, _: Any) -> bool:
    for new in plan.scheduled_new_reqs:
        new.block_ids[0][0] = 0
        return True
    return False


def stale_table_on_resume(plan: Any, worker: Any) -> bool:
    cached = plan.scheduled_cached_reqs
    for index, request_id in enumerate(cached.req_ids):
        if request_id in cached.resumed_req_ids:
            table = cached.new_block_ids[index][0]
            cached.new_block_ids[index] = (worker.rows[request_id].tables[0][: len(table)],)
            return True
    return False


def append_on_resume(plan: Any, _: Any) -> bool:
    cached = plan.scheduled_cached_reqs
    for request_id in list(cached.resumed_req_ids):
        cached.resumed_req_ids.discard(request_id)
        return True
    return False


def resume_without_tokens(plan: Any, _: Any) -> bool:
    cached = plan.scheduled_cached_reqs
    return any(cached.all_token_ids.pop(request_id, None) for request_id in cached.resumed_req_ids)


def resume_without_last_token(plan: Any, _: Any) -> bool:
    for new in plan.scheduled_new_reqs:
        if len(new.prefill_token_ids) > new.prompt_len:
            new.prefill_token_ids = list(new.prefill_token_ids[:-1])
            return True
    return False


def placeholder_in_prefill(plan: Any, _: Any) -> bool:
    for new in plan.scheduled_new_reqs:
        if len(new.prefill_token_ids) > new.prompt_len:
            new.prefill_token_ids = [*new.prefill_token_ids[:-1], -1]
            return True
    return False


def too_many_hits(plan: Any, _: Any) -> bool:
    for new in plan.scheduled_new_reqs:
        if plan.num_scheduled_tokens[new.req_id] > 4:
            new.num_computed_tokens += 4
            plan.num_scheduled_tokens[new.req_id] -= 4
            plan.total_num_scheduled_tokens -= 4
            return True
    return False


def wrong_computed_count(plan: Any, _: Any) -> bool:
    counts = plan.scheduled_cached_reqs.num_computed_tokens
    if counts:
        counts[0] += 1
    return bool(counts)


def one_token_too_many(plan: Any, _: Any) -> bool:
    cached = plan.scheduled_cached_reqs
    for request_id, num_outputs in zip(cached.req_ids, cached.num_output_tokens, strict=True):
        if num_outputs and request_id not in plan.scheduled_spec_decode_tokens:
            plan.num_scheduled_tokens[request_id] += 1
            plan.total_num_scheduled_tokens += 1
            return True
    return False


def zero_a_live_block(plan: Any, worker: Any) -> bool:
    live = [row for row in worker.rows.values() if row.request_id in plan.num_scheduled_tokens and len(row.values) > 4]
    if live:
        plan.new_block_ids_to_zero = [*(plan.new_block_ids_to_zero or ()), live[0].tables[0][0]]
    return bool(live)


def forget_to_zero(plan: Any, _: Any) -> bool:
    done = bool(plan.new_block_ids_to_zero)
    plan.new_block_ids_to_zero = None
    return done


def copy_over_a_live_block(plan: Any, worker: Any) -> bool:
    from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy

    live = [row for row in worker.rows.values() if row.request_id in plan.num_scheduled_tokens and len(row.values) > 8]
    if live:
        plan.kv_cache_block_copies = [KVCacheBlockCopy(live[0].tables[0][0], live[0].tables[0][1])]
    return bool(live)


def total_is_wrong(plan: Any, _: Any) -> bool:
    plan.total_num_scheduled_tokens += 1
    return True


def new_and_cached(plan: Any, _: Any) -> bool:
    cached = plan.scheduled_cached_reqs
    for new in plan.scheduled_new_reqs:
        for column, value in (
            (cached.req_ids, new.req_id),
            (cached.new_block_ids, None),
            (cached.num_computed_tokens, new.num_computed_tokens),
            (cached.num_output_tokens, 0),
        ):
            column.append(value)
        return True
    return False


def forget_a_finish(plan: Any, _: Any) -> bool:
    done = bool(plan.finished_req_ids)
    plan.finished_req_ids = set()
    return done


def forget_a_preemption(plan: Any, _: Any) -> bool:
    done = bool(plan.preempted_req_ids)
    plan.preempted_req_ids = set()
    return done


def wrong_draft(plan: Any, _: Any) -> bool:
    for drafts in plan.scheduled_spec_decode_tokens.values():
        if drafts[0] >= 0:
            drafts[0] += 1
            return True
    return False


def deliver_twice(outputs: list[Any]) -> bool:
    for output in outputs:
        if output.new_token_ids and output.finish_reason is None:
            output.new_token_ids = [*output.new_token_ids, output.new_token_ids[-1]]
            return True
    return False


def lose_a_token(outputs: list[Any]) -> bool:
    for output in outputs:
        if output.new_token_ids and output.finish_reason is None:
            output.new_token_ids = output.new_token_ids[:-1]
            return True
    return False


def swap_two_outputs(outputs: list[Any]) -> bool:
    alive = [output for output in outputs if output.new_token_ids and output.finish_reason is None]
    if len(alive) < 2 or alive[0].new_token_ids == alive[1].new_token_ids:
        return False
    alive[0].new_token_ids, alive[1].new_token_ids = alive[1].new_token_ids, alive[0].new_token_ids
    return True


def wrong_finish_reason(outputs: list[Any]) -> bool:
    from vllm.v1.engine import FinishReason

    for output in outputs:
        if output.finish_reason is not None:
            stopped = output.finish_reason == FinishReason.STOP
            output.finish_reason = FinishReason.LENGTH if stopped else FinishReason.STOP
            return True
    return False


def output_after_the_end(outputs: list[Any]) -> bool:
    for output in outputs:
        if output.finish_reason is not None:
            outputs.append(output)
            return True
    return False


def free_a_block_early(scheduler: Any) -> None:
    """One block of a running request goes back to the pool while the request still reads it."""
    manager = scheduler.kv_cache_manager
    plain, freed = scheduler.schedule, []

    def schedule(*arguments: Any) -> Any:
        running = [r for r in scheduler.running if r.num_computed_tokens > 12]
        if running and not freed:
            block = manager.coordinator.single_type_managers[0].req_to_blocks[running[0].request_id][2]
            freed.append(block)
            block.ref_cnt = 1
            manager.block_pool.free_blocks([block])
        return plain(*arguments)

    scheduler.schedule = schedule


def forget_rejections(scheduler: Any) -> None:
    """Rejected drafts stay counted as computed."""
    plain = scheduler.update_from_output

    def update(plan: Any, output: Any) -> Any:
        ids = {request_id: scheduler.requests.get(request_id) for request_id in plan.scheduled_spec_decode_tokens}
        before = {i: request.num_computed_tokens for i, request in ids.items() if request is not None}
        result = plain(plan, output)
        for request_id, count in before.items():
            if request_id in scheduler.requests and scheduler.requests[request_id].num_computed_tokens:
                scheduler.requests[request_id].num_computed_tokens = count
        return result

    scheduler.update_from_output = update


def leave_the_window_early(scheduler: Any) -> None:
    """A sliding window group frees a block that the next token still sees."""
    for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
        if hasattr(manager, "sliding_window"):
            plain = manager.get_num_skipped_tokens
            manager.get_num_skipped_tokens = lambda count, plain=plain: max(plain(count) + 4, 0) if count > 8 else 0


PLAN_MUTANTS = [
    Mutant("swap_two_blocks", {}, swap_two_blocks),
    Mutant("drop_new_block", {}, drop_new_block),
    Mutant("other_requests_block", {}, other_requests_block),
    Mutant("block_out_of_range", {}, block_out_of_range),
    Mutant("null_block_in_full_group", {}, null_block_in_full_group),
    Mutant("stale_table_on_resume", {"runner": "v1"}, stale_table_on_resume),
    Mutant("append_on_resume", {"runner": "v1"}, append_on_resume),
    Mutant("resume_without_tokens", {"runner": "v1"}, resume_without_tokens),
    Mutant("resume_without_last_token", {"runner": "v2"}, resume_without_last_token),
    Mutant("placeholder_in_prefill", {"runner": "v2"}, placeholder_in_prefill),
    Mutant("too_many_hits", {}, too_many_hits),
    Mutant("wrong_computed_count", {}, wrong_computed_count),
    Mutant("one_token_too_many", {}, one_token_too_many),
    Mutant("zero_a_live_block", {}, zero_a_live_block),
    Mutant("forget_to_zero", {"zero_blocks": True}, forget_to_zero),
    Mutant("copy_over_a_live_block", {}, copy_over_a_live_block),
    Mutant("total_is_wrong", {}, total_is_wrong),
    Mutant("new_and_cached", {}, new_and_cached),
    Mutant("forget_a_finish", {}, forget_a_finish),
    Mutant("forget_a_preemption", {"runner": "v2"}, forget_a_preemption),
    Mutant("wrong_draft", {"num_spec_tokens": 3, "pipeline_depth": 1}, wrong_draft),
]
OUTPUT_MUTANTS = [
    Mutant("deliver_twice", outputs=deliver_twice),
    Mutant("lose_a_token", outputs=lose_a_token),
    Mutant("swap_two_outputs", outputs=swap_two_outputs),
    Mutant("wrong_finish_reason", outputs=wrong_finish_reason),
    Mutant("output_after_the_end", outputs=output_after_the_end),
]
SCHEDULER_MUTANTS = [
    Mutant("free_a_block_early", scheduler=free_a_block_early),
    Mutant("forget_rejections", {"num_spec_tokens": 3}, scheduler=forget_rejections),
    Mutant("leave_the_window_early", {"windowed": True}, scheduler=leave_the_window_early),
]
