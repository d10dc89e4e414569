# SPDX-License-Identifier: Apache-2.0
"""All-reduce + residual add + RMS norm: its definition, the operation that torch sees, and its parameter block."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
import torch

from tokenspeed_plugin.kernels.comm import library, operation
from tokenspeed_plugin.kernels.comm.abi import Arrival, Params, SentPart
from tokenspeed_plugin.kernels.comm.all_reduce_add_norm import AllReduceAddNorm, RowShape
from tokenspeed_plugin.kernels.comm.reference import add_norm_reference, all_reduce_add_norm_reference
from tokenspeed_plugin.kernels.registry import Platform, default_registry
from tokenspeed_plugin.kernels.select import KernelRequest, KernelSelectionError, select_kernel

EPSILON = 1e-3


def test_the_reference_is_the_definition() -> None:
    torch.manual_seed(0)
    branches, residual, weight = torch.randn(3, 4, 16).double(), torch.randn(4, 16).double(), torch.randn(16).double()
    normed, total = all_reduce_add_norm_reference(list(branches), residual, weight, EPSILON, 1.0)
    for row in range(4):
        values = [float(branches[:, row, i].sum() + residual[row, i]) for i in range(16)]
        root = (sum(v * v for v in values) / 16 + EPSILON) ** 0.5
        for i, value in enumerate(values):
            assert abs(total[row, i].item() - value) < 1e-12
            assert abs(normed[row, i].item() - value / root * (float(weight[i]) + 1.0)) < 1e-12


def test_the_sum_is_rounded_before_the_residual_is_added_and_the_norm_sees_it_unrounded() -> None:
    # 1 + 2^-8 is no bf16: the ranks' sum becomes 1. 256 + 1 is none either: it stays whole for the norm, not where it is stored.
    terms = [torch.tensor([[1.0, 0.0]]).bfloat16(), torch.tensor([[2.0**-8, 0.0]]).bfloat16()]
    residual = torch.tensor([[256.0, 0.0]]).bfloat16()
    normed, total = all_reduce_add_norm_reference(terms, residual, None, 0.0)
    assert total.tolist() == [[256.0, 0.0]]
    assert normed.tolist() == [[torch.tensor(2.0).sqrt().bfloat16().item(), 0.0]]
    unrounded, _ = add_norm_reference(torch.zeros(1, 2), torch.tensor([[257.0, 3.0]]), None, 0.0)
    rounded, _ = add_norm_reference(torch.tensor([[1.0, 3.0]]).bfloat16(), residual, None, 0.0)
    assert torch.equal(rounded, unrounded.bfloat16())


class Counted(AllReduceAddNorm):
    """A kernel that is the reference, for a sum of two equal ranks, and counts its launches."""

    def __init__(self, max_rows: int) -> None:
        self.shape, self.fused, self.alone = RowShape(16, torch.float32, max_rows), 0, 0
        self.layouts: list[tuple[bool, bool]] = []

    def __call__(self, branch, residual, weight, epsilon, weight_offset=0.0, out=None):  # type: ignore[no-untyped-def]
        self.fused += 1
        self.layouts.append((branch.is_contiguous(), residual is None or residual.is_contiguous()))
        return add_norm_reference(2 * branch, residual, weight, epsilon, weight_offset)

    def add_norm(self, reduced, residual, weight, epsilon, weight_offset=0.0, out=None):  # type: ignore[no-untyped-def]
        self.alone += 1
        return add_norm_reference(reduced, residual, weight, epsilon, weight_offset)


@pytest.fixture
def kernel() -> Counted:
    found = Counted(max_rows=4)
    operation.register_group("test", operation.ReductionGroup(lambda t: 2 * t, found))
    yield found
    operation.remove_group("test")


@pytest.mark.parametrize(("rows", "launches"), [(1, (1, 0)), (4, (1, 0)), (5, (0, 1)), (64, (0, 1))])
def test_the_number_of_rows_decides_who_reduces(rows: int, launches: tuple[int, int], kernel: Counted) -> None:
    branch, residual, weight = torch.randn(rows, 16), torch.randn(rows, 16), torch.randn(16)
    normed, total = operation.all_reduce_add_norm(branch, residual, weight, EPSILON, 0.0, "test")
    assert (kernel.fused, kernel.alone) == launches
    expected = all_reduce_add_norm_reference([branch, branch], residual, weight, EPSILON)
    assert torch.equal(normed, expected[0])
    assert torch.equal(total, expected[1])


@pytest.mark.parametrize("change", ["hidden", "dtype", "residual", "weight", "dims"])
def test_operands_of_another_kind_go_the_groups_way(change: str, kernel: Counted) -> None:
    hidden = 24 if change == "hidden" else 16
    branch = torch.randn(2, hidden, dtype=torch.float64 if change == "dtype" else torch.float32)
    residual = branch.double() if change == "residual" else branch.clone()
    weight = torch.randn(hidden, dtype=torch.float64 if change == "weight" else torch.float32)
    if change == "dims":
        branch, residual = branch[None], residual[None]
    _, total = operation.all_reduce_add_norm(branch, residual, weight, EPSILON, 0.0, "test")
    assert (kernel.fused, kernel.alone) == (0, 0)
    assert torch.allclose(total, 3 * branch)


def test_rows_apart_in_memory_are_put_together(kernel: Counted) -> None:
    branch, residual = torch.randn(16, 3).T, torch.randn(3, 32)[:, :16]
    _, total = operation.all_reduce_add_norm(branch, residual, None, EPSILON, 0.0, "test")
    assert torch.equal(total, 2 * branch + residual)
    assert kernel.layouts == [(True, True)]


def test_without_a_kernel_the_groups_all_reduce_does_it() -> None:
    operation.register_group("plain", operation.ReductionGroup(lambda t: 2 * t))
    branch = torch.randn(3, 16)
    normed, total = operation.all_reduce_add_norm(branch, None, None, EPSILON, 0.0, "plain")
    operation.remove_group("plain")
    expected = all_reduce_add_norm_reference([branch, branch], None, None, EPSILON)
    assert torch.equal(normed, expected[0])
    assert torch.equal(total, expected[1])


def test_a_group_that_nobody_registered_is_named(kernel: Counted) -> None:
    with pytest.raises(ValueError, match=r"group 'other' is not registered, allowed: .*test"):
        operation.all_reduce_add_norm(torch.randn(1, 16), None, None, EPSILON, 0.0, "other")


def test_a_compiled_graph_keeps_the_operation_and_its_choice_for_every_length(kernel: Counted) -> None:
    def step(branch: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        normed, total = operation.all_reduce_add_norm(branch * 2, residual, None, EPSILON, 0.0, "test")
        return normed + total

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (2, 3, 9):
        branch, residual = torch.randn(rows, 16), torch.randn(rows, 16)
        assert torch.equal(compiled(branch, residual), step(branch, residual))
    assert (kernel.fused, kernel.alone) == (4, 2)


def test_the_operation_keeps_to_its_schema() -> None:
    operation.register_group("schema", operation.ReductionGroup(lambda t: 2 * t))
    arguments = (torch.randn(2, 16), torch.randn(2, 16), torch.randn(16), EPSILON, 0.0, "schema")
    outcome = torch.library.opcheck(torch.ops.tokenspeed.all_reduce_add_norm, arguments)
    operation.remove_group("schema")
    assert set(outcome.values()) == {"SUCCESS"}


@pytest.mark.parametrize("block", [Params, SentPart, Arrival])
def test_parameter_blocks_name_the_same_fields_in_the_same_order(block: type[ctypes.Structure]) -> None:
    text = (Path(library.SOURCES.folder) / "params.cuh").read_text()
    body = re.search(rf"struct {block.__name__} \{{(.*?)\n\}};", text, re.DOTALL)
    assert body is not None
    declarations = re.findall(r"^ *(?:const )?[\w:]+\*? ([^;]+);", body.group(1), re.MULTILINE)
    names = [re.sub(r"\[.*", "", name).strip() for declared in declarations for name in declared.split(",")]
    assert names == [field[0] for field in block._fields_]


@pytest.mark.parametrize(
    ("shape", "ranks", "message"),
    [
        (RowShape(4096, torch.bfloat16, 128), 3, "3 ranks, allowed: 2, 4, 6, 8"),
        (RowShape(4096, torch.float32, 128), 2, "dtype float32, allowed: bfloat16, float16"),
        (RowShape(4100, torch.bfloat16, 128), 2, "hidden=4100, allowed: multiples of 8 up to 16384"),
        (RowShape(32768, torch.bfloat16, 1), 2, "hidden=32768, allowed: multiples of 8 up to 16384"),
        (RowShape(4096, torch.bfloat16, 129), 4, "max_rows=129, allowed: 1 to 128"),
        (RowShape(4096, torch.bfloat16, 8193), 2, "max_rows=8193, allowed: 1 to 8192"),
        (RowShape(4096, torch.bfloat16, 8192), 2, None),
        (RowShape(4096, torch.bfloat16, 128), 2, None),
    ],
)
def test_shapes_that_the_kernel_does_not_take_are_named(shape: RowShape, ranks: int, message: str | None) -> None:
    assert shape.refusal(ranks) == message


@pytest.mark.parametrize(
    ("hidden", "ranks", "rows"), [(4096, 2, 128), (7168, 2, 73), (8192, 4, 21), (8192, 8, 9), (16384, 8, 4)]
)
def test_more_ranks_and_longer_rows_leave_fewer_of_them_to_one_call(hidden: int, ranks: int, rows: int) -> None:
    assert RowShape.fitting(hidden, torch.bfloat16, ranks).max_rows == rows


@pytest.mark.parametrize(
    ("hidden", "ranks", "step_rows", "rows"),
    [
        (4096, 2, 8192, 8192),
        (4096, 2, 9000, 8192),
        (2048, 2, 500, 500),
        (4096, 2, 64, 128),
        (4096, 4, 8192, 42),
        (16384, 2, 8192, 32),
    ],
)
def test_between_two_ranks_one_call_takes_all_rows_of_a_step_up_to_a_limit(
    hidden: int, ranks: int, step_rows: int, rows: int
) -> None:
    shape = RowShape.fitting(hidden, torch.bfloat16, ranks, step_rows)
    assert shape.max_rows == rows
    assert shape.refusal(ranks) is None


def test_the_registry_has_it_and_says_why_it_cannot_run_here() -> None:
    shape = {"hidden": 4096, "rows": 16, "num_ranks": 2}
    signature = {
        operand: default_registry().candidates("comm", "all_reduce_add_norm")[1].signatures[0][operand]
        for operand in ("branch", "residual")
    }
    hopper = Platform("cuda", (9, 0), "NVIDIA H200")
    request = KernelRequest("comm", "all_reduce_add_norm", signature, shape, hopper)
    chosen = select_kernel(request).spec.solution
    assert chosen == ("cuda_sm90" if torch.cuda.device_count() > 1 else "reference")
    with pytest.raises(KernelSelectionError, match="num_ranks=3, allowed: 2, 4, 6, 8"):
        select_kernel(
            KernelRequest("comm", "all_reduce_add_norm", signature, {**shape, "num_ranks": 3}, hopper),
            solution="cuda_sm90",
        )
