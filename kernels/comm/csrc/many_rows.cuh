// SPDX-License-Identifier: Apache-2.0
// Sum over two ranks, residual add and RMS norm of many rows, in one launch whose blocks have several rows each.
//
// What a rank is to get has to cross the link at least once, so the link's time is the least that there is, and the
// memory traffic for sums and norms is to run beside it. Therefore a block sends its next row before it waits for the
// one before: rows are always on their way, and few wait. All blocks run at once (exchange.cuh), with room left for one
// block more: a kernel of another stream that a peer waits for is never kept out.
#pragma once

#include <stdint.h>

#include "all_reduce_add_norm.cuh"
#include "exchange.cuh"
#include "params.cuh"

namespace tokenspeed::comm {

// A row that this rank has sent and not yet added up.
template <int kLanes>
struct SentRow {
    int64_t row;
    uint32_t slot;
    uint4 own[kLanes];

    __device__ __forceinline__ void send(const Params& params, int64_t which) {
        const int lanes = params.hidden / kLaneElements;
        row = which;
        slot = next_slot(params, row);
#pragma unroll
        for (int i = 0; i < kLanes; ++i) {
            const int lane = threadIdx.x + i * blockDim.x;
            own[i] = make_uint4(0, 0, 0, 0);
            if (lane < lanes) own[i] = load_lane(params.branch, row * (params.branch_stride / kLaneElements) + lane);
        }
        const RowExchange<2> exchange(params, static_cast<int>(row), slot);
#pragma unroll
        for (int i = 0; i < kLanes; ++i) {
            const int lane = threadIdx.x + i * blockDim.x;
            if (lane < lanes) exchange.send(lane, own[i]);
        }
#pragma unroll
        for (int i = 0; i < kLanes; ++i) {
            const int lane = threadIdx.x + i * blockDim.x;
            if (lane < lanes) exchange.make_blank(lane);
        }
    }
};

template <typename Element, int kLanes>
__global__ void __launch_bounds__(kMaxThreads) many_rows_kernel(const __grid_constant__ Params params) {
    // In turn: warps that are behind still read the one while those ahead write the other.
    __shared__ float partial[2][kMaxThreads / 32];
    asm volatile("griddepcontrol.wait;" ::: "memory");  // everything below may be written by the previous kernel
    const int lanes = params.hidden / kLaneElements;
    const bool has_packed_weight = params.weight != nullptr && params.weight_type != ElementType::kFloat32;
    SentRow<kLanes> current;
    current.send(params, blockIdx.x);
    for (int turn = 0; current.row < params.rows; turn ^= 1) {
        const int64_t row = current.row, next = row + gridDim.x;
        uint4 residual[kLanes], weight[kLanes];
#pragma unroll
        for (int i = 0; i < kLanes; ++i) {
            const int lane = threadIdx.x + i * blockDim.x;
            residual[i] = make_uint4(0, 0, 0, 0);
            if (params.residual != nullptr && lane < lanes) {
                residual[i] = load_lane(params.residual, row * (params.residual_stride / kLaneElements) + lane);
            }
        }
        SentRow<kLanes> following;
        following.row = next;
        if (next < params.rows) following.send(params, next);

        const RowExchange<2> exchange(params, static_cast<int>(row), current.slot);
        Lane total[kLanes];
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < kLanes; ++i) {
            const int lane = threadIdx.x + i * blockDim.x;
            if (lane >= lanes) continue;
            uint4 other[1];
            exchange.template receive<1>(lane, 1 - params.rank, current.own[i], other);
            Lane sum = Lane::unpack<Element>(current.own[i]);  // of two: the same in either order
            sum.add(Lane::unpack<Element>(other[0]));
            total[i] = Lane::unpack<Element>(sum.template pack<Element>());
            total[i].add(Lane::unpack<Element>(residual[i]));
            squares += total[i].sum_of_squares();
        }
#pragma unroll
        for (int i = 0; i < kLanes; ++i) {  // here, not once: registers are dearer than a row from the L1
            const int lane = threadIdx.x + i * blockDim.x;
            weight[i] = make_uint4(0, 0, 0, 0);
            if (has_packed_weight && lane < lanes) weight[i] = load_lane(params.weight, lane);
        }
        const float sum = block_sum(squares, partial[turn]);
        if (threadIdx.x == 0) params.last_slots[row] = current.slot;
        store_row<Element, kLanes>(params, row, total, weight, sum);
        current = following;
    }
}

}  // namespace tokenspeed::comm
