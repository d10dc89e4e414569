# SPDX-License-Identifier: Apache-2.0
"""Comparison of two systems' greedy tokens, with the margin of every mismatch."""

from __future__ import annotations

from typing import Any


def compare_tokens(stock: list[dict[str, Any]], ours: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare answers request by request.

    A mismatch lists the request, the first position that differs, both tokens and the margin: stock's best
    log-probability minus that of the token ours chose (of the second best where ours is not among the two).
    `distinct_tokens` and `constant_answers` show whether the comparison could have failed at all.
    """
    mismatches = []
    for index, (first, second) in enumerate(zip(stock, ours, strict=True)):
        if first["tokens"] != second["tokens"]:
            mismatches.append(_mismatch(index, first, second))
    return {
        "requests": len(stock),
        "tokens": sum(len(answer["tokens"]) for answer in stock),
        "mismatches": mismatches,
        "distinct_tokens": len({token for answer in stock for token in answer["tokens"]}),
        "constant_answers": sum(len(set(answer["tokens"])) == 1 for answer in stock),
    }


def _mismatch(index: int, stock: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    pairs = zip(stock["tokens"], ours["tokens"], strict=False)
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(stock["tokens"]), len(ours["tokens"])))
    entry: dict[str, Any] = {"request": index, "position": position}
    if position < min(len(stock["tokens"]), len(ours["tokens"])):
        best = stock["best"][position]
        chosen = ours["tokens"][position]
        known: dict[int, float] = dict(best)
        entry |= {
            "stock_token": stock["tokens"][position],
            "our_token": chosen,
            "margin": best[0][1] - known.get(chosen, best[-1][1]),
            "margin_is_lower_bound": chosen not in known,
        }
    return entry
