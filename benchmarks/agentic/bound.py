# SPDX-License-Identifier: Apache-2.0
"""What perfect knowledge of step times and lengths would reach: the most output tokens per second at a rate per user."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.agentic.records import TurnRecord, Window
from benchmarks.agentic.step_time import StepShape, StepTimeModel
from benchmarks.agentic.trace import Trace, shared_tokens


@dataclass(frozen=True)
class Bound:
    """The bound and what it is made of.

    Args:
        tokens_per_s: output tokens per second of one GPU.
        num_users: users that decode at a time.
        prefill_share: share of the device's time that prompts take.
        fixed_ms: what a step takes in any case.
        per_token_ms: what an output token takes, its share of prompts included.
    """

    tokens_per_s: float
    num_users: float
    prefill_share: float
    fixed_ms: float
    per_token_ms: float

    def least_tpot_ms(self, tokens_per_s: float) -> float:
        """Return the shortest mean time per token of users who together get `tokens_per_s`; infinite when none is possible.

        A step of T ms with N users takes at least ``fixed + N * per token``, and ``N = tokens_per_s * T``.
        """
        left = 1.0 - tokens_per_s / 1e3 * self.per_token_ms
        return self.fixed_ms / left if left > 0 else float("inf")


def upper_bound(trace: Trace, times: StepTimeModel, target_tps: float) -> Bound:
    """Return the bound for endless traffic like `trace`, every user at exactly `target_tps`.

    N users that decode need, per step, N rows, N contexts, and the share of the prompts' work that keeps N of them
    decoding: ``fixed + N * (row + context) + N * prompt work per output token <= 1 / target``. Nothing is evicted, no
    step waits for the host, and work is divisible at will, so no schedule is better.
    """
    return _bound(*_work(trace, times), times, target_tps)


def bound_of_run(records: Iterable[TurnRecord], window: Window, times: StepTimeModel, target_tps: float) -> Bound:
    """Return the bound for the traffic that a run had in its window, which is a sample of its trace.

    Tokens are taken to come evenly between a turn's first and last; a prompt counts where its first token came.
    """
    fixed_ms = times.device_ms(StepShape(0, 0, 0, 0))
    prompt_ms = decode_ms = output = 0.0
    for record in records:
        span_s = max(record.last_s - record.first_s, 1e-9)
        begin, end = (
            record.output_tokens * min(max((at_s - record.first_s) / span_s, 0.0), 1.0)
            for at_s in (window.begin_s, window.end_s)
        )
        output += end - begin
        begin, end = max(begin, 1.0), max(end, 1.0)  # the first token comes with the prompt
        context = (end - begin) * (record.prompt_tokens + (begin + end) / 2)
        decode_ms += times.device_ms(StepShape(end - begin, context, 0, 0)) - fixed_ms
        if window.begin_s <= record.first_s < window.end_s:
            new = record.prompt_tokens - max(record.cached_tokens, 0)
            pairs = new * (record.prompt_tokens - new / 2)
            prompt_ms += times.device_ms(StepShape(0, 0, new, pairs)) - fixed_ms
    return _bound(prompt_ms, decode_ms, output, times, target_tps)


def _bound(prompt_ms: float, decode_ms: float, output: float, times: StepTimeModel, target_tps: float) -> Bound:
    per_token_ms = (prompt_ms + decode_ms) / output
    fixed_ms = times.device_ms(StepShape(0, 0, 0, 0))
    num_users = max(0.0, 1e3 / target_tps - fixed_ms) / per_token_ms
    prefill_share = num_users * prompt_ms / output * target_tps / 1e3
    return Bound(num_users * target_tps, num_users, prefill_share, fixed_ms, per_token_ms)


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
