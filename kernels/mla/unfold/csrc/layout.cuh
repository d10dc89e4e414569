// SPDX-License-Identifier: Apache-2.0
// Shared memory of a block, and its barriers.
#pragma once

#include "params.cuh"

namespace tokenspeed::unfold {

constexpr int kLine = 64;                 // dims in the 128 bytes of a swizzled row
constexpr int kPieces = kLatent / kLine;  // of a tile's latents, and of a task's weights
constexpr int kLineBytes = 2 * kLine;     // of bf16
constexpr int kPieceRows = 128;           // tokens, or dims that a task makes
constexpr int kPieceBytes = kPieceRows * kLineBytes;
constexpr int kStages = 4;  // pieces of weights on their way or in use
constexpr int kGroups = 2;  // warpgroups that take turns
constexpr int kThreads = 128 * (1 + kGroups);

// 128 KiB of latents stay for all tasks of a tile, 64 KiB of weights pass through, 32 KiB are results on their way out.
constexpr int kLatentsAt = 0;
constexpr int kWeightsAt = kLatentsAt + kPieces * kPieceBytes;
constexpr int kResultsAt = kWeightsAt + kStages * kPieceBytes;
constexpr int kBarriersAt = kResultsAt + kGroups * kPieceBytes;
constexpr int kAlignment = 1024;  // of what is swizzled
constexpr int kSharedBytes = kBarriersAt + 256 + kAlignment;
static_assert(kSharedBytes <= 232448);
static_assert(kTileTokens == kPieceRows && kDims == kPieceRows);
// A stage is filled twice by every task: the parity of a fill is that of the task's half, whatever was before.
static_assert(kPieces == 2 * kStages);

struct Barriers {
    uint32_t latents;       // of each piece: it has come
    uint32_t latents_free;  // all warps have read the tile's latents for the last time
    uint32_t weights;       // of each stage: both blocks' halves have come
    uint32_t weights_free;  // of each stage: all warps of both blocks have read it

    __device__ explicit Barriers(uint32_t shared)
        : latents(shared + kBarriersAt),
          latents_free(latents + 8 * kPieces),
          weights(latents_free + 8),
          weights_free(weights + 8 * kStages) {}
};

}  // namespace tokenspeed::unfold
