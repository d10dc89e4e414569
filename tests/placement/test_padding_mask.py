# SPDX-License-Identifier: Apache-2.0
"""Steps that a plan pads: vLLM's MoE routers stop at a mask with fewer rows than their input."""

from __future__ import annotations

import torch
from vllm.forward_context import ForwardContext, get_forward_context, override_forward_context

from tokenspeed_plugin.placement.runtime.padding_mask import PaddingMask

MOST_TOKENS = 8


def context(mask: torch.Tensor | None) -> ForwardContext:
    return ForwardContext(no_compile_layers={}, attn_metadata={}, slot_mapping={}, is_padding=mask)


def mask_after(steps: list[tuple[torch.Tensor | None, int]]) -> torch.Tensor | None:
    """What routers see in the last of ``steps``, each vLLM's mask and the rows of the padded step."""
    mask = PaddingMask(MOST_TOKENS, torch.device("cpu"))
    seen: torch.Tensor | None = None
    for own, padded in steps:
        with override_forward_context(context(own)):
            mask.cover(padded - 1 if own is None else len(own), padded)
            seen = get_forward_context().is_padding
    return seen


def test_rows_that_a_plan_adds_are_padding_and_vllms_own_rows_stay_as_they_are() -> None:
    seen = mask_after([(torch.tensor([False, False, True]), 4)])
    assert seen is not None
    assert seen.tolist() == [False, False, True, True]


def test_real_rows_of_a_longer_step_before_do_not_stay_in_the_mask() -> None:
    steps: list[tuple[torch.Tensor | None, int]] = [(torch.zeros(7, dtype=torch.bool), 8), (torch.tensor([False]), 2)]
    seen = mask_after(steps)
    assert seen is not None
    assert seen.tolist() == [False, True]


def test_all_steps_share_one_buffer_because_captured_graphs_keep_its_address() -> None:
    mask = PaddingMask(MOST_TOKENS, torch.device("cpu"))
    places = set()
    for num_tokens in (3, 5, 1):
        with override_forward_context(context(torch.zeros(num_tokens, dtype=torch.bool))):
            mask.cover(num_tokens, num_tokens + 1)
            seen = get_forward_context().is_padding
            assert seen is not None
            places.add(seen.data_ptr())
    assert len(places) == 1


def test_a_step_that_needs_no_padding_keeps_vllms_mask_itself() -> None:
    own = torch.tensor([False, True])
    assert mask_after([(own, 2)]) is own


def test_without_a_mask_or_without_a_context_nothing_happens() -> None:
    assert mask_after([(None, 4)]) is None
    PaddingMask(MOST_TOKENS, torch.device("cpu")).cover(3, 4)
