# SPDX-License-Identifier: Apache-2.0
"""Greedy tokens: every mismatch is listed with its margin, and weak evidence is visible."""

from benchmarks.gpu.comparison import compare_tokens


def answer(tokens, best=None):
    return {"tokens": tokens, "best": best or [[[token, -0.1], [token + 1, -0.3]] for token in tokens]}


def test_equal_answers_have_no_mismatch():
    result = compare_tokens([answer([5, 6, 7]), answer([9, 9, 9])], [answer([5, 6, 7]), answer([9, 9, 9])])
    assert result["mismatches"] == []
    assert (result["requests"], result["tokens"], result["distinct_tokens"]) == (2, 6, 4)
    assert result["constant_answers"] == 1


def test_mismatch_names_position_tokens_and_margin_of_the_second_best():
    result = compare_tokens([answer([5, 6, 7])], [answer([5, 7, 8])])
    (entry,) = result["mismatches"]
    assert entry["request"] == 0
    assert entry["position"] == 1
    assert (entry["stock_token"], entry["our_token"]) == (6, 7)
    assert abs(entry["margin"] - 0.2) < 1e-9
    assert entry["margin_is_lower_bound"] is False


def test_margin_of_a_token_outside_the_best_two_is_a_lower_bound():
    (entry,) = compare_tokens([answer([5])], [answer([50])])["mismatches"]
    assert entry["margin_is_lower_bound"] is True
    assert abs(entry["margin"] - 0.2) < 1e-9


def test_answers_of_different_length_are_a_mismatch():
    (entry,) = compare_tokens([answer([5, 6])], [answer([5])])["mismatches"]
    assert entry["position"] == 1
