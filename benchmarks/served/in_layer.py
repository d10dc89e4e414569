# SPDX-License-Identifier: Apache-2.0
"""MLA decode among the kernels of a layer: what it costs there.

In `benchmarks.mla` a kernel follows itself, so its instructions and its plan are still in the caches. In a layer it follows the
product that takes queries into the latent space, the product that takes outputs back follows it, and then come kernels of
other kinds that read more weights than the L2 holds. All of them are timed without it, too, and what it adds is reported.

Each is also timed right behind a call of itself on a single page, which is then among the neighbours: what it adds less there, it
takes in a layer to fetch its instructions, its plan and what else other kernels have driven out of the caches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch

from benchmarks.latent.peers import FlashAttention3
from benchmarks.latent.timing import Inputs
from tokenspeed_plugin.kernels.graph_timing import time_us
from tokenspeed_plugin.kernels.mla.geometry import LATENT_DIMS
from tokenspeed_plugin.kernels.mla.sm90.decode import MlaDecodePlan, MlaWorkspace, mla_decode

HEAD_DIMS, VALUE_DIMS, HIDDEN, EXPERTS, CHOSEN = 128, 128, 2048, 64, 6
WEIGHTS_BYTES = 256 << 20
"""Read by the rest of the layer."""
SERVED_PAGE_TOKENS, SERVED_SPLITS = 16, 32
"""What vLLM runs FlashAttention 3 with in a CUDA graph unless told otherwise."""
LAUNCHES = (
    ("ours", True, True),
    ("ours, blocks not together", False, True),
    ("ours, after the previous kernel", True, False),
    ("ours, neither", False, False),
)
"""Name, whether all blocks start together, whether they may start before the previous kernel has ended."""
_BEHIND = "behind a call on one page"


class Neighbours:
    """The two products of a layer's decode, on queries of their own, and a few other kernels in place of the rest of the layer."""

    def __init__(self, inputs: Inputs, weights_bytes: int) -> None:
        tokens, heads = inputs.q.shape[:2]

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, dtype=torch.bfloat16, device=inputs.q.device) / shape[-1]

        self.q = random(heads, tokens, HEAD_DIMS)
        self.into_latents, self.out_of_latents = (
            random(heads, HEAD_DIMS, LATENT_DIMS),
            random(heads, LATENT_DIMS, VALUE_DIMS),
        )
        self.latents, self.out = random(tokens, heads, LATENT_DIMS), random(heads, tokens, VALUE_DIMS)
        self.projection, self.router = random(heads * VALUE_DIMS, HIDDEN), random(HIDDEN, EXPERTS)
        self.weights = random(weights_bytes // 2)

    def added_us(
        self, attention: Callable[[int], torch.Tensor], before: Callable[[int], torch.Tensor] | None = None
    ) -> float:
        """Microseconds that a layer takes longer with `attention` between its products, behind `before` if that is given."""

        def layer(call: int, between: Callable[[int], torch.Tensor]) -> None:
            torch.bmm(self.q, self.into_latents, out=self.latents.transpose(0, 1))
            if before is not None:
                before(call)
            torch.bmm(between(call).transpose(0, 1), self.out_of_latents, out=self.out)
            self._rest()

        with_attention = time_us(lambda call: layer(call, attention))
        return with_attention - time_us(lambda call: layer(call, lambda _: self.latents))

    def _rest(self) -> None:
        hidden = self.out.transpose(0, 1).flatten(1) @ self.projection
        hidden = torch.nn.functional.rms_norm(hidden, (HIDDEN,))
        torch.topk((hidden @ self.router).softmax(-1), CHOSEN)
        self.weights.sum()


def in_order(inputs: Inputs) -> Inputs:
    """The same with the pages of a request one behind the other, as in an engine that has just started."""
    inputs.block_tables = [table.flatten().sort().values.view_as(table) for table in inputs.block_tables]
    return inputs


def of_one_page(inputs: Inputs) -> Inputs:
    """The same, but that all requests end with their first page."""
    short = copy.copy(inputs)
    short.seq_lens = torch.full_like(inputs.seq_lens, inputs.page_tokens)
    return short


def in_layer_us(inputs: Inputs, served: Inputs, flash_attention: FlashAttention3) -> dict[str, float]:
    """What each adds to a layer: ours in its ways to launch, and FlashAttention 3 as vLLM serves with it.

    Args:
        inputs: in pages of 64 tokens.
        served: the same cell in pages of `SERVED_PAGE_TOKENS`.
        flash_attention: vLLM's.
    """
    neighbours = Neighbours(inputs, WEIGHTS_BYTES)
    found = {}
    for name, cooperative, dependent in LAUNCHES:
        found[name] = neighbours.added_us(_ours(inputs, neighbours.latents, cooperative, dependent))
    short, launch = (_ours(pages, neighbours.latents) for pages in (of_one_page(inputs), inputs))
    found[f"ours, {_BEHIND}"] = neighbours.added_us(launch, short)
    for pages in (served, inputs):
        name = f"FlashAttention 3, pages of {pages.page_tokens}"
        flash, first = (_flash(cells, flash_attention) for cells in (pages, of_one_page(pages)))
        found[name] = neighbours.added_us(flash)
        found[f"{name}, {_BEHIND}"] = neighbours.added_us(flash, first)
    return found


def _flash(inputs: Inputs, flash_attention: FlashAttention3) -> Callable[[int], torch.Tensor]:
    launch = flash_attention.prepared(inputs, SERVED_SPLITS)
    return lambda call: launch(inputs.part(call))


def _ours(
    inputs: Inputs, q_nope: torch.Tensor, cooperative: bool = True, dependent: bool = True
) -> Callable[[int], torch.Tensor]:
    cell = inputs.cell
    workspace = MlaWorkspace(cell.heads, cell.query_tokens, cell.requests, inputs.q.device, cooperative=cooperative)
    plans = [MlaDecodePlan(workspace, cell.requests) for _ in inputs.block_tables]
    for plan, table in zip(plans, inputs.block_tables, strict=True):
        plan.update(inputs.seq_lens, table, inputs.page_tokens)
    q_rope = inputs.q[..., LATENT_DIMS:]

    def launch(call: int) -> torch.Tensor:
        plan = plans[inputs.part(call)]
        return mla_decode(q_nope, q_rope, inputs.kv_cache, plan, inputs.scale, dependent_launch=dependent)[0]

    return launch
