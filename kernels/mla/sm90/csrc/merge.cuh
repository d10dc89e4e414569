// SPDX-License-Identifier: Apache-2.0
// Joins the partial outputs of a split request inside the decode kernel: every block that wrote a partial waits for
// the others of the request and then merges its share of the output. All blocks are resident (cooperative launch).
#pragma once

#include "rows.cuh"

namespace tokenspeed::mla {

// Partials lie in fragment order. A piece is four numbers: (low row, dim), (low row, dim + step), (high row, dim),
// (high row, dim + step).
//   narrow: [latent block][column block][thread], one piece: low row 8j + 2c, high row the next, dims 16w + g and 8
//     further
//   wide: [warp][latent half][pair of column blocks][lane], two pieces: low row 16w + g, high row 8 further, dims
//     8j + 2c and the next, the second piece 8 dims further
//   turned: [pair of latent blocks][column block][thread], two pieces: rows and dims as in narrow of an e4m3 cache, the
//     second piece 64 dims further
template <int kRows>
struct FragmentIndex {
    static constexpr bool kWide = Layout<kRows>::kWide;
    static constexpr int kPieces = kRows > 16 ? 2 : 1;
    static constexpr int kTotal = kRows * kLatent / 4 / kPieces;
    static constexpr int kRowStep = kWide ? 8 : 1, kDimStep = kWide || kFp8 ? 1 : 8, kPieceDims = kWide ? 8 : 64;
    int row, dim;

    // Where the state of a row lies among those of its row tile: a value's two rows next to each other.
    __host__ __device__ static constexpr int state(int row) {
        return Layout<kRows>::kWide ? row / 16 * 16 + row % 8 * 2 + row / 8 % 2 : row;
    }

    __device__ explicit FragmentIndex(int index) {
        const int g = index / 4 & 7, c = index & 3;
        if (kWide) {
            row = index / 1024 * 16 + g;
            dim = index / 512 % 2 * 256 + index / 32 % 16 * 16 + 2 * c;
        } else {
            row = index / 128 % (kRows / 8) * 8 + 2 * c;
            dim = index / 128 / (kRows / 8) * 64 * kPieces + index / 32 % 4 * 16 + (kFp8 ? 2 * g : g);
        }
    }

    // Indices of the rows in use; those of the wide layout lie first.
    __device__ static int used(const DecodeParams& p) {
        return kWide ? (p.tile_heads * p.tile_query_tokens + 15) / 16 * 1024 : kTotal;
    }
};

// How the pieces of an index are stored: as bf16, for fp32 would weigh as much as the KV itself where a request is
// split over all groups (64 rows: 128 KiB for each part, as much as 114 tokens of KV).
template <int kRows>
struct Partial {
    using Value = uint4;
    __device__ static Value pack(const float4& a, const float4& b) {
        return make_uint4(ptx::pack_bf16(a.x, a.y), ptx::pack_bf16(a.z, a.w), ptx::pack_bf16(b.x, b.y),
                          ptx::pack_bf16(b.z, b.w));
    }
    __device__ static float4 unpack(uint32_t low, uint32_t high) {
        return make_float4(__uint_as_float(low << 16), __uint_as_float(low & 0xFFFF0000u), __uint_as_float(high << 16),
                           __uint_as_float(high & 0xFFFF0000u));
    }
    __device__ static float4 piece(const Value& v, int i) { return i == 0 ? unpack(v.x, v.y) : unpack(v.z, v.w); }
};

template <>
struct Partial<16> {
    using Value = uint2;
    __device__ static Value pack(const float4& v) {
        return make_uint2(ptx::pack_bf16(v.x, v.y), ptx::pack_bf16(v.z, v.w));
    }
    __device__ static float4 piece(const Value& v, int) { return Partial<64>::unpack(v.x, v.y); }
};

// One request that this block shares with others. Arrivals are counted in one of two words, by turns from launch to
// launch: [count 0, count 1, turn]. The last to arrive clears the other word and passes the turn, so nobody has to
// come back to reset what others still poll.
struct SharedRequest {
    int request = -1, first_group, splits, turn;

    __device__ static int32_t* words(const DecodeParams& p, const Place& place, int request) {
        return p.counters + 4 * (request * p.head_tiles * p.token_tiles + place.row_tile);
    }

    __device__ void open(const DecodeParams& p, const Place& place, int id) {
        const PlanView<const int32_t> plan(p.plan, p.groups, p.num_requests);
        request = id;
        first_group = plan.first_group[id];
        splits = plan.last_group[id] - first_group + 1;
        turn = ptx::load_cached_l2(words(p, place, id) + 2);
    }

    // By one thread, after a barrier behind the block's stores.
    __device__ void arrive(const DecodeParams& p, const Place& place) const {
        int32_t* counts = words(p, place, request);
        if (ptx::add_release(counts + turn, 1) == splits - 1) {
            counts[1 - turn] = 0;
            counts[2] = 1 - turn;
        }
    }

    __device__ void wait(const DecodeParams& p, const Place& place) const {
        const int32_t* count = words(p, place, request) + turn;
        while (ptx::load_acquire(count) < splits) {
        }
    }
};

template <int kRows>
class Merger {
  public:
    using Index = FragmentIndex<kRows>;

    __device__ Merger(const DecodeParams& p, const Place& place, char* generic)
        : p_(p),
          place_(place),
          map_(generic),
          sums_(reinterpret_cast<float4*>(generic + Layout<kRows>::kQueryOffset)),
          states_(sums_ + Index::kPieces * kConsumerThreads),
          thread_(threadIdx.x) {}

    __device__ void merge(const SharedRequest& shared) const {
        int share = 16 / Index::kPieces;  // indices per block
        const int used = Index::used(p_);
        while (share * shared.splits < used) share *= 2;
        const int begin = (place_.group - shared.first_group) * share;
        if (begin >= used) return;
        const QuerySpan query(p_, place_, shared.request);
        if (share > kConsumerThreads) {
            merge_columns(shared, query, begin, share);
        } else {
            merge_narrow(shared, query, begin, share);
        }
    }

  private:
    using Store = Partial<kRows>;
    using Value = typename Store::Value;
    using Target = RowTarget<kRows>;

    static constexpr int kPieces = Index::kPieces;

    // Weighted sum over some splits, for the two rows of an index.
    struct State {
        float4 sum[kPieces] = {};
        float top[2] = {-INFINITY, -INFINITY}, total[2] = {0.0f, 0.0f};
    };

    __device__ void wait(const SharedRequest& shared) const {
        if (thread_ == 32) shared.wait(p_, place_);
        ptx::named_sync(3, kConsumerThreads);
    }

    // Many splits: several threads share the splits of a value.
    __device__ void merge_narrow(const SharedRequest& shared, const QuerySpan& query, int begin, int share) const {
        const int shift = 31 - __clz(share), shares = kConsumerThreads >> shift;
        const int index = begin + (thread_ & (share - 1));
        const Index at(index);
        const Target low(p_, place_, query, map_, at.row), high(p_, place_, query, map_, at.row + Index::kRowStep);
        wait(shared);
        State state;
        constexpr int kBatch = kRows == 64 ? 17 : 9;  // 132 splits in one round
#pragma unroll 1
        for (int first = thread_ >> shift; first < shared.splits; first += kBatch * shares) {
            add_splits<kBatch>(shared, index, at.row, first, shares, state);
        }
#pragma unroll
        for (int i = 0; i < kPieces; ++i) sums_[i * kConsumerThreads + thread_] = state.sum[i];
        states_[thread_] = make_float4(state.top[0], state.top[1], state.total[0], state.total[1]);
        ptx::named_sync(3, kConsumerThreads);
        if (thread_ < share) {
            join_shares(share, shares, state);
            write(low, high, at.dim, state);
        }
        ptx::named_sync(3, kConsumerThreads);
    }

    // Few splits: a thread takes whole values, several at a time.
    __device__ void merge_columns(const SharedRequest& shared, const QuerySpan& query, int begin, int share) const {
        constexpr int kColumns = 4 / kPieces, kBatch = 4;
        wait(shared);
#pragma unroll 1
        for (int offset = thread_; offset < share; offset += kColumns * kConsumerThreads) {
            State state[kColumns];
#pragma unroll 1
            for (int first = 0; first < shared.splits; first += kBatch) {
#pragma unroll
                for (int i = 0; i < kColumns; ++i) {
                    const int index = min(begin + offset + i * kConsumerThreads, Index::used(p_) - 1);
                    add_splits<kBatch>(shared, index, Index(index).row, first, 1, state[i]);
                }
            }
#pragma unroll
            for (int i = 0; i < kColumns; ++i) {
                const int column = offset + i * kConsumerThreads;
                if (column >= share || begin + column >= Index::used(p_)) continue;
                const Index at(begin + column);
                write(Target(p_, place_, query, map_, at.row),
                      Target(p_, place_, query, map_, at.row + Index::kRowStep), at.dim, state[i]);
            }
        }
    }

    // Splits from, from + step, ...: kBatch of them, as far as they exist; all loads go out before the first is used.
    template <int kBatch>
    __device__ void add_splits(const SharedRequest& shared, int index, int row, int from, int step,
                               State& state) const {
        const Value* partial = static_cast<const Value*>(p_.partial_out) + index;
        const float2* states = reinterpret_cast<const float2*>(p_.partial_lse + Index::state(row));
        const int row_tiles = p_.head_tiles * p_.token_tiles;
        Value values[kBatch];
        float2 lse[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int split = from + i * step;
            const bool exists = split < shared.splits;
            const int slot = (2 * (shared.first_group + split) + (split == 0)) * row_tiles + place_.row_tile;
            values[i] = exists ? ptx::load_cached_l2(partial + int64_t{slot} * Index::kTotal) : Value{};
            lse[i] =
                exists ? ptx::load_cached_l2(states + int64_t{slot} * (kRows / 2)) : make_float2(-INFINITY, -INFINITY);
        }
        float low = state.top[0], high = state.top[1];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            low = fmaxf(low, lse[i].x);
            high = fmaxf(high, lse[i].y);
        }
        rescale(state, low, high);
        low = finite(low);
        high = finite(high);
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            add(state, values[i], ptx::exp2_fast(lse[i].x - low), ptx::exp2_fast(lse[i].y - high));
    }

    __device__ static float finite(float top) { return top == -INFINITY ? 0.0f : top; }

    __device__ static void add(State& state, const Value& value, float low, float high) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) add_piece(state.sum[i], Store::piece(value, i), low, high);
        state.total[0] += low;
        state.total[1] += high;
    }

    __device__ static void add_piece(float4& sum, const float4& v, float low, float high) {
        sum.x += low * v.x;
        sum.y += low * v.y;
        sum.z += high * v.z;
        sum.w += high * v.w;
    }

    __device__ static void rescale(State& state, float low, float high) {
        const float a = ptx::exp2_fast(state.top[0] - finite(low)), b = ptx::exp2_fast(state.top[1] - finite(high));
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            const float4 v = state.sum[i];
            state.sum[i] = make_float4(v.x * a, v.y * a, v.z * b, v.w * b);
        }
        state.total[0] *= a;
        state.total[1] *= b;
        state.top[0] = low;
        state.top[1] = high;
    }

    __device__ void join_shares(int width, int shares, State& state) const {
        float low = -INFINITY, high = -INFINITY;
#pragma unroll 4
        for (int other = 0; other < shares; ++other) {
            const float4 s = states_[thread_ + other * width];
            low = fmaxf(low, s.x);
            high = fmaxf(high, s.y);
        }
        state = State{};
        state.top[0] = low;
        state.top[1] = high;
        low = finite(low);
        high = finite(high);
#pragma unroll 4
        for (int other = 0; other < shares; ++other) {
            const float4 s = states_[thread_ + other * width];
            const float a = ptx::exp2_fast(s.x - low), b = ptx::exp2_fast(s.y - high);
#pragma unroll
            for (int i = 0; i < kPieces; ++i)
                add_piece(state.sum[i], sums_[i * kConsumerThreads + thread_ + other * width], a, b);
            state.total[0] += a * s.z;
            state.total[1] += b * s.w;
        }
    }

    __device__ static void write(const Target& low, const Target& high, int dim, const State& state) {
        write_row<0>(low, dim, state);
        write_row<1>(high, dim, state);
    }

    template <int kHigh>
    __device__ static void write_row(const Target& target, int dim, const State& state) {
        if (!target.exists) return;
        const float total = state.total[kHigh], scale = total > 0.0f ? __fdividef(1.0f, total) : 0.0f;
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            __nv_bfloat16* out = target.out + dim + i * Index::kPieceDims;
            out[0] = __float2bfloat16((kHigh ? state.sum[i].z : state.sum[i].x) * scale);
            out[Index::kDimStep] = __float2bfloat16((kHigh ? state.sum[i].w : state.sum[i].y) * scale);
        }
        if (dim == 0) *target.lse = total > 0.0f ? (state.top[kHigh] + ptx::log2_fast(total)) * kLn2 : -INFINITY;
    }

    const DecodeParams& p_;
    const Place& place_;
    RowMap<kRows> map_;
    float4 *sums_, *states_;  // [thread]; they lie where the query rows were
    int thread_;
};

}  // namespace tokenspeed::mla
