# SPDX-License-Identifier: Apache-2.0
"""Fault 3 (vllm #25538): re-admission looks at the next chunk only, so a long request restarts in a loop."""

from __future__ import annotations

import pytest
from exact.timeline import Timeline
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_knobs import Group, Knobs

pytestmark = pytest.mark.host_matrix


def test_recomputation_stays_bounded(scheduler: str) -> None:
    knobs = Knobs(groups=(Group(4),), num_blocks=16, budget_tokens=8, prefix_caching=False, max_model_len=128)
    run = Timeline(scheduler, knobs)
    run.submit("r1", 48, 16)
    run.ticks(7)
    run.submit("r2", 40, 8)
    while not run.done:
        assert run.tick() or not run.ledger.open_ids, "no request made progress in this tick"
    run.check_end()
    assert run.computed["r1"] <= 48 + 16, "r1 held memory first and must not be recomputed"
    assert run.computed["r2"] <= 40 + 8, "r2 must not start before its whole context fits"


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.tuples(st.integers(1, 48), st.integers(1, 16)), min_size=2, max_size=6),
    budget=st.integers(8, 32),
)
def test_each_preemption_pays_for_tokens_of_others(scheduler: str, lengths: list[tuple[int, int]], budget: int) -> None:
    knobs = Knobs(groups=(Group(4),), num_blocks=17, budget_tokens=budget, prefix_caching=False, max_model_len=128)
    run = Timeline(scheduler, knobs)
    for number, (prompt, output) in enumerate(lengths):
        run.submit(f"r{number}", prompt, output)
    run.finish()
    total_outputs = sum(output for _, output in lengths)
    assert run.report.preemptions <= total_outputs, "more preemptions than tokens produced"
    needed = sum(prompt + output for prompt, output in lengths)
    assert run.report.tokens_computed <= needed + run.report.preemptions * 64
