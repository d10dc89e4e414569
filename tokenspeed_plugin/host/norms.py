# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's norm layers another kernel can compute, and with which numbers."""

import os
from typing import Any

from tokenspeed_plugin.host.model_names import GemmaRMSNorm, RMSNorm


def rms_norm_numbers(layer: Any) -> tuple[Any, float, float] | None:
    """Weight, epsilon and what is added to the weight; None when the layer is no plain RMS norm over whole rows."""
    if type(layer) is GemmaRMSNorm:
        return layer.weight.data, layer.variance_epsilon, 1.0
    if type(layer) is not RMSNorm or layer.variance_size_override is not None:
        return None
    return layer.weight.data if layer.has_weight else None, layer.variance_epsilon, 0.0


def batch_invariant() -> bool:
    """Whether vLLM was asked for kernels whose results do not depend on the batch."""
    return os.environ.get("VLLM_BATCH_INVARIANT", "0") not in {"", "0"}
