# SPDX-License-Identifier: Apache-2.0
"""Hypothesis looks for multimodal traffic that reads an encoder output which is not there, or overfills budget or cache."""

from __future__ import annotations

import pytest
from exact.multimodal import multimodal_scenarios
from exact.relaxed import random_runs
from exact.strategies import Scenario
from exact_worker import run_scenario
from hypothesis import given
from scheduler_harness import OURS, class_of

pytestmark = pytest.mark.host_matrix

relaxed = random_runs(150)


@relaxed
@given(scenario=multimodal_scenarios(max_depth=2))
def test_random_multimodal_traffic(scenario: Scenario) -> None:
    run_scenario(OURS, scenario.knobs, scenario.workload, draft_right=scenario.draft_right, max_ticks=5_000)


@relaxed
@given(scenario=multimodal_scenarios(max_depth=4))
def test_random_multimodal_traffic_through_a_pipeline(scenario: Scenario) -> None:
    run_scenario(OURS, scenario.knobs, scenario.workload, draft_right=scenario.draft_right, max_ticks=5_000)


@relaxed
@given(scenario=multimodal_scenarios(max_depth=2, splits=True))
def test_the_worker_agrees_with_vllms_scheduler(scenario: Scenario) -> None:
    knobs = scenario.knobs
    run_scenario(class_of("vllm", knobs), knobs, scenario.workload, draft_right=scenario.draft_right, max_ticks=5_000)
