// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/bindings/kv_report.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <vector>

namespace tokenspeed::bindings {
namespace {

using kv_flat::BlockId;
using kv_flat::BlockPool;
using kv_flat::EvictionKind;
using kv_flat::GroupId;
using scheduler_fsm::Request;

static_assert(std::endian::native == std::endian::little, "columns leave as they lie in memory");

enum class State : std::uint8_t { kFree, kCached, kPinned, kInUse };
constexpr std::uint8_t kNoKind = 255;
constexpr std::uint8_t kNoGroup = 255;

/// Blocks' worth of room in a holder's tables that holds nothing.
double num_empty_blocks(const KvHolder& holder, const kv_flat::KvConfig& config) {
    double sum = 0.0;
    for (GroupId group = 0; group < config.groups.size(); ++group) {
        const double used = static_cast<double>(holder.num_computed_tokens) / config.groups[group].block_tokens;
        sum += std::max(0.0, holder.kv->table(group).size() - used);
    }
    return sum;
}

/// A value for each block.
struct Columns {
    explicit Columns(std::size_t num_blocks)
        : state(num_blocks),
          kind(num_blocks, kNoKind),
          group(num_blocks, kNoGroup),
          owners(num_blocks),
          keys(num_blocks),
          key(num_blocks),
          run(num_blocks),
          depth(num_blocks),
          session(num_blocks) {}

    std::vector<std::uint8_t> state;
    std::vector<std::uint8_t> kind;
    std::vector<std::uint8_t> group;
    std::vector<std::uint16_t> owners;
    std::vector<std::uint16_t> keys;
    std::vector<std::uint32_t> key;
    std::vector<std::uint32_t> run;
    std::vector<std::uint32_t> depth;
    std::vector<std::uint64_t> session;

    void add_pool(const BlockPool& pool) {
        for (BlockId block = 1; block <= pool.num_usable(); ++block) {
            owners[block] = static_cast<std::uint16_t>(
                std::min<std::uint32_t>(pool.num_owners(block), std::numeric_limits<std::uint16_t>::max()));
            if (owners[block] > 0) state[block] = static_cast<std::uint8_t>(State::kInUse);
            keys[block] = static_cast<std::uint16_t>(pool.num_keys(block));
            if (keys[block] > 0) key[block] = static_cast<std::uint32_t>(pool.first_key(block).leading_bits());
        }
        for (const kv_flat::IdleBlock& idle : pool.idle_blocks()) {
            const bool is_pinned = idle.kind == EvictionKind::kPinned;
            state[idle.block] = static_cast<std::uint8_t>(is_pinned ? State::kPinned : State::kCached);
            kind[idle.block] = static_cast<std::uint8_t>(idle.kind);
            run[idle.block] = idle.run;
            depth[idle.block] = idle.depth;
            session[idle.block] = idle.session;
        }
    }

    void add_holder(const KvHolder& holder) {
        for (GroupId number = 0; number < holder.kv->num_groups(); ++number) {
            const auto ids = holder.kv->table(number).ids();
            for (std::size_t index = 0; index < ids.size(); ++index) {
                if (ids[index] == kv_flat::kNullBlock) continue;
                group[ids[index]] = static_cast<std::uint8_t>(number);
                run[ids[index]] = holder.number;
                depth[ids[index]] = static_cast<std::uint32_t>(index);
                session[ids[index]] = holder.session;
            }
        }
    }
};

template <typename Value>
py::bytes as_bytes(const std::vector<Value>& values) {
    return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(Value)};
}

}  // namespace

std::vector<KvHolder> holders_of(const scheduler_fsm::EngineState& engine) {
    std::vector<KvHolder> holders;
    const auto add = [&holders](const Request* request) {
        holders.push_back({&request->label, request->handle.index, request->hints.session, request->num_computed_tokens,
                           request->kv()});
    };
    for (const auto* set : {&engine.decoding, &engine.prefilling, &engine.transfers.loading, &engine.transfers.loaded})
        std::ranges::for_each(set->items(), add);
    std::ranges::for_each(engine.idle, add);
    return holders;
}

py::dict kv_gauges(const kv_flat::FlatKv& kv, const std::vector<KvHolder>& holders) {
    const BlockPool& pool = kv.pool();
    double num_empty = 0.0;
    for (const KvHolder& holder : holders) num_empty += num_empty_blocks(holder, kv.config());
    const std::uint64_t num_pinned = pool.num_idle_blocks()[static_cast<std::size_t>(EvictionKind::kPinned)];
    py::dict values;
    values["free"] = pool.num_blank();
    values["cached"] = pool.num_free() - pool.num_blank() - num_pinned;
    values["pinned"] = num_pinned;
    values["in_use"] = pool.num_in_use();
    values["fragmentation"] = pool.num_in_use() > 0 ? std::min(1.0, num_empty / pool.num_in_use()) : 0.0;
    return values;
}

py::dict kv_map(const kv_flat::FlatKv& kv, const std::vector<KvHolder>& holders) {
    const BlockPool& pool = kv.pool();
    Columns columns(std::size_t{pool.num_usable()} + 1);
    columns.add_pool(pool);
    py::list requests;
    for (const KvHolder& holder : holders) {
        columns.add_holder(holder);
        requests.append(py::make_tuple(*holder.label, holder.number, holder.session, holder.num_computed_tokens));
    }
    py::dict values;
    values["state"] = as_bytes(columns.state);
    values["kind"] = as_bytes(columns.kind);
    values["group"] = as_bytes(columns.group);
    values["owners"] = as_bytes(columns.owners);
    values["keys"] = as_bytes(columns.keys);
    values["key"] = as_bytes(columns.key);
    values["run"] = as_bytes(columns.run);
    values["depth"] = as_bytes(columns.depth);
    values["session"] = as_bytes(columns.session);
    values["requests"] = requests;
    return values;
}

}  // namespace tokenspeed::bindings
