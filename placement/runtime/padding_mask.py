# SPDX-License-Identifier: Apache-2.0
"""The mask of padding rows in steps whose tokens a plan pads further than vLLM does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tokenspeed_plugin.host.model_names import get_forward_context, is_forward_context_available

if TYPE_CHECKING:
    from torch import device


class PaddingMask:
    """Lengthens the mask of vLLM's forward context to the rows that MoE routers see.

    vLLM's routers take the mask from the context and stop at one that has fewer rows than their input. The longer mask lies in
    one buffer for all steps: pieces of a CUDA graph read it where it was when they were captured.
    """

    def __init__(self, most_tokens: int, device: device) -> None:
        """Room for steps of up to ``most_tokens``, padding included."""
        self._rows = torch.ones(most_tokens, dtype=torch.bool, device=device)

    def cover(self, num_tokens: int, padded_tokens: int) -> None:
        """Before a forward pass over ``num_tokens`` rows that are padded to ``padded_tokens``."""
        if padded_tokens == num_tokens or not is_forward_context_available():
            return
        context = get_forward_context()
        if context.is_padding is None:
            return
        mask = self._rows[:padded_tokens]
        mask[:num_tokens].copy_(context.is_padding[:num_tokens])
        mask[num_tokens:].fill_(True)
        context.is_padding = mask
