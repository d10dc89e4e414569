# SPDX-License-Identifier: Apache-2.0
"""The definition of all-reduce + residual add + RMS norm, in torch."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


def sum_reference(branches: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of all ranks' `[rows, hidden]` in their order, in fp32 (fp64 stays), rounded once to their type."""
    wide = [branch.to(_wide(branch.dtype)) for branch in branches]
    return reduce(torch.add, wide).to(branches[0].dtype)


def add_norm_reference(
    reduced: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    epsilon: float,
    weight_offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm of `residual + reduced` and that sum, both `[..., hidden]` in the type of `reduced`.

    The norm sees the sum in fp32, unrounded, and rounds its result once: what inductor makes of vLLM's
    `RMSNorm.forward_native`. Formula: Zhang and Sennrich 2019; `weight + weight_offset` is Gemma's form.
    """
    dtype = _wide(reduced.dtype)
    total = reduced.to(dtype)
    if residual is not None:
        total = total + residual.to(dtype)
    scaled = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + epsilon)
    if weight is not None:
        scaled = scaled * (weight.to(dtype) + weight_offset)
    return scaled.to(reduced.dtype), total.to(reduced.dtype)


def all_reduce_add_norm_reference(
    branches: Sequence[torch.Tensor],
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    epsilon: float,
    weight_offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What every rank gets when rank `i` brings `branches[i]`; see `add_norm_reference`."""
    return add_norm_reference(sum_reference(branches), residual, weight, epsilon, weight_offset)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
