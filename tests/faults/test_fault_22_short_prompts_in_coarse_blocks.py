# SPDX-License-Identifier: Apache-2.0
"""Fault 22 (vllm #40696): blocks grown to the size of a state, and shared prompts shorter than one never hit."""

from __future__ import annotations

import pytest
from exact.timeline import Timeline
from exact.workload import words
from scheduler_knobs import Group, Knobs

pytestmark = pytest.mark.host_matrix


@pytest.mark.parametrize(("shared_tokens", "reused_tokens"), [(480, 440), (552, 528), (979, 968)])
def test_the_match_unit_is_not_the_allocation_unit(scheduler: str, shared_tokens: int, reused_tokens: int) -> None:
    """The second prompt shows where the first two part; from then on the states behind the shared tokens are there."""
    groups = (*(Group(528, keeps_state=True) for _ in range(3)), Group(528))
    run = Timeline(scheduler, Knobs(groups, 64, budget_tokens=2048, max_model_len=2048))
    for number in range(3):
        run.submit(f"r{number}", words(1, shared_tokens) + words(10 + number, 40), 2)
        run.finish(40)
    assert run.cached["r2"] == reused_tokens
