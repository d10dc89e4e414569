# SPDX-License-Identifier: Apache-2.0
"""`kv_manager: flat` under vLLM's own scheduler, on real models: the same tokens as stock, with a connector and with copies."""

from __future__ import annotations

import random
from typing import Any

import pytest

from real_vllm.models import FIRST_TEXT_ID, VOCABULARY_TOKENS, tiny_model
from real_vllm.runner import ScenarioError, run_scenarios
from real_vllm.scenario import Outcome, PromptRequest, Scenario

pytestmark = pytest.mark.real_vllm

FLAT = {"additional_config": {"tokenspeed": {"kv_manager": "flat"}}}
OFFLOADING = {
    "kv_transfer_config": {
        "kv_role": "kv_both",
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": 256 << 20,
            "spec_name": "HostMemorySpec",
            "spec_module_path": "real_vllm.host_memory_spec",
        },
    }
}


def text(seed: int, num_tokens: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(FIRST_TEXT_ID, VOCABULARY_TOKENS) for _ in range(num_tokens))


def scenario(model: str, requests: tuple[PromptRequest, ...], num_blocks: int, **arguments: Any) -> Scenario:
    shape = {"block_size": 32, "max_num_seqs": 4, "max_model_len": 704, "max_num_batched_tokens": 256}
    return Scenario(tiny_model(model), requests, None, shape | {"num_gpu_blocks_override": num_blocks} | arguments)


def outcomes(*scenarios: Scenario) -> list[Outcome]:
    found = run_scenarios(scenarios)
    for one in found:
        if isinstance(one, ScenarioError):
            raise one
    return [one for one in found if isinstance(one, Outcome)]


def test_turns_and_forks_give_the_tokens_of_stock_and_reuse_parts_of_blocks() -> None:
    """Blocks of 160 tokens are matched in pieces of 80, so forks inside a block copy it; four that outgrow a block each preempt."""
    shared = text(1, 400)
    forks = tuple(PromptRequest(shared + text(10 + i, 60), 24, arrival_step=30 * i) for i in range(4))
    again = PromptRequest(shared + text(10, 60) + text(20, 40), 24, arrival_step=200)
    crowd = tuple(PromptRequest(text(30 + i, 120), 60, arrival_step=260) for i in range(4))
    requests = (*forks, again, *crowd)
    stock, flat = outcomes(
        scenario("qwen3", requests, 8, block_size=160), scenario("qwen3", requests, 8, block_size=160, **FLAT)
    )
    assert flat.scheduler_name.startswith("tokenspeed_plugin.scheduler_fsm.hosted.schedulers.FlatKv")
    assert flat.token_ids == stock.token_ids
    assert flat.num_cached_tokens > stock.num_cached_tokens > 0
    assert flat.num_preemptions > 0


@pytest.mark.parametrize("model", ["qwen3", "gpt_oss"])
def test_an_evicted_prompt_comes_back_from_host_memory(model: str) -> None:
    first = PromptRequest(text(4, 520), 16)
    between = tuple(PromptRequest(text(10 + i, 500), 8, arrival_step=60 * (i + 1)) for i in range(4))
    requests = (first, *between, PromptRequest(first.prompt_token_ids, 16, arrival_step=400))
    num_blocks = 30 if model == "qwen3" else 60
    stock, flat = outcomes(
        scenario(model, requests, num_blocks, **OFFLOADING), scenario(model, requests, num_blocks, **OFFLOADING, **FLAT)
    )
    assert flat.token_ids == stock.token_ids
    assert flat.num_external_tokens == stock.num_external_tokens > 0
