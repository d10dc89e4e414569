// SPDX-License-Identifier: Apache-2.0
// How functions of a library's C interface report what went wrong, and on which device they work. Each library includes
// it once, in its `api.cu`, and so has a message of its own.
#pragma once

#include <cuda_runtime.h>

#include <stdio.h>

namespace tokenspeed {
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

}  // namespace
}  // namespace tokenspeed
