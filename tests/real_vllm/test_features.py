# SPDX-License-Identifier: Apache-2.0
"""Every way of running the same requests gives the same greedy tokens as vLLM's own scheduler in its plainest mode.

All engines of this file but one run one after another in one process. One baseline serves for all: greedy tokens depend neither on
overlap, drafts, pipeline stages nor on the order of service.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from real_vllm.checkpoints import eagle_drafter
from real_vllm.mixed_traffic import mixed_requests
from real_vllm.models import VOCABULARY_TOKENS, tiny_model
from real_vllm.runner import ScenarioError, run_scenarios
from real_vllm.scenario import Intervention, Outcome, PromptRequest, Scenario

pytestmark = pytest.mark.real_vllm

TOKENSPEED = "tokenspeed_plugin.scheduler_fsm.TokenSpeedScheduler"
ASYNC = {"async_scheduling": True}
TIGHT = {
    "block_size": 32,
    "max_num_seqs": 8,
    "max_model_len": 640,
    "num_gpu_blocks_override": 28,
    "max_num_batched_tokens": 96,
    "structured_outputs_config": {"backend": "xgrammar"},
    "async_scheduling": False,
}
SLEEP_STEP, WAKE_STEP, RESET_STEP = 24, 30, 40


def traffic() -> tuple[PromptRequest, ...]:
    """Mixed traffic; every third request is held by a grammar, every fifth wants its prompt's log probabilities."""
    requests = []
    for index, request in enumerate(mixed_requests(30, 5, VOCABULARY_TOKENS, max_prompt_tokens=400, max_new_tokens=40)):
        sampling: dict[str, Any] = {}
        if index % 3 == 1:
            sampling["structured_outputs"] = {"regex": "[a-z]{4,30} [0-9]{6,20}"}
        if index % 5 == 0:
            sampling["prompt_logprobs"] = 0
        requests.append(dataclasses.replace(request, sampling=sampling, priority=index % 3))
    return tuple(requests)


REQUESTS = traffic()
DRAFT_MODEL = {"method": "draft_model", "model": "qwen3", "num_speculative_tokens": 3}
EAGLE = {"method": "eagle3", "model": "eagle", "num_speculative_tokens": 2}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "async": ASYNC,
    "priority": {"scheduling_policy": "priority"},
    "draft_model": {"speculative_config": DRAFT_MODEL},
    "draft_model_async": {"speculative_config": DRAFT_MODEL, **ASYNC},
    "eagle": {"speculative_config": EAGLE},
    "eagle_async": {"speculative_config": EAGLE, **ASYNC},
    "interrupted": {},
    "interrupted_async": ASYNC,
    "pipeline": {
        "pipeline_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "worker_cls": "real_vllm.pipeline_worker.PipelineWorker",
    },
    # Last: it imports numba, after which vLLM 0.32 can build no other engine in the process.
    "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}},
}
INTERRUPTIONS = (
    Intervention(SLEEP_STEP, "sleep", {"level": 1, "mode": "keep"}),
    Intervention(WAKE_STEP, "wake_up"),
    Intervention(RESET_STEP, "reset_prefix_cache", {"reset_running_requests": True}),
)


def scenario(name: str, scheduler_cls: str | None) -> Scenario:
    arguments = {**TIGHT, **VARIANTS.get(name, {})}
    if "speculative_config" in arguments:
        drafters = {"qwen3": lambda: tiny_model("qwen3"), "eagle": eagle_drafter}
        speculation = dict(arguments["speculative_config"])
        if "model" in speculation:
            speculation["model"] = str(drafters[speculation["model"]]())
        arguments["speculative_config"] = speculation
    return Scenario(
        tiny_model("qwen3"),
        REQUESTS,
        scheduler_cls,
        arguments,
        host_patches=("keep_async_scheduling",) if arguments["async_scheduling"] else ("fork_workers",),
        interventions=INTERRUPTIONS if name.startswith("interrupted") else (),
    )


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome | ScenarioError]:
    """By variant; `stock` is vLLM's own scheduler."""
    in_one_process = ["stock", *(name for name in VARIANTS if name != "pipeline")]
    results = run_scenarios([scenario(name, None if name == "stock" else TOKENSPEED) for name in in_one_process])
    # Its workers are forked: from a process in which no thread is left of an engine before.
    (pipeline,) = run_scenarios([scenario("pipeline", TOKENSPEED)])
    return {**dict(zip(in_one_process, results, strict=True)), "pipeline": pipeline}


def outcome_of(outcomes: dict[str, Outcome | ScenarioError], name: str) -> Outcome:
    result = outcomes[name]
    if isinstance(result, ScenarioError):
        raise result
    return result


def answers(outcome: Outcome) -> dict[int, tuple[int, ...]]:
    """Tokens of the requests that were not aborted."""
    return {
        index: tokens
        for index, (tokens, request) in enumerate(zip(outcome.token_ids, REQUESTS, strict=True))
        if request.abort_after_tokens is None
    }


def test_the_traffic_proves_something(outcomes: dict[str, Outcome | ScenarioError]) -> None:
    stock = outcome_of(outcomes, "stock")
    assert stock.scheduler_name.startswith("vllm.")
    assert stock.num_preemptions > 0
    assert stock.num_cached_tokens > 0
    assert {"length", "stop", "abort"} <= set(stock.finish_reasons)
    assert len({tokens[:4] for tokens in answers(stock).values()}) > len(answers(stock)) // 2
    assert any(len(request.prompt_token_ids) > TIGHT["max_num_batched_tokens"] for request in REQUESTS[::5])


@pytest.mark.parametrize("name", VARIANTS)
def test_each_variant_gives_the_tokens_of_the_stock_scheduler(
    outcomes: dict[str, Outcome | ScenarioError], name: str
) -> None:
    stock, ours = outcome_of(outcomes, "stock"), outcome_of(outcomes, name)
    assert ours.scheduler_name.startswith("tokenspeed_plugin.")
    assert answers(ours) == answers(stock)
    assert ours.finish_reasons == stock.finish_reasons
    assert ours.num_batches_in_flight == (2 if "async" in name or name == "pipeline" else 1)


@pytest.mark.parametrize("name", VARIANTS)
def test_prompt_log_probabilities_survive_chunks_and_preemption(
    outcomes: dict[str, Outcome | ScenarioError], name: str
) -> None:
    stock, ours = outcome_of(outcomes, "stock"), outcome_of(outcomes, name)
    for index in range(0, len(REQUESTS), 5):
        if REQUESTS[index].abort_after_tokens is not None:
            continue
        left, right = ours.prompt_logprobs[index], stock.prompt_logprobs[index]
        assert left is not None
        assert right is not None
        assert len(left) == len(REQUESTS[index].prompt_token_ids) - 1
        assert left == pytest.approx(right, abs=1e-3)


@pytest.mark.parametrize("name", ["ngram", "draft_model", "draft_model_async", "eagle", "eagle_async"])
def test_drafts_are_verified(outcomes: dict[str, Outcome | ScenarioError], name: str) -> None:
    ours = outcome_of(outcomes, name)
    num_drafts = ours.counters["vllm:spec_decode_num_draft_tokens"]
    num_accepted = ours.counters["vllm:spec_decode_num_accepted_tokens"]
    assert num_drafts > 0
    assert num_accepted > 0 or name.startswith("eagle"), "the EAGLE drafter has random weights"
    assert num_accepted < num_drafts or name.startswith("draft_model"), "the draft model is the model itself"
    if name.startswith("draft_model"):
        assert ours.num_steps < outcome_of(outcomes, "plain").num_steps


def test_the_priority_policy_serves_the_urgent_first(outcomes: dict[str, Outcome | ScenarioError]) -> None:
    def mean_rank(outcome: Outcome, priority: int) -> float:
        ranks = [rank for rank, index in enumerate(outcome.finish_order) if REQUESTS[index].priority == priority]
        return sum(ranks) / len(ranks)

    by_priority = outcome_of(outcomes, "priority")
    plain = outcome_of(outcomes, "plain")
    assert mean_rank(by_priority, 0) < mean_rank(by_priority, 1) < mean_rank(by_priority, 2)
    assert mean_rank(by_priority, 0) < mean_rank(plain, 0)


@pytest.mark.parametrize("name", ["interrupted", "interrupted_async"])
def test_sleeping_and_resetting_the_cache_keep_running_requests(
    outcomes: dict[str, Outcome | ScenarioError], name: str
) -> None:
    ours = outcome_of(outcomes, name)
    assert ours.answers == (None, True, True)
    assert ours.num_preemptions > outcome_of(outcomes, "plain").num_preemptions
