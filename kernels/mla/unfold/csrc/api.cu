// SPDX-License-Identifier: Apache-2.0
// C interface of the kernel that makes keys and values of paged latents. Every function returns 0, or -1 after setting
// the message that tokenspeed_unfold_error returns. A launch neither allocates nor synchronizes, so it may be captured
// in a CUDA graph.

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "../../../csrc/status.cuh"
#include "unfold.cuh"

namespace tokenspeed::unfold {
namespace {

PFN_cuTensorMapEncodeTiled_v12000 find_encoder() {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result) !=
            cudaSuccess ||
        result != cudaDriverEntryPointSuccess) {
        return nullptr;
    }
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
}

struct MapShape {
    uint64_t dims[3];    // innermost first, elements
    int64_t strides[2];  // elements
    uint32_t box_rows;   // of kLine elements
};

int encode(CUtensorMap* map, const char* what, const void* base, const MapShape& shape) {
    static const PFN_cuTensorMapEncodeTiled_v12000 encoder = find_encoder();
    if (encoder == nullptr) return fail(what, "this CUDA driver has no cuTensorMapEncodeTiled");
    const cuuint64_t dims[3] = {shape.dims[0], shape.dims[1], shape.dims[2]};
    const cuuint64_t strides[2] = {static_cast<cuuint64_t>(shape.strides[0]) * sizeof(__nv_bfloat16),
                                   static_cast<cuuint64_t>(shape.strides[1]) * sizeof(__nv_bfloat16)};
    const cuuint32_t box[3] = {kLine, shape.box_rows, 1}, steps[3] = {1, 1, 1};
    const CUresult status = encoder(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(base), dims, strides,
                                    box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return status == CUDA_SUCCESS ? 0 : fail(what, "cuTensorMapEncodeTiled refused its address, sizes or strides");
}

struct Maps {
    CUtensorMap cache, weights, rows;
};

int encode_maps(const Params& p, Maps* maps) {
    const uint64_t page_tokens = 1ull << p.page_shift, outputs = 2ull * p.num_heads;
    const uint32_t box_tokens = std::min<uint64_t>(page_tokens, kTileTokens);
    int status = encode(&maps->cache, "kv_cache", p.kv_cache,
                        {{kLatent + kRope, page_tokens, static_cast<uint64_t>(p.num_pages)},
                         {p.token_stride, p.page_stride},
                         box_tokens});
    if (status == 0) {
        const int64_t all = static_cast<int64_t>(outputs) * kDims * kLatent;
        status = encode(&maps->weights, "weights", p.weights,
                        {{kLatent, outputs * kDims, 1}, {kLatent, all}, kPieceRows / kClusterBlocks});
    }
    if (status == 0) {
        status = encode(
            &maps->rows, "rows", p.rows,
            {{kDims, static_cast<uint64_t>(p.num_tokens), outputs}, {p.row_token_stride, p.row_stride}, kTileTokens});
    }
    return status;
}

// `cluster` must outlive the launch.
cudaLaunchConfig_t launch(int clusters, cudaLaunchAttribute* cluster) {
    cluster->id = cudaLaunchAttributeClusterDimension;
    cluster->val.clusterDim.x = kClusterBlocks;
    cluster->val.clusterDim.y = cluster->val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(kClusterBlocks * clusters);
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = kSharedBytes;
    config.attrs = cluster;
    config.numAttrs = 1;
    return config;
}

}  // namespace
}  // namespace tokenspeed::unfold

extern "C" {

using namespace tokenspeed;  // status.cuh
using namespace tokenspeed::unfold;

const char* tokenspeed_unfold_error() { return error_message; }

int tokenspeed_unfold_params_bytes() { return sizeof(Params); }

// Before the first launch on a device: loads the kernel, lets it have its shared memory there, and finds how many
// clusters run at once.
int tokenspeed_unfold_prepare(int device, int* clusters) {
    if (const int status = use_device(device); status != 0) return status;
    int blocks = 0;
    int status = check("shared memory",
                       cudaFuncSetAttribute(unfold_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
    if (status == 0) {
        status = check("multiprocessors", cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, device));
    }
    if (status != 0) return status;
    cudaLaunchAttribute cluster;
    const cudaLaunchConfig_t config = launch(blocks / kClusterBlocks, &cluster);
    status = check("clusters", cudaOccupancyMaxActiveClusters(clusters, unfold_kernel, &config));
    return status == 0 && *clusters < 1 ? fail("clusters", "not one of two blocks runs on this device") : status;
}

int tokenspeed_unfold_run(int device, const Params* params, void* stream) {
    const Params& p = *params;
    if (p.num_heads < 1) return fail("num_heads", "allowed: at least 1");
    if (p.num_tiles < kClusterBlocks || p.num_tiles % kClusterBlocks != 0) {
        return fail("num_tiles", "allowed: positive multiples of 2");
    }
    if (p.page_shift < 0 || p.page_shift > 30 || 1 << p.page_shift < kMinPageTokens) {
        return fail("page_shift", "allowed: 4 to 30");
    }
    if (p.clusters < 1) return fail("clusters", "allowed: at least 1");
    if (const int status = use_device(device); status != 0) return status;
    Maps maps;
    if (const int status = encode_maps(p, &maps); status != 0) return status;
    cudaLaunchAttribute cluster;
    cudaLaunchConfig_t config = launch(std::min(p.clusters, p.num_tiles / kClusterBlocks), &cluster);
    config.stream = static_cast<cudaStream_t>(stream);
    return check("unfold kernel", cudaLaunchKernelEx(&config, unfold_kernel, p, maps.cache, maps.weights, maps.rows));
}
}
