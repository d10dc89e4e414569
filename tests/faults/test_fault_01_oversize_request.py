# SPDX-License-Identifier: Apache-2.0
"""Fault 1 (vllm #39734): a request larger than the whole pool blocks the queue for ever."""

from __future__ import annotations

import pytest
from exact.relaxed import relaxed
from exact.timeline import Timeline
from hypothesis import given
from hypothesis import strategies as st
from scheduler_knobs import Group, Knobs

pytestmark = pytest.mark.host_matrix


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("depth", [1, 2])
def test_oversize_request_is_refused_alone(scheduler: str, runner: str, depth: int) -> None:
    knobs = Knobs(groups=(Group(4),), num_blocks=8, max_model_len=64, runner=runner, pipeline_depth=depth)
    run = Timeline(scheduler, knobs)
    run.submit("r1", 40, 1, refused=True)
    run.submit("r2", 4, 1)
    run.ticks(4)
    assert (run.outcome("r1"), run.outcome("r2")) == ("error", "length")
    run.finish(50)


@pytest.mark.parametrize("prompt_tokens", range(28, 37))
def test_only_what_can_never_fit_is_refused(scheduler: str, prompt_tokens: int) -> None:
    run = Timeline(scheduler, Knobs(groups=(Group(4),), num_blocks=8, max_model_len=64))
    fits = prompt_tokens <= 32
    run.submit("r1", prompt_tokens, 1, refused=not fits)
    run.submit("r2", 4, 1)
    run.finish(50)
    assert run.outcome("r1") == ("length" if fits else "error")


def test_output_that_outgrows_the_pool_ends_with_length(scheduler: str) -> None:
    run = Timeline(scheduler, Knobs(groups=(Group(4),), num_blocks=8, max_model_len=64))
    run.submit("r1", 20, 40)
    run.submit("r2", 4, 2)
    run.finish(400)
    assert (run.outcome("r1"), run.outcome("r2")) == ("length", "length")
    assert run.delivered("r1") >= 12


@relaxed
@given(
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12)), min_size=1, max_size=8),
    windowed=st.booleans(),
    num_blocks=st.integers(4, 12),
)
def test_in_any_mix_what_cannot_fit_is_refused_and_the_rest_ends(
    scheduler: str, lengths: list[tuple[int, int]], windowed: bool, num_blocks: int
) -> None:
    groups = (Group(4), Group(4, 4)) if windowed else (Group(4),)
    run = Timeline(scheduler, Knobs(groups=groups, num_blocks=num_blocks, budget_tokens=16, max_model_len=64))
    expected = []
    for number, (prompt, output) in enumerate(lengths):
        full = -(-prompt // 4)
        # A window of 4 tokens lies in at most 2 blocks of 4.
        fits = full + (min(full, 2) if windowed else 0) <= num_blocks
        run.submit(f"r{number}", prompt, output, refused=not fits)
        expected.append("length" if fits else "error")
    run.finish()
    assert [run.outcome(f"r{number}") for number in range(len(lengths))] == expected
