# SPDX-License-Identifier: Apache-2.0
"""Sessions with streaming input, turn by turn: what the worker sees, what the client gets, what is kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from exact.timeline import Timeline
from exact.workload import words
from scheduler_harness import class_of, make_harness
from scheduler_knobs import Group, Knobs
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import RequestStatus

pytestmark = pytest.mark.host_matrix
OURS = "tokenspeed"
SESSION = {"resumable": True}


def start(prompt: list[int], max_tokens: int, **knobs: Any) -> Timeline:
    run = Timeline(OURS, Knobs(**({"groups": (Group(4),), "num_blocks": 64, "budget_tokens": 32} | knobs)))
    run.submit("s", prompt, max_tokens, extra=SESSION)
    return run


def new_rows(run: Timeline, request_id: str = "s") -> list[Any]:
    return [new for plan in run.plans for new in plan.scheduled_new_reqs if new.req_id == request_id]


@pytest.mark.parametrize(("runner", "depth"), [("v1", 1), ("v1", 2), ("v2", 1), ("v2", 2)])
def test_a_turn_keeps_all_but_the_last_token_and_computes_only_what_is_new(runner: str, depth: int) -> None:
    prompt, chunk = words(3, 6), words(4, 5)
    run = start(prompt, 4, runner=runner, pipeline_depth=depth)
    first_answer = run.ledger.accounts["s"].answer
    assert first_answer is not None
    run.ticks(10)
    run.update_session("s", chunk, 3)
    run.ticks(10)
    first, second = new_rows(run)
    assert first.prompt_token_ids == prompt, "a worker that kept the list must not see it grow"
    assert second.prompt_token_ids == [*prompt, *first_answer.tokens[:-1], *chunk]
    assert second.num_computed_tokens == len(prompt) + 3
    counts = [plan.num_scheduled_tokens["s"] for plan in run.plans if "s" in plan.num_scheduled_tokens]
    assert len(chunk) in counts
    assert second.sampling_params.max_tokens == 3
    run.close_session("s")
    run.finish()


def test_an_idle_session_keeps_its_kv_and_asks_for_no_steps() -> None:
    run = start(words(3, 6), 4)
    run.ticks(6)
    scheduler = run.scheduler
    assert scheduler.requests["s"].status == RequestStatus.WAITING_FOR_STREAMING_REQ
    assert scheduler.get_request_counts() == (0, 1)
    assert scheduler.get_num_unfinished_requests() == 0
    assert scheduler.has_request("s")
    assert scheduler.get_kv_cache_usage() > 0
    stats = scheduler.make_stats()
    assert (stats.num_running_reqs, stats.num_waiting_reqs, stats.num_skipped_waiting_reqs) == (0, 0, 1)
    run.close_session("s")
    run.finish()
    assert run.ledger.accounts["s"].outcome == "closed"


def test_chunks_and_the_end_that_come_early_wait_for_their_turns() -> None:
    run = start(words(3, 6), 4)
    run.ticks(2)
    for number in range(3):
        run.update_session("s", words(10 + number, 5), 2 + number)
    run.close_session("s")
    run.finish()
    assert run.outcome("s") == "length"
    assert [len(new.prompt_token_ids) for new in new_rows(run)] == [6, 6 + 3 + 5, 14 + 1 + 5, 20 + 2 + 5]


@pytest.mark.parametrize("idle", [False, True])
def test_a_client_that_leaves_takes_everything_along(idle: bool) -> None:
    run = start(words(3, 6), 4, pipeline_depth=2, runner="v2")
    run.ticks(8 if idle else 3)
    run.update_session("s", words(4, 5), 30)
    run.ticks(1)
    run.update_session("s", words(5, 5), 30)
    if idle:
        run.ticks(80)
    run.abort("s")
    run.finish()


def test_a_stop_on_an_accepted_draft_leaves_no_gap() -> None:
    knobs = Knobs(groups=(Group(4),), num_spec_tokens=3, budget_tokens=32)
    run = Timeline(OURS, knobs)
    run.submit("s", words(3, 6), 3, extra=SESSION)
    run.ticks(6)
    run.update_session("s", words(4, 5), 2)
    run.ticks(1)
    assert new_rows(run)[-1].num_computed_tokens == 6 + 2
    run.ticks(6)
    run.close_session("s")
    run.finish()


def test_idle_sessions_give_way_to_requests_that_need_their_memory() -> None:
    run = start(words(3, 20), 4, num_blocks=10)
    run.ticks(6)
    run.submit("other", words(5, 30), 2)
    run.ticks(4)
    assert run.delivered("other") > 0
    assert run.preempted["s"] == 1
    assert run.scheduler.requests["s"].status == RequestStatus.WAITING_FOR_STREAMING_REQ
    run.update_session("s", words(4, 5), 3)
    run.ticks(10)
    run.close_session("s")
    run.finish()


@pytest.mark.parametrize("limit", ["slots", "adapters"])
def test_idle_sessions_give_way_to_requests_that_need_their_slot_or_adapter(limit: str) -> None:
    knobs = {"max_num_seqs": 1} if limit == "slots" else {"num_lora_adapters": 1}
    run = Timeline(OURS, Knobs(groups=(Group(4),), num_blocks=64, **knobs))
    loras = (1, 2) if limit == "adapters" else (0, 0)
    run.submit("s", words(3, 6), 2, extra=SESSION, lora_id=loras[0])
    run.ticks(5)
    run.submit("other", words(5, 6), 2, lora_id=loras[1])
    run.ticks(5)
    assert run.outcome("other") == "length"
    run.update_session("s", words(4, 5), 2)
    run.ticks(5)
    run.close_session("s")
    run.finish()


def test_a_running_decode_takes_blocks_of_idle_sessions_before_those_of_others() -> None:
    run = start(words(3, 12), 2, num_blocks=17)
    run.ticks(4)
    run.submit("a", words(5, 10), 20)
    run.submit("b", words(6, 10), 20)
    run.ticks(30)
    assert run.preempted == {"s": 1}
    run.close_session("s")
    run.finish()


def test_a_session_that_outgrows_the_model_fails_alone_and_stays_closed() -> None:
    run = start(words(3, 20), 4, max_model_len=48)
    scheduler = run.scheduler
    run.ticks(6)
    make = run.harness.make_request
    scheduler.add_request(make("s", words(4, 30), 4, resumable=True))
    run.submit("other", words(5, 6), 3)
    [ended] = [output for output in _outputs(run) if output.request_id == "s"]
    assert str(ended.finish_reason) == "error"
    assert not scheduler.has_request("s")
    run.ledger.abort("s")
    scheduler.add_request(make("s", words(4, 2), 4, resumable=True))
    [late] = [output for output in _outputs(run) if output.request_id == "s"]
    assert str(late.finish_reason) == "error", "its client must not wait for ever"
    scheduler.add_request(make("s", [0], 4))
    assert not scheduler.has_request("s"), "the end of a broken session is no new request"
    scheduler.add_request(make("s", [5], 1))
    assert scheduler.has_request("s"), "and its id is free again"
    scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)


def _outputs(run: Timeline) -> list[Any]:
    """Outputs of one step, without the ledger: it knows of no failing sessions."""
    plan = run.scheduler.schedule()
    result = run.worker.execute(plan)
    outputs = run.scheduler.update_from_output(plan, result.output)
    return [output for batch in outputs.values() for output in batch.outputs]


def test_logprobs_of_a_turn_do_not_depend_on_input_that_waits() -> None:
    for waits in (False, True):
        harness = make_harness(class_of(OURS, Knobs()), Knobs())
        scheduler = harness.scheduler
        scheduler.add_request(harness.make_request("s", [3, 4, 5], 1, resumable=True, logprobs=0))
        plan = scheduler.schedule()
        if waits:
            scheduler.add_request(harness.make_request("s", [6, 7], 1, resumable=True))
        lists = LogprobsLists(
            np.array([[9]], dtype=np.int32), np.array([[-0.5]], dtype=np.float32), np.array([1], dtype=np.int32)
        )
        output = ModelRunnerOutput(
            req_ids=["s"],
            req_id_to_index={"s": 0},
            sampled_token_ids=[[9]],
            logprobs=lists,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        [row] = scheduler.update_from_output(plan, output)[0].outputs
        assert str(row.finish_reason) == "length"
        assert row.new_logprobs is not None
        assert scheduler.requests["s"].status == (
            RequestStatus.WAITING if waits else RequestStatus.WAITING_FOR_STREAMING_REQ
        )


def test_an_idle_session_does_not_stop_a_reset_of_running_requests() -> None:
    run = start(words(3, 6), 4)
    run.ticks(6)
    assert not run.scheduler.reset_prefix_cache()
    assert run.scheduler.reset_prefix_cache(reset_running_requests=True)
    run.update_session("s", words(4, 5), 3)
    run.ticks(8)
    run.close_session("s")
    run.finish()


def test_a_session_that_holds_kv_goes_on_while_admissions_are_paused() -> None:
    run = start(words(3, 6), 4)
    run.ticks(6)
    run.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    run.update_session("s", words(4, 5), 3)
    assert run.scheduler.get_num_unfinished_requests() == 1
    run.ticks(6)
    assert run.ledger.accounts["s"].is_waiting
    run.close_session("s")
    run.finish()


def test_fresh_blocks_are_zeroed_and_kept_ones_are_not() -> None:
    run = start(words(3, 6), 4, groups=(Group(4), Group(4, 8)), zero_blocks=True)
    run.ticks(6)
    run.update_session("s", words(4, 9), 3)
    run.ticks(8)
    run.close_session("s")
    run.finish()


def test_input_is_not_split_when_prompts_are_not() -> None:
    run = start(words(3, 6), 4, budget_tokens=48, max_model_len=48, scheduler={"enable_chunked_prefill": False})
    run.ticks(6)
    run.submit("other", words(6, 30), 4)
    run.update_session("s", words(4, 20), 3)
    run.ticks(12)
    counts = [plan.num_scheduled_tokens["s"] for plan in run.plans if "s" in plan.num_scheduled_tokens]
    assert 20 in counts
    run.close_session("s")
    run.finish()
