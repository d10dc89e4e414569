# SPDX-License-Identifier: Apache-2.0
"""Fault 11 (tokenspeed PR 864): only prefilling requests hold memory, none can go on, and the process dies."""

from __future__ import annotations

import pytest
from exact.timeline import Timeline
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_knobs import Group, Knobs

pytestmark = pytest.mark.host_matrix


def test_two_prefills_that_do_not_fit_together(scheduler: str) -> None:
    knobs = Knobs(groups=(Group(4),), num_blocks=8, budget_tokens=16, long_prefill_threshold_tokens=8, max_model_len=64)
    run = Timeline(scheduler, knobs)
    run.submit("r1", 24, 2)
    run.submit("r2", 24, 2)
    run.finish(60)
    assert run.outcome("r1") == run.outcome("r2") == "length"


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompts=st.lists(st.integers(1, 30), min_size=2, max_size=6),
    budget=st.integers(8, 24),
    chunk=st.sampled_from([0, 3, 8]),
    windowed=st.booleans(),
)
def test_any_prefills_that_fit_alone_all_finish(
    scheduler: str, prompts: list[int], budget: int, chunk: int, windowed: bool
) -> None:
    groups = (Group(4), Group(4, 6)) if windowed else (Group(4),)
    knobs = Knobs(
        groups=groups,
        num_blocks=9 * len(groups),
        budget_tokens=budget,
        long_prefill_threshold_tokens=chunk,
        max_model_len=64,
    )
    run = Timeline(scheduler, knobs)
    for number, prompt in enumerate(prompts):
        run.submit(f"r{number}", prompt, 2)
    run.finish(400)
    assert all(run.outcome(f"r{number}") == "length" for number in range(len(prompts)))
