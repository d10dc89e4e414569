# SPDX-License-Identifier: Apache-2.0
"""`torch.ops.tokenspeed.linear_all_reduce_add_norm`: the fused operation with the linear layer that makes its operand.

How many rows a step has is known when it runs and not when it is compiled, so the operation decides: small steps and those that
are captured take the product whole, then what `all_reduce_add_norm` does; large ones take it in parts, see `overlap`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch.library import Library

from tokenspeed_plugin.kernels.comm.operation import ReductionGroup, Sums, group_of, reduce_add_norm
from tokenspeed_plugin.kernels.comm.reference import add_norm_reference

if TYPE_CHECKING:
    from tokenspeed_plugin.kernels.comm.overlap import Overlap, Terms

NAME: Final = "linear_all_reduce_add_norm"
_SCHEMA: Final = (
    f"{NAME}(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, Tensor? norm_weight, float epsilon,"
    " float weight_offset, str group) -> (Tensor, Tensor)"
)


class Linear(NamedTuple):
    """A rank's part of a linear layer: `weight` `[out, in]`, and `bias` `[out]` on the one rank that adds it."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """The product, of which the sum over ranks is the layer's."""
        return torch.nn.functional.linear(rows, self.weight, self.bias)

    def write(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """The same into memory that is there."""
        if self.bias is None:
            torch.mm(rows, self.weight.t(), out=out)
        else:
            torch.addmm(self.bias, rows, self.weight.t(), out=out)


def linear_all_reduce_add_norm(
    rows: torch.Tensor,
    linear: Linear,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    epsilon: float,
    weight_offset: float,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm of `residual` plus the sum over all ranks of `linear` of `rows` `[rows, in]`, and that sum; both `[rows, out]`, new.

    Raises:
        ValueError: the group is not registered in this process.
    """
    normed, total = torch.ops.tokenspeed.linear_all_reduce_add_norm(
        rows, linear.weight, linear.bias, residual, norm_weight, epsilon, weight_offset, group
    )
    return normed, total


def _run(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    epsilon: float,
    weight_offset: float,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    members, linear = group_of(group), Linear(weight, bias)
    norm = (norm_weight, epsilon, weight_offset)
    overlap = members.overlap
    if overlap is not None and rows.dim() == 2 and not _is_captured(rows) and len(overlap.parts(len(rows))) > 1:
        return _in_parts(members, overlap, linear, rows, residual, norm)
    return reduce_add_norm(members, linear(rows), residual, *norm)


def _is_captured(rows: torch.Tensor) -> bool:
    return rows.is_cuda and torch.cuda.is_current_stream_capturing()


def _in_parts(
    members: ReductionGroup,
    overlap: Overlap,
    linear: Linear,
    rows: torch.Tensor,
    residual: torch.Tensor | None,
    norm: tuple[torch.Tensor | None, float, float],
) -> tuple[torch.Tensor, torch.Tensor]:
    """All products first, each with its sum begun behind it; then the norms, part by part, as the terms come in."""
    residual = None if residual is None else residual.contiguous()
    product = rows.new_empty(len(rows), linear.weight.shape[0])
    parts, transfer = overlap.parts(len(rows)), overlap.exchange.begin(product)
    for index, (first, end) in enumerate(parts):
        linear.write(rows[first:end], product[first:end])
        transfer.start(index, first, end)
    sums = Sums(torch.empty_like(product), torch.empty_like(product))
    for index, (first, end) in enumerate(parts):
        own = None if residual is None else residual[first:end]
        out = Sums(sums.normed[first:end], sums.total[first:end])
        _add_norm(members, transfer.wait(index, first, end), own, norm, out)
    return sums


def _add_norm(
    members: ReductionGroup,
    terms: Terms,
    residual: torch.Tensor | None,
    norm: tuple[torch.Tensor | None, float, float],
    out: Sums,
) -> None:
    kernel = members.kernel
    if kernel is not None and kernel.takes(terms.own, residual, norm[0]):
        kernel.add_norm(terms.own, residual, *norm, out=out, other=terms.other)
        return
    for target, value in zip(out, add_norm_reference(terms.total(), residual, *norm), strict=True):
        target.copy_(value)


def _shapes(rows: torch.Tensor, weight: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return Sums(*(rows.new_empty(*rows.shape[:-1], weight.shape[0]) for _ in range(2)))


_library = Library("tokenspeed", "FRAGMENT")
_library.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
_library.impl(NAME, _run, "CompositeExplicitAutograd")
torch.library.register_fake(f"tokenspeed::{NAME}", _shapes, lib=_library)
