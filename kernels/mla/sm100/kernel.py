# SPDX-License-Identifier: Apache-2.0
"""MLA decode for Blackwell: one block per multiprocessor, its warps in roles.

  warps 0-3  softmax, rescaling and output (softmax.py, output.py)
  warp 4     KV boxes through the bulk tensor copy engine (loading.py)
  warp 5     query rows (loading.py)
  warp 6     tensor-core products; owns the tensor memory (products.py)

Grid: (groups, head tiles, token tiles), as on Hopper.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync

from tokenspeed_plugin.kernels.mla.geometry import HEAD_DIMS, LATENT_DIMS, ROPE_DIMS, plan_words
from tokenspeed_plugin.kernels.mla.sm100.block import (
    KV_WARP,
    PRODUCT_WARP,
    QUERY_WARP,
    SOFTMAX_THREADS,
    WARPS,
    Arguments,
    Block,
)
from tokenspeed_plugin.kernels.mla.sm100.loading import load_kv, load_queries
from tokenspeed_plugin.kernels.mla.sm100.operands import DecodeVariant
from tokenspeed_plugin.kernels.mla.sm100.products import run_products
from tokenspeed_plugin.kernels.mla.sm100.softmax import soften

ARRIVALS = {"query full": 32, "probabilities full": SOFTMAX_THREADS}
"""Threads that arrive on a barrier before it opens; one on all others."""


def tensor_of(pointer: Any, shape: Any, strides: Any) -> Any:
    """A tensor in device memory."""
    return cute.make_tensor(pointer, cute.make_layout(shape, stride=strides))


def vector_of(pointer: Any, size: Any) -> Any:
    """A dense vector in device memory."""
    return cute.make_tensor(pointer, cute.make_layout(size))


def aligned(stride: Any, units: int) -> Any:
    """A stride that the caller promises to be a multiple of `units` elements."""
    return cute.assume(stride, divby=units)


def aligned_all(strides: Any, units: int) -> tuple[Any, ...]:
    """Such strides."""
    return tuple(aligned(stride, units) for stride in strides)


class DecodeKernel:
    """The kernel of one variant.

    Args:
        variant: what to compile for; its layout is checked here, because the compiler checks neither shared nor tensor
            memory.
    """

    def __init__(self, variant: DecodeVariant) -> None:
        variant.layout.checked()
        self.variant = variant

    @cute.jit
    def __call__(
        self,
        q_nope: cute.Pointer,
        q_rope: cute.Pointer,
        kv_cache: cute.Pointer,
        out: cute.Pointer,
        lse: cute.Pointer,
        block_table: cute.Pointer,
        seq_lens: cute.Pointer,
        query_starts: cute.Pointer,
        plan: cute.Pointer,
        partial_out: cute.Pointer,
        partial_lse: cute.Pointer,
        q_nope_strides: tuple[Int64, Int64],
        q_rope_strides: tuple[Int64, Int64],
        kv_strides: tuple[Int64, Int64],
        out_strides: tuple[Int64, Int64],
        table_stride: Int64,
        num_tokens: Int32,
        num_requests: Int32,
        num_pages: Int32,
        page_shift: Int32,
        groups: Int32,
        scale_log2: Float32,
        output_scale: Float32,
        stream: Any,
    ) -> None:
        """Launch on a stream. Pointers are device addresses, strides count elements.

        Args:
            q_nope: [tokens, heads, 512] of the cache's type.
            q_rope: [tokens, heads, 64], likewise.
            kv_cache: [pages, page_tokens, 576].
            out: [tokens, heads, 512] bf16.
            lse: [tokens, heads] fp32.
            block_table: [requests, pages per request] int32.
            seq_lens: [requests] int32.
            query_starts: [requests + 1] int32.
            plan: the split plan, `plan_words` int32.
            partial_out: [slots x rows, 512] of `partial_element`.
            partial_lse: [slots x rows] fp32, base 2.
            q_nope_strides: of token and head; so are the next ones, multiples of 16 bytes.
            q_rope_strides: likewise.
            kv_strides: of page and token, likewise.
            out_strides: of token and head.
            table_stride: of a request's row of the page table.
            num_tokens: query tokens, padding included.
            num_requests: requests, padding included.
            num_pages: pages of the cache.
            page_shift: page_tokens is two to this power.
            groups: blocks that share the KV, per row tile.
            scale_log2: factor of the scores, in base 2.
            output_scale: factor of the output (that of an FP8 cache; else 1).
            stream: CUDA stream.
        """
        variant, layout = self.variant, self.variant.layout
        heads, slots = variant.num_heads, 2 * groups * variant.tiles.row_tiles * layout.rows
        units = 16 // layout.element_bytes
        box, load = variant.box_tokens, cpasync.CopyBulkTensorTileG2SOp()
        cache = tensor_of(
            kv_cache,
            (cute.assume(Int32(1) << page_shift, divby=box), HEAD_DIMS, num_pages),
            (aligned(kv_strides[1], units), 1, aligned(kv_strides[0], units)),
        )
        latents_map, latents = cpasync.make_tiled_tma_atom(
            load, cache, variant.box(layout.block_dims), (box, layout.block_dims)
        )
        ropes_map, ropes = cpasync.make_tiled_tma_atom(load, cache, variant.box(ROPE_DIMS), (box, ROPE_DIMS))
        self.kernel(
            tensor_of(q_nope, (num_tokens, heads, LATENT_DIMS), (*aligned_all(q_nope_strides, units), 1)),
            tensor_of(q_rope, (num_tokens, heads, ROPE_DIMS), (*aligned_all(q_rope_strides, units), 1)),
            tensor_of(out, (num_tokens, heads, LATENT_DIMS), (*out_strides, 1)),
            tensor_of(lse, (num_tokens, heads), (heads, 1)),
            tensor_of(block_table, (num_requests, table_stride), (table_stride, 1)),
            vector_of(seq_lens, num_requests),
            vector_of(query_starts, num_requests + 1),
            vector_of(plan, plan_words(groups, num_requests)),
            tensor_of(partial_out, (slots, LATENT_DIMS), (LATENT_DIMS, 1)),
            vector_of(partial_lse, slots),
            latents,
            latents_map,
            ropes,
            ropes_map,
            scale_log2,
            output_scale,
            num_requests,
            page_shift,
            groups,
        ).launch(
            grid=(groups, variant.tiles.head_tiles, variant.tiles.token_tiles),
            block=(32 * WARPS, 1, 1),
            smem=layout.shared_bytes,
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        q_nope: cute.Tensor,
        q_rope: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        block_table: cute.Tensor,
        seq_lens: cute.Tensor,
        query_starts: cute.Tensor,
        plan: cute.Tensor,
        partial_out: cute.Tensor,
        partial_lse: cute.Tensor,
        latents: cute.Tensor,
        latents_map: cute.CopyAtom,
        ropes: cute.Tensor,
        ropes_map: cute.CopyAtom,
        scale_log2: Float32,
        output_scale: Float32,
        num_requests: Int32,
        page_shift: Int32,
        groups: Int32,
    ) -> None:
        """The body of a block."""
        arguments = Arguments(
            q_nope, q_rope, out, lse, block_table, seq_lens, query_starts, plan, partial_out, partial_lse,
            latents, latents_map, ropes, ropes_map, scale_log2, output_scale, num_requests, q_nope.shape[0],
            page_shift, groups,
        )  # fmt: skip
        block = Block.running(self.variant, arguments)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self.prepare(block, warp)
        cute.arch.sync_threads()
        first = block.columns()
        if warp == KV_WARP:
            load_kv(block)
        elif warp == QUERY_WARP:
            load_queries(block)
        elif warp == PRODUCT_WARP:
            run_products(block, first)
        elif warp < KV_WARP:
            soften(block, first)
        cute.arch.sync_threads()
        if warp == PRODUCT_WARP:
            block.free_columns(first)

    @cute.jit
    def prepare(self, block: Block, warp: Int32) -> None:
        """Barriers, tensor memory and the copy engine's maps."""
        if warp == KV_WARP:
            cpasync.prefetch_descriptor(block.arguments.latents_map)
            cpasync.prefetch_descriptor(block.arguments.ropes_map)
            with cute.arch.elect_one():
                for name, count in block.layout.barrier_counts.items():
                    for index in cutlass.range_constexpr(count):
                        cute.arch.mbarrier_init(block.barrier(name, index), ARRIVALS.get(name, 1))
            cute.arch.mbarrier_init_fence()
        if warp == PRODUCT_WARP:
            block.allocate_columns()
