# SPDX-License-Identifier: Apache-2.0
"""How far two engines' greedy answers lie apart: where they part, and the log-probabilities before that."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Any

from benchmarks.gpu.comparison import compare_tokens

NOISE_LOGPROB = 0.125
"""Two logits between 8 and 16, each off by one step of bfloat16 (1/16): sums in another order may move them so far."""
LARGEST_ERROR_RATIO = 1.5


def compared_answers(stock: list[dict[str, Any]], ours: list[dict[str, Any]]) -> dict[str, Any]:
    """See `benchmarks.gpu.comparison.compare_tokens`; `error` is that of `logprob_error`."""
    return compare_tokens(stock, ours) | {"error": logprob_error(stock, ours)}


def logprob_error(stock: list[dict[str, Any]], ours: list[dict[str, Any]]) -> dict[str, float]:
    """Difference of the log-probability of stock's best token, at positions before the answers part."""
    differences = []
    for first, second in zip(stock, ours, strict=True):
        for position, (one, other) in enumerate(zip(first["best"], second["best"], strict=False)):
            known = dict(other)
            if one[0][0] in known:
                differences.append(abs(one[0][1] - known[one[0][0]]))
            if first["tokens"][position] != second["tokens"][position]:
                break
    return {
        "positions": len(differences),
        "mean": statistics.fmean(differences) if differences else float("nan"),
        "largest": max(differences, default=float("nan")),
    }


def margin(mismatch: dict[str, Any]) -> float:
    """A token that is not among the best is no matter of rounding."""
    return math.inf if mismatch.get("margin_is_lower_bound") else float(mismatch.get("margin", math.inf))


def noise_logprob(control: Iterable[dict[str, Any]]) -> float:
    """How far answers may lie apart where they part; as far as vLLM's own do (mismatches of `control`) in any case."""
    return max([NOISE_LOGPROB, *filter(math.isfinite, map(margin, control))])


def error_ratio(ours: dict[str, Any], control: dict[str, Any]) -> float:
    """Mean error of the log-probabilities of compared answers, over the control's."""
    own, noise = ours["error"]["mean"], control["error"]["mean"]
    return float(own / noise) if noise > 0 else (0.0 if own == 0 else math.inf)
