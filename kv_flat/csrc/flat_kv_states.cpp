// SPDX-License-Identifier: Apache-2.0
// The part of FlatKv that looks after groups that keep states.
#include <utility>

#include "kv_flat/csrc/flat_kv.h"

namespace tokenspeed::kv_flat {

void FlatKv::extend_state(KvSequence& sequence, GroupId group, std::uint32_t num_columns) {
    KvSequence::Column& column = sequence.columns_[group];
    BlockTable& table = column.table;
    if (num_columns > table.size()) {
        while (table.size() + 1 < num_columns) table.append_null();
        table.append(pool_.take());
    } else if (column.num_told < table.size()) {
        // The step goes on in the column of the state that the cache gave; others may come back to that one.
        BlockRef own = pool_.take();
        BlockRef target = pool_.share(own.id());
        sequence.add_copy({group, table.replace(table.size() - 1, std::move(own)), std::move(target)});
    }
}

void FlatKv::note_states(KvSequence& sequence, std::uint32_t num_tokens, bool is_wanted) noexcept {
    const bool has_key = config_.prefix_caching && num_tokens % config_.key_tokens == 0;
    for (GroupId group = 0; group < config_.groups.size(); ++group) {
        if (config_.groups[group].retention != Retention::kState) continue;
        sequence.columns_[group].checkpoint_tokens = has_key ? num_tokens : 0;
        sequence.columns_[group].checkpoint_is_wanted = is_wanted;
    }
}

std::uint32_t FlatKv::keep_states(KvSequence& sequence, const KeyChain& chain, std::span<const TokenId> tokens,
                                  std::uint32_t end_tokens, std::uint32_t num_spare_blocks) {
    std::uint32_t num_lost = 0;
    for (GroupId group = 0; group < config_.groups.size(); ++group) {
        KvSequence::Column& column = sequence.columns_[group];
        const std::uint32_t num_tokens = std::exchange(column.checkpoint_tokens, 0);
        // Without the ids there is no key: more was sampled in flight than has been delivered.
        if (num_tokens == 0 || num_tokens / config_.key_tokens > chain.keys().size()) continue;
        const std::uint32_t index = config_.groups[group].num_dead_blocks(num_tokens);
        const BlockId block = column.table.ids()[index];
        if (ceil_div(end_tokens, config_.groups[group].block_tokens) > index + 1) {
            publish_state(block, group, chain, tokens, num_tokens);
        } else if (column.checkpoint_is_wanted &&
                   pool_.find(chain.keys()[num_tokens / config_.key_tokens - 1], group) == kNullBlock) {
            if (num_spare_blocks == 0) {
                ++num_lost;
                continue;
            }
            --num_spare_blocks;
            BlockRef kept = pool_.take();
            publish_state(kept.id(), group, chain, tokens, num_tokens);
            const std::uint32_t num_units = config_.groups[group].block_tokens / config_.key_tokens;
            clock_.note_written(kept.id(), (num_tokens / config_.key_tokens - 1) % num_units);
            sequence.add_copy({group, pool_.share(block), std::move(kept)});
        }
    }
    return num_lost;
}

void FlatKv::publish_whole_state(KvSequence::Column& column, GroupId group, const KeyChain& chain,
                                 std::span<const TokenId> tokens, std::uint32_t num_complete) {
    const std::uint32_t num_tokens = column.checkpoint_tokens;
    const std::uint32_t block_tokens = config_.groups[group].block_tokens;
    if (num_tokens == 0 || num_tokens % block_tokens != 0 || num_tokens / config_.key_tokens > num_complete) return;
    const BlockId block = column.table.ids()[num_tokens / block_tokens - 1];
    clock_.note_written(block, block_tokens / config_.key_tokens - 1);
    publish_state(block, group, chain, tokens, num_tokens);
    column.checkpoint_tokens = 0;
}

void FlatKv::publish_state(BlockId block, GroupId group, const KeyChain& chain, std::span<const TokenId> tokens,
                           std::uint32_t num_tokens) {
    const std::uint32_t index = num_tokens / config_.key_tokens - 1;
    const std::uint32_t num_units = config_.groups[group].block_tokens / config_.key_tokens;
    if (pool_.publish(block, chain.keys()[index], group, index % num_units) && pool_.events().enabled())
        record_stored(chain, tokens, group, index);
}

}  // namespace tokenspeed::kv_flat
