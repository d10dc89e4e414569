# SPDX-License-Identifier: Apache-2.0
"""The checks of ``benchmarks.comm`` find what is wrong; its bars are not met by what did not run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.comm import checks
from benchmarks.comm.__main__ import joined
from benchmarks.comm.bars import NCCL, OURS, comm_bars
from tokenspeed_plugin.kernels.comm.reference import add_norm_reference

Pair = tuple[torch.Tensor, torch.Tensor]
CPU = torch.device("cpu")


def right(branch: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, out: Pair) -> Pair:
    for target, source in zip(out, add_norm_reference(branch, residual, weight, checks.EPSILON), strict=True):
        target.copy_(source)
    return out


def spoilt(spoil: Callable[[Pair], object]) -> checks.Fused:
    def fused(branch: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, out: Pair) -> Pair:
        right(branch, residual, weight, out)
        spoil(out)
        return out

    return fused


def one_unit_off(out: Pair) -> None:
    out[1].view(torch.int16)[-1, -1] += 1


@pytest.mark.parametrize(
    ("fused", "is_right"),
    [
        (right, True),
        (spoilt(lambda out: out[0][-1].fill_(float("nan"))), False),
        (spoilt(one_unit_off), False),
        (spoilt(lambda out: out[0].mul_(1.02)), False),
        (lambda x, r, w, out: right(x, r, None, out), False),
        (lambda x, r, w, out: right(x * 2, r, w, out), False),
    ],
)
def test_shapes_and_endurance_find_what_is_wrong(fused: checks.Fused, is_right: bool) -> None:
    shapes = checks.check_shapes(fused, 0, 1, 32, (1, 3), torch.bfloat16, CPU)
    endurance = checks.check_endurance(fused, 0, 1, 32, 4, 12, CPU)
    assert (shapes == 0, endurance == 0) == (is_right, is_right)


def test_writing_past_the_rows_of_a_call_is_found() -> None:
    def fused(branch: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, out: Pair) -> Pair:
        right(branch, residual, weight, out)
        whole = out[1]._base
        if whole is not None and len(whole) > len(out[1]):
            whole[len(out[1])] = 0.0
        return out

    assert checks.check_endurance(fused, 0, 1, 32, 4, 12, CPU) > 0


def found(wrong: int, ours_us: float) -> dict[str, object]:
    cell = {"hidden": 4096, "rows": 1, "times_us": {OURS: ours_us, NCCL: 20.0}}
    return {"checks": {str(i): wrong for i in range(4)}, "times": [cell], "absent": {}}


def test_ranks_are_joined_by_the_sum_of_errors_and_the_slowest_time() -> None:
    whole = joined([found(0, 5.0), found(1, 10.0)])
    assert set(whole["checks"].values()) == {1}
    assert whole["times"][0]["times_us"] == {OURS: 10.0, NCCL: 20.0}
    assert whole["large"] == []


def test_large_sums_count_as_the_slower_rank_has_them_on_the_gpu_and_on_the_host() -> None:
    def rank(gpu_us: float, host_us: float) -> dict[str, object]:
        times = {"ours, one launch": {"gpu": gpu_us, "host": host_us}}
        return {**found(0, 5.0), "large": [{"hidden": 2048, "rows": 8192, "times_us": times}]}

    whole = joined([rank(90.0, 30.0), rank(80.0, 40.0)])
    assert whole["large"][0]["times_us"] == {"ours, one launch": {"gpu": 90.0, "host": 40.0}}


def test_bars_need_checks_and_times() -> None:
    assert all(bar.judge().met for bar in comm_bars(found(0, 5.0), with_times=True))
    assert not any(bar.judge().met for bar in comm_bars(found(1, 50.0), with_times=True) if "ran" not in bar.claim)
    nothing = {"checks": {}, "times": [], "absent": {OURS: "no peer memory"}}
    outcomes = [bar.judge() for bar in comm_bars(nothing, with_times=True)]
    assert [outcome.met for outcome in outcomes] == [False, False]
    assert "no peer memory" in outcomes[-1].note
