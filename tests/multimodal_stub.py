# SPDX-License-Identifier: Apache-2.0
"""Makes a scheduler believe that the stub model takes multimodal input."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

from vllm.config import ModelConfig

_BUDGET_PLACES = ("vllm.v1.core.sched.scheduler", "tokenspeed_plugin.scheduler_fsm.encoder_inputs")


@contextlib.contextmanager
def taking(step_embeds: int, cache_embeds: int) -> Iterator[None]:
    """While a scheduler is built: multimodal input with this encoder budget of a step and this encoder cache; 0 is a text model."""
    if not cache_embeds:
        yield
        return
    budget = SimpleNamespace(
        encoder_compute_budget=step_embeds, encoder_cache_size=cache_embeds, mm_max_toks_per_item={}
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(ModelConfig, "supports_multimodal_inputs", new=True))
        for place in _BUDGET_PLACES:
            stack.enter_context(mock.patch(f"{place}.MultiModalBudget", return_value=budget))
        yield
