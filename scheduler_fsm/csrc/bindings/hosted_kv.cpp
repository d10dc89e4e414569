// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/bindings/hosted_kv.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "scheduler_fsm/csrc/bindings/py_handle.h"

namespace tokenspeed::bindings {

using kv_flat::BlockId;
using kv_flat::GroupId;
using kv_flat::GroupSpec;
using kv_flat::KvSequence;
using kv_flat::Match;
using kv_flat::MatchEnd;
using scheduler_fsm::PreparedPrompt;

HostedKv::HostedKv(kv_flat::KvConfig config, bool drop_last_match_block, bool whole_blocks_only, bool zeroes_blocks)
    : drop_last_match_block_(drop_last_match_block),
      whole_blocks_only_(whole_blocks_only),
      zeroes_blocks_(zeroes_blocks),
      kv_(std::move(config)),
      isolation_(kv_.max_keys()) {}

HostedKv::Held& HostedKv::at(const std::string& id) {
    const auto found = held_.find(id);
    if (found == held_.end()) throw py::key_error("request " + id + " was never looked up, or has ended");
    return found->second;
}

void HostedKv::begin_step(double now_s) {
    kv_.begin_step();
    kv_.pool().set_time(now_s);
    ++step_;
    is_planning_ = true;
}

void HostedKv::open(const std::string& id, PreparedPrompt& prompt, const kv_flat::SessionHints& hints) {
    Held& held = held_[id];
    held.prompt = std::move(prompt);
    held.hints = hints;
    held.matched_at = 0;
    if (held.number == 0) held.number = ++num_opened_;
}

std::uint32_t HostedKv::probe(const std::string& id, std::uint32_t max_tokens, std::uint32_t num_whole) {
    Held& held = at(id);
    const auto keys = held.prompt.chain.keys();
    held.match = kv_.probe(keys, max_tokens, drop_last_match_block_, match_end());
    // A request that could only start with one more block than it needs might never start.
    if (held.match.num_tokens > 0 && kv_.blocks_to_open(held.match, num_whole) > kv_.pool().num_free())
        held.match = kv_.probe(keys, max_tokens, drop_last_match_block_, MatchEnd::kPhysicalBlock);
    held.matched_at = num_changes_;
    return held.match.num_tokens;
}

std::uint32_t HostedKv::blocks_to_begin(const Match& match, const Growth& growth) const {
    if (growth.num_external > 0) return kv_.blocks_to_load(match, growth.num_slots, growth.num_settled);
    std::uint32_t num_matched = 0;
    std::uint32_t num_more = 0;
    const std::vector<GroupSpec>& groups = kv_.config().groups;
    for (GroupId group = 0; group < groups.size(); ++group) {
        const auto& blocks = match.blocks[group];
        num_matched += static_cast<std::uint32_t>(blocks.size() - std::ranges::count(blocks, kv_flat::kNullBlock));
        const std::uint32_t wanted = kv_flat::ceil_div(growth.num_slots, groups[group].block_tokens);
        if (wanted > blocks.size()) num_more += wanted - static_cast<std::uint32_t>(blocks.size());
    }
    // Those that are neither shared nor idle are copied.
    return num_matched - match.num_shared_blocks + match.num_copied_idle_blocks + num_more;
}

bool HostedKv::fits(std::uint32_t num_blocks, std::uint32_t num_whole_blocks, const Growth& growth) const {
    const std::uint64_t num_free = kv_.pool().num_free();
    if (growth.num_whole > 0 && std::uint64_t{num_whole_blocks} + growth.num_watermark > num_free) return false;
    return std::uint64_t{num_blocks} + growth.num_kept_free <= num_free;
}

bool HostedKv::begin(Held& held, const Growth& growth, std::uint32_t num_known_tokens) {
    if (growth.num_hit == 0) held.match = kv_.no_match();
    if (growth.num_hit > 0 && (held.matched_at != num_changes_ || held.match.num_tokens != growth.num_hit)) {
        held.match = kv_.probe(held.prompt.chain.keys(), growth.num_hit, false, match_end());
        if (held.match.num_tokens != growth.num_hit) return false;  // evicted since; the next lookup knows
    }
    const std::uint32_t num_whole = growth.num_whole > 0 ? kv_.blocks_to_open(held.match, growth.num_whole) : 0;
    if (!fits(blocks_to_begin(held.match, growth), num_whole, growth)) return false;
    count_admission(held, growth, num_known_tokens);
    held.kv = kv_.open(held.match, held.hints.session);
    const std::size_t num_copies = copies_.size();
    for (kv_flat::BlockCopy& copy : held.kv->take_copies()) copies_.push_back(std::move(copy));
    counters_.num_block_copies += copies_.size() - num_copies;
    held.num_hit = growth.num_hit;
    held.published_step = 0;
    held.num_published = held.num_confirmed = held.match.num_tokens;
    held.match = kv_.no_match();
    for (GroupId group = 0; group < held.kv->num_groups(); ++group) static_cast<void>(held.kv->take_news(group));
    if (growth.num_external > 0) {
        kv_.extend_loaded(*held.kv, growth.num_slots, growth.num_settled);
        return true;
    }
    return kv_.extend(*held.kv, growth.num_slots);
}

bool HostedKv::extend(Held& held, const Growth& growth) {
    kv_.retire(*held.kv, growth.num_settled, growth.num_settled);
    const std::uint32_t num_blocks = kv_.blocks_to_extend(*held.kv, growth.num_slots);
    const std::uint32_t num_whole = growth.num_whole > 0 ? kv_.blocks_to_complete(*held.kv, growth.num_whole) : 0;
    return fits(num_blocks, num_whole, growth) && kv_.extend(*held.kv, growth.num_slots);
}

py::object HostedKv::news(Held& held, const std::vector<GroupId>& unzeroed) {
    const std::uint32_t num_groups = held.kv->num_groups();
    bool has_news = false;
    num_told_.resize(num_groups);
    for (GroupId group = 0; group < num_groups; ++group) {
        num_told_[group] = held.kv->take_news(group);
        has_news = has_news || num_told_[group] < held.kv->table(group).size();
    }
    if (!has_news) return py::tuple();
    py::tuple blocks(num_groups);
    for (GroupId group = 0; group < num_groups; ++group) {
        const auto ids = held.kv->table(group).ids().subspan(num_told_[group]);
        blocks[group] = int_list(ids);
        if (!zeroes_blocks_ || std::ranges::find(unzeroed, group) != unzeroed.end()) continue;
        std::ranges::remove_copy(ids, std::back_inserter(blocks_to_zero_), kv_flat::kNullBlock);
    }
    return blocks;
}

py::object HostedKv::grow(const std::string& id, const py::list& tokens, const Growth& growth,
                          const std::vector<GroupId>& unzeroed) {
    Held& held = at(id);
    const std::uint32_t num_free = kv_.pool().num_free();
    const auto num_known = static_cast<std::uint32_t>(PyList_GET_SIZE(tokens.ptr()));
    const bool is_done = held.kv ? extend(held, growth) : begin(held, growth, num_known);
    num_changes_ += num_free != kv_.pool().num_free();
    if (!is_done) return py::none();
    held.num_computed = std::max(growth.num_published, growth.num_settled);
    publish(held, tokens, growth.num_published);
    return news(held, unzeroed);
}

void HostedKv::publish(Held& held, const py::list& tokens, std::uint32_t num_tokens) {
    const std::uint32_t key_tokens = kv_.config().key_tokens;
    if (!kv_.config().prefix_caching || num_tokens / key_tokens <= held.num_published / key_tokens) return;
    PreparedPrompt& prompt = held.prompt;
    for (auto index = static_cast<Py_ssize_t>(prompt.tokens.size()); index < PyList_GET_SIZE(tokens.ptr()); ++index)
        prompt.tokens.push_back(py::handle(PyList_GET_ITEM(tokens.ptr(), index)).cast<kv_flat::TokenId>());
    prompt.chain.extend(prompt.tokens);
    kv_.publish(*held.kv, prompt.chain, prompt.tokens, num_tokens);
    if (std::exchange(held.published_step, step_) != step_ || !is_planning_) held.num_confirmed = held.num_published;
    const auto num_keyed = static_cast<std::uint32_t>(prompt.chain.keys().size()) * key_tokens;
    held.num_published = std::max(held.num_published, std::min(num_tokens / key_tokens * key_tokens, num_keyed));
    ++num_changes_;
}

void HostedKv::publish(const std::string& id, const py::list& tokens, std::uint32_t num_tokens) {
    if (Held& held = at(id); held.kv) publish(held, tokens, num_tokens);
}

void HostedKv::retire(const std::string& id, std::uint32_t num_settled) {
    const auto found = held_.find(id);
    if (found == held_.end() || !found->second.kv) return;
    kv_.retire(*found->second.kv, num_settled, num_settled);
    ++num_changes_;
}

void HostedKv::take_back_unwritten(Held& held) {
    if (!is_planning_ || held.published_step != step_) return;
    const std::vector<GroupSpec>& groups = kv_.config().groups;
    for (GroupId group = 0; group < groups.size(); ++group) {
        const auto ids = held.kv->table(group).ids();
        const std::uint32_t block_tokens = groups[group].block_tokens;
        const std::uint32_t end = kv_flat::ceil_div(held.num_published, block_tokens);
        for (std::uint32_t index = held.num_confirmed / block_tokens; index < std::min<std::size_t>(end, ids.size());
             ++index)
            if (ids[index] != kv_flat::kNullBlock) kv_.pool().unpublish(ids[index]);
    }
}

kv_flat::Departure HostedKv::departure(const std::string& id, std::uint32_t num_prompt_tokens,
                                       std::uint32_t num_output_tokens) const {
    const auto found = held_.find(id);
    if (found == held_.end() || num_prompt_tokens == 0) return {};
    return {num_prompt_tokens, num_output_tokens, found->second.hints};
}

void HostedKv::release(const std::string& id, std::uint32_t num_prompt_tokens, std::uint32_t num_output_tokens) {
    const auto found = held_.find(id);
    if (found == held_.end() || !found->second.kv) return;
    take_back_unwritten(found->second);
    const auto leaving = kv_.depart(departure(id, num_prompt_tokens, num_output_tokens));
    found->second.kv.reset();
    ++num_changes_;
}

std::vector<BlockId> HostedKv::release_into_pins(const std::string& id) {
    std::vector<BlockId> blocks;
    const auto found = held_.find(id);
    if (found == held_.end() || !found->second.kv) return blocks;
    take_back_unwritten(found->second);
    KvSequence& sequence = *found->second.kv;
    for (GroupId group = sequence.num_groups(); group > 0; --group) {
        for (const BlockId block : sequence.table(group - 1).ids())
            if (block != kv_flat::kNullBlock) blocks.push_back(block);
    }
    pins_.pin(kv_.pool(), blocks);
    kv_.pool().settle(0);
    found->second.kv.reset();
    return blocks;
}

void HostedKv::pin(const std::vector<BlockId>& blocks) {
    pins_.pin(kv_.pool(), blocks);
    kv_.pool().settle(0);
    ++num_changes_;
}

void HostedKv::unpin(const std::vector<BlockId>& blocks, const kv_flat::Departure& departure) {
    const auto leaving = kv_.depart(departure);
    pins_.unpin(blocks);
    ++num_changes_;
}

void HostedKv::unpublish(const std::vector<BlockId>& blocks) {
    for (const BlockId block : blocks) kv_.pool().unpublish(block);
    ++num_changes_;
}

bool HostedKv::reset() {
    ++num_changes_;
    if (!kv_.pool().clear_cache()) return false;
    isolation_.clear();
    return true;
}

py::tuple HostedKv::block_ids(const std::string& id) const {
    const std::size_t num_groups = kv_.config().groups.size();
    py::tuple table(num_groups);
    const auto found = held_.find(id);
    for (GroupId group = 0; group < num_groups; ++group) {
        std::span<const BlockId> ids;
        if (found != held_.end() && found->second.kv) ids = found->second.kv->table(group).ids();
        table[group] = int_list(ids);
    }
    return table;
}

std::uint32_t HostedKv::num_hit_tokens(const std::string& id) const {
    const auto found = held_.find(id);
    return found == held_.end() ? 0 : found->second.num_hit;
}

std::uint32_t HostedKv::num_published_tokens(const std::string& id) const {
    const auto found = held_.find(id);
    return found == held_.end() || !found->second.kv ? 0 : found->second.num_published;
}

std::uint32_t HostedKv::blocks_to_complete(const std::string& id, std::uint32_t num_tokens) const {
    const auto found = held_.find(id);
    if (found == held_.end() || !found->second.kv) return kv_.max_held_blocks(num_tokens);
    return kv_.blocks_to_complete(*found->second.kv, num_tokens);
}

py::list HostedKv::take_copies() {
    py::list pairs;
    for (const kv_flat::BlockCopy& copy : copies_) {
        const BlockId target = copy.target->id();
        pins_.pin(kv_.pool(), std::vector<BlockId>{copy.source.id(), target});
        pairs.append(py::make_tuple(copy.source.id(), target));
    }
    copies_.clear();
    return pairs;
}

void HostedKv::zero_from(const std::string& id, std::uint32_t num_tokens) {
    const Held& held = at(id);
    if (!zeroes_blocks_ || !held.kv) return;
    const std::vector<GroupSpec>& groups = kv_.config().groups;
    for (GroupId group = 0; group < groups.size(); ++group) {
        const auto ids = held.kv->table(group).ids();
        const std::size_t first = std::min<std::size_t>(num_tokens / groups[group].block_tokens, ids.size());
        std::ranges::remove_copy(ids.subspan(first), std::back_inserter(blocks_to_zero_), kv_flat::kNullBlock);
    }
}

void HostedKv::check_integrity() const {
    std::vector<std::uint32_t> owners(kv_.config().num_blocks);
    for (const auto& [id, held] : held_) {
        if (held.kv) kv_flat::FlatKv::count_owners(*held.kv, owners);
    }
    for (const kv_flat::BlockCopy& copy : copies_) {
        ++owners[copy.source.id()];
        ++owners[copy.target->id()];
    }
    pins_.count_owners(owners);
    kv_.pool().check_integrity(owners);
}

}  // namespace tokenspeed::bindings
