# SPDX-License-Identifier: Apache-2.0
"""`torch.ops.tokenspeed.few_rows_linear`: a linear layer as torch.compile and CUDA graphs see it.

How many rows a step has is known when it runs and not when it is compiled, so the operation decides: few rows go to the kernel, all
others to torch's own product.
"""

from __future__ import annotations

from typing import Final

import torch
from torch.library import Library

from tokenspeed_plugin.kernels.linear import few_rows
from tokenspeed_plugin.kernels.linear.limits import LEAST_WEIGHT_BYTES, MAX_ROWS, MOST_WEIGHT_BYTES, refusal

NAME: Final = "few_rows_linear"
_SCHEMA: Final = f"{NAME}(Tensor rows, Tensor weight, Tensor? bias=None) -> Tensor"

_taken: list[bool] = [False]


def take_products(on: bool) -> None:
    """Whether `product` uses the operation in this process from now on; it does not before the first call."""
    _taken[0] = on


def takes_layer(weight: torch.Tensor) -> bool:
    """Whether a layer with such a weight `[out, in]` gains: the kernel takes it, and it has a size at which that pays."""
    if weight.dim() != 2 or not weight.is_cuda:
        return False
    fits = refusal(weight.shape[0], weight.shape[1], str(weight.dtype).removeprefix("torch.")) is None
    return fits and LEAST_WEIGHT_BYTES <= weight.numel() * weight.element_size() <= MOST_WEIGHT_BYTES


def few_rows_linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`rows` `[..., in]` times the transpose of `weight` `[out, in]`, plus `bias` `[out]`; new."""
    result: torch.Tensor = torch.ops.tokenspeed.few_rows_linear(rows, weight, bias)
    return result


def product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The same, by the operation only where an engine asked for it (`take_products`) and the layer gains.

    Where it is compiled the operation hides the number of rows: a branch on it would be settled for all steps by the first one.
    """
    if _taken[0] and takes_layer(weight):
        return few_rows_linear(rows, weight, bias)
    return torch.nn.functional.linear(rows, weight, bias)


def _run(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if rows.shape[0] <= MAX_ROWS and rows.is_cuda:
        kernel = few_rows.of_device(rows.device)
        if kernel.takes(rows, weight, bias):
            return kernel.launch(rows, weight, bias)
    return torch.nn.functional.linear(rows, weight, bias)


def _shape(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:  # noqa: ARG001
    return rows.new_empty(*rows.shape[:-1], weight.shape[0])


_library = Library("tokenspeed", "FRAGMENT")
_library.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
_library.impl(NAME, _run, "CompositeExplicitAutograd")
torch.library.register_fake(f"tokenspeed::{NAME}", _shape, lib=_library)
