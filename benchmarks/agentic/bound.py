# SPDX-License-Identifier: Apache-2.0
"""What perfect knowledge of step times and lengths would reach: the most output tokens per second at a rate per user."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.agentic.records import TurnRecord, Window
from benchmarks.agentic.step_time import StepShape, StepTimeModel
from benchmarks.agentic.trace import Trace, shared_tokens

LEAST_STEPS_SHARE = 0.5
"""Of the target's steps per second, how many there are at least while somebody decodes; see `bound_of_steps`."""


class StepDone(NamedTuple):
    """A step that a simulated device did."""

    taken_s: float
    """When its tokens were handed out, on the simulation's clock."""
    begin_ms: float
    """When the device began with it, on the same clock."""
    end_ms: float
    decode_ms: float
    """Of its time, what rows and their contexts took."""
    prompt_ms: float
    num_tokens: int
    """Tokens handed out."""


@dataclass(frozen=True)
class Bound:
    """The bound and what it is made of.

    Args:
        tokens_per_s: output tokens per second of one GPU.
        num_users: users that decode at a time, each at the target.
        prefill_share: share of the device's time that prompts take.
        fixed_ms: what a step takes in any case.
        per_token_ms: what an output token takes, its share of prompts included.
    """

    tokens_per_s: float
    num_users: float
    prefill_share: float
    fixed_ms: float
    per_token_ms: float


def upper_bound(trace: Trace, times: StepTimeModel, target_tps: float) -> Bound:
    """Return the bound for endless traffic like `trace`, every user at `target_tps`.

    Nothing is evicted, no step waits for the host, and work is divisible at will. Steps are as rare as `bound_of_steps` says.
    """
    prompt_ms, decode_ms, output = _work(trace, times)
    fixed_ms = times.device_ms(StepShape(0, 0, 0, 0))
    per_token_ms = (prompt_ms + decode_ms) / output
    left = max(0.0, 1.0 - LEAST_STEPS_SHARE * target_tps / 1e3 * fixed_ms)
    tokens_per_s = 1e3 * left / per_token_ms
    return Bound(
        tokens_per_s, tokens_per_s / target_tps, tokens_per_s / 1e3 * prompt_ms / output, fixed_ms, per_token_ms
    )


def bound_of_steps(
    steps: Sequence[StepDone], records: Iterable[TurnRecord], window: Window, fixed_ms: float, target_tps: float
) -> Bound:
    """Return the bound for the work that a run's device did in its window, which is a sample of its trace.

    The device does one step after the other, so ``steps * fixed + tokens * per token <= time``, where what a token takes, its share of
    prompts included, is what it took in this window. The fewer steps, the more tokens; but a turn of n tokens at the target needs
    n - 1 steps between its first token and its last, so at least ``target`` a second. Of the turns that are wholly inside the window some can be
    chosen that cover the same time, none of it more than twice; so there are at least half of ``target * covered time`` steps.
    (Half, because a turn's rate is a mean: turns may overlap where steps are frequent and stand alone where they are rare.)
    """
    inside = [step for step in steps if window.begin_s <= step.taken_s < window.end_s]
    seconds = window.end_s - window.begin_s
    tokens = sum(step.num_tokens for step in inside)
    if not tokens:
        return Bound(0.0, 0.0, 0.0, fixed_ms, float("inf"))
    # The first step may have begun before the window.
    available_ms = max(seconds * 1e3, inside[-1].end_ms - inside[0].begin_ms)
    prompt_ms = sum(step.prompt_ms for step in inside)
    per_token_ms = (prompt_ms + sum(step.decode_ms for step in inside)) / tokens
    good = [r for r in records if r.tps >= target_tps and window.begin_s <= r.first_s and r.last_s < window.end_s]
    least_steps = LEAST_STEPS_SHARE * target_tps * _covered_s(good)
    tokens_per_s = (available_ms - least_steps * fixed_ms) / per_token_ms / seconds
    prefill_share = tokens_per_s / 1e3 * prompt_ms / tokens
    return Bound(tokens_per_s, tokens_per_s / target_tps, prefill_share, fixed_ms, per_token_ms)


def _covered_s(records: Sequence[TurnRecord]) -> float:
    """Return the time in which at least one of these turns is between its first token and its last."""
    covered_s, until_s = 0.0, float("-inf")
    for record in sorted(records, key=lambda one: one.first_s):
        covered_s += max(0.0, record.last_s - max(record.first_s, until_s))
        until_s = max(until_s, record.last_s)
    return covered_s


def _work(trace: Trace, times: StepTimeModel) -> tuple[float, float, int]:
    """Return device milliseconds of all prompts, of all decodes, and the number of output tokens."""
    fixed_ms = times.device_ms(StepShape(0, 0, 0, 0))
    prompt_ms = decode_ms = 0.0
    output = 0
    for session in trace.sessions:
        previous = None
        for turn in session.turns:
            length, num_output = turn.prompt.num_tokens, turn.output_tokens
            # A session's first prompt is in the cache, as in a simulation.
            known = length if previous is None else shared_tokens(previous.prompt, turn.prompt)
            new = length - min(known, length - 1)
            known = length - new
            prompt_ms += times.device_ms(StepShape(0, 0, new, new * (known + length) // 2)) - fixed_ms
            # The first token comes with the prompt.
            context = (num_output - 1) * (length + (num_output + 1) / 2)
            decode_ms += times.device_ms(StepShape(num_output - 1, context, 0, 0)) - fixed_ms
            output += num_output
            previous = turn
    return prompt_ms, decode_ms, output
