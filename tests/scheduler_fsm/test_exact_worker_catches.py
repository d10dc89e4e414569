# SPDX-License-Identifier: Apache-2.0
"""The exact worker passes vLLM's own schedulers and catches every fault planted in them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from exact.driver import Driver
from exact.memory import ExactError
from exact.mutants import OUTPUT_MUTANTS, PLAN_MUTANTS, SCHEDULER_MUTANTS, Mutant
from exact.workload import Arrival, Workload, words
from scheduler_harness import STOCK_ASYNC, STOCK_SYNC, make_harness
from scheduler_knobs import Group, Knobs

pytestmark = pytest.mark.host_matrix

SHAPES = [(runner, depth) for runner in ("v1", "v2") for depth in (1, 2)]
WINDOWED = (Group(4), Group(4, 6))


def workload() -> Workload:
    """Shared prefixes and a pool too small for all: hits, chunked prefills and preemptions."""
    arrivals = [Arrival(i, f"r{i}", words(0, 8) + words(i + 1, 5 + 3 * (i % 5)), 12) for i in range(12)]
    return Workload(arrivals, seed=7)


def knobs_for(mutant: Mutant | None, runner: str, depth: int) -> Knobs:
    needs = dict(mutant.needs) if mutant is not None else {}
    windowed = needs.pop("windowed", False) or needs.get("zero_blocks", False)
    groups, num_blocks = (WINDOWED, 40) if windowed else ((Group(4),), 22)
    base = Knobs(groups=groups, num_blocks=num_blocks, runner=runner, pipeline_depth=depth, budget_tokens=16)
    return replace(base, **needs)


def drive(knobs: Knobs, mutant: Mutant | None, record: bool = False) -> Driver:
    """Runs the scenario with one planted fault; which must get its chance."""
    harness = make_harness(STOCK_ASYNC if knobs.is_async else STOCK_SYNC, knobs)
    state = SimpleNamespace(applied=False)
    if mutant is not None and mutant.scheduler is not None:
        mutant.scheduler(harness.scheduler)
        state.applied = True

    def change_plan(plan: Any) -> Any:
        if mutant is not None and mutant.plan is not None and not state.applied:
            state.applied = mutant.plan(plan, driver.worker)
        return plan

    def change_outputs(outputs: Any) -> Any:
        for batch in outputs.values():
            if mutant is not None and mutant.outputs is not None and not state.applied:
                state.applied = mutant.outputs(batch.outputs)
        return outputs

    driver = Driver(harness, workload(), record=record, wrap_plan=change_plan, wrap_outputs=change_outputs)
    try:
        driver.run(max_ticks=2000)
    finally:
        assert state.applied or mutant is None, f"the scenario gave {mutant} no chance"
    return driver


@pytest.mark.parametrize(("runner", "depth"), SHAPES)
@pytest.mark.parametrize("groups", [(Group(4),), WINDOWED], ids=["full", "windowed"])
@pytest.mark.parametrize("num_spec_tokens", [0, 3])
def test_stock_scheduler_passes(runner: str, depth: int, groups: tuple[Group, ...], num_spec_tokens: int) -> None:
    knobs = replace(knobs_for(None, runner, depth), num_spec_tokens=num_spec_tokens, groups=groups)
    knobs = replace(knobs, num_blocks=22 * len(groups))
    driver = drive(knobs, None)
    assert driver.report.tokens_delivered == 12 * 12
    assert driver.report.cached_tokens > 0
    assert driver.report.preemptions > 0


@pytest.mark.parametrize(("runner", "depth"), SHAPES)
@pytest.mark.parametrize("mutant", PLAN_MUTANTS + OUTPUT_MUTANTS + SCHEDULER_MUTANTS, ids=repr)
def test_planted_fault_is_caught(mutant: Mutant, runner: str, depth: int) -> None:
    shape = {"runner": runner, "pipeline_depth": depth}
    if any(mutant.needs.get(key, value) != value for key, value in shape.items()):
        runner, depth = mutant.needs.get("runner", runner), mutant.needs.get("pipeline_depth", depth)
    with pytest.raises(ExactError) as caught:
        drive(knobs_for(mutant, runner, depth), mutant)
    assert caught.value.kind


@pytest.mark.parametrize(("runner", "depth"), SHAPES)
def test_wrong_read_names_its_place_and_changes_the_token(runner: str, depth: int) -> None:
    mutant = next(m for m in PLAN_MUTANTS if m.name == "copy_over_a_live_block")
    with pytest.raises(ExactError) as caught:
        drive(knobs_for(mutant, runner, depth), mutant)
    fault = caught.value
    assert (fault.kind, fault.position, fault.group) == ("wrong_read", 4, 0)
    assert fault.request_id is not None
    assert fault.block is not None
    with pytest.raises(ExactError, match="wrong_token"):
        drive(knobs_for(mutant, runner, depth), mutant, record=True)
