# SPDX-License-Identifier: Apache-2.0
"""Random agentic traffic over a KV connector that really moves what blocks hold: no wrong, lost or doubled token, no leak."""

from __future__ import annotations

from dataclasses import replace

import pytest
from exact.relaxed import random_runs
from exact.store_connector import PATH
from exact.strategies import Scenario, connectors, scenarios
from exact_worker import Driver
from hypothesis import given
from scheduler_harness import OURS, make_harness

pytestmark = pytest.mark.host_matrix

relaxed = random_runs(60)


def run(scenario: Scenario, options: dict[str, object], policy: str = "fail") -> Driver:
    knobs = replace(scenario.knobs, connector=PATH, connector_options=options, load_failure_policy=policy)
    driver = Driver(make_harness(OURS, knobs), scenario.workload, draft_right=scenario.draft_right)
    try:
        driver.run(5_000)
    except Exception as error:
        error.add_note(f"{knobs}, {scenario.workload}, tick {driver.report.ticks}")
        raise
    return driver


@relaxed
@given(scenario=scenarios(max_depth=3), options=connectors(fail_share=0.0))
def test_loads_saves_and_sends(scenario: Scenario, options: dict[str, object]) -> None:
    run(scenario, options)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@relaxed
@given(scenario=scenarios(max_depth=3), options=connectors(fail_share=0.5))
def test_loads_that_fail(policy: str, scenario: Scenario, options: dict[str, object]) -> None:
    run(scenario, options, policy)
