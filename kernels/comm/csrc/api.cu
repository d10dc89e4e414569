// SPDX-License-Identifier: Apache-2.0
// C interface of the collective kernels. Every function returns 0, or -1 after setting the message that
// tokenspeed_comm_error returns. A launch neither allocates nor synchronizes, so it may be captured in a CUDA graph.

#include <cuda_runtime.h>

#include <stdio.h>
#include <string.h>

#include <algorithm>

#include "all_reduce_add_norm.cuh"
#include "flags.cuh"
#include "many_rows.cuh"

namespace tokenspeed::comm {
namespace {

thread_local char error_message[512];

int fail(const char* what, const char* why) {
    snprintf(error_message, sizeof(error_message), "%s: %s", what, why);
    return -1;
}

int check(const char* what, cudaError_t status) {
    if (status == cudaSuccess) return 0;
    cudaGetLastError();  // so that the next check does not meet it again
    return fail(what, cudaGetErrorString(status));
}

// This library has a runtime of its own, which need not know the device that the process works on.
int use_device(int device) {
    int current = -1;
    if (cudaGetDevice(&current) == cudaSuccess && current == device) return 0;
    return check("cudaSetDevice", cudaSetDevice(device));
}

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
        case 4:
            return many_rows_kernel<Element, 4>;
        default:
            return nullptr;
    }
}

// Of two ranks.
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
    if (p.ahead != nullptr && (p.num_ranks == 1 || p.ahead_rows < 1 || p.ahead_bytes < kLaneBytes ||
                               p.ahead_bytes % kLaneBytes != 0 || p.ahead_stride % kLaneBytes != 0)) {
        return fail("ahead", "allowed: with several ranks, rows of multiples of 16 bytes");
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

// The words of a probe: rank r writes word r of every peer.
__global__ void probe_kernel(const __grid_constant__ Params params, uint64_t base) {
    const int peer = threadIdx.x;
    if (peer >= params.num_ranks || peer == params.rank) return;
    const uint64_t value = base + params.rank;
    const auto low = static_cast<uint32_t>(value), high = static_cast<uint32_t>(value >> 32);
    char* place = static_cast<char*>(params.staging[peer]) + params.rank * kLaneBytes;
    write_words(place, make_uint4(low, high, ~low, ~high));
}

}  // namespace
}  // namespace tokenspeed::comm

extern "C" {

using namespace tokenspeed::comm;

const char* tokenspeed_comm_error() { return error_message; }

int tokenspeed_comm_params_bytes() { return sizeof(Params); }

int64_t tokenspeed_comm_staging_bytes(int num_ranks, int max_rows, int hidden) {
    return staging_bytes(num_ranks, max_rows, hidden);
}

// Memory that other processes can map, blank, and the 64 bytes by which they map it.
int tokenspeed_comm_allocate(int device, int64_t bytes, void** address, char* handle) {
    if (const int status = use_device(device); status != 0) return status;
    if (const int status = check("cudaMalloc", cudaMalloc(address, bytes)); status != 0) return status;
    cudaIpcMemHandle_t own;
    int status = check("cudaMemset", cudaMemset(*address, kBlankByte, bytes));
    if (status == 0) status = check("cudaDeviceSynchronize", cudaDeviceSynchronize());
    if (status == 0) status = check("cudaIpcGetMemHandle", cudaIpcGetMemHandle(&own, *address));
    if (status != 0) {
        cudaFree(*address);
        return status;
    }
    static_assert(sizeof(own) == 64);
    memcpy(handle, &own, sizeof(own));
    return 0;
}

int tokenspeed_comm_free(int device, void* address) {
    if (const int status = use_device(device); status != 0) return status;
    return check("cudaFree", cudaFree(address));
}

// Another process's memory, mapped for `device`.
int tokenspeed_comm_open(int device, const char* handle, void** address) {
    if (const int status = use_device(device); status != 0) return status;
    cudaIpcMemHandle_t other;
    memcpy(&other, handle, sizeof(other));
    return check("cudaIpcOpenMemHandle", cudaIpcOpenMemHandle(address, other, cudaIpcMemLazyEnablePeerAccess));
}

int tokenspeed_comm_close(int device, void* address) {
    if (const int status = use_device(device); status != 0) return status;
    return check("cudaIpcCloseMemHandle", cudaIpcCloseMemHandle(address));
}

// Writes 16 bytes to every peer and waits until that is done.
int tokenspeed_comm_probe(int device, const Params* params, uint64_t base) {
    if (const int status = use_device(device); status != 0) return status;
    probe_kernel<<<1, 32>>>(*params, base);
    if (const int status = check("probe kernel", cudaGetLastError()); status != 0) return status;
    return check("probe kernel", cudaDeviceSynchronize());
}

// What the probes of all ranks left in this rank's staging memory: two words for each rank.
int tokenspeed_comm_read_probe(int device, const Params* params, uint64_t* words) {
    if (const int status = use_device(device); status != 0) return status;
    return check("cudaMemcpy", cudaMemcpy(words, params->staging[params->rank],
                                          static_cast<size_t>(params->num_ranks) * kLaneBytes, cudaMemcpyDeviceToHost));
}

int tokenspeed_comm_clear(int device, void* address, int64_t bytes) {
    if (const int status = use_device(device); status != 0) return status;
    if (const int status = check("cudaMemset", cudaMemset(address, kBlankByte, bytes)); status != 0) return status;
    return check("cudaDeviceSynchronize", cudaDeviceSynchronize());
}

// Loads the kernels that launches with these parameters use: loading one later could wait for a kernel that waits for a
// peer.
int tokenspeed_comm_prepare(int device, const Params* params) {
    if (const int status = refusal(*params); status != 0) return status;
    if (const int status = use_device(device); status != 0) return status;
    for (const int num_ranks : {1, params->num_ranks}) {
        if (const int status = load(kernel_for(params->element_type, num_ranks, params->hidden)); status != 0) {
            return status;
        }
    }
    return params->num_ranks == 2 ? load(many_rows_for(params->element_type, params->hidden)) : 0;
}

// Blocks of a launch with many rows that run at once, less one: see many_rows.cuh.
int tokenspeed_comm_blocks_at_once(int device, const Params* params, int32_t* blocks) {
    if (const int status = refusal(*params); status != 0) return status;
    const Kernel kernel = many_rows_for(params->element_type, params->hidden);
    if (kernel == nullptr || params->num_ranks != 2) return fail("many rows", "allowed: bf16 or fp16, 2 ranks");
    if (const int status = use_device(device); status != 0) return status;
    int on_each = 0, multiprocessors = 0;
    int status = check("cudaOccupancyMaxActiveBlocksPerMultiprocessor",
                       cudaOccupancyMaxActiveBlocksPerMultiprocessor(&on_each, reinterpret_cast<const void*>(kernel),
                                                                     num_threads(params->hidden), 0));
    if (status == 0) {
        status = check("cudaDeviceGetAttribute",
                       cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
    }
    *blocks = on_each * multiprocessors - 1;
    return status;
}

int tokenspeed_comm_all_reduce_add_norm(int device, const Params* params, void* stream) {
    if (params->rows == 0) return 0;
    if (const int status = refusal(*params); status != 0) return status;
    const bool many = params->most_blocks > 0;
    const Kernel kernel = many ? many_rows_for(params->element_type, params->hidden)
                               : kernel_for(params->element_type, params->num_ranks, params->hidden);
    if (kernel == nullptr) return fail("kernel", "allowed: bf16 or fp16, 1, 2, 4, 6 or 8 ranks");
    if (const int status = use_device(device); status != 0) return status;
    cudaLaunchConfig_t config = {};
    const int ahead_blocks = params->ahead == nullptr ? 0 : std::min(params->ahead_rows, kAheadBlocks);
    config.gridDim = dim3(many ? std::min(params->rows, params->most_blocks) : params->rows + ahead_blocks);
    config.blockDim = dim3(num_threads(params->hidden));
    config.stream = static_cast<cudaStream_t>(stream);
    cudaLaunchAttribute attribute;
    if (params->launch_flags & kDependentLaunch) {
        attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute.val.programmaticStreamSerializationAllowed = 1;
        config.attrs = &attribute;
        config.numAttrs = 1;
    }
    return check("all_reduce_add_norm", cudaLaunchKernelEx(&config, kernel, *params));
}

// Mark in a stream, for tokenspeed_comm_send: made once and used again.
int tokenspeed_comm_event(int device, void** event) {
    if (const int status = use_device(device); status != 0) return status;
    return check("cudaEventCreate",
                 cudaEventCreateWithFlags(reinterpret_cast<cudaEvent_t*>(event), cudaEventDisableTiming));
}

// Once `producer` has come to where it is now, copies to a peer's memory on `stream`, which only copies, and then
// writes the peer's flag on `flags`. The copy engines do the first: no multiprocessor is taken from the kernels of
// other streams. The second needs a free multiprocessor, and a matrix product leaves none until it ends: on a stream of
// its own it keeps no later copy waiting. `event` then marks the end of the copy.
int tokenspeed_comm_send(int device, const void* source, void* target, int64_t bytes, uint32_t* flag, uint32_t value,
                         void* producer, void* stream, void* flags, void* event) {
    if (const int status = use_device(device); status != 0) return status;
    const auto on = static_cast<cudaStream_t>(stream), behind = static_cast<cudaStream_t>(flags);
    const auto mark = static_cast<cudaEvent_t>(event);
    int status = check("cudaEventRecord", cudaEventRecord(mark, static_cast<cudaStream_t>(producer)));
    if (status == 0) status = check("cudaStreamWaitEvent", cudaStreamWaitEvent(on, mark, 0));
    if (status == 0) status = check("cudaMemcpyAsync", cudaMemcpyAsync(target, source, bytes, cudaMemcpyDefault, on));
    if (status == 0) status = check("cudaEventRecord", cudaEventRecord(mark, on));
    if (status == 0) status = check("cudaStreamWaitEvent", cudaStreamWaitEvent(behind, mark, 0));
    if (status != 0) return status;
    raise_flag_kernel<<<1, 1, 0, behind>>>(flag, value);
    return check("raise_flag", cudaGetLastError());
}

// Makes a stream wait for `event`, the end of this rank's copy, and for a flag of this rank.
int tokenspeed_comm_await(int device, const uint32_t* flag, uint32_t value, uint64_t timeout_ns, void* stream,
                          void* event) {
    if (const int status = use_device(device); status != 0) return status;
    const auto on = static_cast<cudaStream_t>(stream);
    const int status = check("cudaStreamWaitEvent", cudaStreamWaitEvent(on, static_cast<cudaEvent_t>(event), 0));
    if (status != 0) return status;
    await_flag_kernel<<<1, 1, 0, on>>>(flag, value, timeout_ns);
    return check("await_flag", cudaGetLastError());
}
}
