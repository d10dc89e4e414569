// SPDX-License-Identifier: Apache-2.0
// Thin wrappers over the Hopper instructions that the MLA kernels use. Nothing here knows about attention.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <stdint.h>

namespace tokenspeed::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- mbarriers ----

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "WAIT:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra DONE;\n"
        "bra WAIT;\n"
        "DONE:\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

__device__ __forceinline__ void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Makes this thread's ordinary shared-memory accesses visible to the tensor cores and the copy engine.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void named_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives without waiting: the threads that `named_sync` the barrier see what was written before.
__device__ __forceinline__ void named_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- roles ----

template <int kRegisters>
__device__ __forceinline__ void grow_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void shrink_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// The warp's number in its block, known to the compiler to be the same in all lanes.
__device__ __forceinline__ int warp_number() { return __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0); }

// ---- bulk tensor copies ----

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void copy_box(uint32_t destination, const CUtensorMap* map, uint32_t barrier, int x, int y,
                                         int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
            "r"(destination),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
        : "memory");
}

// ---- dependent launch ----

__device__ __forceinline__ void allow_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_primary() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- warpgroup matrix multiply ----

__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void mma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Registers that a product in flight writes: nothing that reads them may move above this.
template <int kCount>
__device__ __forceinline__ void mma_settle(float (&d)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Shared-memory operand with the 128-byte swizzle: 8 rows of 128 bytes form an atom of 1024 bytes; atoms follow each
// other along the strided dimension.
// `column_stride`: bytes between atoms along the contiguous dimension, where an operand spans several.
__device__ __forceinline__ uint64_t operand_descriptor(uint32_t address, uint32_t column_stride = 16) {
    constexpr uint64_t kSwizzle128 = 1ull << 62;
    constexpr uint64_t kAtomStride = static_cast<uint64_t>(1024 >> 4) << 32;
    return kSwizzle128 | kAtomStride | static_cast<uint64_t>(column_stride >> 4) << 16 | ((address & 0x3FFFF) >> 4);
}

// d[64 x N] (+)= a[64 x 16] b[16 x N], bf16 operands, fp32 accumulators. kTransposedA: a lies with its 64 rows
// contiguous (M-major); b is always K-major.
template <int kTransposedA>
__device__ __forceinline__ void mma(float (&d)[8], uint64_t a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1, %11, 0;\n"
        "}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
        : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposedA));
}

// ---- global memory between blocks ----

__device__ __forceinline__ int add_release(int32_t* counter, int value) {
    int before;
    asm volatile("atom.release.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(value) : "memory");
    return before;
}

__device__ __forceinline__ int load_acquire(const int32_t* counter) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
    return value;
}

// Data that other blocks of this launch wrote: never from this multiprocessor's own cache.
template <typename T>
__device__ __forceinline__ T load_cached_l2(const T* address) {
    return __ldcg(address);
}

// ---- small arithmetic ----

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ void store_zeros(uint32_t address) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
}

// Stores four 8 x 8 bf16 fragments transposed; `address` is the row that this lane names.
__device__ __forceinline__ void store_transposed(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a),
                 "r"(b), "r"(c), "r"(d)
                 : "memory");
}

__device__ __forceinline__ void store_fragments(uint32_t address, const uint32_t (&a)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a[0]),
                 "r"(a[1]), "r"(a[2]), "r"(a[3])
                 : "memory");
}

}  // namespace tokenspeed::ptx
