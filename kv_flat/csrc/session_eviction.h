// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "kv_flat/csrc/eviction_policy.h"

namespace tokenspeed::kv_flat {

/// Evicts by who is likely to come back, and when.
///
/// Blocks that one sequence gave back form a *run*, tail first. A run stands in one of four places; `pop` looks at them
/// in this order:
///
///   spent     a later turn left it behind, or its session ended       oldest first
///   idle      ordered by release time - scale                         } whichever has the longer wait ahead:
///   expected  its session said when it returns; then it turns idle    } scale + age, or time until the return
///   pinned    until the pin runs out; then it turns idle              first to run out first
///
/// What a run keeps when another sequence adopts its head is a tail that this sequence did not want. When both belong
/// to one session the tail is superseded. When sessions are not named it is taken to be, as long as such guesses mostly
/// come true: the policy counts how many such tails were asked for after all.
///
/// A block that several living runs build on has no scale and no hints: its newest owner does not speak for the others.
/// A pinned block stays with the run that pinned it, whoever uses it meanwhile.
class SessionEviction final : public EvictionPolicy {
  public:
    SessionEviction(const EvictionSpec& spec, BlockLinks& links);

    void open_run(const Departure& departure) override;
    void close_run() noexcept override;
    void add(BlockId block) noexcept override;
    void adopt(BlockId block) noexcept override;
    void settle(std::uint64_t session) noexcept override;
    void remove(BlockId block) noexcept override;
    [[nodiscard]] Victim pop() noexcept override;
    [[nodiscard]] CountsByKind num_blocks() const override { return num_blocks_; }
    [[nodiscard]] std::vector<IdleBlock> idle_blocks() const override;
    [[nodiscard]] double bytes_per_block() const noexcept override;
    [[nodiscard]] std::vector<BlockId> order() const override;

  private:
    using RunId = std::uint32_t;
    enum class Place : std::uint8_t { kSpent, kIdle, kExpected, kPinned };

    struct Run {
        BlockList blocks;
        std::uint32_t generation = 0;  // tells a run from one that had its number before
        Place place = Place::kIdle;
        bool queued = false;
        bool superseded = false;
        std::size_t num_pinned = 0;
        std::uint64_t session = 0;
        std::uint64_t serial = 0;  // among equals the older run goes first
        double idle_key_s = 0.0;   // release time - scale
        double key_s = 0.0;        // what its place is ordered by
    };
    struct RunRef {
        RunId run = 0;
        std::uint32_t generation = 0;
    };
    struct QueueKey {
        double key_s;
        std::uint64_t serial;
        RunId run;
        friend bool operator<(const QueueKey& a, const QueueKey& b) noexcept {
            return std::tie(a.key_s, a.serial) < std::tie(b.key_s, b.serial);
        }
    };
    using Queue = std::set<QueueKey>;
    /// How guesses about superseded tails turned out, in blocks; old ones fade.
    struct Guesses {
        double num_right = 0.0;
        double num_wrong = 0.0;
        void add(bool right) noexcept;
        [[nodiscard]] bool are_good() const noexcept;
    };

    [[nodiscard]] RunId new_run();
    void enqueue(RunId run);
    void dequeue(RunId run) noexcept;
    void move(RunId run, Place place, double key_s);
    [[nodiscard]] std::uint64_t& count(const Run& run) noexcept {
        return num_blocks_[static_cast<std::size_t>(kind_of(run))];
    }
    [[nodiscard]] double wait_s(const Run& run) const noexcept;
    void recycle_if_empty(RunId run) noexcept;
    void take_out(BlockId block, RunId run) noexcept;
    void release_due() noexcept;
    void place_by_hints(Run& run, const SessionHints& hints) const noexcept;
    [[nodiscard]] bool pins_too_much() const noexcept;
    void supersede(RunId run, std::uint64_t session) noexcept;
    [[nodiscard]] RunId plain_run();
    [[nodiscard]] RunId run_for(BlockId block);
    [[nodiscard]] bool is_alive(RunRef ref) const noexcept;
    [[nodiscard]] double scale_s(const Departure& departure) const noexcept;
    [[nodiscard]] Queue& queue(Place place) noexcept { return queues_[static_cast<std::size_t>(place)]; }
    [[nodiscard]] const Queue& queue(Place place) const noexcept { return queues_[static_cast<std::size_t>(place)]; }
    [[nodiscard]] EvictionKind kind_of(const Run& run) const noexcept;

    EvictionSpec spec_;
    BlockLinks& links_;
    std::vector<RunRef> run_of_;  // by block: where it stands, or stood before it was adopted
    std::vector<Run> runs_;
    std::vector<RunId> unused_runs_;
    std::array<Queue, 4> queues_;
    std::uint64_t next_serial_ = 0;

    bool is_open_ = false;
    RunId open_run_ = 0;
    RunRef plain_run_;  // takes what has no run of its own, for as long as the clock stands still
    double plain_time_s_ = -1.0;
    std::vector<RunRef> adopted_from_;  // runs that lost blocks since the last settle
    Guesses guesses_;
    CountsByKind num_blocks_{};  // kept in step with every run's blocks and place
};

}  // namespace tokenspeed::kv_flat
