# SPDX-License-Identifier: Apache-2.0
"""`torch.ops.tokenspeed.linear_all_reduce_add_norm`: the fused operation with the linear layer that makes its operand.

How many rows a step has is known when it runs and not when it is compiled, so the operation decides: small steps and those that
are captured take the product whole, then what `all_reduce_add_norm` does; large ones take it in parts, see `overlap`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch.library import Library

from tokenspeed_plugin.kernels.comm.operation import (
    ReductionGroup,
    Sums,
    group_of,
    is_captured,
    norms_of_parts,
    reduce_add_norm,
)
from tokenspeed_plugin.kernels.linear.operation import product

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenspeed_plugin.kernels.comm.overlap import Overlap

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
        return product(rows, self.weight, self.bias)

    def writer(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """`write(rows, out)`: the same into memory that is there."""
        columns, bias = self.weight.t(), self.bias
        if bias is None:
            return lambda rows, out: torch.mm(rows, columns, out=out)
        return lambda rows, out: torch.addmm(bias, rows, columns, out=out)


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
    if overlap is not None and rows.dim() == 2 and not is_captured(rows) and len(overlap.parts(len(rows))) > 1:
        return _in_parts(members, overlap, linear, rows, residual, norm)
    return reduce_add_norm(members, linear(rows), residual, *norm)


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
    whole = rows.new_empty(len(rows), linear.weight.shape[0])
    parts, transfer = overlap.parts(len(rows)), overlap.exchange.begin(whole)
    sizes, write = [end - first for first, end in parts], linear.writer()
    pieces = zip(parts, rows.split_with_sizes(sizes), whole.split_with_sizes(sizes), strict=True)
    for index, (part, own, out) in enumerate(pieces):
        write(own, out)
        transfer.start(index, *part)
    return norms_of_parts(members, transfer, parts, residual, norm, whole)


def _shapes(rows: torch.Tensor, weight: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return Sums(*(rows.new_empty(*rows.shape[:-1], weight.shape[0]) for _ in range(2)))


_library = Library("tokenspeed", "FRAGMENT")
_library.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
_library.impl(NAME, _run, "CompositeExplicitAutograd")
torch.library.register_fake(f"tokenspeed::{NAME}", _shapes, lib=_library)
