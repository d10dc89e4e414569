// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kv_flat/csrc/flat_kv.h"
#include "kv_flat/csrc/isolation_watch.h"
#include "kv_flat/csrc/pinned_blocks.h"
#include "scheduler_fsm/csrc/bindings/kv_report.h"
#include "scheduler_fsm/csrc/request.h"

namespace tokenspeed::bindings {

namespace py = pybind11;

/// The flat KV manager under a scheduler that is not ours: sequences by request id.
///
/// All counts are tokens or blocks. A request is known from `open` to `close`; it holds blocks from `grow` to
/// `release`.
class HostedKv {
  public:
    /// What one call of `grow` asks for.
    struct Growth {
        std::uint32_t num_hit = 0;        ///< tokens of the match to adopt; only while the request holds nothing
        std::uint32_t num_external = 0;   ///< tokens behind the match that a connector loads
        std::uint32_t num_settled = 0;    ///< computed tokens that no step in flight takes back: windows end here
        std::uint32_t num_slots = 0;      ///< tokens that the tables must cover
        std::uint32_t num_published = 0;  ///< tokens to make hittable; 0 while a load is in flight
        std::uint32_t num_whole = 0;      ///< tokens of the whole sequence, which must fit as well; 0: not asked
        std::uint32_t num_kept_free = 0;  ///< blocks to leave to others
        std::uint32_t num_watermark = 0;  ///< the part of these that the whole sequence must leave, too
    };

    /// Counts since start, of admissions that could read the cache; as in scheduler_fsm::Counters.
    struct Counters {
        std::uint64_t num_evicted_hit_tokens = 0;
        std::uint64_t num_granularity_lost_tokens = 0;
        std::uint64_t num_missing_state_tokens = 0;
        std::uint64_t num_isolated_tokens = 0;
        std::uint64_t num_block_copies = 0;
    };

    /// @param drop_last_match_block see FlatKv::probe
    /// @param whole_blocks_only matches end at whole physical blocks
    /// @param zeroes_blocks workers zero new blocks, so they are listed
    HostedKv(kv_flat::KvConfig config, bool drop_last_match_block, bool whole_blocks_only, bool zeroes_blocks);

    /// A step is about to be planned, at `now_s` on any clock.
    void begin_step(double now_s);
    /// The step is planned: what was published for it will be written.
    void end_step() noexcept { is_planning_ = false; }

    [[nodiscard]] bool knows(const std::string& id) const { return held_.contains(id); }
    /// Takes a prompt in, or the longer one of a session in its place: its keys must begin alike.
    void open(const std::string& id, scheduler_fsm::PreparedPrompt& prompt, const kv_flat::SessionHints& hints);
    /// Forgets a request that holds nothing.
    void close(const std::string& id) { held_.erase(id); }

    /// Looks a prompt up. Remembered until `grow`. @returns tokens
    /// @param num_whole tokens of the whole sequence
    [[nodiscard]] std::uint32_t probe(const std::string& id, std::uint32_t max_tokens, std::uint32_t num_whole);

    /// Blocks for more tokens. @returns the new blocks by group, an empty tuple for none; None, and no change, when
    /// there are too few.
    /// @param tokens list[int], all known tokens of the request
    /// @param unzeroed groups whose blocks are not to be listed for zeroing
    [[nodiscard]] py::object grow(const std::string& id, const py::list& tokens, const Growth& growth,
                                  const std::vector<kv_flat::GroupId>& unzeroed);

    /// Makes the first `num_tokens` tokens hittable.
    void publish(const std::string& id, const py::list& tokens, std::uint32_t num_tokens);
    void retire(const std::string& id, std::uint32_t num_settled);

    /// What is known of a request that leaves; nothing while its prompt is given as empty.
    [[nodiscard]] kv_flat::Departure departure(const std::string& id, std::uint32_t num_prompt_tokens,
                                               std::uint32_t num_output_tokens) const;
    /// Gives a request's blocks back.
    void release(const std::string& id, std::uint32_t num_prompt_tokens, std::uint32_t num_output_tokens);
    /// The same, but the blocks become pins. @returns them in the order opposite to that of `release`
    [[nodiscard]] std::vector<kv_flat::BlockId> release_into_pins(const std::string& id);

    void pin(const std::vector<kv_flat::BlockId>& blocks);
    void unpin(const std::vector<kv_flat::BlockId>& blocks, const kv_flat::Departure& departure);
    void unpublish(const std::vector<kv_flat::BlockId>& blocks);
    [[nodiscard]] bool reset();

    /// Blocks of each group: tuple[list[int], ...].
    [[nodiscard]] py::tuple block_ids(const std::string& id) const;
    [[nodiscard]] std::uint32_t num_hit_tokens(const std::string& id) const;
    [[nodiscard]] std::uint32_t num_published_tokens(const std::string& id) const;
    /// Blocks that a request may still take until it holds `num_tokens`.
    [[nodiscard]] std::uint32_t blocks_to_complete(const std::string& id, std::uint32_t num_tokens) const;

    /// list[(source, target)]; both ends are pinned.
    [[nodiscard]] py::list take_copies();
    [[nodiscard]] std::vector<kv_flat::BlockId> take_blocks_to_zero() { return std::exchange(blocks_to_zero_, {}); }
    /// Lists a request's blocks from `num_tokens` on for zeroing. @pre a multiple of every group's block
    void zero_from(const std::string& id, std::uint32_t num_tokens);
    /// Tells again, as events, what the last match of a request found.
    void record_match(const std::string& id);

    [[nodiscard]] const Counters& counters() const noexcept { return counters_; }
    [[nodiscard]] std::vector<KvHolder> holders() const;

    [[nodiscard]] kv_flat::FlatKv& kv() noexcept { return kv_; }
    [[nodiscard]] const kv_flat::FlatKv& kv() const noexcept { return kv_; }
    /// Throws std::logic_error naming the first broken invariant.
    void check_integrity() const;

  private:
    struct Held {
        scheduler_fsm::PreparedPrompt prompt;
        kv_flat::SessionHints hints;
        std::optional<kv_flat::KvSequence> kv;
        kv_flat::Match match;
        std::uint64_t matched_at = 0;     // count of changes when it was probed
        std::uint32_t num_hit = 0;        // tokens of the match that `kv` began with
        std::uint32_t num_published = 0;  // tokens offered to the index
        std::uint32_t num_confirmed = 0;  // of these, before the step being planned
        std::uint64_t published_step = 0;
        std::uint32_t number = 0;        // for reports
        std::uint32_t num_computed = 0;  // tokens, with those of the step being planned
    };

    [[nodiscard]] Held& at(const std::string& id);
    [[nodiscard]] bool begin(Held& held, const Growth& growth, std::uint32_t num_known_tokens);
    void count_admission(Held& held, const Growth& growth, std::uint32_t num_known_tokens);
    [[nodiscard]] bool extend(Held& held, const Growth& growth);
    [[nodiscard]] std::uint32_t blocks_to_begin(const kv_flat::Match& match, const Growth& growth) const;
    [[nodiscard]] kv_flat::MatchEnd match_end() const noexcept {
        return whole_blocks_only_ ? kv_flat::MatchEnd::kPhysicalBlock : kv_flat::MatchEnd::kLogicalBlock;
    }
    [[nodiscard]] bool fits(std::uint32_t num_blocks, std::uint32_t num_whole_blocks, const Growth& growth) const;
    [[nodiscard]] py::object news(Held& held, const std::vector<kv_flat::GroupId>& unzeroed);
    void publish(Held& held, const py::list& tokens, std::uint32_t num_tokens);
    void take_back_unwritten(Held& held);

    bool drop_last_match_block_;
    bool whole_blocks_only_;
    bool zeroes_blocks_;
    kv_flat::FlatKv kv_;
    kv_flat::IsolationWatch isolation_;
    Counters counters_;
    std::uint32_t num_opened_ = 0;
    std::unordered_map<std::string, Held> held_;
    std::vector<kv_flat::BlockCopy> copies_;
    kv_flat::PinnedBlocks pins_;
    std::vector<kv_flat::BlockId> blocks_to_zero_;
    std::vector<std::uint32_t> num_told_;  // by group; kept for its capacity
    std::uint64_t num_changes_ = 1;
    std::uint64_t step_ = 0;
    bool is_planning_ = false;
};

void bind_hosted_kv(py::module_& module);

}  // namespace tokenspeed::bindings
