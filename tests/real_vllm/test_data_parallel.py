# SPDX-License-Identifier: Apache-2.0
"""`vllm serve --scheduler tokenspeed` with two data-parallel ranks: requests are split, and tokens are those of one stock engine."""

import asyncio
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from demo.server import VllmServer
from real_vllm.mixed_traffic import mixed_requests
from real_vllm.models import VOCABULARY_TOKENS, tiny_model
from real_vllm.runner import run_scenario
from real_vllm.scenario import PromptRequest, Scenario

pytestmark = pytest.mark.real_vllm

MODEL = "tiny"
MAX_MODEL_TOKENS = 640


def arguments() -> tuple[str, ...]:
    return (
        *("--scheduler", "tokenspeed", "--served-model-name", MODEL, "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", str(MAX_MODEL_TOKENS), "--block-size", "32", "--max-num-batched-tokens", "128"),
        *("--kv-cache-memory-bytes", str(64 << 20), "--max-num-seqs", "8"),
        *("--data-parallel-size", "2", "--data-parallel-address", "127.0.0.1", "--api-server-count", "1"),
    )


async def answers_of(server: VllmServer, requests: tuple[PromptRequest, ...]) -> list[tuple[int, ...]]:
    """Token ids of all requests, sent at once."""

    async def one(client: httpx.AsyncClient, request: PromptRequest) -> tuple[int, ...]:
        body = {
            "model": MODEL,
            "prompt": list(request.prompt_token_ids),
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "return_token_ids": True,
        }
        response = await client.post(f"{server.url}/v1/completions", json=body)
        return tuple(response.raise_for_status().json()["choices"][0]["token_ids"])

    async with httpx.AsyncClient(timeout=240.0) as client:
        return list(await asyncio.gather(*(one(client, request) for request in requests)))


def by_rank(server: VllmServer, metric: str) -> dict[str, float]:
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
    samples = [sample for family in families for sample in family.samples if sample.name == metric]
    return {sample.labels["engine"]: sample.value for sample in samples}


def test_two_ranks_share_the_requests_and_answer_as_one_stock_engine(tmp_path: Path) -> None:
    traffic = mixed_requests(24, 9, VOCABULARY_TOKENS, max_prompt_tokens=400, max_new_tokens=24)
    requests = tuple(request for request in traffic if request.abort_after_tokens is None)
    settings = {"block_size": 32, "max_model_len": MAX_MODEL_TOKENS, "max_num_seqs": 8}
    stock = run_scenario(Scenario(tiny_model("qwen3"), requests, None, settings))

    environment = {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    with VllmServer(tiny_model("qwen3"), arguments(), tmp_path / "server.log", environment) as server:
        answers = asyncio.run(answers_of(server, requests))
        num_tokens = by_rank(server, "vllm:generation_tokens_total")
        running = by_rank(server, "vllm:num_requests_running")
    assert answers == list(stock.token_ids)
    assert set(num_tokens) == {"0", "1"}
    assert min(num_tokens.values()) > 0, "both ranks worked"
    assert sum(num_tokens.values()) == sum(len(tokens) for tokens in stock.token_ids)
    assert set(running.values()) == {0.0}
    assert (tmp_path / "server.log").read_text().count("TokenSpeedScheduler") > 0
