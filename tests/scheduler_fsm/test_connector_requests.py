# SPDX-License-Identifier: Apache-2.0
"""What becomes of single requests under a KV connector: loads, failures, late frees, aborts, refusals, exceptions."""

from __future__ import annotations

from typing import Any

import pytest
from exact.driver import check_idle
from exact.store_connector import PATH, StoreConnector
from exact.timeline import Timeline
from exact.workload import words
from scheduler_knobs import Group, Knobs
from vllm.v1.request import RequestStatus

pytestmark = pytest.mark.host_matrix

PROMPT = words(7, 41)
NUM_STORED = 40


def timeline(policy: str = "fail", knobs: dict[str, Any] | None = None, **options: Any) -> Timeline:
    return Timeline(
        "tokenspeed",
        Knobs(
            groups=(Group(4),),
            connector=PATH,
            connector_options=options,
            load_failure_policy=policy,
            **(knobs or {}),
        ),
    )


def with_stored_prompt(**arguments: Any) -> Timeline:
    """The prompt has run once, and only the store still has its KV."""
    run = timeline(**arguments)
    run.submit("first", PROMPT, 1)
    run.finish()
    assert run.scheduler.reset_prefix_cache()
    return run


def connector_of(run: Timeline) -> StoreConnector:
    connector: StoreConnector = run.scheduler.connector
    assert connector is run.scheduler.get_kv_connector()
    return connector


def request_of(run: Timeline, request_id: str) -> Any:
    return run.scheduler.requests[request_id]


def test_a_synchronous_load_is_a_part_of_the_step() -> None:
    run = with_stored_prompt()
    run.submit("again", PROMPT, 5)
    run.tick()
    assert run.plans[-1].has_sync_kv_loads
    assert run.plans[-1].num_scheduled_tokens == {"again": 1}
    run.finish()
    assert run.cached["again"] == NUM_STORED
    assert connector_of(run).calls["again"] == ["new", f"alloc {NUM_STORED}", "finished"]
    assert run.worker.transfers.num_loaded == 1


def test_an_asynchronous_load_holds_blocks_and_no_slot() -> None:
    run = with_stored_prompt(is_async=True, load_steps=3, knobs={"max_num_seqs": 1})
    run.submit("again", PROMPT, 5)
    run.tick()
    assert request_of(run, "again").status == RequestStatus.WAITING_FOR_REMOTE_KVS
    assert run.scheduler.get_request_counts() == (0, 1)
    assert run.scheduler.get_kv_cache_usage() > 0
    assert not run.plans[-1].has_sync_kv_loads
    run.submit("other", 6, 12)
    run.ticks(8)
    assert run.scheduled_ticks("again") == [], "the slot is taken"
    stages = run.scheduler.make_stats().num_kv_fetch_reqs_by_stage
    stages = {stage: count for stage, count in stages.items() if not stage.startswith("tokenspeed:")}
    assert stages == {"waiting_to_start": 0, "in_progress": 0, "completed_waiting": 1}
    run.finish()
    assert run.cached["again"] == NUM_STORED
    assert run.computed["again"] == 5
    assert connector_of(run).calls["again"] == ["new", f"alloc {NUM_STORED}", "alloc 0", "finished"]


def test_paused_admissions_let_loads_go_on() -> None:
    run = with_stored_prompt(is_async=True, load_steps=1)
    run.submit("again", PROMPT, 5)
    run.tick()
    run.scheduler.set_pause_state(type(run.scheduler.pause_state).PAUSED_NEW)
    assert run.scheduler.get_num_unfinished_requests() == 1
    run.finish()
    assert run.outcome("again") == "length"


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_failed_load_is_recomputed(is_async: bool, depth: int) -> None:
    knobs = {"pipeline_depth": depth}
    run = with_stored_prompt(policy="recompute", is_async=is_async, fail_share=1.0, knobs=knobs)
    run.submit("again", PROMPT, 5)
    run.submit("sharer", PROMPT, 5)
    run.finish()
    assert run.worker.transfers.num_failed >= 1
    assert {run.outcome("again"), run.outcome("sharer")} == {"length"}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_failed_load_ends_its_request_alone(is_async: bool, depth: int) -> None:
    run = with_stored_prompt(is_async=is_async, fail_share=1.0, seed=3, knobs={"pipeline_depth": depth})
    run.submit("again", PROMPT, 5)
    run.submit("other", 30, 5)
    run.finish()
    assert (run.outcome("again"), run.outcome("other")) == ("error", "length")
    assert connector_of(run).calls["again"][-1] == "finished"


def test_blocks_stay_until_they_are_sent() -> None:
    run = timeline(send_steps=4)
    run.submit("sent", PROMPT, 3)
    params: list[Any] = []
    run._wrap_outputs = lambda outputs: _note_params(outputs, params)
    while run.outcome("sent") is None:
        run.tick()
    assert params == [{"sent_by": "sent", "num_tokens": len(PROMPT) + 2}]
    assert run.scheduler.get_kv_cache_usage() > 0
    assert run.scheduler.has_finished_requests()
    assert run.scheduler.finish_requests("sent", RequestStatus.FINISHED_ABORTED) == []
    with pytest.raises(ValueError, match="'sent' is in use"):
        run.scheduler.add_request(run.harness.make_request("sent", PROMPT, 3))
    run.finish()
    assert run.worker.transfers.num_sent == 1


def _note_params(outputs: Any, params: list[Any]) -> Any:
    params += [row.kv_transfer_params for batch in outputs.values() for row in batch.outputs if row.kv_transfer_params]
    return outputs


def test_an_abort_during_a_load_keeps_its_blocks_until_it_is_reported() -> None:
    run = with_stored_prompt(is_async=True, load_steps=5)
    run.submit("again", PROMPT, 5)
    run.tick()
    held = run.scheduler.get_kv_cache_usage()
    run.abort("again")
    assert run.scheduler.get_kv_cache_usage() == held
    run.ticks(2)
    assert run.scheduler.get_kv_cache_usage() == held
    run.finish()
    assert connector_of(run).calls["again"] == ["new", f"alloc {NUM_STORED}", "finished"]


@pytest.mark.parametrize("order", [("recving", "sending"), ("sending", "recving"), ("both",)])
def test_reports_of_an_aborted_request_in_any_order_and_twice(order: tuple[str, ...]) -> None:
    """Fault 45: freed once, after both; a report that nobody waits for is noted."""
    run = with_stored_prompt(is_async=True, load_steps=50)
    connector = connector_of(run)
    connector.request_finished_all_groups = lambda request, block_ids: (True, None)  # type: ignore[method-assign]
    run.submit("again", PROMPT, 5)
    run.tick()
    run.abort("again")
    port = run.scheduler._port
    usage = []
    for what in (*order, *order):
        report = type(run.worker.transfers.start(_no_jobs()))(finished_sending=set(), finished_recving=set())
        report.kv_connector_worker_meta = []
        if what != "sending":
            report.finished_recving.add("again")
        if what != "recving":
            report.finished_sending.add("again")
        port.take_reports(report, run.scheduler._desk.handles)
        usage.append(run.scheduler.get_kv_cache_usage() > 0)
    assert usage == [*[True] * (len(order) - 1), False, *[False] * len(order)]
    run.worker.transfers._loads.clear()
    run.finish()


def _no_jobs() -> Any:
    from exact.store_connector import StepJobs

    return StepJobs([], [], [], set())


def test_a_request_without_kv_is_told_too() -> None:
    run = timeline()
    run.submit("gone", PROMPT, 5)
    run.abort("gone")
    run.finish()
    assert connector_of(run).calls["gone"] == ["new", "finished"]


def test_a_refused_request_is_told_too() -> None:
    run = timeline(knobs={"num_blocks": 4})
    run.submit("huge", PROMPT, 5, refused=True)
    run.finish()
    assert connector_of(run).calls["huge"] == ["new", "finished"]


def test_a_loaded_request_can_be_retracted() -> None:
    knobs = {"max_num_seqs": 1, "num_blocks": 22, "policy": "priority"}
    run = with_stored_prompt(is_async=True, load_steps=4, knobs=knobs)
    run.submit("again", PROMPT, 5, priority=1)
    run.tick()
    run.submit("runner", 20, 60, priority=0)
    run.finish()
    assert (run.outcome("runner"), run.outcome("again")) == ("length", "length")
    assert run.preempted.get("again", 0) > 0
    assert "runner" not in run.preempted


def test_a_loaded_request_in_front_gives_way_to_the_one_in_the_slot() -> None:
    knobs = {"max_num_seqs": 1, "num_blocks": 20}
    run = with_stored_prompt(is_async=True, load_steps=4, knobs=knobs)
    run.submit("again", PROMPT, 5)
    run.tick()
    run.submit("runner", 12, 60)
    run.finish()
    assert (run.outcome("runner"), run.outcome("again")) == ("length", "length")


@pytest.mark.parametrize(
    "method", ["get_num_new_matched_tokens", "update_state_after_alloc", "request_finished_all_groups"]
)
def test_an_exception_of_the_connector_ends_at_most_its_request(method: str) -> None:
    run = timeline()
    connector = connector_of(run)
    original = getattr(connector, method)

    def raising(request: Any, *arguments: Any) -> Any:
        if request.request_id == "bad":
            raise RuntimeError("the store is gone")
        return original(request, *arguments)

    setattr(connector, method, raising)
    run.ledger.may_fail = True
    run.submit("bad", PROMPT, 5)
    run.submit("good", 30, 5)
    run.finish()
    assert run.outcome("good") == "length"
    assert run.outcome("bad") == ("length" if method == "request_finished_all_groups" else "error")


def test_a_prompt_that_the_connector_cuts_is_cut_everywhere() -> None:
    run = timeline()
    connector = connector_of(run)

    def cut(request: Any) -> None:
        StoreConnector.on_new_request(connector, request)
        del request.prompt_token_ids[-1], request._all_token_ids[-1]
        request.num_prompt_tokens -= 1
        request.max_tokens = 1

    connector.on_new_request = cut  # type: ignore[method-assign]
    request = run.harness.make_request("cut", PROMPT, 9)
    run.scheduler.add_request(request)
    plan = run.scheduler.schedule()
    (new,) = plan.scheduled_new_reqs
    assert new.prompt_token_ids == PROMPT[:-1]
    assert plan.num_scheduled_tokens == {"cut": 32}
    run.scheduler.finish_requests("cut", RequestStatus.FINISHED_ABORTED)
    check_idle_after_abort(run)


def check_idle_after_abort(run: Timeline) -> None:
    run.scheduler.schedule()
    assert run.scheduler.get_request_counts() == (0, 0)


def test_an_undecided_connector_holds_up_nobody_else() -> None:
    run = timeline(knobs={"max_num_seqs": 64, "num_blocks": 400})
    connector = connector_of(run)
    connector.get_num_new_matched_tokens = lambda request, _: (  # type: ignore[method-assign]
        (0, False) if request.request_id == "decided" or run.report.ticks > 60 else (None, False)
    )
    for number in range(40):
        run.submit(f"slow{number}", 5, 2)
    run.submit("decided", 5, 2)
    run.ticks(10)
    assert run.outcome("decided") == "length"
    run.finish()


def test_statistics_and_reset() -> None:
    run = with_stored_prompt()
    run.scheduler.make_stats()
    run.submit("again", PROMPT, 2)
    run.tick()
    run.finish()
    outputs = run.scheduler.make_stats()
    assert outputs.connector_prefix_cache_stats is not None
    assert run.scheduler.reset_prefix_cache(reset_connector=True)
    assert connector_of(run).was_reset
    assert run.scheduler.make_stats().connector_prefix_cache_stats.reset


def test_a_consumer_takes_over_what_a_producer_computed() -> None:
    """Prefill and decode in two engines: the producer frees late, the consumer loads the whole prompt."""
    producer = timeline(send_steps=3)
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    producer.submit("r", PROMPT[:-1], 1, extra={"extra_args": {"kv_transfer_params": params}})
    producer.finish()
    consumer = timeline(is_async=True, whole_prompt=True)
    connector_of(consumer).store = connector_of(producer).store
    params = {"do_remote_decode": False, "do_remote_prefill": True}
    consumer.submit("r", PROMPT[:-1], 6, extra={"extra_args": {"kv_transfer_params": params}})
    assert consumer.scheduler.make_stats().num_kv_fetch_reqs_by_stage["waiting_to_start"] == 1
    consumer.finish()
    assert consumer.outcome("r") == "length"
    assert consumer.computed["r"] == 6, "of the prompt only the last token, for its logits"
    check_idle(consumer.harness)
