// SPDX-License-Identifier: Apache-2.0
// Which kernel a call takes, and how it is launched.
#pragma once

#include <cuda_runtime.h>

#include <stdint.h>

#include <algorithm>

#include "../../csrc/status.cuh"
#include "all_reduce_add_norm.cuh"
#include "flags.cuh"
#include "many_rows.cuh"
#include "params.cuh"

namespace tokenspeed::comm {
namespace {

using Kernel = void (*)(const Params);

template <typename Element, int kRanks>
Kernel kernel_for_lanes(int lanes_per_thread) {
    switch (lanes_per_thread) {
        case 1:
            return all_reduce_add_norm_kernel<Element, kRanks, 1>;
        case 2:
            return all_reduce_add_norm_kernel<Element, kRanks, 2>;
        case 4:
            return all_reduce_add_norm_kernel<Element, kRanks, 4>;
        default:
            return nullptr;
    }
}

template <typename Element>
Kernel kernel_for_ranks(int num_ranks, int lanes_per_thread) {
    switch (num_ranks) {
        case 1:
            return kernel_for_lanes<Element, 1>(lanes_per_thread);
        case 2:
            return kernel_for_lanes<Element, 2>(lanes_per_thread);
        case 4:
            return kernel_for_lanes<Element, 4>(lanes_per_thread);
        case 6:
            return kernel_for_lanes<Element, 6>(lanes_per_thread);
        case 8:
            return kernel_for_lanes<Element, 8>(lanes_per_thread);
        default:
            return nullptr;
    }
}

int lanes_per_thread(int hidden) {
    const int lanes = hidden / kLaneElements;
    return lanes <= kMaxThreads ? 1 : lanes <= 2 * kMaxThreads ? 2 : 4;
}

Kernel kernel_for(ElementType type, int num_ranks, int hidden) {
    const int per_thread = lanes_per_thread(hidden);
    if (type == ElementType::kBfloat16) return kernel_for_ranks<__nv_bfloat16>(num_ranks, per_thread);
    if (type == ElementType::kFloat16) return kernel_for_ranks<__half>(num_ranks, per_thread);
    return nullptr;
}

template <typename Element>
Kernel many_rows_for_lanes(int lanes_per_thread) {
    switch (lanes_per_thread) {
        case 1:
            return many_rows_kernel<Element, 1>;
        case 2:
            return many_rows_kernel<Element, 2>;
        default:  // longer rows leave too few registers for two of them
            return nullptr;
    }
}

// Of two ranks; null for rows of more than 8192.
Kernel many_rows_for(ElementType type, int hidden) {
    const int per_thread = lanes_per_thread(hidden);
    if (type == ElementType::kBfloat16) return many_rows_for_lanes<__nv_bfloat16>(per_thread);
    if (type == ElementType::kFloat16) return many_rows_for_lanes<__half>(per_thread);
    return nullptr;
}

int num_threads(int hidden) {
    const int lanes = hidden / kLaneElements, per_thread = lanes_per_thread(hidden);
    return ((lanes + per_thread - 1) / per_thread + 31) / 32 * 32;
}

int refusal(const Params& p) {
    if (p.hidden < kLaneElements || p.hidden % kLaneElements != 0 || p.hidden / kLaneElements > kMaxLanes) {
        return fail("hidden", "allowed: multiples of 8 from 8 to 16384");
    }
    if (p.num_ranks > 1 && (p.rows > p.max_rows || p.rank < 0 || p.rank >= p.num_ranks)) {
        return fail("rows or rank", "allowed: up to max_rows rows, ranks below num_ranks");
    }
    if (p.weight != nullptr && p.weight_type != p.element_type && p.weight_type != ElementType::kFloat32) {
        return fail("weight", "allowed: the type of the elements, or fp32");
    }
    if (p.most_blocks != 0 && (p.num_ranks != 2 || p.most_blocks < 0)) {
        return fail("most_blocks", "allowed: with two ranks, more than 0");
    }
    return 0;
}

int load(Kernel kernel) {
    if (kernel == nullptr) return fail("kernel", "allowed: bf16 or fp16, 1, 2, 4, 6 or 8 ranks");
    cudaFuncAttributes attributes;
    return check("loading a kernel", cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)));
}

// One launch on a stream of the current device.
int launch(const Params& params, cudaStream_t stream) {
    if (params.rows == 0) return 0;
    if (const int status = refusal(params); status != 0) return status;
    const bool many = params.most_blocks > 0;
    const Kernel kernel = many ? many_rows_for(params.element_type, params.hidden)
                               : kernel_for(params.element_type, params.num_ranks, params.hidden);
    if (kernel == nullptr) return fail("kernel", "allowed: bf16 or fp16, 1, 2, 4, 6 or 8 ranks");
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(many ? std::min(params.rows, params.most_blocks) : params.rows);
    config.blockDim = dim3(num_threads(params.hidden));
    config.stream = stream;
    cudaLaunchAttribute attribute;
    if (params.launch_flags & kDependentLaunch) {
        attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute.val.programmaticStreamSerializationAllowed = 1;
        config.attrs = &attribute;
        config.numAttrs = 1;
    }
    return check("all_reduce_add_norm", cudaLaunchKernelEx(&config, kernel, params));
}

// Makes a stream of the current device wait for `event`, the end of this rank's copy, and for a flag of this rank.
int await(const uint32_t* flag, uint32_t value, uint64_t timeout_ns, cudaStream_t stream, void* event) {
    const int status = check("cudaStreamWaitEvent", cudaStreamWaitEvent(stream, static_cast<cudaEvent_t>(event), 0));
    if (status != 0) return status;
    await_flag_kernel<<<1, 1, 0, stream>>>(flag, value, timeout_ns);
    return check("await_flag", cudaGetLastError());
}

const void* row_of(const void* rows, int64_t row, int64_t stride) {
    return rows == nullptr ? nullptr : static_cast<const uint16_t*>(rows) + row * stride;
}

void* row_of(void* rows, int64_t row, int64_t stride) { return static_cast<uint16_t*>(rows) + row * stride; }

// A call for the rows of a part only.
Params part_of(const Params& whole, int first, int end) {
    Params part = whole;
    part.rows = end - first;
    part.branch = row_of(whole.branch, first, whole.branch_stride);
    part.other = row_of(whole.other, first, whole.hidden);
    part.residual = row_of(whole.residual, first, whole.residual_stride);
    part.normed = row_of(whole.normed, first, whole.hidden);
    part.total = row_of(whole.total, first, whole.hidden);
    return part;
}

}  // namespace
}  // namespace tokenspeed::comm
