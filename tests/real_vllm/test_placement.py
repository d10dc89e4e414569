# SPDX-License-Identifier: Apache-2.0
"""Placed models on two real ranks give the greedy tokens of vLLM's own models on one rank and on two.

Each engine runs in a process of its own; an engine of two ranks forks two workers. A fork knows the model classes that its parent
has looked up, so one that has run vLLM's own model could not get the placed one.
"""

import random
from typing import Any

import pytest

from real_vllm.expert_worker import model_class, open_linears
from real_vllm.models import FIRST_TEXT_ID, VOCABULARY_TOKENS, tiny_model
from real_vllm.runner import ScenarioError, run_scenarios
from real_vllm.scenario import Intervention, Outcome, PromptRequest, Scenario

pytestmark = pytest.mark.real_vllm

# Prompts longer than a step and steps of odd sizes: a plan that splits tokens has to pad.
SETTINGS = {"block_size": 32, "max_model_len": 512, "max_num_batched_tokens": 97, "max_num_seqs": 7}
TWO_RANKS = {
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "worker_cls": "real_vllm.expert_worker.ExpertWorker",
}
NUM_NEW_TOKENS = 20


def requests() -> tuple[PromptRequest, ...]:
    """Unrelated prompts that come while others are decoding."""
    draw = random.Random(9)
    prompts = [
        tuple(draw.randrange(FIRST_TEXT_ID, VOCABULARY_TOKENS) for _ in range(n)) for n in (5, 17, 40, 63, 150, 211)
    ]
    return tuple(
        PromptRequest(prompt, NUM_NEW_TOKENS, arrival_step=2 * index, sampling={"ignore_eos": True})
        for index, prompt in enumerate(prompts)
    )


REQUESTS = requests()
# Name -> model, placement (None: vLLM's own model on as many ranks), ranks.
ENGINES: dict[str, tuple[str, str | None, int]] = {
    "dense, stock, one rank": ("qwen3", None, 1),
    "dense, stock, two ranks": ("qwen3", None, 2),
    "dense, tokens split": ("qwen3", "attn=tp2,dense=tp2,residual=sharded", 2),
    "experts, stock, one rank": ("qwen3_moe", None, 1),
    "experts, by experts": ("qwen3_moe", "attn=tp2,dense=tp2,moe=ep2,fusion=reference,overlap=reference", 2),
}


def scenario(model: str, placement: str | None, num_ranks: int) -> Scenario:
    arguments: dict[str, Any] = {**SETTINGS, **(TWO_RANKS if num_ranks == 2 else {})}
    if placement is not None:
        arguments["additional_config"] = {"tokenspeed": {"placement": placement}}
    asked = tuple(Intervention(1, "collective_rpc", {"method": method}) for method in (model_class, open_linears))
    return Scenario(tiny_model(model), REQUESTS, None, arguments, ("fork_workers",), interventions=asked)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome | ScenarioError]:
    return {name: run_scenarios([scenario(*engine)])[0] for name, engine in ENGINES.items()}


def outcome_of(outcomes: dict[str, Outcome | ScenarioError], name: str) -> Outcome:
    result = outcomes[name]
    if isinstance(result, ScenarioError):
        raise result
    return result


@pytest.mark.parametrize("name", ENGINES)
def test_every_rank_runs_the_class_that_was_asked_for(outcomes: dict[str, Outcome | ScenarioError], name: str) -> None:
    model, placement, num_ranks = ENGINES[name]
    stock = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}[model]
    # Three layers of experts: only their attention ends in a linear layer.
    overlapped = 3 if "overlap" in (placement or "") else 0
    classes = [("Placed" if placement else "") + stock] * num_ranks
    assert outcome_of(outcomes, name).answers == (classes, [overlapped] * num_ranks)


@pytest.mark.parametrize("name", [name for name, engine in ENGINES.items() if engine[2] == 2])
def test_two_ranks_give_the_tokens_of_one(outcomes: dict[str, Outcome | ScenarioError], name: str) -> None:
    alone = outcome_of(outcomes, f"{name.partition(',')[0]}, stock, one rank")
    ours = outcome_of(outcomes, name)
    assert ours.token_ids == alone.token_ids
    assert ours.finish_reasons == alone.finish_reasons


def test_the_answers_differ_enough_to_show_a_mistake(outcomes: dict[str, Outcome | ScenarioError]) -> None:
    for name in ("dense, stock, one rank", "experts, stock, one rank"):
        answers = outcome_of(outcomes, name).token_ids
        assert len({tokens[:3] for tokens in answers}) == len(answers)
        assert all(len(set(tokens)) > NUM_NEW_TOKENS // 2 for tokens in answers)
