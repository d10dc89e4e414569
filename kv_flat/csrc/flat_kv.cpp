// SPDX-License-Identifier: Apache-2.0
#include "kv_flat/csrc/flat_kv.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace tokenspeed::kv_flat {
namespace {

KvConfig checked(KvConfig config) {
    const auto fail = [](const std::string& what) { throw std::invalid_argument("KvConfig." + what); };
    if (config.groups.size() > PrefixIndex::kMaxGroups) {
        fail("groups are " + std::to_string(config.groups.size()) + "; there can be at most " +
             std::to_string(PrefixIndex::kMaxGroups));
    }
    if (config.key_tokens == 0) fail("key_tokens is 0; it must be at least 1");
    for (const GroupSpec& group : config.groups) {
        if (group.block_tokens == 0 || group.block_tokens % config.key_tokens != 0) {
            fail("groups[" + group.name + "].block_tokens is " + std::to_string(group.block_tokens) +
                 "; it must be a positive multiple of key_tokens = " + std::to_string(config.key_tokens));
        }
        const bool is_windowed = group.retention == Retention::kSlidingWindow || group.retention == Retention::kChunk;
        if (is_windowed && group.window_tokens == 0) {
            fail("groups[" + group.name + "].window_tokens is 0; a window has at least 1 token");
        }
    }
    if (!(config.residency_sample_rate >= 0.0 && config.residency_sample_rate <= 1.0)) {
        fail("residency_sample_rate is " + std::to_string(config.residency_sample_rate) + "; it must be from 0 to 1");
    }
    return config;
}

std::uint32_t most_units(const KvConfig& config) noexcept {
    std::uint32_t most = 1;
    for (const GroupSpec& group : config.groups) most = std::max(most, group.block_tokens / config.key_tokens);
    return most;
}

std::uint32_t state_block_tokens_of(const KvConfig& config) noexcept {
    std::uint32_t largest = 0;
    for (const GroupSpec& group : config.groups) {
        if (group.retention == Retention::kState) largest = std::max(largest, group.block_tokens);
    }
    return largest;
}

}  // namespace

FlatKv::FlatKv(KvConfig config)
    : config_(checked(std::move(config))),
      state_block_tokens_(state_block_tokens_of(config_)),
      has_dying_blocks_(std::ranges::any_of(
          config_.groups, [](const GroupSpec& group) { return group.retention != Retention::kFull; })),
      pool_(config_.num_blocks, config_.record_events, most_units(config_), config_.eviction),
      clock_(config_.num_blocks, most_units(config_), state_block_tokens_ > 0),
      matcher_(pool_, clock_, config_.groups, config_.key_tokens) {
    if (config_.prefix_caching && config_.residency_sample_rate > 0.0)
        pool_.follow_blocks(config_.residency_sample_rate);
}

Match FlatKv::probe(std::span<const Digest> keys, std::uint32_t max_tokens, bool drop_last, MatchEnd end) const {
    if (!config_.prefix_caching || config_.groups.empty()) return no_match();
    Match match = matcher_.find(keys, max_tokens, end);
    if (drop_last && match.num_tokens > 0) match = matcher_.find(keys, match.num_tokens - 1, end);
    return match;
}

Match FlatKv::no_match() const {
    Match match;
    match.blocks.resize(config_.groups.size());
    return match;
}

std::uint32_t FlatKv::max_held_blocks(std::uint32_t num_tokens) const noexcept {
    return held_blocks(num_tokens, config_.in_flight_tokens);
}

std::uint32_t FlatKv::least_held_blocks(std::uint32_t num_tokens) const noexcept { return held_blocks(num_tokens, 1); }

std::uint32_t FlatKv::held_blocks(std::uint32_t num_tokens, std::uint32_t in_flight_tokens) const noexcept {
    std::uint32_t sum = 0;
    for (const GroupSpec& group : config_.groups) sum += group.max_held_blocks(num_tokens, in_flight_tokens);
    return sum;
}

std::uint32_t FlatKv::blocks_to_open(const Match& match, std::uint32_t num_tokens) const noexcept {
    const std::uint32_t held = max_held_blocks(num_tokens);
    const std::uint32_t taken = held > match.num_shared_blocks ? held - match.num_shared_blocks : 0;
    return taken + match.num_copied_idle_blocks;
}

std::uint32_t FlatKv::num_missing_blocks(const KvSequence& sequence, std::uint32_t num_tokens) const noexcept {
    std::uint32_t sum = 0;
    for (GroupId group = 0; group < config_.groups.size(); ++group) {
        sum += num_missing(sequence, group, num_tokens);
    }
    return sum;
}

std::uint32_t FlatKv::num_missing(const KvSequence& sequence, GroupId group, std::uint32_t num_tokens) const noexcept {
    const std::uint32_t wanted = ceil_div(num_tokens, config_.groups[group].block_tokens);
    const std::uint32_t present = sequence.table(group).size();
    if (config_.groups[group].retention != Retention::kState) return wanted > present ? wanted - present : 0;
    // A state of the cache that the step would replace needs a block of the sequence's own.
    return wanted > present || sequence.columns_[group].num_told < present ? 1 : 0;
}

void FlatKv::note_lengths(KvSequence& sequence) const noexcept {
    constexpr std::uint64_t kNever = std::numeric_limits<std::uint32_t>::max();
    std::uint64_t covered = kNever;
    std::uint64_t settled = kNever;
    for (GroupId group = 0; group < config_.groups.size(); ++group) {
        const KvSequence::Column& column = sequence.columns_[group];
        const bool is_state = config_.groups[group].retention == Retention::kState;
        const std::uint64_t held = std::uint64_t{column.table.size()} * config_.groups[group].block_tokens;
        const std::uint64_t next_key = (std::uint64_t{column.num_published} + 1) * config_.key_tokens;
        covered = std::min(covered, is_state ? 0 : held);
        settled = std::min(settled, is_state ? 0 : next_key);
    }
    sequence.covered_tokens_ = static_cast<std::uint32_t>(covered);
    sequence.settled_tokens_ = static_cast<std::uint32_t>(config_.prefix_caching ? settled : kNever);
}

std::uint32_t FlatKv::blocks_to_complete(const KvSequence& sequence, std::uint32_t num_tokens) const noexcept {
    std::uint32_t sum = 0;
    for (GroupId group = 0; group < config_.groups.size(); ++group) {
        const std::uint32_t most = config_.groups[group].max_held_blocks(num_tokens, config_.in_flight_tokens);
        const std::uint32_t held = sequence.table(group).num_held();
        if (most > held) sum += most - held;
    }
    return sum;
}

void FlatKv::own_match(KvSequence& sequence, const Match& match) {
    sequence.columns_.reserve(config_.groups.size());
    for (GroupId group = 0; group < config_.groups.size(); ++group) {
        KvSequence::Column column{BlockTable(pool_)};
        const std::uint32_t tail_units = num_tail_units(match, group);
        const std::size_t num_blocks = match.blocks[group].size();
        for (std::size_t index = 0; index < num_blocks; ++index) {
            const BlockId block = match.blocks[group][index];
            if (block == kNullBlock) {
                column.table.append_null();
            } else if (index + 1 < num_blocks || tail_units == 0 ||
                       config_.groups[group].retention == Retention::kState ||
                       matcher_.may_adopt(group, block, tail_units)) {
                column.table.append(pool_.share(block));
            } else {
                sequence.add_copy({group, pool_.share(block)});
            }
        }
        sequence.columns_.push_back(std::move(column));
    }
}

KvSequence FlatKv::open(const Match& match, std::uint64_t session) {
    KvSequence sequence;
    own_match(sequence, match);
    pool_.settle(session);
    // Only now, with every block of the match owned, may others be taken: taking evicts.
    const auto copies = sequence.copies_ ? std::span(*sequence.copies_) : std::span<BlockCopy>();
    for (BlockCopy& copy : copies) {
        copy.target = pool_.take();
        sequence.columns_[copy.group].table.append(pool_.share(copy.target->id()));
        const std::uint32_t tail_units = num_tail_units(match, copy.group);
        for (std::uint32_t unit = 0; unit < tail_units; ++unit) clock_.note_written(copy.target->id(), unit);
    }
    for (KvSequence::Column& column : sequence.columns_) {
        column.num_warm = column.table.size();
        column.num_published = match.num_tokens / config_.key_tokens;
    }
    note_lengths(sequence);
    return sequence;
}

std::uint32_t FlatKv::max_keys() const noexcept { return config_.num_blocks * most_units(config_); }

std::uint32_t FlatKv::fitting_tokens(const KvSequence& sequence, std::uint32_t num_tokens,
                                     std::uint32_t num_blocks) const noexcept {
    if (config_.groups.empty()) return num_tokens;
    // Each block taken lets at most one group grow by its block, so walk down by the smallest block.
    std::uint32_t step = config_.groups.front().block_tokens;
    for (const GroupSpec& group : config_.groups) step = std::min(step, group.block_tokens);
    while (num_tokens > 0 && blocks_to_extend(sequence, num_tokens) > num_blocks) {
        num_tokens = (num_tokens - 1) / step * step;
    }
    return num_tokens;
}

bool FlatKv::grow(KvSequence& sequence, std::uint32_t num_tokens) {
    const std::uint32_t needed = num_missing_blocks(sequence, num_tokens);
    if (needed > pool_.num_free()) return false;
    if (needed == 0) return true;
    sequence.has_grown_ = true;
    for (GroupId group = 0; group < config_.groups.size(); ++group) {
        BlockTable& table = sequence.columns_[group].table;
        const std::uint32_t wanted = ceil_div(num_tokens, config_.groups[group].block_tokens);
        if (config_.groups[group].retention == Retention::kState) {
            extend_state(sequence, group, wanted);
            continue;
        }
        while (table.size() < wanted) table.append(pool_.take());
    }
    note_lengths(sequence);
    return true;
}

std::uint32_t FlatKv::blocks_to_load(const Match& match, std::uint32_t num_tokens,
                                     std::uint32_t num_computed_tokens) const noexcept {
    std::uint32_t sum = match.num_idle_blocks;
    for (GroupId group = 0; group < config_.groups.size(); ++group) {
        const auto num_matched = static_cast<std::uint32_t>(match.blocks[group].size());
        const std::uint32_t first = std::max(num_matched, config_.groups[group].num_dead_blocks(num_computed_tokens));
        const std::uint32_t wanted = ceil_div(num_tokens, config_.groups[group].block_tokens);
        if (wanted > first) sum += wanted - first;
    }
    return sum;
}

void FlatKv::extend_loaded(KvSequence& sequence, std::uint32_t num_tokens, std::uint32_t num_computed_tokens) {
    retire(sequence, num_computed_tokens, num_computed_tokens);
    for (GroupId group = 0; group < config_.groups.size(); ++group) {
        KvSequence::Column& column = sequence.columns_[group];
        const std::uint32_t num_dead = config_.groups[group].num_dead_blocks(num_computed_tokens);
        while (column.table.size() < num_dead) column.table.append_null();
        column.num_retired = std::max(column.num_retired, num_dead);
    }
    sequence.has_grown_ = true;
    note_lengths(sequence);
    static_cast<void>(extend(sequence, num_tokens));
}

void FlatKv::retire_dead(KvSequence& sequence, std::uint32_t num_computed_tokens,
                         std::uint32_t num_planned_tokens) noexcept {
    for (GroupId group = 0; group < config_.groups.size(); ++group) {
        KvSequence::Column& column = sequence.columns_[group];
        const GroupSpec& spec = config_.groups[group];
        const std::uint32_t num_tokens = spec.retention == Retention::kState ? num_planned_tokens : num_computed_tokens;
        const std::uint32_t num_dead = std::min(spec.num_dead_blocks(num_tokens), column.table.size());
        // Tail first, like a whole table's release: the eviction order within a group does not depend on the path.
        for (std::uint32_t index = num_dead; index > column.num_retired; --index) column.table.retire(index - 1);
        column.num_retired = std::max(column.num_retired, num_dead);
    }
}

void FlatKv::publish_complete(KvSequence& sequence, const KeyChain& chain, std::span<const TokenId> tokens,
                              std::uint32_t num_tokens) {
    if (!config_.prefix_caching || chain.key_tokens() == 0) return;
    // Keys that look ahead come later than their block.
    const auto num_keyed = static_cast<std::uint32_t>(chain.keys().size());
    const std::uint32_t num_complete = std::min(num_tokens / config_.key_tokens, num_keyed);
    for (GroupId group = 0; group < config_.groups.size(); ++group) {
        KvSequence::Column& column = sequence.columns_[group];
        if (config_.groups[group].retention == Retention::kState) {
            publish_whole_state(column, group, chain, tokens, num_complete);
            continue;
        }
        if (column.num_published >= num_complete) continue;
        const std::uint32_t num_units = config_.groups[group].block_tokens / config_.key_tokens;
        for (std::uint32_t& index = column.num_published; index < num_complete; ++index) {
            const BlockId block = column.table.ids()[index / num_units];
            if (block == kNullBlock) continue;
            const std::uint32_t unit = index % num_units;
            clock_.note_written(block, unit);
            if (pool_.publish(block, chain.keys()[index], group, unit) && pool_.events().enabled())
                record_stored(chain, tokens, group, index);
        }
    }
    note_lengths(sequence);
}

void FlatKv::record_stored(const KeyChain& chain, std::span<const TokenId> tokens, GroupId group, std::uint32_t index) {
    KvEvent stored;
    stored.kind = KvEvent::Kind::kStored;
    stored.group = group;
    stored.block_tokens = config_.key_tokens;
    stored.key = chain.keys()[index];
    stored.has_parent = index > 0;
    stored.parent = index > 0 ? chain.keys()[index - 1] : chain.root();
    const auto block = tokens.subspan(std::size_t{index} * config_.key_tokens, config_.key_tokens);
    stored.tokens.assign(block.begin(), block.end());
    pool_.events().record(std::move(stored));
}

void FlatKv::count_owners(const KvSequence& sequence, std::vector<std::uint32_t>& owners) {
    for (GroupId group = 0; group < sequence.num_groups(); ++group) {
        for (const BlockId block : sequence.table(group).ids()) owners[block] += block != kNullBlock;
    }
    for (const BlockCopy& copy : sequence.copies()) {
        ++owners[copy.source.id()];
        if (copy.target) ++owners[copy.target->id()];
    }
}

}  // namespace tokenspeed::kv_flat
