# SPDX-License-Identifier: Apache-2.0
"""Launches of the product of a few rows; the kernel is in `csrc/few_rows.cuh`."""

from __future__ import annotations

import functools

import torch

from tokenspeed_plugin.kernels.linear import library as linear
from tokenspeed_plugin.kernels.linear.abi import DEPENDENT_LAUNCH, LinearLibrary, Params
from tokenspeed_plugin.kernels.linear.limits import MAX_ROWS, gains, refusal

_LANE_VALUES, _LANE_BYTES = 8, 16
"""What a thread reads at once."""


class FewRows:
    """The launches of one device, all on streams of one thread.

    A launch copies its parameters, so one block of them serves all.
    """

    def __init__(self, library: LinearLibrary, device: torch.device, *, dependent_launch: bool = True) -> None:
        """Load the kernels. `dependent_launch`: read weights before the kernel before has ended."""
        self.device, self._library = device, library
        self._params = Params(launch_flags=DEPENDENT_LAUNCH if dependent_launch else 0)
        self._num_multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        library.prepare(device.index)

    def __call__(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `few_rows_reference`; sums are taken in fp32.

        Args:
            rows: `[rows, in]` bf16, 1 to 16 rows, dense in the last dimension.
            weight: `[out, in]` bf16, dense in the last dimension, rows at multiples of 16 bytes; `out` a multiple of 16, `in` of 64.
                It must not change while kernels that were launched before run: it is read before they end.
            bias: `[out]` bf16, contiguous.

        Returns:
            `[rows, out]`, new.

        Raises:
            ValueError: an operand is not what the kernel takes; nothing was launched.
        """
        if problem := self.refusal(rows, weight, bias):
            raise ValueError(problem)
        return self.launch(rows, weight, bias)

    def launch(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The same for operands that are known to be the kernel's: each call of a layer looks once."""
        out = torch.empty(rows.shape[0], weight.shape[0], dtype=rows.dtype, device=self.device)
        params = self._params
        params.rows_in, params.weight, params.rows_out = rows.data_ptr(), weight.data_ptr(), out.data_ptr()
        params.bias = None if bias is None else bias.data_ptr()
        params.row_stride, params.weight_stride = rows.stride(0), weight.stride(0)
        params.num_rows, params.in_values, params.out_values = *rows.shape, weight.shape[0]
        stream = torch.cuda.current_stream(self.device).cuda_stream
        self._library.few_rows(self.device.index, params, stream)
        return out

    def takes(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """Whether the operands are the kernel's, and cuBLAS is not the faster."""
        if self.refusal(rows, weight, bias) is not None:
            return False
        return gains(rows.shape[0], weight.shape[0], self._num_multiprocessors)

    def refusal(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> str | None:
        """Why the kernel does not take the operands, or None."""
        if rows.dim() != 2 or not 0 < rows.shape[0] <= MAX_ROWS:
            return f"rows: shape {tuple(rows.shape)}, allowed: 1 to {MAX_ROWS} rows"
        if rows.shape[1:] != weight.shape[1:]:
            return f"weight: shape {tuple(weight.shape)}, allowed: (any, {rows.shape[1]})"
        if problem := refusal(weight.shape[0], weight.shape[1], str(weight.dtype).removeprefix("torch.")):
            return f"weight: {problem}"
        if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_contiguous()):
            return f"bias: shape {tuple(bias.shape)}, allowed: {tuple(weight.shape[:1])}, contiguous"
        operands = {"rows": rows, "weight": weight} | ({} if bias is None else {"bias": bias})
        return next((problem for name, one in operands.items() if (problem := self._misplaced(name, one))), None)

    def _misplaced(self, name: str, operand: torch.Tensor) -> str | None:
        """Why an operand of the right shape does not lie as the kernel reads it, or None."""
        if operand.dtype != torch.bfloat16 or operand.device != self.device:
            return f"{name}: {operand.dtype} on {operand.device}, allowed: bfloat16 on {self.device}"
        if operand.dim() == 1:
            return None
        if operand.stride(1) != 1 or operand.stride(0) % _LANE_VALUES or operand.data_ptr() % _LANE_BYTES:
            return f"{name}: strides {operand.stride()}, allowed: a dense last dimension, rows at multiples of 16 bytes"
        return None


@functools.cache
def of_device(device: torch.device) -> FewRows:
    """The launches of a device; the library is built first if need be.

    Raises:
        LibraryUnavailableError: see `CudaSources.build`.
    """
    return FewRows(linear.load(), device)
