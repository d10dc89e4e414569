# SPDX-License-Identifier: Apache-2.0
"""Fault 8 (vllm #47971, #55427): a slot is kept for a sampled token that a pooling request never makes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from exact.relaxed import relaxed
from exact.timeline import Timeline
from hypothesis import given
from hypothesis import strategies as st
from scheduler_knobs import Group, Knobs

pytestmark = pytest.mark.host_matrix

KNOBS = Knobs(groups=(Group(4),), num_blocks=32, budget_tokens=8, max_num_seqs=4, max_model_len=16, pooling=True)


@pytest.mark.parametrize(("prompt_tokens", "num_ticks"), [(16, 2), (15, 2), (8, 1), (1, 1)])
def test_prompt_up_to_the_model_length_is_embedded(scheduler: str, prompt_tokens: int, num_ticks: int) -> None:
    run = Timeline(scheduler, KNOBS)
    run.submit("p", prompt_tokens, 1, pooling=True)
    run.ticks(num_ticks)
    assert run.outcome("p") == "stop"
    run.finish(10)


def test_prompt_beyond_the_model_length_is_refused_alone(scheduler: str) -> None:
    run = Timeline(scheduler, KNOBS)
    run.submit("too long", 17, 1, pooling=True, refused=True)
    run.submit("p", 16, 1, pooling=True)
    run.finish(10)
    assert (run.outcome("too long"), run.outcome("p")) == ("error", "stop")


def test_long_after_short_in_one_batch(scheduler: str) -> None:
    run = Timeline(scheduler, KNOBS)
    for number, prompt_tokens in enumerate((3, 16, 5, 16)):
        run.submit(f"p{number}", prompt_tokens, 1, pooling=True)
    run.finish(20)
    assert [run.outcome(f"p{number}") for number in range(4)] == ["stop"] * 4


@relaxed
@given(prompts=st.lists(st.integers(1, 20), min_size=1, max_size=8), budget=st.integers(4, 32))
def test_any_prompts_are_embedded_or_refused_alone(scheduler: str, prompts: list[int], budget: int) -> None:
    run = Timeline(scheduler, replace(KNOBS, budget_tokens=budget))
    for number, prompt in enumerate(prompts):
        run.submit(f"p{number}", prompt, 1, pooling=True, refused=prompt > KNOBS.max_model_len)
    run.finish(200)
    expected = ["stop" if prompt <= KNOBS.max_model_len else "error" for prompt in prompts]
    assert [run.outcome(f"p{number}") for number in range(len(prompts))] == expected
