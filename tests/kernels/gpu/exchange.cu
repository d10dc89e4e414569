// SPDX-License-Identifier: Apache-2.0
// The smallest kernel of which racecheck reports what it reports of the MLA kernels: two warpgroups exchange values
// across a named barrier of both, after each of them has passed some barriers of its own (docs/kernels.md).
// Usage: exchange BARRIERS_OF_GROUP_0 BARRIERS_OF_GROUP_1; exit status 1 if a value is wrong.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>

__device__ void sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

__global__ void __launch_bounds__(384, 1) exchange(const int* extra, int* wrong) {
    __shared__ int box[256];
    __syncthreads();
    if (threadIdx.x >= 256) return;  // as the producer's warps, which take no part
    const int group = threadIdx.x / 128;
    for (int i = 0; i < extra[group]; ++i) group == 0 ? sync(1, 128) : sync(2, 128);
    box[threadIdx.x] = threadIdx.x;
    sync(3, 256);
    const int other = threadIdx.x ^ 128;
    if (box[other] != other) atomicAdd(wrong, 1);
}

int main(int, char** argv) {
    int *extra, *wrong, host[2] = {atoi(argv[1]), atoi(argv[2])}, result = 0;
    cudaMalloc(&extra, sizeof(host));
    cudaMalloc(&wrong, sizeof(int));
    cudaMemcpy(extra, host, sizeof(host), cudaMemcpyHostToDevice);
    cudaMemset(wrong, 0, sizeof(int));
    exchange<<<4, 384>>>(extra, wrong);
    cudaMemcpy(&result, wrong, sizeof(int), cudaMemcpyDeviceToHost);
    const cudaError_t status = cudaDeviceSynchronize();
    std::printf("extra barriers %d, %d: %d wrong values, %s\n", host[0], host[1], result, cudaGetErrorString(status));
    return result != 0 || status != cudaSuccess;
}
