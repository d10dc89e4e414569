# SPDX-License-Identifier: Apache-2.0
"""Random agentic traffic through vLLM's own scheduler over the flat KV manager: no wrong, lost or doubled token, no leak."""

from __future__ import annotations

from dataclasses import replace

import pytest
from exact.relaxed import random_runs
from exact.store_connector import PATH
from exact.strategies import Scenario, connectors, scenarios
from exact_worker import run_scenario
from hypothesis import given
from scheduler_harness import class_of

pytestmark = pytest.mark.host_matrix


def check(scenario: Scenario, **fields: object) -> None:
    knobs = replace(scenario.knobs, **fields)
    if knobs.pipeline_depth > 2 and knobs.num_lora_adapters:
        knobs = replace(knobs, num_lora_adapters=4)  # vLLM's scheduler admits too many (see test_exact_random)
    run_scenario(class_of("flat", knobs), knobs, scenario.workload, draft_right=scenario.draft_right, max_ticks=5_000)


@random_runs(100)
@given(scenario=scenarios(max_depth=3))
def test_random_traffic(scenario: Scenario) -> None:
    check(scenario)


@random_runs(40)
@given(scenario=scenarios(max_depth=2, resets=False), options=connectors(fail_share=0.0))
def test_loads_saves_and_sends(scenario: Scenario, options: dict[str, object]) -> None:
    # vLLM's scheduler computes the last token of a prompt in the step that loads the others.
    options["whole_prompt"] = options["whole_prompt"] and options["is_async"]
    check(scenario, connector=PATH, connector_options=options)
