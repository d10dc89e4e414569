# SPDX-License-Identifier: Apache-2.0
"""Sessions with streaming input under vLLM's own scheduler, over the flat KV manager and over vLLM's.

vLLM's scheduler has faults of its own with such sessions. They are pinned down here, with both managers: what is left is exact.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from exact.memory import ExactError
from exact.random_workload import pool_for
from exact.relaxed import random_runs
from exact.strategies import Scenario, scenarios
from exact.workload import Arrival, Chunk, Reset, Workload, words
from exact_worker import run_scenario
from hypothesis import given
from scheduler_harness import class_of
from scheduler_knobs import Group, Knobs

from tokenspeed_plugin.host.version import installed_version

pytestmark = pytest.mark.host_matrix

DRAFTS_OUTLIVE_TURNS = str(installed_version()).startswith("0.32")

LAST_CHUNK_TICK = 120


def within_vllms_reach(scenario: Scenario) -> tuple[Knobs, Workload]:
    """The same traffic without what vLLM's scheduler gets wrong: see the tests below."""
    workload = scenario.workload
    arrivals = [replace(one, stop_token_ids=()) if one.chunks else one for one in workload.arrivals]
    kept = sum(pool_for(scenario.knobs, Workload([one])) for one in arrivals if one.chunks)
    knobs = replace(scenario.knobs, num_blocks=scenario.knobs.num_blocks + kept)
    if DRAFTS_OUTLIVE_TURNS:
        knobs = replace(knobs, num_spec_tokens=0)
    if knobs.pipeline_depth > 2 and knobs.num_lora_adapters:
        knobs = replace(knobs, num_lora_adapters=4)  # vLLM's scheduler admits too many (see test_exact_random)
    resets = [reset for reset in workload.resets if not reset.reset_running]
    return knobs, replace(workload, arrivals=arrivals, resets=resets)


@random_runs(60)
@given(scenario=scenarios(max_depth=3, max_streams=3))
def test_random_sessions(scenario: Scenario) -> None:
    knobs, workload = within_vllms_reach(scenario)
    run_scenario(class_of("flat", knobs), knobs, workload, draft_right=scenario.draft_right, max_ticks=5_000)


def session(*chunks: Chunk, prompt_tokens: int = 4, max_tokens: int = 4, **fields: Any) -> Arrival:
    end = Chunk(LAST_CHUNK_TICK)
    prompt = words(500, prompt_tokens)
    extra = {"resumable": True}
    return Arrival(0, "session", prompt, max_tokens, chunks=(*chunks, end), extra=extra, **fields)


def stopped_session() -> Arrival:
    """Its first turn ends with a stop token, its second one is as long as it may be."""
    first = session(Chunk(20, tuple(words(1000, 3)), 2))
    return replace(first, stop_token_ids=(first.answer(512).tokens[1],))


STALE_DRAFTS = session(Chunk(20, tuple(words(1000, 5)), 1), prompt_tokens=1, max_tokens=2)
OTHER = Arrival(8, "other", words(7, 20), 8)
FAULTS = {
    "the stop token of one turn is reported for the next": (
        Knobs(),
        Workload([stopped_session()]),
        "wrong_end: ends with length/",
    ),
    "an idle session keeps its blocks from all others": (
        Knobs(groups=(Group(4),), num_blocks=8),
        Workload([session(prompt_tokens=8), replace(OTHER, tick=6)]),
        "stalled",
    ),
    "a session that outgrows the pool is preempted for ever": (
        Knobs(groups=(Group(1),), num_blocks=12),
        Workload([session(Chunk(5, tuple(words(1000, 5)), 5))]),
        "stalled",
    ),
    "a reset of all requests ends the engine": (
        Knobs(),
        Workload([session()], [Reset(20, reset_running=True)]),
        "Failed to reset KV cache even when all the running requests are preempted",
    ),
}
if DRAFTS_OUTLIVE_TURNS:
    FAULTS["drafts behind the end of a turn are tried in the next"] = (
        Knobs(groups=(Group(1),), num_spec_tokens=3),
        Workload([STALE_DRAFTS], seed=2073),
        "wrong_",
    )


@pytest.mark.parametrize("manager", ["vllm", "flat"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_vllms_scheduler(fault: str, manager: str) -> None:
    knobs, workload, symptom = FAULTS[fault]
    with pytest.raises((ExactError, RuntimeError), match=symptom):
        run_scenario(class_of(manager, knobs), knobs, workload, draft_right=0.6, max_ticks=500)
    # The same traffic is served by the plugin's own scheduler.
    run_scenario(class_of("tokenspeed", knobs), knobs, workload, draft_right=0.6, max_ticks=500)
