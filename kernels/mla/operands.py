# SPDX-License-Identifier: Apache-2.0
"""What every decode and prefill kernel asks of its operands."""

from __future__ import annotations

import torch


def require(tensor: torch.Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Check a tensor's shape, type, device and last stride.

    Raises:
        ValueError: one of them is wrong.
    """
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: shape {tuple(tensor.shape)}, allowed: {shape}")
    if tensor.dtype != dtype:
        raise ValueError(f"{name}: dtype {tensor.dtype}, allowed: {dtype}")
    if tensor.device.type != device.type:
        raise ValueError(f"{name}: on {tensor.device}, allowed: {device}")
    if tensor.stride(-1) != 1:
        raise ValueError(f"{name}: last dimension has stride {tensor.stride(-1)}, allowed: 1")
