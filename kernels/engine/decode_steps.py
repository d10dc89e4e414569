# SPDX-License-Identifier: Apache-2.0
"""Decode steps of one metadata builder: workspaces for the batches to come, and a plan for each step, shared by all layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tokenspeed_plugin.kernels.mla.share import DecodeShare, rounded_query_tokens
from tokenspeed_plugin.kernels.registry import KernelSpec


@dataclass(frozen=True)
class DecodeStep:
    """What all layers of a step share.

    Attributes:
        decode: the kernel.
        plan: its plan, updated for this step.
        query_starts: [requests + 1] int32; None when every request has one token.
        persistent: whether the plan outlives the step, as a captured graph needs it.
    """

    decode: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    plan: Any
    query_starts: torch.Tensor | None
    persistent: bool

    def run(
        self, q_nope: torch.Tensor, q_rope: torch.Tensor, kv_cache: torch.Tensor, softmax_scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of one layer: [tokens, heads, 512] and the logarithm of the softmax's sum, [tokens, heads].

        Raises:
            RuntimeError: a graph is being captured with a plan that would be gone when it is replayed.
        """
        self._refuse_capture(kv_cache)
        return self.decode(q_nope, q_rope, kv_cache, self.plan, softmax_scale, query_starts=self.query_starts)

    def run_scaled(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        softmax_scale: float,
        query_scale: torch.Tensor,
        kv_scale: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same on e4m3 queries [tokens, heads, 576] and an e4m3 cache, each to be multiplied by its scale, one fp32 number."""
        self._refuse_capture(kv_cache)
        scales = (query_scale.reshape(1), kv_scale.reshape(1))
        return self.decode(q, kv_cache, self.plan, softmax_scale, *scales, query_starts=self.query_starts)

    def _refuse_capture(self, kv_cache: torch.Tensor) -> None:
        if not self.persistent and kv_cache.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("MLA decode is captured in a graph, but its metadata was not built for capture")


class DecodeSteps:
    """Plans the steps that a kernel takes.

    A step whose shape was captured once updates the plan that the graph reads; others get a plan of their own. Workspaces are
    shared by all layers, because the launches of a builder's layers follow each other.

    Args:
        spec: a kernel that serves engines.
        share: the batches that it takes.
        num_heads: query heads on this GPU.
        max_requests: requests of a batch, at most, padding included.
        page_tokens: tokens of a kernel page.
        device: where the engine runs.
    """

    def __init__(
        self,
        spec: KernelSpec,
        share: DecodeShare,
        num_heads: int,
        max_requests: int,
        page_tokens: int,
        device: torch.device,
    ) -> None:
        self.spec, self.share = spec, share
        self._decode = spec.load()
        self._num_heads, self._max_requests = num_heads, max_requests
        self._page_tokens, self._device = page_tokens, device
        self._workspaces: dict[int, Any] = {}
        self._captured: dict[tuple[int, int], Any] = {}

    def reserve(self, query_tokens: int) -> None:
        """Allocate the workspace for batches of that many query tokens now, while the engine measures its memory."""
        rounded = rounded_query_tokens(query_tokens)
        if rounded is not None and self.share.takes(query_tokens, 1):
            self._workspace(rounded)

    def step(
        self,
        query_tokens: int,
        num_tokens: int,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        query_starts: torch.Tensor,
        *,
        for_capture: bool,
    ) -> DecodeStep | None:
        """Plan a step; None leaves it to the host's backend.

        What is taken depends on the numbers of tokens and requests alone, so that a replayed graph finds the plan it was
        captured with.

        Args:
            query_tokens: tokens of the longest request, at least 1.
            num_tokens: tokens of the batch, padding included.
            seq_lens: [requests] int32 on the device, this step's tokens included; 0 pads.
            block_table: [requests, pages] int32.
            query_starts: [requests + 1] int32.
            for_capture: a graph will be captured with this plan.
        """
        requests = seq_lens.shape[0]
        rounded = rounded_query_tokens(query_tokens)
        if rounded is None or requests > self._max_requests or not self.share.takes(query_tokens, requests):
            return None
        plan = self._captured.get((rounded, requests))
        if plan is None:
            plan = self.spec.plan(self._workspace(rounded), requests)
            if for_capture:
                self._captured[rounded, requests] = plan
        plan.update(seq_lens, block_table, self._page_tokens)
        single = query_tokens == 1 and num_tokens == requests
        persistent = (rounded, requests) in self._captured
        return DecodeStep(self._decode, plan, None if single else query_starts, persistent)

    def _workspace(self, query_tokens: int) -> Any:
        found = self._workspaces.get(query_tokens)
        if found is None:
            found = self.spec.workspace(self._num_heads, query_tokens, self._max_requests, self._device)
            self._workspaces[query_tokens] = found
        return found
