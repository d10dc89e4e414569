# SPDX-License-Identifier: Apache-2.0
"""How far two engines' greedy answers lie apart: where they part, and the log-probabilities before that."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.gpu.comparison import compare_tokens


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
