// SPDX-License-Identifier: Apache-2.0
// C interface of the product of a few rows. Every function returns 0, or -1 after setting the message that
// tokenspeed_linear_error returns. A launch neither allocates nor synchronizes, so it may be captured in a CUDA graph.

#include <cuda_runtime.h>

#include "../../csrc/status.cuh"
#include "few_rows.cuh"

namespace tokenspeed::linear {
namespace {

using Kernel = void (*)(const Params);

Kernel kernel_for(int num_rows) { return num_rows <= kTileRows ? few_rows_kernel<1> : few_rows_kernel<2>; }

}  // namespace
}  // namespace tokenspeed::linear

extern "C" {

using namespace tokenspeed;  // status.cuh
using namespace tokenspeed::linear;

const char* tokenspeed_linear_error() { return error_message; }

int tokenspeed_linear_params_bytes() { return sizeof(Params); }

// Loads the kernels: doing it in a launch could wait for a kernel that waits for a peer.
int tokenspeed_linear_prepare(int device) {
    if (const int status = use_device(device); status != 0) return status;
    for (const int num_rows : {1, kMaxRows}) {
        cudaFuncAttributes attributes;
        const auto* kernel = reinterpret_cast<const void*>(kernel_for(num_rows));
        const int status = check("loading a kernel", cudaFuncGetAttributes(&attributes, kernel));
        if (status != 0) return status;
    }
    return 0;
}

int tokenspeed_linear_few_rows(int device, const Params* params, void* stream) {
    if (params->num_rows < 1 || params->num_rows > kMaxRows) return fail("num_rows", "allowed: 1 to 16");
    if (params->out_values < kTileOut || params->out_values % kTileOut != 0) {
        return fail("out_values", "allowed: multiples of 16");
    }
    if (params->in_values < kLine || params->in_values % kLine != 0) {
        return fail("in_values", "allowed: multiples of 64");
    }
    if (const int status = use_device(device); status != 0) return status;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(params->out_values / kTileOut);
    config.blockDim = dim3(kThreads);
    config.stream = static_cast<cudaStream_t>(stream);
    cudaLaunchAttribute attribute;
    if (params->launch_flags & kDependentLaunch) {
        attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute.val.programmaticStreamSerializationAllowed = 1;
        config.attrs = &attribute;
        config.numAttrs = 1;
    }
    return check("few_rows", cudaLaunchKernelEx(&config, kernel_for(params->num_rows), *params));
}
}
