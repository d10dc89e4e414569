// SPDX-License-Identifier: Apache-2.0
// C interface of the collective kernels. Every function returns 0, or -1 after setting the message that
// tokenspeed_comm_error returns. A launch neither allocates nor synchronizes, so it may be captured in a CUDA graph.

#include <cuda_runtime.h>

#include <string.h>

#include "../../csrc/status.cuh"
#include "exchange.cuh"
#include "flags.cuh"
#include "launch.cuh"
#include "params.cuh"

namespace tokenspeed::comm {
namespace {

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

using namespace tokenspeed;  // status.cuh
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
    const Kernel many = params->num_ranks == 2 ? many_rows_for(params->element_type, params->hidden) : nullptr;
    return many == nullptr ? 0 : load(many);
}

// Blocks of a launch with many rows that run at once, less one: see many_rows.cuh.
int tokenspeed_comm_blocks_at_once(int device, const Params* params, int32_t* blocks) {
    if (const int status = refusal(*params); status != 0) return status;
    const Kernel kernel = many_rows_for(params->element_type, params->hidden);
    if (kernel == nullptr || params->num_ranks != 2) return fail("many rows", "allowed: 2 ranks, up to 8192 elements");
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
    if (const int status = use_device(device); status != 0) return status;
    return launch(*params, static_cast<cudaStream_t>(stream));
}

// Sums of parts that come one after the other: for each part waits for this rank's copy and the peer's flag, then adds
// and normalises its rows. `whole`: a call of one rank for all rows.
int tokenspeed_comm_add_norm_of_parts(int device, const Params* whole, const Arrival* parts, int num_parts,
                                      void* stream) {
    if (const int status = use_device(device); status != 0) return status;
    const auto on = static_cast<cudaStream_t>(stream);
    for (int i = 0; i < num_parts; ++i) {
        const Arrival& part = parts[i];
        int status = await(part.flag, part.value, whole->timeout_ns, on, part.event);
        if (status == 0) status = launch(part_of(*whole, part.first, part.end), on);
        if (status != 0) return status;
    }
    return 0;
}

// Mark in a stream, for tokenspeed_comm_send: made once and used again.
int tokenspeed_comm_event(int device, void** event) {
    if (const int status = use_device(device); status != 0) return status;
    return check("cudaEventCreate",
                 cudaEventCreateWithFlags(reinterpret_cast<cudaEvent_t*>(event), cudaEventDisableTiming));
}

// Once the producer has come to where it is now, copies to a peer's memory on one stream, which only copies, and then
// writes the peer's flag on another. The copy engines do the first: no multiprocessor is taken from the kernels of
// other streams. The second needs a free multiprocessor, and a matrix product leaves none until it ends: on a stream of
// its own it keeps no later copy waiting.
int tokenspeed_comm_send(int device, const SentPart* part) {
    if (const int status = use_device(device); status != 0) return status;
    const auto on = static_cast<cudaStream_t>(part->copies), behind = static_cast<cudaStream_t>(part->flags);
    const auto mark = static_cast<cudaEvent_t>(part->event);
    int status = check("cudaEventRecord", cudaEventRecord(mark, static_cast<cudaStream_t>(part->producer)));
    if (status == 0) status = check("cudaStreamWaitEvent", cudaStreamWaitEvent(on, mark, 0));
    if (status == 0) {
        status = check("cudaMemcpyAsync",
                       cudaMemcpyAsync(part->target, part->source, part->num_bytes, cudaMemcpyDefault, on));
    }
    if (status == 0) status = check("cudaEventRecord", cudaEventRecord(mark, on));
    if (status == 0) status = check("cudaStreamWaitEvent", cudaStreamWaitEvent(behind, mark, 0));
    if (status != 0) return status;
    raise_flag_kernel<<<1, 1, 0, behind>>>(part->flag, part->value);
    return check("raise_flag", cudaGetLastError());
}

// Makes a stream wait for `event`, the end of this rank's copy, and for a flag of this rank.
int tokenspeed_comm_await(int device, const uint32_t* flag, uint32_t value, uint64_t timeout_ns, void* stream,
                          void* event) {
    if (const int status = use_device(device); status != 0) return status;
    return await(flag, value, timeout_ns, static_cast<cudaStream_t>(stream), event);
}
}
