# SPDX-License-Identifier: Apache-2.0
"""The same requests give the same greedy tokens whoever schedules them: vLLM's scheduler or ours, with room or without.

All engines of one model run one after another in one process, which reads the tokenizer once: 11 s for Gemma.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from real_vllm.mixed_traffic import mixed_requests
from real_vllm.models import VOCABULARY_TOKENS, gemma_model, tiny_model
from real_vllm.runner import ScenarioError, run_scenarios
from real_vllm.scenario import Outcome, PromptRequest, Scenario

pytestmark = pytest.mark.real_vllm

NUM_REQUESTS = 64
NUM_REQUESTS_OF_OTHERS = 28  # two models run them all, the others enough to fill 16 slots and be preempted
STOCK = None
TOKENSPEED = "tokenspeed_plugin.scheduler_fsm.TokenSpeedScheduler"
GEMMA_VOCABULARY_TOKENS = 262_144


@dataclass(frozen=True)
class Case:
    """One model under mixed traffic.

    Attributes:
        model: gives the model's folder.
        requests: the traffic.
        max_model_len: longest sequence in tokens.
        tiny_pool_blocks: a pool so small that running requests must be preempted.
        roomy_pool_bytes: a pool so large that none is.
        is_stock_squeezed: vLLM's own scheduler gets the tiny pool, too.
    """

    model: Callable[[], Path]
    requests: tuple[PromptRequest, ...]
    max_model_len: int
    tiny_pool_blocks: int
    roomy_pool_bytes: int = 64 << 20
    is_stock_squeezed: bool = False

    def scenario(self, scheduler_cls: str | None, *, tiny_pool: bool) -> Scenario:
        """The traffic with a roomy pool and whole prompts, or with a tiny pool and prompts in chunks."""
        arguments: dict[str, Any] = {"block_size": 32, "max_num_seqs": 16, "max_model_len": self.max_model_len}
        if tiny_pool:
            arguments |= {"num_gpu_blocks_override": self.tiny_pool_blocks, "max_num_batched_tokens": 128}
        else:
            arguments |= {"kv_cache_memory_bytes": self.roomy_pool_bytes, "max_num_batched_tokens": 8192}
        return Scenario(self.model(), self.requests, scheduler_cls, arguments)

    def scenarios(self) -> dict[str, Scenario]:
        """By name."""
        named = {
            "roomy stock": self.scenario(STOCK, tiny_pool=False),
            "roomy": self.scenario(TOKENSPEED, tiny_pool=False),
            "tight": self.scenario(TOKENSPEED, tiny_pool=True),
        }
        if self.is_stock_squeezed:
            named["tight stock"] = self.scenario(STOCK, tiny_pool=True)
        return named


_ALL_TRAFFIC = mixed_requests(NUM_REQUESTS, 1, VOCABULARY_TOKENS, max_prompt_tokens=600, max_new_tokens=96)
_TINY_TRAFFIC = mixed_requests(NUM_REQUESTS_OF_OTHERS, 1, VOCABULARY_TOKENS, max_prompt_tokens=600, max_new_tokens=96)
# Mostly short, for time's sake; two long ones outgrow the sliding window of 512 tokens.
_GEMMA_TRAFFIC = (
    *mixed_requests(2, 11, GEMMA_VOCABULARY_TOKENS, max_prompt_tokens=800, max_new_tokens=12),
    *mixed_requests(NUM_REQUESTS_OF_OTHERS - 2, 3, GEMMA_VOCABULARY_TOKENS, max_prompt_tokens=180, max_new_tokens=12),
)

CASES = {
    "qwen3": Case(partial(tiny_model, "qwen3"), _ALL_TRAFFIC, 704, 32, is_stock_squeezed=True),
    "qwen3_moe": Case(partial(tiny_model, "qwen3_moe"), _TINY_TRAFFIC, 704, 32),
    "mistral": Case(partial(tiny_model, "mistral"), _TINY_TRAFFIC, 704, 24),
    "gemma3": Case(partial(tiny_model, "gemma3"), _ALL_TRAFFIC, 704, 80, is_stock_squeezed=True),
    "gpt_oss": Case(partial(tiny_model, "gpt_oss"), _TINY_TRAFFIC, 704, 40),
    "gemma_270m": Case(gemma_model, _GEMMA_TRAFFIC, 832, 144, roomy_pool_bytes=512 << 20),
}


def differences(case: Case, expected: Outcome, actual: Outcome) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Requests whose tokens differ, with both token lists; an aborted request is held to the common prefix alone."""
    differing = {}
    for index, request in enumerate(case.requests):
        left, right = expected.token_ids[index], actual.token_ids[index]
        if request.abort_after_tokens is not None:
            common = min(len(left), len(right))
            left, right = left[:common], right[:common]
        if left != right:
            differing[index] = (left, right)
    return differing


@pytest.fixture(scope="module", params=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


Results = Mapping[str, Outcome | ScenarioError]


@pytest.fixture(scope="module")
def results(case: Case) -> Results:
    """By name of the scenario."""
    scenarios = case.scenarios()
    return dict(zip(scenarios, run_scenarios(list(scenarios.values())), strict=True))


def outcome_of(results: Results, name: str) -> Outcome:
    result = results[name]
    if isinstance(result, ScenarioError):
        raise result
    return result


@pytest.fixture
def roomy_stock(results: Results) -> Outcome:
    """What vLLM's own scheduler gives when nothing is short."""
    return outcome_of(results, "roomy stock")


def test_the_traffic_proves_something(case: Case, roomy_stock: Outcome) -> None:
    """Answers depend on their prompts, prefixes are found, some requests are aborted: equality below is not vacuous."""
    answers = [
        tokens[:4]
        for tokens, request in zip(roomy_stock.token_ids, case.requests, strict=True)
        if request.abort_after_tokens is None and len(tokens) >= 4
    ]
    num_prompts = len({request.prompt_token_ids for request in case.requests})
    assert len(set(answers)) > len(answers) // 2
    assert num_prompts < len(case.requests)
    assert roomy_stock.num_cached_tokens > 0
    assert roomy_stock.num_preemptions == 0
    assert "abort" in roomy_stock.finish_reasons
    assert roomy_stock.scheduler_name.startswith("vllm.")


@pytest.mark.parametrize("case", [n for n, c in CASES.items() if c.is_stock_squeezed], indirect=True, scope="module")
def test_stock_scheduler_does_not_depend_on_room(case: Case, results: Results, roomy_stock: Outcome) -> None:
    """vLLM gives the same tokens when it must chunk and preempt, so a difference below can only be ours."""
    tight = outcome_of(results, "tight stock")
    assert tight.scheduler_name.startswith("vllm.")
    assert differences(case, roomy_stock, tight) == {}
    assert tight.num_preemptions > 0
    assert tight.num_steps > roomy_stock.num_steps


@pytest.mark.parametrize("name", ["roomy", "tight"])
def test_tokenspeed_scheduler_gives_the_tokens_of_the_stock_one(
    case: Case, results: Results, roomy_stock: Outcome, name: str
) -> None:
    ours = outcome_of(results, name)
    assert ours.scheduler_name.startswith("tokenspeed_plugin.")
    assert differences(case, roomy_stock, ours) == {}
    assert (ours.num_preemptions > 0) == (name == "tight")
    assert ours.num_cached_tokens > 0
