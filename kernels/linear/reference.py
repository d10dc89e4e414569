# SPDX-License-Identifier: Apache-2.0
"""The definition of a linear layer of a few rows."""

from __future__ import annotations

import torch


def few_rows_reference(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`rows` `[rows, in]` times the transpose of `weight` `[out, in]`, plus `bias` `[out]`; summed in fp64, rounded once."""
    exact = rows.double() @ weight.double().t()
    return (exact if bias is None else exact + bias.double()).to(rows.dtype)
