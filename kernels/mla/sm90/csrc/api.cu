// SPDX-License-Identifier: Apache-2.0
// C interface of the Hopper MLA decode library. Every function returns 0, or -1 after setting the message that
// tokenspeed_mla_error returns. Nothing here allocates or synchronizes, so all of it may be captured in a CUDA graph.

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <stdio.h>

#include "decode.cuh"
#include "plan.cuh"

namespace tokenspeed::mla {
namespace {

thread_local char error_message[512];

int fail(const char* what, const char* why) {
    snprintf(error_message, sizeof(error_message), "%s: %s", what, why);
    return -1;
}

int check(const char* what, cudaError_t status) {
    return status == cudaSuccess ? 0 : fail(what, cudaGetErrorString(status));
}

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
    uint32_t box[3];
};

int encode(CUtensorMap* map, const char* what, const void* base, const MapShape& shape) {
    static const PFN_cuTensorMapEncodeTiled_v12000 encoder = find_encoder();
    if (encoder == nullptr) return fail(what, "this CUDA driver has no cuTensorMapEncodeTiled");
    const cuuint64_t dims[3] = {shape.dims[0], shape.dims[1], shape.dims[2]};
    const cuuint64_t strides[2] = {static_cast<cuuint64_t>(shape.strides[0]) * kElementBytes,
                                   static_cast<cuuint64_t>(shape.strides[1]) * kElementBytes};
    const cuuint32_t box[3] = {shape.box[0], shape.box[1], shape.box[2]}, steps[3] = {1, 1, 1};
    const CUresult status =
        encoder(map, kFp8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3,
                const_cast<void*>(base), dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return status == CUDA_SUCCESS ? 0 : fail(what, "cuTensorMapEncodeTiled refused its address, sizes or strides");
}

struct Maps {
    CUtensorMap q_nope, q_rope, kv;
};

int encode_maps(const DecodeParams& p, Maps* maps) {
    const uint64_t heads = p.num_heads, tokens = p.num_tokens;
    const uint32_t box_heads = p.tile_heads, box_tokens = p.tile_query_tokens;
    const uint32_t page_tokens = 1u << p.page_shift;
    const uint32_t box_page = page_tokens < kTileTokens ? page_tokens : kTileTokens;
    int status = encode(&maps->q_nope, "q_nope", p.q_nope,
                        {{static_cast<uint64_t>(kFp8 ? kHeadDim : kLatent), heads, tokens},
                         {p.q_nope_head_stride, p.q_nope_token_stride},
                         {kBlockDims, box_heads, box_tokens}});
    if (kFp8) {
        maps->q_rope = maps->q_nope;
    } else if (status == 0) {
        status = encode(&maps->q_rope, "q_rope", p.q_rope,
                        {{kRope, heads, tokens},
                         {p.q_rope_head_stride, p.q_rope_token_stride},
                         {kBlockDims, box_heads, box_tokens}});
    }
    if (status == 0) {
        status = encode(&maps->kv, "kv_cache", p.kv_cache,
                        {{kHeadDim, page_tokens, static_cast<uint64_t>(p.num_pages)},
                         {p.kv_token_stride, p.kv_page_stride},
                         {kBlockDims, box_page, 1}});
    }
    return status;
}

// The two row tiles of a request read the same KV: next to each other, the second one finds it in the L2.
bool in_cluster(const DecodeParams& p) { return !kFp8 && p.rows == 64 && p.head_tiles * p.token_tiles == 2; }

template <int kRows, bool kPaired>
int run(const DecodeParams& p, cudaStream_t stream) {
    Maps maps;
    if (const int status = encode_maps(p, &maps); status != 0) return status;
    constexpr int kBytes = Layout<kRows>::kSharedBytes;
    static const cudaError_t raised =
        cudaFuncSetAttribute(decode_kernel<kRows, kPaired>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    if (raised != cudaSuccess) return check("decode kernel's shared memory", raised);
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(p.groups, p.head_tiles, p.token_tiles);
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = kBytes;
    config.stream = stream;
    cudaLaunchAttribute attributes[3];
    config.attrs = attributes;
    if (p.launch_flags & kDependentLaunch) {
        attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (p.launch_flags & kCooperativeLaunch) {
        attributes[config.numAttrs].id = cudaLaunchAttributeCooperative;
        attributes[config.numAttrs++].val.cooperative = 1;
    }
    if (in_cluster(p)) {
        attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
        attributes[config.numAttrs].val.clusterDim.x = 1;
        attributes[config.numAttrs].val.clusterDim.y = p.head_tiles;
        attributes[config.numAttrs++].val.clusterDim.z = p.token_tiles;
    }
    return check("decode kernel",
                 cudaLaunchKernelEx(&config, decode_kernel<kRows, kPaired>, p, maps.q_nope, maps.q_rope, maps.kv));
}

}  // namespace
}  // namespace tokenspeed::mla

extern "C" {

const char* tokenspeed_mla_error() { return tokenspeed::mla::error_message; }

int tokenspeed_mla_params_bytes() { return sizeof(tokenspeed::mla::DecodeParams); }

int tokenspeed_mla_plan(const tokenspeed::mla::PlanParams* params, void* stream) {
    using namespace tokenspeed::mla;
    plan_kernel<<<1, kPlanThreads, 0, static_cast<cudaStream_t>(stream)>>>(*params);
    return check("plan kernel", cudaGetLastError());
}

int tokenspeed_mla_decode(const tokenspeed::mla::DecodeParams* params, void* stream) {
    using namespace tokenspeed::mla;
    const cudaStream_t target = static_cast<cudaStream_t>(stream);
    switch (params->rows) {
        case 16:
            return run<16, false>(*params, target);
#ifdef TOKENSPEED_MLA_FP8
        case 32:
            return run<32, false>(*params, target);
        case 64:
            return run<64, false>(*params, target);
        default:
            return fail("rows", "allowed: 16, 32, 64");
#else
        case 64:
            return in_cluster(*params) || params->head_tiles * params->token_tiles >= kPairedRowTiles
                       ? run<64, true>(*params, target)
                       : run<64, false>(*params, target);
        default:
            return fail("rows", "allowed: 16, 64");
#endif
    }
}
}
