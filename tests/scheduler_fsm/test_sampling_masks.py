# SPDX-License-Identifier: Apache-2.0
"""`--return-sampling-mask`: every output carries the token ids that its sampler left to choose from, position by position."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scheduler_harness import make_harness
from scheduler_knobs import Knobs
from vllm.v1.outputs import ModelRunnerOutput, SamplingMaskLists

from tokenspeed_plugin.scheduler_fsm import TokenSpeedScheduler

pytestmark = pytest.mark.host_matrix


def harness_with_masks(wanted: bool) -> Any:
    class Patched(TokenSpeedScheduler):
        def __init__(self, vllm_config: Any, **arguments: Any) -> None:
            before = vllm_config.model_config.return_sampling_mask
            vllm_config.model_config.return_sampling_mask = wanted
            try:
                super().__init__(vllm_config=vllm_config, **arguments)
            finally:
                vllm_config.model_config.return_sampling_mask = before

    return make_harness(Patched, Knobs())


def run_step(harness: Any, kept: dict[str, list[int]]) -> dict[str, Any]:
    """One step in which each request samples the last of the tokens that were kept for it."""
    plan = harness.scheduler.schedule()
    req_ids = list(plan.num_scheduled_tokens)
    rows = [kept[req_id] for req_id in req_ids]
    output = ModelRunnerOutput(
        req_ids=req_ids,
        req_id_to_index={req_id: index for index, req_id in enumerate(req_ids)},
        sampled_token_ids=[[row[-1]] for row in rows],
        sampling_masks=SamplingMaskLists(
            np.array([token for row in rows for token in row]), np.cumsum([0, *(len(row) for row in rows)])
        ),
    )
    outputs = harness.scheduler.update_from_output(plan, output)
    return {out.request_id: out for batch in outputs.values() for out in batch.outputs}


@pytest.mark.parametrize("wanted", [True, False])
def test_masks_travel_with_the_tokens_of_every_step(wanted: bool) -> None:
    harness = harness_with_masks(wanted)
    for name in ("a", "b"):
        harness.scheduler.add_request(harness.make_request(name, [3, 4, 5], 8))
    for step in range(4):
        kept = {"a": [11, 12 + step], "b": [20, 21, 22 + step]}
        outputs = run_step(harness, kept)
        for name, output in outputs.items():
            assert output.new_token_ids == kept[name][-1:]
            mask = output.new_sampling_mask
            assert (list(mask.token_ids) == kept[name]) if wanted else mask is None


def test_masks_travel_with_the_answers_of_later_chunks_of_a_session() -> None:
    harness = harness_with_masks(True)
    for prompt in ([3, 4, 5], [6, 7]):
        harness.scheduler.add_request(harness.make_request("s", prompt, 3, resumable=True))
    masks = [run_step(harness, {"s": [11, 12 + step]})["s"].new_sampling_mask for step in range(6)]
    assert [list(mask.token_ids) for mask in masks] == [[11, 12 + step] for step in range(6)]
