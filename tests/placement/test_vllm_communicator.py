# SPDX-License-Identifier: Apache-2.0
"""Which communicator a group gets, what the log says about it, and what the compile-cache key learns of it."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.placement.placement_cases import compile_plan, model
from tests.placement.test_vllm_binding import vllm_config
from tokenspeed_plugin.kernels.comm import all_reduce_add_norm
from tokenspeed_plugin.kernels.comm.reference import add_norm_reference
from tokenspeed_plugin.placement.runtime import vllm_communicator
from tokenspeed_plugin.placement.runtime.communicator import FusingCommunicator, OverlappingCommunicator
from tokenspeed_plugin.placement.runtime.residual_sum import RmsNorm
from tokenspeed_plugin.placement.runtime.start import KEY, PlacementRequest, request_for
from tokenspeed_plugin.placement.runtime.vllm_communicator import GroupCommunicator, communicator_of
from tokenspeed_plugin.placement.spec import Fusing, Overlapping


class Group:
    """Two ranks on CPU that hold equal values, with what of vLLM's coordinator is used."""

    world_size, unique_name, device = 2, "tp:7", torch.device("cpu")

    device_group: object = None

    def __init__(self) -> None:
        self.reduced = 0
        self.cpu_group = SimpleNamespace(size=lambda: 2, rank=lambda: 0)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.reduced += 1
        return tensor.mul_(2)


def test_the_request_carries_the_fusion_and_the_worker_writes_down_what_it_found() -> None:
    config = vllm_config()
    request = request_for("fusion=off,attn=tp2,dense=tp2", config)
    assert (request.fusion, request.fused, request.spec) == ("off", False, "attn=tp2,dense=tp2,moe=tp2")
    assert request_for("auto,residual=replicated", config).fusion == "auto"
    config.additional_config = {"other": 1, KEY: vars(request)}
    request.settle(config, fused=True, overlapped=True)
    assert config.additional_config["other"] == 1
    assert PlacementRequest.of(config) == replace(request, fused=True, overlapped=True)


def test_fusion_off_and_one_rank_reduce_as_before() -> None:
    plan, group = compile_plan(model("qwen3")), Group()
    assert type(communicator_of(group, [plan], 32, torch.bfloat16, Fusing.OFF)) is GroupCommunicator
    alone = SimpleNamespace(world_size=1, unique_name="tp:8")
    assert type(communicator_of(alone, [], 32, torch.bfloat16, Fusing.AUTO)) is GroupCommunicator


@pytest.mark.parametrize(
    ("dtype", "invariant", "reason"),
    [
        (torch.float32, "0", "rank 0: dtype float32, allowed: bfloat16, float16"),
        (torch.bfloat16, "0", "rank 0: device cpu, allowed: cuda with a number"),
        (torch.bfloat16, "1", "VLLM_BATCH_INVARIANT asks for vLLM's own batch-invariant norms"),
    ],
)
def test_where_the_kernel_cannot_run_the_log_says_why(
    dtype: torch.dtype, invariant: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    log = SimpleNamespace(info=lambda text, *values: lines.append(text % values))
    monkeypatch.setattr(vllm_communicator, "logger", lambda _: log)
    monkeypatch.setattr(all_reduce_add_norm, "settle", lambda _, problem: problem and f"rank 0: {problem}")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", invariant)
    found = communicator_of(Group(), [compile_plan(model("qwen3"))], 32, dtype, Fusing.AUTO)
    assert type(found) is GroupCommunicator
    assert lines == [f"placement: all-reduce + residual + norm in one kernel is not used because {reason}"]


def test_the_reference_runs_the_groups_all_reduce_and_leaves_its_input_alone() -> None:
    group = Group()
    found = communicator_of(group, [compile_plan(model("qwen3"))], 32, torch.float32, Fusing.REFERENCE)
    assert isinstance(found, FusingCommunicator)
    branch, residual, weight = torch.randn(3, 32), torch.randn(3, 32), torch.randn(32)
    kept = branch.clone()
    normed, total = found.all_reduce_add_norm(branch, residual, RmsNorm(weight, 1e-5, 0.0), (0,))
    assert torch.equal(branch, kept)
    assert torch.equal(total, 2 * branch + residual)
    assert torch.equal(normed, add_norm_reference(2 * branch, residual, weight, 1e-5)[0])
    assert group.reduced == 1


@pytest.mark.parametrize(
    ("overlapping", "invariant", "problem", "line"),
    [
        (Overlapping.OFF, "0", None, None),
        (Overlapping.AUTO, "0", None, None),
        (
            Overlapping.ON,
            "0",
            None,
            "in steps of 2048 tokens and more linear layers overlap their reduction in up to 4 parts",
        ),
        (Overlapping.REFERENCE, "0", None, "in steps of 2 tokens and more linear layers overlap"),
        (
            Overlapping.ON,
            "0",
            "rank 1: broken",
            "linear layers do not overlap their reduction by .* because rank 1: broken",
        ),
        (Overlapping.ON, "1", None, "linear layers do not overlap their reduction because VLLM_BATCH_INVARIANT asks"),
    ],
)
def test_an_overlap_is_tried_first_and_the_log_says_what_came_of_it(
    overlapping: Overlapping, invariant: str, problem: str | None, line: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    log = SimpleNamespace(info=lambda text, *values: lines.append(text % values))
    monkeypatch.setattr(vllm_communicator, "logger", lambda _: log)
    monkeypatch.setattr(vllm_communicator, "trial", lambda *_: problem)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", invariant)
    group = Group()
    plans = [compile_plan(model("qwen3"))]
    found = communicator_of(group, plans, 32, torch.float32, Fusing.REFERENCE, overlapping, 64)
    works = problem is None and invariant == "0" and overlapping not in (Overlapping.OFF, Overlapping.AUTO)
    assert isinstance(found, OverlappingCommunicator) is works
    assert isinstance(found, FusingCommunicator)
    assert (len(lines) == 1 and re.search(line, lines[0]) is not None) if line else not lines


@pytest.mark.parametrize(
    ("hidden", "device", "copies", "invariant", "reason"),
    [
        (4096, "NVIDIA H200", True, "0", None),
        (
            2048,
            "NVIDIA H200",
            True,
            "0",
            "hidden size 2048 on NVIDIA H200 is not known to gain: known is 4096 and more",
        ),
        (4096, "NVIDIA H20", True, "0", "hidden size 4096 on NVIDIA H20 is not known to gain"),
        (4096, "NVIDIA H200", False, "0", ""),
        (4096, "NVIDIA H200", True, "1", "because VLLM_BATCH_INVARIANT asks"),
    ],
)
def test_unasked_an_overlap_is_chosen_where_it_is_known_to_gain(
    hidden: int, device: str, copies: bool, invariant: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    log = SimpleNamespace(info=lambda text, *values: lines.append(text % values))
    monkeypatch.setattr(vllm_communicator, "logger", lambda _: log)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: device)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", invariant)
    exchange = SimpleNamespace(way="copies", max_rows=8192) if copies else None
    shape = all_reduce_add_norm.RowShape(hidden, torch.bfloat16, 8192)
    found = vllm_communicator._overlap(Group(), exchange, shape, Overlapping.AUTO)  # type: ignore[arg-type]
    assert (found is not None) is (reason is None)
    assert len(lines) == (reason != "")
    assert not reason or reason in lines[0]


def test_large_sums_go_by_copies_between_two_ranks_with_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    log = SimpleNamespace(info=lambda text, *values: lines.append(text % values))
    monkeypatch.setattr(vllm_communicator, "logger", lambda _: log)
    exchange, kernel = SimpleNamespace(way="copies"), SimpleNamespace()
    monkeypatch.setattr(vllm_communicator, "connect_copies", lambda *_: exchange)
    shape, group = all_reduce_add_norm.RowShape(8, torch.bfloat16, 64), Group()
    for problem, found in ((None, exchange), ("rank 1: broken", None)):
        monkeypatch.setattr(vllm_communicator, "trial", lambda *_, problem=problem: problem)
        assert vllm_communicator._copies(group, shape, kernel) is found  # type: ignore[arg-type]
    assert lines[0] == "placement: sums of more tokens go by copies, where nothing is captured"
    assert lines[1] == "placement: large sums do not go by copies because rank 1: broken"
    assert vllm_communicator._copies(group, shape, None) is None
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("hidden", "kernel_rows", "overlapping", "needed"),
    [
        (2048, 8192, Overlapping.AUTO, False),
        (2048, 128, Overlapping.AUTO, True),
        (4096, 8192, Overlapping.AUTO, True),
        (4096, 8192, Overlapping.OFF, False),
        (2048, 8192, Overlapping.ON, True),
    ],
)
def test_copies_are_set_up_only_for_sums_that_overlap_or_that_the_kernel_does_not_take(
    hidden: int, kernel_rows: int, overlapping: Overlapping, needed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    memory = SimpleNamespace(way="threads")
    kernel = SimpleNamespace(max_rows=kernel_rows, memory=memory)
    monkeypatch.setattr(vllm_communicator, "_connected", lambda *_: kernel)
    monkeypatch.setattr(vllm_communicator, "_copies", lambda _, shape, __: asked.append(shape.max_rows))
    monkeypatch.setattr(vllm_communicator, "_overlap", lambda *_: None)
    plans = [compile_plan(model("qwen3"))]
    communicator_of(Group(), plans, hidden, torch.bfloat16, Fusing.AUTO, overlapping, 8192)
    assert asked == ([8192] if needed else [])


def test_the_overlap_is_part_of_the_request() -> None:
    config = vllm_config()
    request = request_for("attn=tp2,dense=tp2,overlap=on", config)
    assert (request.overlap, request.overlapped, request.residual) == ("on", False, "replicated")
    assert request_for("attn=tp2,dense=tp2", config).overlap == "auto"
