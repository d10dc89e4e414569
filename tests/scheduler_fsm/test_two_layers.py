# SPDX-License-Identifier: Apache-2.0
"""Coarse physical blocks, fine matches: a shared prefix is reused to its last whole logical block."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from exact.driver import Driver
from exact.memory import ExactError
from exact.timeline import Timeline
from exact.workload import Arrival, Workload, words
from scheduler_harness import OURS, make_harness
from scheduler_knobs import REUSED_OF_COARSE_BLOCKS, RUNNER_SHAPES, Group, Knobs

from tokenspeed_plugin.kv_flat.groups import match_unit_tokens

pytestmark = pytest.mark.host_matrix

REUSED_TOKENS = [*REUSED_OF_COARSE_BLOCKS, (16, 100, 96), (128, 300, 256)]


def knobs_of(block_tokens: int, runner: str = "v1", depth: int = 1, **fields: Any) -> Knobs:
    shape = {"num_blocks": 5000 // block_tokens * 4, "budget_tokens": 4096, "max_model_len": 4096}
    return Knobs(groups=(Group(block_tokens),), runner=runner, pipeline_depth=depth, **(shape | fields))


@pytest.mark.parametrize(
    ("block_tokens", "unit_tokens"), [(8, 8), (16, 16), (128, 128), (528, 88), (1536, 128), (131, 131), (8320, 128)]
)
def test_the_unit_is_the_largest_divisor_up_to_128(block_tokens: int, unit_tokens: int) -> None:
    assert match_unit_tokens([], block_tokens) == unit_tokens


def test_a_state_of_several_tokens_is_never_cut() -> None:
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(tokens_per_state=4))
    assert match_unit_tokens([group], 264) == 88
    assert match_unit_tokens([group], 132) == 44
    assert match_unit_tokens([group], 130) == 130, "no unit fits: matches end at whole blocks"


@pytest.mark.parametrize(("runner", "depth"), RUNNER_SHAPES)
@pytest.mark.parametrize(("block_tokens", "shared_tokens", "reused_tokens"), REUSED_TOKENS)
def test_shared_tokens_are_reused(
    runner: str, depth: int, block_tokens: int, shared_tokens: int, reused_tokens: int
) -> None:
    """One after the other and side by side: the second at once, the exact worker reads every slot back."""
    run = Timeline("tokenspeed", knobs_of(block_tokens, runner, depth))
    prefix = words(1, shared_tokens)
    for number in range(3):
        run.submit(f"r{number}", prefix + words(10 + number, 50), 4)
        run.ticks(2)
    run.finish()
    run.submit("late", prefix + words(20, 50), 4)
    run.finish()
    assert run.cached == {"r0": 0, "r1": reused_tokens, "r2": reused_tokens, "late": reused_tokens}


@pytest.mark.parametrize(("runner", "depth"), RUNNER_SHAPES)
def test_the_next_turn_writes_on_in_its_own_block(runner: str, depth: int) -> None:
    run = Timeline("tokenspeed", knobs_of(1536, runner, depth))
    history = words(1, 600)
    for turn in range(4):
        history = history + words(10 + turn, 200)
        answer = run.submit(f"turn{turn}", history, 60).answer(4096)
        run.finish()
        if turn:
            assert run.cached[f"turn{turn}"] == (len(history) - 200 - 1) // 128 * 128
        history = history + list(answer.tokens)
    assert run.scheduler._core.counters()["block_copies"] == 0


def test_blocks_of_the_usual_size_are_never_copied() -> None:
    run = Timeline("tokenspeed", knobs_of(128))
    for number in range(4):
        run.submit(f"r{number}", words(1, 700) + words(10 + number, 90), 8)
        run.ticks(1)
    run.finish()
    assert run.scheduler._core.counters()["block_copies"] == 0
    assert all(plan.kv_cache_block_copies is None for plan in run.plans)


def test_without_room_for_a_copy_whole_blocks_are_shared_and_the_loss_is_counted() -> None:
    knobs = Knobs(groups=(Group(8),), num_blocks=3, budget_tokens=64, max_model_len=32, match_tokens=2)
    run = Timeline("tokenspeed", knobs)
    run.submit("first", words(1, 16), 1)
    run.finish()
    run.submit("fork", words(1, 12) + words(2, 12), 1)
    run.finish()
    assert run.cached["fork"] == 8
    assert run.scheduler._core.counters()["coarsened_tokens"] == 4


def test_both_ends_of_a_copy_are_held_until_its_step_is_done() -> None:
    run = Timeline("tokenspeed", Knobs(groups=(Group(8),), num_blocks=6, max_model_len=32, match_tokens=2))
    run.submit("first", words(1, 16), 1)
    run.finish()
    run.submit("fork", words(1, 12) + words(2, 4), 1)
    plan = run.scheduler.schedule()
    assert len(plan.kv_cache_block_copies) == 1
    run.scheduler.finish_requests("fork", run_status())
    free_blocks = run.scheduler._core.counters()["free_blocks"]
    assert free_blocks == 4, "the request is gone, source and target are not"
    run.scheduler.check_integrity()
    output = SimpleNamespace(
        sampled_token_ids=[[7]],
        req_ids=["fork"],
        req_id_to_index={"fork": 0},
        num_nans_in_logits=None,
        cudagraph_stats=None,
        kv_connector_output=None,
    )
    run.scheduler.update_from_output(plan, output)
    assert run.scheduler._core.counters()["free_blocks"] == 6
    run.scheduler.check_integrity()


def run_status() -> Any:
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED


def forget_copies(plan: Any) -> None:
    plan.kv_cache_block_copies = None


def copy_backwards(plan: Any) -> None:
    ends = [(copy.dst_block_id, copy.src_block_id) for copy in plan.kv_cache_block_copies]
    plan.kv_cache_block_copies = [type(plan.kv_cache_block_copies[0])(*pair) for pair in ends]


def zero_a_target(plan: Any) -> None:
    """As it would be if zeroing came after the copy."""
    plan.new_block_ids_to_zero = [copy.dst_block_id for copy in plan.kv_cache_block_copies]
    plan.kv_cache_block_copies = None


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("fault", [forget_copies, copy_backwards, zero_a_target])
def test_the_worker_notices_a_wrong_copy(fault: Callable[[Any], None], runner: str) -> None:
    knobs = Knobs(groups=(Group(8),), num_blocks=24, runner=runner, match_tokens=2)
    arrivals = [Arrival(3 * i, f"r{i}", words(1, 12) + words(9 + i, 4), 6) for i in range(3)]
    applied = []

    def change(plan: Any) -> Any:
        if plan.kv_cache_block_copies:
            fault(plan)
            applied.append(plan)
        return plan

    with pytest.raises(ExactError):
        Driver(make_harness(OURS, knobs), Workload(arrivals), wrap_plan=change).run(500)
    assert applied
