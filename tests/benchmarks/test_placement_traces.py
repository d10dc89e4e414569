# SPDX-License-Identifier: Apache-2.0
"""Traced steps of the placement benchmark: which step is traced, what its figures are, and how two systems stand side by side."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.placed.trace_tables import print_traces
from benchmarks.placed.traces import StepTrace, step_figures


def event(name: str, start: float, end: float, device: str = "CUDA", **more: Any) -> SimpleNamespace:
    times = SimpleNamespace(start=start, end=end)
    own_us = end - start
    return SimpleNamespace(
        name=name, device_type=SimpleNamespace(name=device), time_range=times, self_cpu_time_total=own_us, **more
    )


STEP = (
    event("aten::mm", 0, 9, "CPU"),
    event("cudaLaunchKernel", 2, 5, "CPU"),
    event("cuLaunchKernelEx", 6, 8, "CPU"),
    event("cudaMemcpyAsync", 8, 9, "CPU"),
    event("gemm", 10, 20),
    event("norm", 15, 25),
    event("gemm", 30, 34),
    event("Memcpy DtoH (Device -> Pinned)", 40, 41),
    event("region", 0, 100, is_user_annotation=True),
)


def test_busy_time_is_the_union_of_kernels_and_the_span_begins_with_the_first_launch() -> None:
    found = step_figures(STEP)
    assert (found["busy_us"], found["span_us"], found["idle_us"]) == (19.0, 32.0, 13.0)
    assert found["num_kernels"] == 3
    assert found["launches"] == {"calls": 2, "us": 5.0, "span_us": 6.0}


def test_kernels_copies_and_calls_are_summed_by_name_and_the_longest_comes_first() -> None:
    found = step_figures(STEP)
    assert [(k["name"], k["calls"], k["us"]) for k in found["kernels"]] == [("gemm", 2, 14.0), ("norm", 1, 10.0)]
    assert found["copies"] == [{"name": "Memcpy DtoH (Device -> Pinned)", "calls": 1, "us": 1.0}]
    assert [call["name"] for call in found["calls"]] == ["cudaLaunchKernel", "cuLaunchKernelEx", "cudaMemcpyAsync"]
    assert found["host"][0] == {"name": "aten::mm", "calls": 1, "us": 9.0}


def test_kernels_beyond_those_that_are_kept_are_summed_up() -> None:
    found = step_figures(event(f"kernel{index:02}", 2 * index, 2 * index + 1) for index in range(30))
    assert len(found["kernels"]) == 25
    assert found["other_kernels_us"] == 5.0
    assert found["busy_us"] == 30.0


def test_a_step_without_a_gpu_has_no_time_on_one() -> None:
    found = step_figures([event("aten::mm", 0, 9, "CPU")])
    assert (found["busy_us"], found["span_us"], found["kernels"]) == (0.0, 0.0, [])


def test_the_step_that_was_asked_for_is_traced_and_no_other() -> None:
    met: list[str] = []
    trace = StepTrace(num_requests=2, num_tokens=2, steps_left=2)
    assert trace.figures() == {}
    for scheduled in ({"a": 2}, {"a": 1, "b": 1}, {"a": 1, "b": 2}):
        trace.end()
        trace.begin_if_due(scheduled, lambda: met.append("all"))
        torch.zeros(4).neg()
    assert met == []
    trace.end()
    trace.begin_if_due({"a": 1, "b": 1}, lambda: met.append("all"))
    torch.ones(4).abs()
    for _ in range(2):
        trace.end()
        trace.begin_if_due({"a": 1, "b": 1}, lambda: met.append("all"))
        torch.zeros(4).neg()
    assert met == ["all"]
    names = [operation["name"] for operation in trace.figures()["host"]]
    assert "aten::abs" in names
    assert "aten::neg" not in names


def test_tables_show_the_kernels_of_both_systems_and_what_could_not_be_traced(
    capsys: pytest.CaptureFixture[str],
) -> None:
    theirs, ours = step_figures(STEP), step_figures([event("fused", 0, 1500)])
    systems: dict[str, Any] = {"stock": {"traces": {"prefill": theirs}}, "placed": {"traces": {"prefill": ours}}}
    print_traces("mla", {**systems, "ours": {"traces_error": "took too long"}})
    printed = capsys.readouterr().out
    assert "mla: ours: no traces: took too long" in printed
    assert all(name in printed for name in ("prefill: stock", "gemm", "fused", "1.50"))
    print_traces("mla", {"stock": {}})
    assert capsys.readouterr().out == ""
