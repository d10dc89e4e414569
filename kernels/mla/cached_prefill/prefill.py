# SPDX-License-Identifier: Apache-2.0
"""MLA prefill on a cached prefix: make keys and values of some heads from latents, one causal attention call, next heads.

The new tokens' latents lie in the cache already, so prefix and new tokens are one sequence for the attention, which aligns its
mask to the end of it: no partial results, no merge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tokenspeed_plugin.kernels.mla.cached_prefill.groups import (
    KEY_DIMS,
    NOPE_DIMS,
    TOKEN_BYTES,
    VALUE_DIMS,
    Group,
    group_requests,
)
from tokenspeed_plugin.kernels.mla.cached_prefill.making import Making, PlanMaking, gather_and_products
from tokenspeed_plugin.kernels.mla.geometry import HEAD_DIMS, LATENT_DIMS
from tokenspeed_plugin.kernels.mla.operands import require


class Attend(Protocol):
    """Causal attention of ragged requests, the mask aligned to the last query token of each and its last key.

    q [query tokens, heads, 192], k [KV tokens, heads, 192], v [KV tokens, heads, 128] and out [query tokens, heads, 128] have
    any strides but a dense last dimension; starts are [requests + 1] int32, `longest_query` and `longest_kv` bound the lengths.
    """

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        query_starts: torch.Tensor,
        kv_starts: torch.Tensor,
        longest_query: int,
        longest_kv: int,
        softmax_scale: float,
        out: torch.Tensor,
    ) -> None:
        """Write the attention's result to `out`."""


@dataclass(frozen=True)
class PlannedGroup:
    """A group of requests on the device: where its rows start, and what makes its keys and values."""

    group: Group
    query_rows: slice
    query_starts: torch.Tensor
    kv_starts: torch.Tensor
    make: Making


@dataclass(frozen=True)
class CachedPrefillPlan:
    """What all layers of a step share."""

    groups: tuple[PlannedGroup, ...]
    num_rows: int
    num_heads: int


def plan_cached_prefill(
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    block_table: torch.Tensor,
    page_tokens: int,
    num_heads: int,
    workspace_bytes: int,
    plan_making: PlanMaking = gather_and_products,
) -> CachedPrefillPlan:
    """Plan a batch, once per step: for each group a small copy to the device, and another one or a kernel.

    Args:
        query_lens: new tokens of each request, on the CPU; a request without any is passed over.
        kv_lens: KV tokens of each request, new ones included, on the CPU.
        block_table: [requests, pages per request] int32 on the device; entries past a request's last page are never read.
        page_tokens: tokens of a page.
        num_heads: query heads on this GPU.
        workspace_bytes: what keys, values and gathered latents may take at once.
        plan_making: the way in which keys and values are made.

    Raises:
        WorkspaceTooSmallError: one request alone does not fit.
        ValueError: a request has fewer KV tokens than new ones.
    """
    planned = []
    first_row = 0
    for group in group_requests(query_lens, kv_lens, num_heads, workspace_bytes):
        first_row = sum(query_lens[: group.requests.start])
        both = torch.tensor([*group.query_starts, *group.kv_starts], dtype=torch.int32)
        if block_table.is_cuda:
            both = both.pin_memory().to(block_table.device, non_blocking=True)
        query_starts, kv_starts = both.split(len(group.query_starts))
        make = plan_making(group, block_table[group.requests], kv_starts, page_tokens)
        rows = slice(first_row, first_row + group.query_starts[-1])
        planned.append(PlannedGroup(group, rows, query_starts, kv_starts, make))
    return CachedPrefillPlan(tuple(planned), sum(query_lens), num_heads)


def mla_cached_prefill(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    plan: CachedPrefillPlan,
    softmax_scale: float,
    workspace: torch.Tensor,
    attend: Attend,
    out: torch.Tensor,
) -> None:
    """Attention of one layer; see `mla_cached_prefill_reference`.

    Args:
        q: [tokens, heads, 192] bf16, 128 dims without rope then 64 with it.
        kv_cache: [pages, page_tokens, 576] bf16; holds the new tokens, too. Slots that no request owns are never read.
        weights: [heads, 256, 512] bf16, dense: of each head 128 rows for keys, then 128 for values.
        plan: of this step.
        softmax_scale: factor of the scores.
        workspace: bytes (uint8), as many as the plan was made for; overwritten.
        attend: the attention that keys and values are made for.
        out: [tokens, heads, 128] bf16, dense in the last dimension; overwritten.

    Raises:
        ValueError: an operand has another shape, type or device.
    """
    heads = plan.num_heads
    require(q, "q", (plan.num_rows, heads, KEY_DIMS), torch.bfloat16, kv_cache.device)
    require(out, "out", (plan.num_rows, heads, VALUE_DIMS), torch.bfloat16, kv_cache.device)
    require(weights, "weights", (heads, NOPE_DIMS + VALUE_DIMS, LATENT_DIMS), torch.bfloat16, kv_cache.device)
    require(kv_cache, "kv_cache", (*kv_cache.shape[:2], HEAD_DIMS), torch.bfloat16, kv_cache.device)
    for planned in plan.groups:
        group, rows = planned.group, planned.query_rows
        latents, unfolded = _carve(workspace, group)
        for first in range(0, heads, group.heads):
            count = min(group.heads, heads - first)
            some = weights[first : first + count]
            planned.make(kv_cache, some, latents, unfolded[: 2 * count], first == 0)
            keys, values = unfolded[: 2 * count : 2], unfolded[1 : 2 * count : 2, :, :VALUE_DIMS]
            attend(
                q[rows, first : first + count],
                keys.transpose(0, 1),
                values.transpose(0, 1),
                planned.query_starts,
                planned.kv_starts,
                group.longest_query,
                group.longest_kv,
                softmax_scale,
                out[rows, first : first + count],
            )


def _carve(workspace: torch.Tensor, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents [tokens, 512], and [2 x heads, tokens, 192]: keys of a head, then its values in the same pitch."""
    if workspace.numel() < group.bytes():
        raise ValueError(f"workspace: {workspace.numel()} bytes, allowed: at least {group.bytes()}")
    tokens = group.num_kv_tokens
    latents = workspace[: tokens * 2 * LATENT_DIMS].view(torch.bfloat16).view(tokens, LATENT_DIMS)
    rest = workspace[tokens * TOKEN_BYTES : group.bytes()].view(torch.bfloat16)
    return latents, rest.view(2 * group.heads, tokens, KEY_DIMS)
