# SPDX-License-Identifier: Apache-2.0
"""MLA decode on Hopper: bf16, paged latent cache, split plan on the device, safe to capture in a CUDA graph."""

from __future__ import annotations

import torch

from ..geometry import HEAD_DIMS, LATENT_DIMS, ROPE_DIMS, RowTiles, plan_words
from .abi import COOPERATIVE_LAUNCH, DecodeParams
from .library import load


class MlaDecodePlan:
    """Persistent buffers of one (heads, query tokens) shape; `update` fills them once per step, all layers read them.

    Args:
        num_requests: requests of the batch, padding included.
        num_heads: query heads on this GPU.
        max_query_tokens: query tokens of a request, at most (drafts count).
        device: the CUDA device.
    """

    def __init__(self, num_requests: int, num_heads: int, max_query_tokens: int, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.num_requests, self.num_heads, self.max_query_tokens = num_requests, num_heads, max_query_tokens
        self.tiles = RowTiles.fold(num_heads, max_query_tokens)
        self.groups = self.tiles.groups(torch.cuda.get_device_properties(self.device).multi_processor_count)
        partial_rows = 2 * self.groups * self.tiles.row_tiles * self.tiles.rows
        self.words = torch.zeros(plan_words(self.groups, num_requests), dtype=torch.int32, device=self.device)
        self.partial_out = torch.empty(partial_rows * LATENT_DIMS, dtype=torch.float32, device=self.device)
        self.partial_lse = torch.empty(partial_rows, dtype=torch.float32, device=self.device)
        self.counters = torch.zeros(2 * num_requests * self.tiles.row_tiles, dtype=torch.int32, device=self.device)
        self.seq_lens: torch.Tensor | None = None

    def update(self, seq_lens: torch.Tensor) -> None:
        """Plans the splits for `seq_lens`, [requests] int32 on the device, this step's tokens included; 0 pads."""
        _require(seq_lens, "seq_lens", (self.num_requests,), torch.int32, self.device)
        stream = torch.cuda.current_stream(self.device).cuda_stream
        load().plan(seq_lens.data_ptr(), self.words.data_ptr(), self.num_requests, self.groups, stream)
        self.seq_lens = seq_lens


def mla_decode(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    plan: MlaDecodePlan,
    softmax_scale: float,
    *,
    query_starts: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    launch_flags: int = COOPERATIVE_LAUNCH,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of each request's last query tokens over its cached latents.

    Args:
        q_nope: [tokens, heads, 512] bf16, already multiplied into the latent space; any token and head strides.
        q_rope: [tokens, heads, 64] bf16.
        kv_cache: [pages, page_tokens, 576] bf16, 512 latent then 64 rope dims; page_tokens a power of two.
        block_table: [requests, pages per request] int32. Entries past a request's last page are never read.
        plan: updated with this step's `seq_lens`.
        softmax_scale: factor of the scores.
        query_starts: [requests + 1] int32; None: every request has `plan.max_query_tokens` tokens.
        out: [tokens, heads, 512] bf16 to write to.
        lse: [tokens, heads] fp32 to write to.
        launch_flags: see `abi.py`.

    Returns:
        out and lse (natural logarithm). Rows that may read no KV are zero with lse -inf, and so are rows past the last
        request.

    Raises:
        ValueError: a shape, type or layout is not what the kernel takes; nothing was launched.
    """
    tokens = q_nope.shape[0]
    device = plan.device
    _require(q_nope, "q_nope", (tokens, plan.num_heads, LATENT_DIMS), torch.bfloat16, device)
    _require(q_rope, "q_rope", (tokens, plan.num_heads, ROPE_DIMS), torch.bfloat16, device)
    _require_cache(kv_cache, device)
    _require(block_table, "block_table", (plan.num_requests, block_table.shape[1]), torch.int32, device)
    if plan.seq_lens is None:
        raise ValueError("plan: update(seq_lens) has not been called")
    if query_starts is None:
        if tokens < plan.num_requests * plan.max_query_tokens:
            raise ValueError(f"q_nope has {tokens} tokens, {plan.num_requests} x {plan.max_query_tokens} are planned")
    else:
        _require(query_starts, "query_starts", (plan.num_requests + 1,), torch.int32, device)
    if out is None:
        out = torch.empty(tokens, plan.num_heads, LATENT_DIMS, dtype=torch.bfloat16, device=device)
    if lse is None:
        lse = torch.empty(tokens, plan.num_heads, dtype=torch.float32, device=device)
    _require(out, "out", tuple(q_nope.shape), torch.bfloat16, device)
    _require(lse, "lse", (tokens, plan.num_heads), torch.float32, device)
    if not lse.is_contiguous():
        raise ValueError(f"lse: strides {lse.stride()}, allowed: contiguous")
    tiles = plan.tiles
    params = DecodeParams(
        q_nope=q_nope.data_ptr(),
        q_rope=q_rope.data_ptr(),
        kv_cache=kv_cache.data_ptr(),
        out=out.data_ptr(),
        lse=lse.data_ptr(),
        block_table=block_table.data_ptr(),
        seq_lens=plan.seq_lens.data_ptr(),
        query_starts=None if query_starts is None else query_starts.data_ptr(),
        plan=plan.words.data_ptr(),
        partial_out=plan.partial_out.data_ptr(),
        partial_lse=plan.partial_lse.data_ptr(),
        counters=plan.counters.data_ptr(),
        q_nope_token_stride=q_nope.stride(0),
        q_nope_head_stride=q_nope.stride(1),
        q_rope_token_stride=q_rope.stride(0),
        q_rope_head_stride=q_rope.stride(1),
        kv_page_stride=kv_cache.stride(0),
        kv_token_stride=kv_cache.stride(1),
        out_token_stride=out.stride(0),
        out_head_stride=out.stride(1),
        block_table_stride=block_table.stride(0),
        num_requests=plan.num_requests,
        num_tokens=tokens,
        num_heads=plan.num_heads,
        max_query_tokens=plan.max_query_tokens,
        num_pages=kv_cache.shape[0],
        page_shift=kv_cache.shape[1].bit_length() - 1,
        rows=tiles.rows,
        tile_heads=tiles.heads,
        tile_query_tokens=tiles.query_tokens,
        head_tiles=tiles.head_tiles,
        token_tiles=tiles.token_tiles,
        groups=plan.groups,
        launch_flags=launch_flags,
        softmax_scale=softmax_scale,
    )
    load().decode(params, torch.cuda.current_stream(device).cuda_stream)
    return out, lse


def _require(
    tensor: torch.Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: shape {tuple(tensor.shape)}, allowed: {shape}")
    if tensor.dtype != dtype:
        raise ValueError(f"{name}: dtype {tensor.dtype}, allowed: {dtype}")
    if tensor.device.type != device.type:
        raise ValueError(f"{name}: on {tensor.device}, allowed: {device}")
    if tensor.stride(-1) != 1:
        raise ValueError(f"{name}: last dimension has stride {tensor.stride(-1)}, allowed: 1")


def _require_cache(kv_cache: torch.Tensor, device: torch.device) -> None:
    if kv_cache.dim() != 3:
        raise ValueError(f"kv_cache: {kv_cache.dim()} dimensions, allowed: 3 (pages, page_tokens, {HEAD_DIMS})")
    page_tokens = kv_cache.shape[1]
    _require(kv_cache, "kv_cache", (kv_cache.shape[0], page_tokens, HEAD_DIMS), torch.bfloat16, device)
    if page_tokens & (page_tokens - 1):
        raise ValueError(f"kv_cache: page size {page_tokens}, allowed: a power of two")
    if kv_cache.data_ptr() % 16 or kv_cache.stride(0) % 8 or kv_cache.stride(1) % 8:
        raise ValueError("kv_cache: its address and strides must be multiples of 16 bytes")
