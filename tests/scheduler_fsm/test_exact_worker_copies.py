# SPDX-License-Identifier: Apache-2.0
"""Copy-on-write as the runners do it, on hand-made plans: a shared partial block is copied before the step reads it."""

from __future__ import annotations

from typing import Any

import pytest
from exact.workload import Arrival, words
from exact_worker import Driver, ExactError, Workload
from scheduler_harness import STOCK_SYNC, make_harness
from scheduler_knobs import Group, Knobs
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

pytestmark = pytest.mark.host_matrix

PROMPT = words(1, 8)
SIBLING = [*PROMPT[:6], *words(2, 4)]


def make_worker(runner: str) -> Any:
    harness = make_harness(STOCK_SYNC, Knobs(groups=(Group(4),), num_blocks=8, runner=runner))
    driver = Driver(harness, Workload([]))
    for name, prompt in (("first", PROMPT), ("second", SIBLING)):
        driver.ledger.open(Arrival(0, name, prompt, 4))
    return driver.worker


def new_plan(name: str, prompt: list[int], blocks: list[int], computed: int, **fields: Any) -> SchedulerOutput:
    plan = SchedulerOutput.make_empty()
    plan.scheduled_new_reqs = [
        NewRequestData(
            req_id=name,
            prompt_token_ids=prompt,
            mm_features=[],
            sampling_params=None,
            pooling_params=None,
            block_ids=(blocks,),
            num_computed_tokens=computed,
            lora_request=None,
            prefill_token_ids=prompt,
        )
    ]
    plan.num_scheduled_tokens = {name: len(prompt) - computed}
    plan.total_num_scheduled_tokens = len(prompt) - computed
    for key, value in fields.items():
        setattr(plan, key, value)
    return plan


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_copied_block_serves_its_first_tokens(runner: str) -> None:
    worker = make_worker(runner)
    worker.execute(new_plan("first", PROMPT, [1, 2], 0))
    copies = [KVCacheBlockCopy(2, 3)]
    plan = new_plan("second", SIBLING, [1, 3, 4], 6, kv_cache_block_copies=copies)
    assert worker.execute(plan).output.sampled_token_ids[0]


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize(
    ("copies", "kind", "position"),
    [
        (None, "wrong_read", 4),
        ([KVCacheBlockCopy(3, 2)], "wrong_read", 4),
        ([KVCacheBlockCopy(1, 3)], "wrong_read", 4),
        ([KVCacheBlockCopy(2, 9)], "block_range", None),
    ],
    ids=["missed", "reversed", "of another block", "out of range"],
)
def test_wrong_copy_is_caught(runner: str, copies: list[Any] | None, kind: str, position: int | None) -> None:
    worker = make_worker(runner)
    worker.execute(new_plan("first", PROMPT, [1, 2], 0))
    with pytest.raises(ExactError) as caught:
        worker.execute(new_plan("second", SIBLING, [1, 3, 4], 6, kv_cache_block_copies=copies))
    assert (caught.value.kind, caught.value.position) == (kind, position)


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_shared_partial_block_without_a_copy_is_caught(runner: str) -> None:
    """Writing on in the block of another request would change what that request reads."""
    worker = make_worker(runner)
    worker.execute(new_plan("first", PROMPT, [1, 2], 0))
    with pytest.raises(ExactError, match="shared_block"):
        worker.execute(new_plan("second", SIBLING, [1, 2, 4], 6))
