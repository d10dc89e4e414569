# SPDX-License-Identifier: Apache-2.0
"""Linear layers of few rows on a GPU: against fp64, in graphs, and behind kernels that let them start early."""

from __future__ import annotations

import pytest
import torch

from tokenspeed_plugin.kernels.linear import library
from tokenspeed_plugin.kernels.linear.few_rows import FewRows, of_device
from tokenspeed_plugin.kernels.linear.operation import few_rows_linear
from tokenspeed_plugin.kernels.linear.reference import few_rows_reference

DEVICE = torch.device("cuda", 0)


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed + sum(shape))
    return (torch.randn(shape, device=DEVICE, generator=generator) * scale).bfloat16()


def check(found: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Half a unit of bf16 for the one rounding, and what fp32 sums of that length may lose."""
    exact = few_rows_reference(rows.double(), weight.double(), None if bias is None else bias.double())
    terms = rows.double().abs() @ weight.double().abs().t()
    allowed = exact.abs() * 2**-8 + terms * 2**-20
    assert ((found.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("num_rows", [1, 2, 7, 8, 9, 15, 16])
@pytest.mark.parametrize(
    ("out", "in_values"),
    [(16, 64), (48, 448), (64, 512), (3072, 4096), (4096, 2048), (12288, 4096), (4096, 6144), (32, 1088)],
)
def test_it_is_the_product(num_rows: int, out: int, in_values: int) -> None:
    rows, weight, bias = draw(num_rows, in_values), draw(out, in_values, scale=0.05), draw(out)
    kernel = of_device(DEVICE)
    check(kernel(rows, weight), rows, weight)
    check(kernel(rows, weight, bias), rows, weight, bias)


def test_rows_and_weights_may_lie_apart_and_what_lies_between_is_not_read() -> None:
    rows, weight = draw(11, 576), draw(160, 640)
    rows[:, 512:], weight[:, 512:] = float("nan"), float("nan")
    check(of_device(DEVICE)(rows[:, :512], weight[:, :512]), rows[:, :512], weight[:, :512])


def test_a_row_does_not_depend_on_the_rows_around_it() -> None:
    rows, weight = draw(16, 4096), draw(3072, 4096)
    kernel = of_device(DEVICE)
    whole = kernel(rows, weight)
    for count in (1, 8, 9):
        assert torch.equal(kernel(rows[:count], weight), whole[:count])


@pytest.mark.parametrize("num_rows", [1, 16])
def test_a_chain_in_a_graph_reads_what_the_kernel_before_has_written(num_rows: int) -> None:
    """Each product reads the one before; with a dependent launch its blocks run before that has ended."""
    layers = [draw(4096, 4096, seed=seed, scale=1 / 64) for seed in range(6)]
    rows = draw(num_rows, 4096)
    early = of_device(DEVICE)
    late = FewRows(library.load(), DEVICE, dependent_launch=False)

    def chain(kernel: FewRows) -> torch.Tensor:
        found = rows
        for weight in layers * 4:
            found = kernel(found, weight)
        return found

    expected = chain(late)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(early)
    for _ in range(50):
        found.fill_(float("nan"))
        graph.replay()
        assert torch.equal(found, expected)


def test_the_operation_takes_few_rows_by_the_kernel_and_many_by_torch() -> None:
    weight = draw(2048, 4096)
    for count in (16, 17):
        rows = draw(count, 4096)
        expected = of_device(DEVICE)(rows, weight) if count == 16 else torch.nn.functional.linear(rows, weight)
        assert torch.equal(few_rows_linear(rows, weight), expected)
