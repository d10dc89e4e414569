# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters, a pooling model, and a mixture of experts with latent attention and an MTP layer: ours against the stock scheduler."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from real_vllm.checkpoints import adapter, deepseek_with_mtp, encoder
from real_vllm.mixed_traffic import mixed_requests
from real_vllm.models import VOCABULARY_TOKENS, tiny_model
from real_vllm.runner import ScenarioError, run_scenarios
from real_vllm.scenario import Outcome, PromptRequest, Scenario

pytestmark = pytest.mark.real_vllm

TOKENSPEED = "tokenspeed_plugin.scheduler_fsm.TokenSpeedScheduler"
COMMON = {"block_size": 32, "max_num_seqs": 6, "max_model_len": 512, "async_scheduling": False}
ASYNC = {"async_scheduling": True}
NUM_ADAPTERS = 3
APPEND = {"additional_config": {"tokenspeed": {"kernels": "append=reference"}}}
# vLLM 0.32 turns queries of several heads wrongly on CPU without it: its plain rotary embedding has a CPU kernel, this one none.
YARN = {
    "rope_type": "deepseek_yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "mscale": 0.707,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
}
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}


def traffic(num_requests: int, seed: int) -> tuple[PromptRequest, ...]:
    requests = mixed_requests(num_requests, seed, VOCABULARY_TOKENS, max_prompt_tokens=300, max_new_tokens=24)
    return tuple(dataclasses.replace(request, abort_after_tokens=None) for request in requests)


def with_adapters(requests: tuple[PromptRequest, ...]) -> tuple[PromptRequest, ...]:
    """Each prompt under three adapters. None without: vLLM 0.32 on CPU computes those with the adapter that was loaded last."""
    return tuple(
        dataclasses.replace(request, adapter=adapter(number))
        for request in requests
        for number in range(1, NUM_ADAPTERS + 1)
    )


def scenarios() -> Mapping[str, Scenario]:
    """By name; what is compared with what is in the tests."""
    tight = {**COMMON, "num_gpu_blocks_override": 20, "max_num_batched_tokens": 96}
    lora = {**tight, "enable_lora": True, "max_loras": 1, "max_lora_rank": 8, "max_cpu_loras": 4}
    lora_requests = with_adapters(traffic(4, 21))
    pooling = {**tight, "runner": "pooling", "convert": "embed"}
    pooling_requests = traffic(12, 22)
    bert = {"runner": "pooling", "max_num_seqs": 6, "max_num_batched_tokens": 512, "max_model_len": 512}
    bert["async_scheduling"] = False
    # vLLM's CPU platform wants whole prompts and no prefix cache for latent attention.
    latent = {**COMMON, "block_size": 16, "max_num_batched_tokens": 2048, "load_format": "dummy"}
    latent_requests = traffic(12, 23)
    deepseek = deepseek_with_mtp()
    yarn = {**latent, **MTP, "hf_overrides": {"rope_parameters": YARN}}

    def one(model: Any, requests: tuple[PromptRequest, ...], ours: bool, arguments: Mapping[str, Any]) -> Scenario:
        patches = ("keep_async_scheduling", "vary_dummy_weights")
        return Scenario(model, requests, TOKENSPEED if ours else None, arguments, patches)

    qwen = tiny_model("qwen3")
    return {
        "lora_stock": one(qwen, lora_requests, False, lora),
        "lora": one(qwen, lora_requests, True, lora),
        "lora_async": one(qwen, lora_requests, True, {**lora, **ASYNC}),
        "pooling_stock": one(qwen, pooling_requests, False, pooling),
        "pooling": one(qwen, pooling_requests, True, pooling),
        "encoder_stock": one(encoder(), pooling_requests, False, bert),
        "encoder": one(encoder(), pooling_requests, True, bert),
        "latent_stock": one(deepseek, latent_requests, False, latent),
        "latent": one(deepseek, latent_requests, True, latent),
        # Latent attention on CPU rounds differently for one token and for several: drafts are compared with drafts.
        "latent_mtp_stock": one(deepseek, latent_requests, False, {**latent, **MTP}),
        "latent_mtp": one(deepseek, latent_requests, True, {**latent, **MTP}),
        "latent_yarn_stock": one(deepseek, latent_requests, False, yarn),
        "latent_yarn_append": one(deepseek, latent_requests, True, {**yarn, **APPEND}),
        "latent_mtp_async_stock": one(deepseek, latent_requests, False, {**latent, **MTP, **ASYNC}),
        "latent_mtp_async": one(deepseek, latent_requests, True, {**latent, **MTP, **ASYNC}),
    }


Results = Mapping[str, Outcome | ScenarioError]


@pytest.fixture(scope="module")
def results() -> Results:
    chosen = scenarios()
    return dict(zip(chosen, run_scenarios(list(chosen.values())), strict=True))


def outcome_of(results: Results, name: str) -> Outcome:
    result = results[name]
    if isinstance(result, ScenarioError):
        raise result
    assert result.scheduler_name.startswith("vllm." if name.endswith("stock") else "tokenspeed_plugin.")
    return result


@pytest.mark.parametrize(
    ("stock", "name"),
    [
        ("lora_stock", "lora"),
        ("lora_stock", "lora_async"),
        ("latent_stock", "latent"),
        ("latent_mtp_stock", "latent_mtp"),
        ("latent_yarn_stock", "latent_yarn_append"),
        ("latent_mtp_async_stock", "latent_mtp_async"),
    ],
)
def test_tokens_are_those_of_the_stock_scheduler(results: Results, stock: str, name: str) -> None:
    expected, ours = outcome_of(results, stock), outcome_of(results, name)
    assert ours.token_ids == expected.token_ids
    assert ours.finish_reasons == expected.finish_reasons
    assert ours.num_batches_in_flight == (2 if name.endswith("async") else 1)
    assert len({tokens[:3] for tokens in expected.token_ids}) > len(expected.token_ids) // 2


def test_adapters_answer_differently_and_share_no_prefix(results: Results) -> None:
    ours, stock = outcome_of(results, "lora"), outcome_of(results, "lora_stock")
    answers = [ours.token_ids[index : index + NUM_ADAPTERS] for index in range(0, len(ours.token_ids), NUM_ADAPTERS)]
    assert any(len(set(by_adapter)) == NUM_ADAPTERS for by_adapter in answers)
    assert ours.num_steps > len(ours.token_ids), "one adapter at a time"
    assert ours.num_query_tokens == stock.num_query_tokens


@pytest.mark.parametrize("name", ["pooling", "encoder"])
def test_embeddings_are_those_of_the_stock_scheduler(results: Results, name: str) -> None:
    stock, ours = outcome_of(results, f"{name}_stock"), outcome_of(results, name)
    assert set(ours.finish_reasons) == {"stop"}
    assert ours.num_steps > 1
    assert len(set(ours.embeddings)) > len(ours.embeddings) // 2
    for left, right in zip(ours.embeddings, stock.embeddings, strict=True):
        assert left == pytest.approx(right, abs=1e-4)
    assert (ours.num_cached_tokens > 0) == (name == "pooling"), "an encoder keeps nothing to share"


@pytest.mark.parametrize("name", ["latent_mtp", "latent_mtp_async"])
def test_drafts_of_the_mtp_layer_are_verified(results: Results, name: str) -> None:
    counters = outcome_of(results, name).counters
    assert counters["vllm:spec_decode_num_draft_tokens"] > 0
