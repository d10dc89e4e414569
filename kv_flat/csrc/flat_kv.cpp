// SPDX-License-Identifier: Apache-2.0
#include "kv_flat/csrc/flat_kv.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace tokenspeed::kv_flat {
namespace {

KvConfig checked(KvConfig config) {
    const auto fail = [](const std::string& what) { throw std::invalid_argument("KvConfig." + what); };
    if (config.groups.empty()) fail("groups is empty; at least one KV cache group is needed");
    if (config.key_tokens == 0) fail("key_tokens is 0; it must be at least 1");
    for (const GroupSpec& group : config.groups) {
        if (group.block_tokens == 0 || group.block_tokens % config.key_tokens != 0) {
            fail("groups[" + group.name + "].block_tokens is " + std::to_string(group.block_tokens) +
                 "; it must be a positive multiple of key_tokens = " + std::to_string(config.key_tokens));
        }
        if (group.retention == Retention::kSlidingWindow && group.window_tokens == 0) {
            fail("groups[" + group.name + "].window_tokens is 0; a sliding window has at least 1 token");
        }
    }
    if (!(config.residency_sample_rate >= 0.0 && config.residency_sample_rate <= 1.0)) {
        fail("residency_sample_rate is " + std::to_string(config.residency_sample_rate) + "; it must be from 0 to 1");
    }
    return config;
}

}  // namespace

FlatKv::FlatKv(KvConfig config)
    : config_(checked(std::move(config))),
      pool_(config_.num_blocks, config_.record_events),
      matcher_(pool_, config_.groups, config_.key_tokens) {
    if (config_.prefix_caching && config_.residency_sample_rate > 0.0)
        pool_.follow_blocks(config_.residency_sample_rate);
}

Match FlatKv::probe(std::span<const Digest> keys, std::uint32_t max_tokens, bool drop_last) const {
    if (!config_.prefix_caching) return no_match();
    Match match = matcher_.find(keys, max_tokens);
    if (drop_last && match.num_tokens > 0) match = matcher_.find(keys, match.num_tokens - 1);
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
    return held > match.num_shared_blocks ? held - match.num_shared_blocks : 0;
}

std::uint32_t FlatKv::blocks_to_extend(const KvSequence& sequence, std::uint32_t num_tokens) const noexcept {
    std::uint32_t sum = 0;
    for (GroupId group = 0; group < config_.groups.size(); ++group) {
        const std::uint32_t wanted = ceil_div(num_tokens, config_.groups[group].block_tokens);
        const std::uint32_t present = sequence.table(group).size();
        if (wanted > present) sum += wanted - present;
    }
    return sum;
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

KvSequence FlatKv::open(const Match& match) {
    KvSequence sequence;
    sequence.columns_.reserve(config_.groups.size());
    for (GroupId group = 0; group < config_.groups.size(); ++group) {
        KvSequence::Column column{BlockTable(pool_)};
        for (const BlockId block : match.blocks[group]) {
            if (block == kNullBlock) {
                column.table.append_null();
            } else {
                column.table.append(pool_.share(block));
            }
        }
        column.num_published = column.table.size();
        sequence.columns_.push_back(std::move(column));
    }
    return sequence;
}

std::uint32_t FlatKv::fitting_tokens(const KvSequence& sequence, std::uint32_t num_tokens,
                                     std::uint32_t num_blocks) const noexcept {
    // Each block taken lets at most one group grow by its block, so walk down by the smallest block.
    std::uint32_t step = config_.groups.front().block_tokens;
    for (const GroupSpec& group : config_.groups) step = std::min(step, group.block_tokens);
    while (num_tokens > 0 && blocks_to_extend(sequence, num_tokens) > num_blocks) {
        num_tokens = (num_tokens - 1) / step * step;
    }
    return num_tokens;
}

bool FlatKv::extend(KvSequence& sequence, std::uint32_t num_tokens) {
    const std::uint32_t needed = blocks_to_extend(sequence, num_tokens);
    if (needed > pool_.num_free()) return false;
    if (needed == 0) return true;
    for (GroupId group = 0; group < config_.groups.size(); ++group) {
        BlockTable& table = sequence.columns_[group].table;
        const std::uint32_t wanted = ceil_div(num_tokens, config_.groups[group].block_tokens);
        while (table.size() < wanted) table.append(pool_.take());
    }
    return true;
}

void FlatKv::retire(KvSequence& sequence, std::uint32_t num_computed_tokens) noexcept {
    for (GroupId group = 0; group < config_.groups.size(); ++group) {
        KvSequence::Column& column = sequence.columns_[group];
        const std::uint32_t num_dead =
            std::min(config_.groups[group].num_dead_blocks(num_computed_tokens), column.table.size());
        // Tail first, like a whole table's release: the eviction order within a group does not depend on the path.
        for (std::uint32_t index = num_dead; index > column.num_retired; --index) column.table.retire(index - 1);
        column.num_retired = std::max(column.num_retired, num_dead);
    }
}

void FlatKv::publish(KvSequence& sequence, const KeyChain& chain, std::span<const TokenId> tokens,
                     std::uint32_t num_tokens) {
    if (!config_.prefix_caching || chain.key_tokens() == 0) return;
    for (GroupId group = 0; group < config_.groups.size(); ++group) {
        KvSequence::Column& column = sequence.columns_[group];
        const std::uint32_t block_tokens = config_.groups[group].block_tokens;
        const std::uint32_t num_whole = num_tokens / block_tokens;
        for (std::uint32_t& index = column.num_published; index < num_whole; ++index) {
            const BlockId block = column.table.ids()[index];
            if (block == kNullBlock) continue;
            const Digest& key = chain.keys()[(index + 1) * (block_tokens / chain.key_tokens()) - 1];
            if (pool_.publish(block, key, group) && pool_.events().enabled())
                record_stored(chain, tokens, group, index);
        }
    }
}

void FlatKv::record_stored(const KeyChain& chain, std::span<const TokenId> tokens, GroupId group, std::uint32_t index) {
    const std::uint32_t block_tokens = config_.groups[group].block_tokens;
    const std::uint32_t keys_per_block = block_tokens / chain.key_tokens();
    KvEvent stored;
    stored.kind = KvEvent::Kind::kStored;
    stored.group = group;
    stored.block_tokens = block_tokens;
    stored.key = chain.keys()[(index + 1) * keys_per_block - 1];
    stored.has_parent = index > 0;
    stored.parent = index > 0 ? chain.keys()[index * keys_per_block - 1] : chain.root();
    const auto block = tokens.subspan(std::size_t{index} * block_tokens, block_tokens);
    stored.tokens.assign(block.begin(), block.end());
    pool_.events().record(std::move(stored));
}

void FlatKv::count_owners(const KvSequence& sequence, std::vector<std::uint32_t>& owners) {
    for (GroupId group = 0; group < sequence.num_groups(); ++group) {
        for (const BlockId block : sequence.table(group).ids()) owners[block] += block != kNullBlock;
    }
}

}  // namespace tokenspeed::kv_flat
