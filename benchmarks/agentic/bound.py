# SPDX-License-Identifier: Apache-2.0
"""What perfect knowledge of step times and lengths would reach: the most output tokens per second at a rate per user."""

from __future__ import annotations

from dataclasses import dataclass

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
    prompt_ms, decode_ms, output = _work(trace, times)
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
            context = num_output * (2 * length + num_output) // 2
            decode_ms += times.device_ms(StepShape(num_output, context, 0, 0)) - fixed_ms
            output += num_output
            previous = turn
    return prompt_ms, decode_ms, output
