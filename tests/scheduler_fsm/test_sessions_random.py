# SPDX-License-Identifier: Apache-2.0
"""Hypothesis mixes sessions with streaming input into other traffic: chunks come early, late and while steps are in flight."""

from __future__ import annotations

import pytest
from exact.relaxed import random_runs
from exact.strategies import Scenario, scenarios
from exact_worker import run_scenario
from hypothesis import given
from scheduler_harness import class_of

pytestmark = pytest.mark.host_matrix


@random_runs(150)
@given(scenario=scenarios(max_depth=3, max_streams=4))
def test_random_sessions(scenario: Scenario) -> None:
    knobs = scenario.knobs
    run_scenario(
        class_of("tokenspeed", knobs), knobs, scenario.workload, draft_right=scenario.draft_right, max_ticks=5_000
    )
