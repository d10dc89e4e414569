# SPDX-License-Identifier: Apache-2.0
"""`torch.ops.tokenspeed.all_reduce_add_norm`: the fused step as torch.compile and CUDA graphs see it.

The operation finds its group by name, because a graph can hold no object. It gives the same results whether the kernel runs or
not: with more rows than the kernel takes, or without one, copies or the group's own all-reduce run and a norm behind them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch.library import Library

from tokenspeed_plugin.kernels.comm.overlap import parts_of_sum
from tokenspeed_plugin.kernels.comm.reference import add_norm_reference

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenspeed_plugin.kernels.comm.all_reduce_add_norm import AllReduceAddNorm
    from tokenspeed_plugin.kernels.comm.overlap import Exchange, Overlap, Terms, Transfer

NAME: Final = "all_reduce_add_norm"
_SCHEMA: Final = (
    f"{NAME}(Tensor branch, Tensor? residual, Tensor? weight, float epsilon, float weight_offset, str group)"
    " -> (Tensor, Tensor)"
)


@dataclass(frozen=True)
class ReductionGroup:
    """A group of ranks.

    Attributes:
        all_reduce: its own, which leaves its input alone.
        kernel: the fused one, where there is one.
        overlap: how linear layers in front are overlapped, if they are.
        exchange: what takes the group's place where the kernel has too few rows and nothing is captured.
    """

    all_reduce: Callable[[torch.Tensor], torch.Tensor]
    kernel: AllReduceAddNorm | None = None
    overlap: Overlap | None = None
    exchange: Exchange | None = None


class Sums(NamedTuple):
    """What the operations return, or write to."""

    normed: torch.Tensor
    total: torch.Tensor


_groups: dict[str, ReductionGroup] = {}


def register_group(name: str, group: ReductionGroup) -> None:
    """Make a group known to the operation in this process; a second one of that name takes its place."""
    _groups[name] = group


def remove_group(name: str) -> None:
    """Forget a group; nothing may call the operation for it any more."""
    _groups.pop(name, None)


def group_of(name: str) -> ReductionGroup:
    """The group of that name.

    Raises:
        ValueError: it is not registered in this process.
    """
    members = _groups.get(name)
    if members is None:
        raise ValueError(f"group {name!r} is not registered, allowed: {', '.join(_groups) or 'none, so far'}")
    return members


def all_reduce_add_norm(
    branch: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    epsilon: float,
    weight_offset: float,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm of `residual` plus the sum of all ranks' `branch` `[rows, hidden]`, and that sum; both new.

    Raises:
        ValueError: the group is not registered in this process.
    """
    normed, total = torch.ops.tokenspeed.all_reduce_add_norm(branch, residual, weight, epsilon, weight_offset, group)
    return normed, total


def _run(
    branch: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    epsilon: float,
    weight_offset: float,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return reduce_add_norm(group_of(group), branch, residual, weight, epsilon, weight_offset)


def reduce_add_norm(
    members: ReductionGroup,
    branch: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    epsilon: float,
    weight_offset: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the operation does, in the one way of three that fits the operands."""
    kernel = members.kernel
    if kernel is None or not kernel.takes(branch, residual, weight):
        return add_norm_reference(members.all_reduce(branch), residual, weight, epsilon, weight_offset)
    branch, residual = branch.contiguous(), None if residual is None else residual.contiguous()
    if branch.shape[0] <= kernel.max_rows:
        return kernel(branch, residual, weight, epsilon, weight_offset)
    exchange = members.exchange
    if exchange is not None and len(branch) <= (exchange.max_rows or 0) and not is_captured(branch):
        transfer = exchange.begin(branch)
        parts = parts_of_sum(len(branch), branch.shape[1] * branch.element_size())
        for index, (first, end) in enumerate(parts):
            transfer.start(index, first, end)
        return norms_of_parts(members, transfer, parts, residual, (weight, epsilon, weight_offset), branch)
    return kernel.add_norm(members.all_reduce(branch), residual, weight, epsilon, weight_offset)


def is_captured(tensor: torch.Tensor) -> bool:
    """Whether a CUDA graph is being made of what runs now."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def norms_of_parts(
    members: ReductionGroup,
    transfer: Transfer,
    parts: tuple[tuple[int, int], ...],
    residual: torch.Tensor | None,
    norm: tuple[torch.Tensor | None, float, float],
    like: torch.Tensor,
) -> Sums:
    """The norms of parts that are on their way, one by one as they come in; `norm`: weight, epsilon, offset.

    `like`: the whole of this rank's terms.
    """
    sums, kernel = Sums(torch.empty_like(like), torch.empty_like(like)), members.kernel
    if kernel is not None and kernel.takes(like, residual, norm[0]) and (arriving := transfer.arriving(parts)):
        kernel.add_norm_of_parts(like, residual, *norm, out=sums, arriving=arriving)
        return sums
    for index, (first, end) in enumerate(parts):
        own, out = residual, sums
        if len(parts) > 1:
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


def _shapes(branch: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    normed, total = (torch.empty_like(branch, memory_format=torch.contiguous_format) for _ in range(2))
    return normed, total


_library = Library("tokenspeed", "FRAGMENT")
_library.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
_library.impl(NAME, _run, "CompositeExplicitAutograd")
torch.library.register_fake(f"tokenspeed::{NAME}", _shapes, lib=_library)
