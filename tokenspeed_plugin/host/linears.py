# SPDX-License-Identifier: Apache-2.0
"""vLLM's row-parallel layers, left open: they hand on what they read, and whoever reads that takes the product."""

from typing import Any

from tokenspeed_plugin.host.model_names import RowParallelLinear, UnquantizedLinearMethod


class OpenRowLinear(RowParallelLinear):
    """A layer of this class has vLLM's weights, and loads them as vLLM does."""

    def forward(self, input_: Any) -> Any:
        """The input in place of the output."""
        return (input_, None) if self.return_bias else input_


def open_row_linear(layer: Any) -> bool:
    """Leave ``layer`` open if its product is a plain one of 16 or 32 bits and it has a part of the rows; whether it is open now."""
    if type(layer) is not RowParallelLinear or type(layer.quant_method) is not UnquantizedLinearMethod:
        return False
    if layer.tp_size == 1 or not layer.input_is_parallel or layer.skip_bias_add:
        return False
    layer.__class__ = OpenRowLinear
    # On CPUs vLLM otherwise packs the weight for its own kernel and drops it.
    layer._cpu_skip_gemm_dispatch = True
    return True


def row_linear_numbers(layer: OpenRowLinear) -> tuple[Any, Any]:
    """Weight ``[out, in]`` and the bias that this rank adds."""
    bias = None if layer.tp_rank > 0 or layer.bias is None else layer.bias.data
    return layer.weight.data, bias
