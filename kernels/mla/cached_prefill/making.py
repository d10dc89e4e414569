# SPDX-License-Identifier: Apache-2.0
"""How keys and values of a group of requests are made of latents: what every way offers, and the one by gather and products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from tokenspeed_plugin.kernels.mla.cached_prefill.groups import NOPE_DIMS, Group
from tokenspeed_plugin.kernels.mla.geometry import LATENT_DIMS

UNFOLD_TOKENS = 16384
"""Tokens, about, that are unfolded by one product: their latents stay in the L2 cache while all heads read them."""


class Making(Protocol):
    """Makes keys and values of some heads, for all KV tokens of one group of requests."""

    def __call__(
        self,
        kv_cache: torch.Tensor,
        weights: torch.Tensor,
        latents: torch.Tensor,
        unfolded: torch.Tensor,
        first: bool,
    ) -> None:
        """Write keys and values, and with the first heads the rope part of all tokens: others find it in its place.

        Args:
            kv_cache: [pages, page_tokens, 576] bf16.
            weights: [heads, 256, 512] bf16 of these heads, contiguous.
            latents: [tokens, 512] bf16, room that keeps its contents from the first heads to the last ones.
            unfolded: [2 x heads, tokens, 192] bf16: keys of a head, then its values, whose last 64 dims nobody reads.
            first: these are the first heads.
        """


PlanMaking = Callable[[Group, torch.Tensor, torch.Tensor, int], Making]
"""Called once per step and group: with the group, its rows of the block table, its kv_starts on the device, tokens of a page."""


@dataclass(frozen=True)
class GatherAndProducts:
    """Gathers latents, then multiplies them with the weights of all heads.

    Attributes:
        slots: [tokens] int64, the cache slot of every KV token.
    """

    slots: torch.Tensor

    def __call__(
        self,
        kv_cache: torch.Tensor,
        weights: torch.Tensor,
        latents: torch.Tensor,
        unfolded: torch.Tensor,
        first: bool,
    ) -> None:
        """See `Making`."""
        if first:
            _gather(kv_cache, self.slots, latents, unfolded[::2].transpose(0, 1))
        halves = weights.view(-1, NOPE_DIMS, LATENT_DIMS).transpose(1, 2)
        tokens = latents.shape[0]
        share = -(-tokens // max(1, round(tokens / UNFOLD_TOKENS)))
        for start in range(0, tokens, share):
            block = latents[start : start + share].expand(halves.shape[0], -1, -1)
            torch.bmm(block, halves, out=unfolded[:, start : start + share, :NOPE_DIMS])


def gather_and_products(
    group: Group, block_table: torch.Tensor, kv_starts: torch.Tensor, page_tokens: int
) -> GatherAndProducts:
    """Find the slots of a group's tokens: one kernel."""
    from tokenspeed_plugin.kernels.mla.cached_prefill import packing

    find = packing.token_slots if block_table.is_cuda else packing.token_slots_torch
    return GatherAndProducts(find(block_table, kv_starts, group.num_kv_tokens, group.longest_kv, page_tokens))


def _gather(kv_cache: torch.Tensor, slots: torch.Tensor, latents: torch.Tensor, keys: torch.Tensor) -> None:
    from tokenspeed_plugin.kernels.mla.cached_prefill import packing

    (packing.gather if kv_cache.is_cuda else packing.gather_torch)(kv_cache, slots, latents, keys)
