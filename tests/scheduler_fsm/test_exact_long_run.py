# SPDX-License-Identifier: Apache-2.0
"""100,000 random steps: no wrong token, and nothing left behind after each scenario (an eighth of them with vLLM's own)."""

from __future__ import annotations

import itertools

import pytest
from exact.random_workload import Traffic, random_knobs, random_workload
from exact_worker import Report, run_scenario
from scheduler_harness import SCHEDULERS, class_of
from scheduler_knobs import Knobs

pytestmark = pytest.mark.host_matrix

NUM_STEPS = {"tokenspeed": 100_000, "vllm": 12_500}
FIRST_SEED = 20_000
SHAPES = [
    Knobs(runner=runner, pipeline_depth=depth, num_spec_tokens=spec)
    for runner, depth, spec in itertools.product(("v1", "v2"), (1, 2), (0, 3))
]


def run_steps(scheduler: str, shape: Knobs, num_steps: int, seed: int) -> Report:
    """Runs scenarios of consecutive seeds until `num_steps` steps are done."""
    total = Report()
    while total.steps < num_steps:
        traffic = Traffic(num_sessions=20, num_salts=2)
        workload = random_workload(seed, traffic, shape.max_model_len)
        knobs = random_knobs(seed, shape, workload)
        report = run_scenario(class_of(scheduler, knobs), knobs, workload)
        for name, value in vars(report).items():
            setattr(total, name, getattr(total, name) + value)
        seed += 1
    return total


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda k: f"{k.runner}-depth{k.pipeline_depth}-spec{k.num_spec_tokens}")
def test_random_steps(scheduler: str, shape: Knobs) -> None:
    num_steps = NUM_STEPS[scheduler] // len(SHAPES)
    report = run_steps(scheduler, shape, num_steps, FIRST_SEED)
    assert report.steps >= num_steps
    assert report.preemptions > 0
    assert report.cached_tokens > 0
    assert report.aborted > 0
