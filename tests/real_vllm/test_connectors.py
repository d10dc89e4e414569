# SPDX-License-Identifier: Apache-2.0
"""KV connectors of vLLM under both schedulers: what one process stores another finds, and what was evicted comes back."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from real_vllm.models import FIRST_TEXT_ID, VOCABULARY_TOKENS, tiny_model
from real_vllm.runner import run_scenario
from real_vllm.scenario import Outcome, PromptRequest, Scenario

pytestmark = pytest.mark.real_vllm

STOCK = None
TOKENSPEED = "tokenspeed_plugin.scheduler_fsm.TokenSpeedScheduler"
BLOCK_TOKENS = 32


def text(seed: int, num_tokens: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(FIRST_TEXT_ID, VOCABULARY_TOKENS) for _ in range(num_tokens))


def run(
    scheduler_cls: str | None,
    requests: tuple[PromptRequest, ...],
    connector: dict[str, Any] | None,
    num_blocks: int,
    model: str = "qwen3",
    budget_tokens: int = 256,
) -> Outcome:
    arguments: dict[str, Any] = {
        "block_size": BLOCK_TOKENS,
        "max_num_seqs": 4,
        "max_model_len": 704,
        "max_num_batched_tokens": budget_tokens,
        "num_gpu_blocks_override": num_blocks,
    }
    if connector is not None:
        arguments["kv_transfer_config"] = {"kv_role": "kv_both", **connector}
    return run_scenario(Scenario(tiny_model(model), requests, scheduler_cls, arguments))


def test_a_second_process_finds_what_the_first_stored(tmp_path: Path) -> None:
    """ExampleConnector loads as a part of the step, from files. It stores a prompt right only when one step computes all of it."""
    requests = (PromptRequest(text(1, 600), 24), PromptRequest(text(2, 300), 24))
    plain = run(STOCK, requests, None, 96)
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    first = run(TOKENSPEED, requests, connector, 96, budget_tokens=1024)
    second = run(TOKENSPEED, requests, connector, 96, budget_tokens=1024)
    assert first.num_external_tokens == 0
    assert second.num_external_tokens == 576 + 288
    assert first.token_ids == second.token_ids == plain.token_ids


def test_stock_reads_what_ours_stored(tmp_path: Path) -> None:
    """Keys in a shared store are those of vLLM."""
    requests = (PromptRequest(text(3, 400), 16),)
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    ours = run(TOKENSPEED, requests, connector, 96, budget_tokens=1024)
    stock = run(STOCK, requests, connector, 96, budget_tokens=1024)
    assert (ours.num_external_tokens, stock.num_external_tokens) == (0, 384)
    assert ours.token_ids == stock.token_ids


OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_connector_extra_config": {
        "cpu_bytes_to_use": 256 << 20,
        "spec_name": "HostMemorySpec",
        "spec_module_path": "real_vllm.host_memory_spec",
    },
}


@pytest.mark.parametrize("model", ["qwen3", "gpt_oss"])
def test_an_evicted_prompt_comes_back_from_host_memory(model: str) -> None:
    """OffloadingConnector loads beside the steps. The prompts in between push the first one out of the pool."""
    first = PromptRequest(text(4, 520), 16)
    between = tuple(PromptRequest(text(10 + i, 500), 8, arrival_step=60 * (i + 1)) for i in range(4))
    again = PromptRequest(first.prompt_token_ids, 16, arrival_step=400)
    requests = (first, *between, again)
    num_blocks = 30 if model == "qwen3" else 60
    plain = run(STOCK, requests, None, num_blocks, model)
    stock = run(STOCK, requests, OFFLOADING, num_blocks, model)
    ours = run(TOKENSPEED, requests, OFFLOADING, num_blocks, model)
    assert ours.token_ids == stock.token_ids == plain.token_ids
    assert ours.num_external_tokens == stock.num_external_tokens > 0


def test_traffic_with_preemptions_gives_the_same_tokens() -> None:
    """Loads, saves and preemptions at once, in a pool for two prompts."""
    shared = text(50, 256)
    requests = tuple(PromptRequest(shared + text(60 + i, 40 + 8 * i), 40, arrival_step=2 * (i % 7)) for i in range(14))
    plain = run(STOCK, requests, None, 200)
    ours = run(TOKENSPEED, requests, OFFLOADING, 26)
    assert ours.token_ids == plain.token_ids
    assert ours.num_preemptions > 0
