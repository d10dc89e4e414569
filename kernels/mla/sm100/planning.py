# SPDX-License-Identifier: Apache-2.0
"""The split plan on the device, word by word that of `SplitPlan` and of the Hopper version. Runs on any recent GPU."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Int64, cute

from tokenspeed_plugin.kernels.mla.geometry import TILE_TOKENS, plan_words
from tokenspeed_plugin.kernels.mla.sm100.arithmetic import first_group, last_group, plan_offset, span_bound, tiles_of

THREADS, LANES = 256, 32
PAGE_SHIFT_OF_TILE = TILE_TOKENS.bit_length() - 1


@cute.jit
def block_scan(value: Int32, scratch: cute.Tensor, thread: Int32) -> tuple[Int32, Int32]:
    """Inclusive prefix sum over the block, and the sum of all."""
    lane, warp = thread % LANES, thread // LANES
    for distance in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(value, offset=1 << distance, mask_and_clamp=0)
        value += cutlass.select_(lane >= (1 << distance), other, Int32(0))
    if lane == LANES - 1:
        scratch[warp] = value
    cute.arch.sync_threads()
    before, total = Int32(0), Int32(0)
    for number in cutlass.range_constexpr(THREADS // LANES):
        before += cutlass.select_(number < warp, scratch[number], Int32(0))
        total += scratch[number]
    cute.arch.sync_threads()
    return value + before, total


@cute.jit
def find_request(plan: cute.Tensor, starts: Int32, num_requests: Int32, tile: Int32) -> Int32:
    """The last request that starts at or before a tile: those before it that start there, too, are empty."""
    low, high = Int32(0), num_requests
    while low < high:
        middle = (low + high) // 2
        if plan[starts + middle] <= tile:
            low = middle + 1
        else:
            high = middle
    return cutlass.max(low - 1, 0)


class PlanKernel:
    """Deals the tiles of all requests, laid end to end, to the groups in equal contiguous spans."""

    @cute.jit
    def __call__(
        self,
        seq_lens: cute.Pointer,
        block_table: cute.Pointer,
        plan: cute.Pointer,
        table_stride: Int64,
        num_requests: Int32,
        page_shift: Int32,
        groups: Int32,
        stream: Any,
    ) -> None:
        """Launch on a stream; see `DecodeKernel` for the arguments."""
        self.kernel(
            cute.make_tensor(seq_lens, cute.make_layout(num_requests)),
            cute.make_tensor(block_table, cute.make_layout((num_requests, table_stride), stride=(table_stride, 1))),
            cute.make_tensor(plan, cute.make_layout(plan_words(groups, num_requests))),
            num_requests,
            page_shift,
            groups,
        ).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), smem=THREADS // LANES * 4, stream=stream)

    @cute.kernel
    def kernel(
        self,
        seq_lens: cute.Tensor,
        block_table: cute.Tensor,
        plan: cute.Tensor,
        num_requests: Int32,
        page_shift: Int32,
        groups: Int32,
    ) -> None:
        """One block: tile starts of the requests, then the groups' spans and the requests' groups."""
        thread, _, _ = cute.arch.thread_idx()
        tiles = self.sum_tiles(seq_lens, plan, num_requests, groups, thread)
        cute.arch.sync_threads()
        used = cutlass.max(cutlass.min(groups, tiles), 1)  # every used group has at least one tile
        self.plan_groups(seq_lens, block_table, plan, num_requests, page_shift, groups, thread, used, tiles)
        self.plan_requests(plan, num_requests, groups, thread, used, tiles)

    @cute.jit
    def sum_tiles(
        self, seq_lens: cute.Tensor, plan: cute.Tensor, num_requests: Int32, groups: Int32, thread: Int32
    ) -> Int32:
        """Writes where each request's tiles start; returns how many there are."""
        scratch = cute.make_tensor(cute.arch.get_dyn_smem(Int32, alignment=16), cute.make_layout(THREADS // LANES))
        starts, tiles = plan_offset("tile_start", groups, num_requests), Int32(0)
        for base in cutlass.range(0, num_requests, THREADS):
            request, own = base + thread, Int32(0)
            if request < num_requests:
                own = tiles_of(cutlass.max(seq_lens[request], 0))
            end, chunk = block_scan(own, scratch, thread)
            if request < num_requests:
                plan[starts + request] = tiles + end - own
            tiles += chunk
        if thread == 0:
            plan[starts + num_requests] = tiles
        return tiles

    @cute.jit
    def plan_groups(
        self,
        seq_lens: cute.Tensor,
        block_table: cute.Tensor,
        plan: cute.Tensor,
        num_requests: Int32,
        page_shift: Int32,
        groups: Int32,
        thread: Int32,
        used: Int32,
        tiles: Int32,
    ) -> None:
        """Where each group starts, and how many tiles it has."""
        starts = plan_offset("tile_start", groups, num_requests)
        for group in cutlass.range(thread, groups, THREADS):
            begin = Int32(span_bound(Int64(cutlass.min(group, used)), used, tiles))
            end = Int32(span_bound(Int64(cutlass.min(group + 1, used)), used, tiles))
            request = find_request(plan, starts, num_requests, begin)
            tile, page = begin - plan[starts + request], Int32(0)
            if end > begin and page_shift >= PAGE_SHIFT_OF_TILE:
                page = block_table[request, (tile * TILE_TOKENS) >> page_shift]
            plan[plan_offset("group_request", groups, num_requests) + group] = request
            plan[plan_offset("group_tile", groups, num_requests) + group] = tile
            plan[plan_offset("group_tiles", groups, num_requests) + group] = end - begin
            plan[plan_offset("group_seq_len", groups, num_requests) + group] = seq_lens[request]
            plan[plan_offset("group_page", groups, num_requests) + group] = page

    @cute.jit
    def plan_requests(
        self, plan: cute.Tensor, num_requests: Int32, groups: Int32, thread: Int32, used: Int32, tiles: Int32
    ) -> None:
        """The first and last group of each request; the last is -1 without tokens."""
        starts = plan_offset("tile_start", groups, num_requests)
        for request in cutlass.range(thread, num_requests, THREADS):
            begin, end = plan[starts + request], plan[starts + request + 1]
            first, last = Int32(0), Int32(-1)
            if end > begin:
                first = Int32(first_group(Int64(begin), used, tiles))
                last = Int32(last_group(Int64(end), used, tiles))
            plan[plan_offset("first_group", groups, num_requests) + request] = first
            plan[plan_offset("last_group", groups, num_requests) + request] = last
