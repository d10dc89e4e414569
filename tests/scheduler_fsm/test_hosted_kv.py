# SPDX-License-Identifier: Apache-2.0
"""The flat KV manager under vLLM's own scheduler: what it must do beyond random traffic."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
from exact.replica import Replica, record_events
from exact.timeline import Timeline
from exact.workload import Arrival, Workload, words
from exact_worker import Driver
from scheduler_harness import class_of, make_harness
from scheduler_knobs import Group, Knobs
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched import async_scheduler, scheduler
from vllm.v1.request import RequestStatus

pytestmark = pytest.mark.host_matrix

WINDOWED = (Group(4), Group(4, 10))
SHAPES = [("v1", 1), ("v1", 2), ("v2", 1), ("v2", 2)]


def agentic(num_sessions: int, num_turns: int) -> list[Arrival]:
    """Sessions that share a system prompt; each turn re-sends the history."""
    arrivals = []
    for session in range(num_sessions):
        prompt = words(1, 40)
        for turn in range(num_turns):
            prompt = prompt + words(100 * session + turn + 10, 13)
            after = f"s{session}.{turn - 1}" if turn else None
            arrival = Arrival(2 * session, f"s{session}.{turn}", prompt, 6, after=after)
            arrivals.append(arrival)
            prompt = prompt + list(arrival.answer(512).tokens)
    return arrivals


def hits(name: str, knobs: Knobs) -> dict[str, int]:
    """Tokens that the cache served, by request."""
    run = Timeline(name, knobs)
    driver = Driver(run.harness, Workload(agentic(5, 4)), wrap_outputs=run._note_outputs)
    driver.run(5_000)
    return run.cached


@pytest.mark.parametrize(("runner", "depth"), SHAPES)
@pytest.mark.parametrize("groups", [(Group(4),), WINDOWED], ids=["full", "with window"])
def test_it_hits_as_much_as_vllms_own_manager(groups: tuple[Group, ...], runner: str, depth: int) -> None:
    knobs = Knobs(groups=groups, num_blocks=900, runner=runner, pipeline_depth=depth)
    stock, flat = hits("vllm", knobs), hits("flat", knobs)
    assert flat.keys() == stock.keys()
    assert all(flat[name] >= stock[name] for name in stock)
    assert sum(stock.values()) > 0


def test_fine_matches_hit_more_than_vllms_own_manager() -> None:
    knobs = Knobs(groups=(Group(16),), num_blocks=300, match_tokens=4)
    stock, flat = hits("vllm", knobs), hits("flat", knobs)
    assert all(flat[name] >= stock[name] for name in stock)
    assert sum(flat.values()) > sum(stock.values())


@pytest.mark.parametrize(("runner", "depth"), SHAPES)
def test_a_match_inside_a_block_is_copied_by_the_workers(runner: str, depth: int) -> None:
    run = Timeline("flat", Knobs(groups=(Group(8),), runner=runner, pipeline_depth=depth, match_tokens=2))
    for number in range(3):
        run.submit(f"r{number}", words(1, 12) + words(10 + number, 9), 4)
        run.ticks(4)
    run.finish()
    assert [run.cached[f"r{number}"] for number in range(3)] == [0, 12, 12]
    assert sum(len(plan.kv_cache_block_copies or ()) for plan in run.plans) == 2


def test_without_room_for_a_copy_whole_blocks_are_shared() -> None:
    knobs = Knobs(groups=(Group(8),), num_blocks=3, budget_tokens=64, max_model_len=32, match_tokens=2)
    run = Timeline("flat", knobs)
    run.submit("first", words(1, 16), 1)
    run.finish()
    run.submit("fork", words(1, 12) + words(2, 12), 1)
    run.finish()
    assert run.cached["fork"] == 8


@pytest.mark.parametrize("depth", [1, 2])
def test_a_small_pool_preempts_and_stays_whole(depth: int) -> None:
    knobs = Knobs(num_blocks=26, budget_tokens=48, pipeline_depth=depth, match_tokens=2, groups=(Group(4),))
    run = Timeline("flat", knobs)
    for number in range(6):
        run.submit(f"r{number}", words(1, 8) + words(number + 2, 10), 24)
    for _ in range(30):
        run.tick()
        run.scheduler.check_integrity()
    run.abort("r1")
    run.scheduler.check_integrity()
    run.finish()
    assert run.preempted


def test_a_reset_takes_everything_back_and_is_refused_while_blocks_are_used() -> None:
    run = Timeline("flat", Knobs())
    run.submit("one", words(1, 20), 8)
    run.ticks(2)
    assert not run.scheduler.reset_prefix_cache()
    assert run.scheduler.reset_prefix_cache(reset_running_requests=True)
    run.finish()
    assert run.scheduler.reset_prefix_cache()
    run.submit("again", words(1, 20), 2)
    run.finish()
    assert run.cached["again"] == 0


@pytest.mark.parametrize("match_tokens", [128, 2], ids=["one layer", "two layers"])
def test_replayed_events_give_the_hittable_set(monkeypatch: pytest.MonkeyPatch, match_tokens: int) -> None:
    record_events(monkeypatch)
    run = Timeline("flat", Knobs(groups=(Group(4),), num_blocks=16, match_tokens=match_tokens))
    run.scheduler.kv_cache_manager.enable_kv_cache_events = True
    run.scheduler.kv_event_publisher = replica = Replica(run.knobs.groups)
    for number in range(8):
        run.submit(f"r{number}", words(1, 8) + words(10 + number, 9), 6)
    kv = run.scheduler.kv_cache_manager._kv
    for _ in range(60):
        run.tick()
        assert len(replica.stored) == kv.num_cached
    run.finish()
    assert len(replica.stored) == kv.num_cached > 0
    event = next(iter(replica.stored.values()))
    assert (event.kv_cache_spec_kind, event.block_size) == ("full_attention", min(4, match_tokens))
    assert run.scheduler.reset_prefix_cache()
    run.submit("after", words(1, 12), 1)
    run.finish()
    assert replica.num_clears == 1
    assert len(replica.stored) == kv.num_cached


def test_a_full_report_tells_the_hit_blocks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    record_events(monkeypatch)
    run = Timeline("flat", Knobs(groups=WINDOWED, num_blocks=64))
    manager = run.scheduler.kv_cache_manager
    manager.enable_kv_cache_events = True
    run.submit("first", words(1, 24), 2)
    run.ticks(3)
    manager.take_events()
    run.submit("second", words(1, 24), 2, extra={"extra_args": {"kv_cache_report_mode": "full"}})
    told: list[Any] = []
    monkeypatch.setattr(run.scheduler.kv_event_publisher, "publish", lambda batch: told.extend(batch.events))
    run.tick()
    hit = run.cached["second"]
    by_group = [sum(event.group_idx == group for event in told) for group in (0, 1)]
    assert hit == 20
    assert by_group[0] == hit // 4
    assert 3 <= by_group[1] < by_group[0], "the window holds only the last blocks of the match"


def test_a_request_that_loses_its_place_in_a_step_takes_back_what_it_published() -> None:
    """vLLM's priority policy preempts what it has planned already; the blocks of that chunk will never be written."""
    num_lost = 0
    for num_blocks in range(17, 24):
        knobs = Knobs(policy="priority", num_blocks=num_blocks, max_num_seqs=4, long_prefill_threshold_tokens=8)
        run = Timeline("flat", knobs)
        run.submit("low", words(1, 60), 4, priority=5)
        run.submit("high", words(2, 9), 30, priority=1)
        while not run.done:
            run.tick()
            run.scheduler.check_integrity()
        run.finish()
        num_lost += run.preempted.get("low", 0)
    assert num_lost > 0


def test_a_session_with_streaming_input_goes_on_with_its_blocks() -> None:
    run = Timeline("flat", Knobs(num_blocks=40))
    run.submit("talk", words(1, 10), 5, extra={"resumable": True})
    run.ticks(20)
    blocks = run.scheduler.kv_cache_manager.get_block_ids("talk")[0]
    assert len(blocks) == 4, "between its turns it keeps what it has"
    run.update_session("talk", words(2, 9), 5)
    run.ticks(20)
    assert run.scheduler.kv_cache_manager.get_block_ids("talk")[0][:4] == blocks
    run.close_session("talk")
    run.finish()
    answer = run.ledger.accounts["talk"].arrival
    run.submit("same", list(answer.prompt), 3)
    run.finish()
    assert run.cached["same"] == (len(answer.prompt) - 1) // 4 * 4, "its keys name the tokens of all turns"


@pytest.mark.parametrize("prompt_tokens", [8, 9, 10, 11])
def test_what_a_turn_sampled_last_is_in_no_key(prompt_tokens: int) -> None:
    """It is dropped when the next input comes; with asynchronous scheduling its block may have been offered before."""
    run = Timeline("flat", Knobs(num_blocks=40, runner="v2", pipeline_depth=2))
    run.submit("talk", words(1, prompt_tokens), 5, extra={"resumable": True})
    run.ticks(20)
    run.update_session("talk", words(2, 9), 5)
    run.ticks(20)
    run.close_session("talk")
    run.finish()
    prompt = list(run.ledger.accounts["talk"].arrival.prompt)
    run.submit("same", prompt, 3)
    run.finish()
    assert run.cached["same"] == (len(prompt) - 1) // 4 * 4


def test_lives_of_blocks_reach_vllms_collector() -> None:
    knobs = Knobs(num_blocks=20, observability={"kv_cache_metrics": True, "kv_cache_metrics_sample": 1.0})
    run = Timeline("flat", knobs)
    reports: list[Any] = []
    original = run.scheduler.make_stats

    def noting(*args: Any, **kwargs: Any) -> Any:
        reports.append(original(*args, **kwargs))
        return reports[-1]

    run.scheduler.make_stats = noting
    for number in range(6):
        run.submit(f"r{number}", words(number, 30), 4)
        run.finish()
    events = [event for report in reports for event in report.kv_cache_eviction_events]
    assert events
    assert all(event.lifetime_seconds >= event.idle_seconds >= 0 for event in events)


def test_bad_hints_are_ignored_and_their_request_goes_on() -> None:
    run = Timeline("flat", Knobs())
    run.submit("odd", words(1, 9), 3, extra={"extra_args": {"kv_pin_s": -4}})
    run.finish()
    assert run.outcome("odd") == "length"


def test_hints_reach_the_eviction_policy() -> None:
    run = Timeline("flat", Knobs(num_blocks=40))
    run.submit("pinned", words(1, 16), 2, extra={"session_id": "a", "extra_args": {"kv_pin_s": 60}})
    run.submit("ended", words(2, 16), 2, extra={"session_id": "b", "extra_args": {"kv_session_ends": 1}})
    run.finish()
    counts = run.scheduler.kv_cache_manager.eviction_counts()
    assert counts["cached_blocks_pinned"] == counts["cached_blocks_ended"] == 4


def test_put_off_returns_come_back_in_the_same_order() -> None:
    orders = []
    for deferred in (False, True):
        run = Timeline("flat", Knobs(groups=WINDOWED, num_blocks=40))
        run.submit("one", words(1, 30), 12)
        run.ticks(4)
        manager, request = run.scheduler.kv_cache_manager, run.scheduler.requests["one"]
        request.status = RequestStatus.FINISHED_ABORTED
        if deferred:
            blocks = manager.pop_blocks_for_free(request)
            manager.check_integrity()
            manager.block_pool.free_blocks(reversed(blocks))
        else:
            manager.free(request)
        manager.check_integrity()
        assert manager.usage == 0
        orders.append(manager._kv.free_order())
    assert orders[0] == orders[1]


def test_every_member_that_vllms_scheduler_uses_is_there() -> None:
    manager = Timeline("flat", Knobs()).scheduler.kv_cache_manager
    source = inspect.getsource(scheduler) + inspect.getsource(async_scheduler)
    for owner, path in ((manager, "kv_cache_manager"), (manager.block_pool, "kv_cache_manager.block_pool")):
        names = set(re.findall(rf"self\.{re.escape(path)}\.([a-z_]+)", source))
        assert names
        assert {name for name in names if not hasattr(owner, name)} == set()
    names = set(re.findall(r"kv_cache_manager\.coordinator\.([a-z_]+)", source))
    assert {name for name in names if not hasattr(manager.coordinator, name)} == set()


def test_methods_take_every_call_that_vllms_take() -> None:
    manager = Timeline("flat", Knobs()).scheduler.kv_cache_manager
    for name, theirs in inspect.getmembers(KVCacheManager, inspect.isfunction):
        ours = getattr(type(manager), name, None)
        if name.startswith("_") or ours is None:
            continue
        wanted = list(inspect.signature(theirs).parameters)
        assert list(inspect.signature(ours).parameters)[: len(wanted)] == wanted, name


def test_only_the_scheduler_that_asks_gets_it() -> None:
    flat = make_harness(class_of("flat", Knobs()), Knobs()).scheduler
    stock = make_harness(class_of("vllm", Knobs()), Knobs()).scheduler
    assert type(stock.kv_cache_manager) is KVCacheManager
    assert type(flat.kv_cache_manager) is not KVCacheManager
