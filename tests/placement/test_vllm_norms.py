# SPDX-License-Identifier: Apache-2.0
"""vLLM's norm layers against the numbers that our kernel gets of them, in 16 bits and in 32."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

from tokenspeed_plugin.kernels.comm.reference import add_norm_reference
from tokenspeed_plugin.placement.runtime.vllm_modules import Norm

HIDDEN = 64


def layer(kind: type[nn.Module], dtype: torch.dtype, **arguments: object) -> nn.Module:
    with set_current_vllm_config(VllmConfig()):
        made = kind(HIDDEN, eps=1e-5, **arguments).to(dtype)
    if isinstance(made.weight, nn.Parameter):
        made.weight.data.copy_(torch.randn(HIDDEN))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kind", "arguments"), [(RMSNorm, {}), (RMSNorm, {"has_weight": False}), (GemmaRMSNorm, {})])
def test_the_kernel_computes_what_the_layer_computes(
    kind: type[nn.Module], arguments: dict[str, object], dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    own = layer(kind, dtype, **arguments)
    numbers = Norm(own).rms_norm()
    assert numbers is not None
    values, residual = torch.randn(5, HIDDEN).to(dtype), torch.randn(5, HIDDEN).to(dtype)
    for branch in (None, residual):
        expected = own.forward_native(values.clone(), None if branch is None else branch.clone())
        normed, total = add_norm_reference(values, branch, *numbers[:3])
        # The layer rounds once more before it multiplies by a 16-bit weight; inductor leaves that out, and so do we.
        torch.testing.assert_close(
            normed, expected if branch is None else expected[0], rtol=4 * torch.finfo(dtype).eps, atol=1e-6
        )
        assert branch is None or torch.equal(total, expected[1])


def test_other_norms_are_left_to_vllm() -> None:
    assert Norm(layer(RMSNorm, torch.float32, var_hidden_size=32)).rms_norm() is None
    assert Norm(nn.Identity()).rms_norm() is None
