# SPDX-License-Identifier: Apache-2.0
"""Ragged MLA prefill for Blackwell: one block per tile of 128 query tokens, head and request, its warps in roles.

  warps 0-3  softmax, rescaling and output (softmax.py)
  warp 4     queries, keys and values through the bulk tensor copy engine (pipeline.py)
  warp 5     tensor-core products; owns the tensor memory (pipeline.py)

Grid: (query tiles of the longest request, heads, requests).
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync

from tokenspeed_plugin.kernels.mla.sm100.prefill.block import PrefillArguments, PrefillBlock, PrefillVariant
from tokenspeed_plugin.kernels.mla.sm100.prefill.layout import (
    BLOCK_DIMS,
    ELEMENT_BYTES,
    KEY_DIMS,
    KV_TILE,
    QUERY_TILE,
    VALUE_DIMS,
)
from tokenspeed_plugin.kernels.mla.sm100.prefill.pipeline import load_tokens, run_products
from tokenspeed_plugin.kernels.mla.sm100.prefill.softmax import soften

LOAD_WARP, PRODUCT_WARP, WARPS = 4, 5, 8
ARRIVALS = {"probabilities full": QUERY_TILE}
"""Threads that arrive on a barrier before it opens; one on all others."""
STRIDE_UNITS = 16 // ELEMENT_BYTES


def per_head(pointer: Any, tokens: Any, dims: int, heads: Any, strides: Any) -> Any:
    """A tensor (tokens, dims, heads) in device memory; strides of token and head are multiples of 16 bytes."""
    token, head = (cute.assume(stride, divby=STRIDE_UNITS) for stride in strides)
    return cute.make_tensor(pointer, cute.make_layout((tokens, dims, heads), stride=(token, 1, head)))


class PrefillKernel:
    """The kernel of one variant.

    Args:
        variant: what to compile for; its layout is checked here, because the compiler checks neither shared nor tensor
            memory.
    """

    def __init__(self, variant: PrefillVariant) -> None:
        variant.layout.checked()
        self.variant = variant

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        k: cute.Pointer,
        v: cute.Pointer,
        out: cute.Pointer,
        lse: cute.Pointer,
        query_starts: cute.Pointer,
        kv_starts: cute.Pointer,
        q_strides: tuple[Int64, Int64],
        k_strides: tuple[Int64, Int64],
        v_strides: tuple[Int64, Int64],
        out_strides: tuple[Int64, Int64],
        num_tokens: Int32,
        num_kv_tokens: Int32,
        num_heads: Int32,
        num_requests: Int32,
        num_query_tiles: Int32,
        scale_log2: Float32,
        stream: Any,
    ) -> None:
        """Launch on a stream. Pointers are device addresses, strides count elements and are multiples of 16 bytes.

        Args:
            q: [tokens, heads, 192] bf16.
            k: [kv tokens, heads, 192] bf16.
            v: [kv tokens, heads, 128] bf16.
            out: [tokens, heads, 128] bf16.
            lse: [tokens, heads] fp32.
            query_starts: [requests + 1] int32.
            kv_starts: [requests + 1] int32.
            q_strides: of token and head; so are the next ones.
            k_strides: likewise.
            v_strides: likewise.
            out_strides: likewise.
            num_tokens: query tokens of all requests.
            num_kv_tokens: KV tokens of all requests.
            num_heads: heads.
            num_requests: requests.
            num_query_tiles: tiles of 128 query tokens of the longest request.
            scale_log2: factor of the scores, in base 2.
            stream: CUDA stream.
        """
        load, box = cpasync.CopyBulkTensorTileG2SOp(), self.variant.box()
        shape = (KV_TILE, BLOCK_DIMS)
        q_map, queries = cpasync.make_tiled_tma_atom(
            load, per_head(q, num_tokens, KEY_DIMS, num_heads, q_strides), box, shape
        )
        k_map, keys = cpasync.make_tiled_tma_atom(
            load, per_head(k, num_kv_tokens, KEY_DIMS, num_heads, k_strides), box, shape
        )
        v_map, values = cpasync.make_tiled_tma_atom(
            load, per_head(v, num_kv_tokens, VALUE_DIMS, num_heads, v_strides), box, shape
        )
        token, head = (cute.assume(stride, divby=STRIDE_UNITS) for stride in out_strides)
        outputs = cute.make_layout((num_tokens, num_heads, VALUE_DIMS), stride=(token, head, 1))
        starts = cute.make_layout(num_requests + 1)
        self.kernel(
            queries,
            q_map,
            keys,
            k_map,
            values,
            v_map,
            cute.make_tensor(out, outputs),
            cute.make_tensor(lse, cute.make_layout((num_tokens, num_heads), stride=(num_heads, 1))),
            cute.make_tensor(query_starts, starts),
            cute.make_tensor(kv_starts, starts),
            scale_log2,
        ).launch(
            grid=(num_query_tiles, num_heads, num_requests),
            block=(32 * WARPS, 1, 1),
            smem=self.variant.layout.shared_bytes,
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        q_map: cute.CopyAtom,
        k: cute.Tensor,
        k_map: cute.CopyAtom,
        v: cute.Tensor,
        v_map: cute.CopyAtom,
        out: cute.Tensor,
        lse: cute.Tensor,
        query_starts: cute.Tensor,
        kv_starts: cute.Tensor,
        scale_log2: Float32,
    ) -> None:
        """The body of a block."""
        arguments = PrefillArguments(q, q_map, k, k_map, v, v_map, out, lse, query_starts, kv_starts, scale_log2)
        block = PrefillBlock.running(self.variant, arguments)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self.prepare(block, warp)
        cute.arch.sync_threads()
        first = block.columns()
        if warp == LOAD_WARP:
            load_tokens(block)
        elif warp == PRODUCT_WARP:
            run_products(block, first)
        elif warp < LOAD_WARP:
            soften(block, first)
        cute.arch.sync_threads()
        if warp == PRODUCT_WARP:
            block.free_columns(first)

    @cute.jit
    def prepare(self, block: PrefillBlock, warp: Int32) -> None:
        """Barriers, tensor memory and the copy engine's maps."""
        if warp == LOAD_WARP:
            cpasync.prefetch_descriptor(block.arguments.q_map)
            cpasync.prefetch_descriptor(block.arguments.k_map)
            cpasync.prefetch_descriptor(block.arguments.v_map)
            with cute.arch.elect_one():
                for name, count in block.layout.barrier_counts.items():
                    for index in cutlass.range_constexpr(count):
                        cute.arch.mbarrier_init(block.barrier(name, index), ARRIVALS.get(name, 1))
            cute.arch.mbarrier_init_fence()
        if warp == PRODUCT_WARP:
            block.allocate_columns()
