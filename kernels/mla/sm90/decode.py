# SPDX-License-Identifier: Apache-2.0
"""MLA decode on Hopper: bf16, paged latent cache, split plan on the device, safe to capture in a CUDA graph."""

from __future__ import annotations

import torch

from tokenspeed_plugin.kernels.mla.geometry import (
    HEAD_DIMS,
    LATENT_DIMS,
    NARROW_ROWS,
    ROPE_DIMS,
    WIDE_ROWS,
    RowTiles,
    plan_words,
)
from tokenspeed_plugin.kernels.mla.operands import require
from tokenspeed_plugin.kernels.mla.sm90.abi import COOPERATIVE_LAUNCH, DEPENDENT_LAUNCH, DecodeParams, PlanParams
from tokenspeed_plugin.kernels.mla.sm90.library import load


class MlaWorkspace:
    """Partial outputs of split requests. Launches that may overlap in time must not share one.

    Args:
        num_heads: query heads on this GPU.
        max_query_tokens: query tokens of a request, at most (drafts count).
        max_requests: requests of a batch, at most, padding included.
        device: the CUDA device.
        compiled: row tiles to choose from, see `RowTiles.fold`.
        cooperative: start the blocks of a launch together. Without it other kernels that run meanwhile must come to their end
            without this one: blocks wait for each other, and some may start late.
    """

    def __init__(
        self,
        num_heads: int,
        max_query_tokens: int,
        max_requests: int,
        device: torch.device | str,
        compiled: tuple[int, ...] = (NARROW_ROWS, WIDE_ROWS),
        cooperative: bool = True,
    ) -> None:
        self.device, self.cooperative = torch.device(device), cooperative
        self.num_heads, self.max_query_tokens, self.max_requests = num_heads, max_query_tokens, max_requests
        self.tiles = RowTiles.fold(num_heads, max_query_tokens, compiled)
        self.groups = self.tiles.groups(torch.cuda.get_device_properties(self.device).multi_processor_count)
        rows = 2 * self.groups * self.tiles.row_tiles * self.tiles.rows
        self.partial_out = torch.empty(rows * LATENT_DIMS, dtype=torch.bfloat16, device=self.device)
        self.partial_lse = torch.empty(rows, dtype=torch.float32, device=self.device)
        self.counters = torch.zeros(4 * max_requests * self.tiles.row_tiles, dtype=torch.int32, device=self.device)


class MlaDecodePlan:
    """The split plan of one step in persistent memory: `update` fills it once, all layers read it.

    Args:
        workspace: its shapes are the plan's.
        num_requests: requests of the batch, padding included; at most the workspace's.
    """

    def __init__(self, workspace: MlaWorkspace, num_requests: int) -> None:
        if not 0 < num_requests <= workspace.max_requests:
            raise ValueError(f"num_requests={num_requests}, allowed: 1 to {workspace.max_requests}")
        self.workspace, self.num_requests = workspace, num_requests
        words = plan_words(workspace.groups, num_requests)
        self.words = torch.zeros(words, dtype=torch.int32, device=workspace.device)
        self.step: tuple[torch.Tensor, torch.Tensor, int] | None = None

    def update(self, seq_lens: torch.Tensor, block_table: torch.Tensor, page_tokens: int) -> None:
        """Plans the splits of a step.

        Args:
            seq_lens: [requests] int32, this step's tokens included; 0 pads. Must keep its contents until the last layer.
            block_table: [requests, pages per request] int32, likewise. Entries past a request's last page are never read.
            page_tokens: tokens of a page, a power of two.
        """
        device = self.workspace.device
        require(seq_lens, "seq_lens", (self.num_requests,), torch.int32, device)
        require(block_table, "block_table", (self.num_requests, block_table.shape[1]), torch.int32, device)
        if page_tokens < 1 or page_tokens & (page_tokens - 1):
            raise ValueError(f"page_tokens={page_tokens}, allowed: a power of two")
        params = PlanParams(
            seq_lens=seq_lens.data_ptr(),
            block_table=block_table.data_ptr(),
            plan=self.words.data_ptr(),
            block_table_stride=block_table.stride(0),
            num_requests=self.num_requests,
            groups=self.workspace.groups,
            page_shift=page_tokens.bit_length() - 1,
        )
        load().plan(params, torch.cuda.current_stream(device).cuda_stream)
        self.step = (seq_lens, block_table, page_tokens)

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """What the last update was called with.

        Raises:
            ValueError: there was none.
        """
        if self.step is None:
            raise ValueError("plan: update() has not been called")
        return self.step


def mla_decode(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    plan: MlaDecodePlan,
    softmax_scale: float,
    *,
    query_starts: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    dependent_launch: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of each request's last query tokens over its cached latents.

    Args:
        q_nope: [tokens, heads, 512] bf16, already multiplied into the latent space; any token and head strides.
        q_rope: [tokens, heads, 64] bf16.
        kv_cache: [pages, page_tokens, 576] bf16, 512 latent then 64 rope dims.
        plan: updated for this step.
        softmax_scale: factor of the scores.
        query_starts: [requests + 1] int32; None: every request has `workspace.max_query_tokens` tokens.
        out: [tokens, heads, 512] bf16 to write to.
        lse: [tokens, heads] fp32 to write to.
        dependent_launch: start before the previous kernel has drained; the kernel waits for it by itself.

    Returns:
        out and lse (natural logarithm). Rows that may read no KV are zero with lse -inf, and so are rows past the last
        request.

    Raises:
        ValueError: a shape, type or layout is not what the kernel takes; nothing was launched.
    """
    _, _, page_tokens = plan.inputs()
    workspace, tokens = plan.workspace, q_nope.shape[0]
    heads, device = workspace.num_heads, workspace.device
    require(q_nope, "q_nope", (tokens, heads, LATENT_DIMS), torch.bfloat16, device)
    require(q_rope, "q_rope", (tokens, heads, ROPE_DIMS), torch.bfloat16, device)
    require_cache(kv_cache, page_tokens, device)
    out, lse = check_results(plan, q_nope, query_starts, out, lse)
    params = decode_params(plan, q_nope, kv_cache, out, lse, query_starts, softmax_scale, dependent_launch)
    params.q_rope = q_rope.data_ptr()
    params.q_rope_token_stride, params.q_rope_head_stride = q_rope.stride(0), q_rope.stride(1)
    load().decode(params, torch.cuda.current_stream(device).cuda_stream)
    return out, lse


def check_results(
    plan: MlaDecodePlan,
    q: torch.Tensor,
    query_starts: torch.Tensor | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`out` and `lse` for the tokens of `q`, made where they are not given.

    Raises:
        ValueError: they, the number of tokens or `query_starts` do not fit the plan.
    """
    workspace, (tokens, heads) = plan.workspace, q.shape[:2]
    if query_starts is None:
        if tokens < plan.num_requests * workspace.max_query_tokens:
            raise ValueError(f"q has {tokens} tokens, {plan.num_requests} x {workspace.max_query_tokens} are planned")
    else:
        require(query_starts, "query_starts", (plan.num_requests + 1,), torch.int32, q.device)
    if out is None:
        out = torch.empty(tokens, heads, LATENT_DIMS, dtype=torch.bfloat16, device=q.device)
    if lse is None:
        lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    require(out, "out", (tokens, heads, LATENT_DIMS), torch.bfloat16, q.device)
    require(lse, "lse", (tokens, heads), torch.float32, q.device)
    if not lse.is_contiguous():
        raise ValueError(f"lse: strides {lse.stride()}, allowed: contiguous")
    return out, lse


def decode_params(
    plan: MlaDecodePlan,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    query_starts: torch.Tensor | None,
    softmax_scale: float,
    dependent_launch: bool,
) -> DecodeParams:
    """What every element type's launch needs, from tensors that have been checked; `q` fills the fields of `q_nope`."""
    seq_lens, block_table, page_tokens = plan.inputs()
    workspace, tiles = plan.workspace, plan.workspace.tiles
    return DecodeParams(
        q_nope=q.data_ptr(),
        kv_cache=kv_cache.data_ptr(),
        out=out.data_ptr(),
        lse=lse.data_ptr(),
        block_table=block_table.data_ptr(),
        seq_lens=seq_lens.data_ptr(),
        query_starts=None if query_starts is None else query_starts.data_ptr(),
        plan=plan.words.data_ptr(),
        partial_out=workspace.partial_out.data_ptr(),
        partial_lse=workspace.partial_lse.data_ptr(),
        counters=workspace.counters.data_ptr(),
        q_nope_token_stride=q.stride(0),
        q_nope_head_stride=q.stride(1),
        kv_page_stride=kv_cache.stride(0),
        kv_token_stride=kv_cache.stride(1),
        out_token_stride=out.stride(0),
        out_head_stride=out.stride(1),
        block_table_stride=block_table.stride(0),
        num_requests=plan.num_requests,
        num_tokens=q.shape[0],
        num_heads=workspace.num_heads,
        max_query_tokens=workspace.max_query_tokens,
        num_pages=kv_cache.shape[0],
        page_shift=page_tokens.bit_length() - 1,
        rows=tiles.rows,
        tile_heads=tiles.heads,
        tile_query_tokens=tiles.query_tokens,
        head_tiles=tiles.head_tiles,
        token_tiles=tiles.token_tiles,
        groups=workspace.groups,
        launch_flags=_launch_flags(workspace, dependent_launch),
        softmax_scale=softmax_scale,
    )


def _launch_flags(workspace: MlaWorkspace, dependent_launch: bool) -> int:
    # Blocks wait for each other only where a request may be split, and then all of them are resident.
    cooperative = COOPERATIVE_LAUNCH if workspace.cooperative and workspace.groups > 1 else 0
    return cooperative | (DEPENDENT_LAUNCH if dependent_launch else 0)


def require_cache(
    kv_cache: torch.Tensor, page_tokens: int, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Raise ValueError unless the cache has the dtype, 576 dims per token, and what the copy engine can address."""
    if kv_cache.dim() != 3:
        raise ValueError(f"kv_cache: {kv_cache.dim()} dimensions, allowed: 3 (pages, {page_tokens}, {HEAD_DIMS})")
    require(kv_cache, "kv_cache", (kv_cache.shape[0], page_tokens, HEAD_DIMS), dtype, device)
    unit = 16 // dtype.itemsize
    if kv_cache.data_ptr() % 16 or kv_cache.stride(0) % unit or kv_cache.stride(1) % unit:
        raise ValueError("kv_cache: its address and strides must be multiples of 16 bytes")
