# SPDX-License-Identifier: Apache-2.0
"""Joins the parts of split requests, and clears the rows that no group writes. Runs on any recent GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute

from tokenspeed_plugin.kernels.mla.geometry import LATENT_DIMS, RowTiles, plan_words
from tokenspeed_plugin.kernels.mla.sm100.arithmetic import partial_slot, plan_offset
from tokenspeed_plugin.kernels.mla.sm100.formulas import LN_2, merge_step, row_end
from tokenspeed_plugin.kernels.mla.sm100.memory import DeviceMath

WARPS, LANES = 8, 32
PIECE_DIMS = 4
"""Dims that a lane takes at a time: 16 bytes of fp32, 8 of bf16."""
PIECES = LATENT_DIMS // (LANES * PIECE_DIMS)


@dataclass(frozen=True)
class MergeArguments:
    """Tensors and numbers of a launch; see `DecodeKernel`."""

    out: Any
    lse: Any
    query_starts: Any
    plan: Any
    partial_out: Any
    partial_lse: Any
    output_scale: Any
    num_requests: Any
    groups: Any


class MergeKernel:
    """One warp per (token, head).

    Args:
        num_heads: query heads.
        max_query_tokens: query tokens of a request, at most.
        tiles: how the query rows fold in the decode kernel.
    """

    def __init__(self, num_heads: int, max_query_tokens: int, tiles: RowTiles) -> None:
        self.num_heads, self.max_query_tokens, self.tiles = num_heads, max_query_tokens, tiles

    @cute.jit
    def __call__(
        self,
        out: cute.Pointer,
        lse: cute.Pointer,
        query_starts: cute.Pointer,
        plan: cute.Pointer,
        partial_out: cute.Pointer,
        partial_lse: cute.Pointer,
        out_strides: tuple[Int64, Int64],
        num_tokens: Int32,
        num_requests: Int32,
        groups: Int32,
        output_scale: Float32,
        stream: Any,
    ) -> None:
        """Launch on a stream: one row of blocks per request, and one for the tokens past the last request.

        For the arguments see `DecodeKernel`.
        """
        heads, slots = self.num_heads, 2 * groups * self.tiles.row_tiles * self.tiles.rows
        outputs = cute.make_layout((num_tokens, heads, LATENT_DIMS), stride=(*out_strides, 1))
        self.kernel(
            cute.make_tensor(out, outputs),
            cute.make_tensor(lse, cute.make_layout((num_tokens, heads), stride=(heads, 1))),
            cute.make_tensor(query_starts, cute.make_layout(num_requests + 1)),
            cute.make_tensor(plan, cute.make_layout(plan_words(groups, num_requests))),
            cute.make_tensor(partial_out, cute.make_layout((slots, LATENT_DIMS), stride=(LATENT_DIMS, 1))),
            cute.make_tensor(partial_lse, cute.make_layout(slots)),
            output_scale,
            num_requests,
            groups,
        ).launch(
            grid=(num_requests + 1, self.max_query_tokens, -(-heads // WARPS)),
            block=(WARPS * LANES, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        out: cute.Tensor,
        lse: cute.Tensor,
        query_starts: cute.Tensor,
        plan: cute.Tensor,
        partial_out: cute.Tensor,
        partial_lse: cute.Tensor,
        output_scale: Float32,
        num_requests: Int32,
        groups: Int32,
    ) -> None:
        """The body of a block."""
        a = MergeArguments(out, lse, query_starts, plan, partial_out, partial_lse, output_scale, num_requests, groups)
        request, token, heads = cute.arch.block_idx()
        head = heads * WARPS + cute.arch.warp_idx()
        if head < self.num_heads:
            if request == num_requests:
                for row in cutlass.range(
                    query_starts[num_requests] + token, cute.size(lse, mode=[0]), self.max_query_tokens
                ):
                    self.clear(a, row, head)
            else:
                start = query_starts[request]
                if token < query_starts[request + 1] - start:
                    self.finish(a, request, token, start + token, head)

    @cute.jit
    def finish(self, a: MergeArguments, request: Int32, token: Int32, row: Int32, head: Int32) -> None:
        """A row of a request: cleared without KV, merged if it was split; else it is there already."""
        first = a.plan[plan_offset("first_group", a.groups, a.num_requests) + request]
        last = a.plan[plan_offset("last_group", a.groups, a.num_requests) + request]
        if last < 0:
            self.clear(a, row, head)
        elif last > first:
            self.merge(a, first, last, token, row, head)

    @cute.jit
    def clear(self, a: MergeArguments, row: Int32, head: Int32) -> None:
        """Zeros and -inf."""
        zeros = cute.make_rmem_tensor((PIECE_DIMS * PIECES,), Float32)
        zeros.fill(0.0)
        self.write(a, row, head, zeros, Float32(0.0), Float32(-math.inf))

    @cute.jit
    def merge(self, a: MergeArguments, first: Int32, last: Int32, token: Int32, row: Int32, head: Int32) -> None:
        """Weighted mean of the groups' parts."""
        tiles = self.tiles
        row_tile = (token // tiles.query_tokens) * tiles.head_tiles + head // tiles.heads
        row_in_tile = (token % tiles.query_tokens) * tiles.heads + head % tiles.heads
        sums = cute.make_rmem_tensor((PIECE_DIMS * PIECES,), Float32)
        sums.fill(0.0)
        top, total = Float32(-math.inf), Float32(0.0)
        for group in cutlass.range(first, last + 1):
            # Its first tile is the first of the request only in the first group.
            starts = cutlass.select_(group == first, Int32(1), Int32(0))
            at = partial_slot(group, starts, row_tile, tiles.row_tiles) * tiles.rows + row_in_tile
            top, keep, weight = merge_step(DeviceMath, top, a.partial_lse[at])
            total = total * keep + weight
            for piece in cutlass.range_constexpr(PIECES):
                values = self.piece(a.partial_out[at, None], piece)
                for dim in cutlass.range_constexpr(PIECE_DIMS):
                    index = piece * PIECE_DIMS + dim
                    sums[index] = sums[index] * keep + values[dim].to(Float32) * weight
        factor, lse = row_end(DeviceMath, top, total, a.output_scale, 0.0)
        self.write(a, row, head, sums, factor, lse * LN_2)

    @cute.jit
    def piece(self, row: cute.Tensor, piece: cutlass.Constexpr) -> cute.Tensor:
        """This lane's dims of a row of partial output, in registers."""
        pieces = cute.logical_divide(row, cute.make_layout(PIECE_DIMS))
        values = cute.make_rmem_tensor((PIECE_DIMS,), row.element_type)
        cute.autovec_copy(pieces[None, piece * LANES + cute.arch.lane_idx()], values)
        return values

    @cute.jit
    def write(
        self, a: MergeArguments, row: Int32, head: Int32, sums: cute.Tensor, factor: Float32, lse: Float32
    ) -> None:
        """A finished row; natural log-sum-exp."""
        out, lses = a.out, a.lse
        for piece in cutlass.range_constexpr(PIECES):
            for dim in cutlass.range_constexpr(PIECE_DIMS):
                at = (piece * LANES + cute.arch.lane_idx()) * PIECE_DIMS + dim
                out[row, head, at] = (sums[piece * PIECE_DIMS + dim] * factor).to(BFloat16)
        if cute.arch.lane_idx() == 0:
            lses[row, head] = lse
