// SPDX-License-Identifier: Apache-2.0
#include "kv_flat/csrc/session_eviction.h"

#include <algorithm>
#include <cmath>

namespace tokenspeed::kv_flat {
namespace {

// Where the scale of a run is idle_scale_s: an answer and a prompt of this many tokens.
constexpr double kTypicalOutputTokens = 200.0;
constexpr double kTypicalPromptTokens = 100'000.0;

// Guesses are acted on while fewer than one block in so many was asked for after all.
constexpr double kRightPerWrong = 8.0;
// So many blocks of guesses are remembered; what is older counts half.
constexpr double kGuessMemoryBlocks = 16384.0;
// Benefit of the doubt before anything is known.
constexpr double kGuessPriorBlocks = 64.0;

// Pins may cover this share of the pool; a run that would exceed it is not pinned.
constexpr double kMaxPinnedShare = 0.25;

}  // namespace

void SessionEviction::Guesses::add(bool right) noexcept {
    (right ? num_right : num_wrong) += 1.0;
    if (num_right + num_wrong < kGuessMemoryBlocks) return;
    num_right /= 2.0;
    num_wrong /= 2.0;
}

bool SessionEviction::Guesses::are_good() const noexcept {
    return num_wrong * kRightPerWrong <= num_right + kGuessPriorBlocks;
}

SessionEviction::SessionEviction(const EvictionSpec& spec, BlockLinks& links)
    : spec_(spec), links_(links), run_of_(links.size()) {}

SessionEviction::RunId SessionEviction::new_run() {
    RunId run = 0;
    if (unused_runs_.empty()) {
        run = static_cast<RunId>(runs_.size());
        runs_.emplace_back();
    } else {
        run = unused_runs_.back();
        unused_runs_.pop_back();
        const std::uint32_t generation = runs_[run].generation;
        runs_[run] = {};
        runs_[run].generation = generation;
    }
    ++runs_[run].generation;  // 0 names no run
    runs_[run].serial = next_serial_++;
    runs_[run].idle_key_s = runs_[run].key_s = now_s_;
    return run;
}

bool SessionEviction::is_alive(RunRef ref) const noexcept {
    return ref.generation != 0 && runs_[ref.run].generation == ref.generation && runs_[ref.run].queued;
}

void SessionEviction::enqueue(RunId run) {
    Run& entry = runs_[run];
    queue(entry.place).insert({entry.key_s, entry.serial, run});
    entry.queued = true;
}

void SessionEviction::dequeue(RunId run) noexcept {
    Run& entry = runs_[run];
    if (!std::exchange(entry.queued, false)) return;
    queue(entry.place).erase({entry.key_s, entry.serial, run});
}

void SessionEviction::move(RunId run, Place place, double key_s) {
    Run& entry = runs_[run];
    dequeue(run);
    count(entry) -= entry.blocks.size();
    entry.place = place;
    count(entry) += entry.blocks.size();
    entry.key_s = key_s;
    enqueue(run);
}

void SessionEviction::recycle_if_empty(RunId run) noexcept {
    const Run& entry = runs_[run];
    if (!entry.blocks.empty() || (is_open_ && run == open_run_)) return;
    if (entry.place == Place::kPinned && entry.queued) return;  // its blocks come back to it
    dequeue(run);
    ++runs_[run].generation;
    unused_runs_.push_back(run);
}

double SessionEviction::scale_s(const Departure& departure) const noexcept {
    if (departure.num_prompt_tokens == 0) return 0.0;
    const double output = (departure.num_output_tokens + 1) / kTypicalOutputTokens;
    const double prompt = departure.num_prompt_tokens / kTypicalPromptTokens;
    return spec_.idle_scale_s * std::pow(output, spec_.output_exponent) * std::pow(prompt, spec_.prompt_exponent);
}

void SessionEviction::place_by_hints(Run& run, const SessionHints& hints) const noexcept {
    if (hints.pin_s > 0.0) {
        run.place = Place::kPinned;
        run.key_s = now_s_ + hints.pin_s;
    } else if (hints.ends) {
        run.place = Place::kSpent;
        run.key_s = now_s_;
    } else if (hints.return_in_s >= 0.0) {
        run.place = Place::kExpected;
        run.key_s = now_s_ + hints.return_in_s;
    }
}

void SessionEviction::open_run(const Departure& departure) {
    open_run_ = new_run();
    is_open_ = true;
    plain_run_ = {};  // what is released from now on goes behind this run
    Run& run = runs_[open_run_];
    run.session = departure.hints.session;
    run.idle_key_s = run.key_s = now_s_ - scale_s(departure);
    if (spec_.use_hints) place_by_hints(run, departure.hints);
}

bool SessionEviction::pins_too_much() const noexcept {
    std::size_t num_pinned = runs_[open_run_].blocks.size();
    for (const QueueKey& pinned : queue(Place::kPinned)) num_pinned += runs_[pinned.run].num_pinned;
    return static_cast<double>(num_pinned) > kMaxPinnedShare * static_cast<double>(links_.size());
}

void SessionEviction::close_run() noexcept {
    is_open_ = false;
    release_due();
    Run& run = runs_[open_run_];
    if (run.blocks.empty()) return recycle_if_empty(open_run_);
    if (run.place == Place::kPinned && pins_too_much()) {
        count(run) -= run.blocks.size();
        run.place = Place::kIdle;
        run.key_s = run.idle_key_s;
        count(run) += run.blocks.size();
    }
    run.num_pinned = run.place == Place::kPinned ? run.blocks.size() : 0;
    enqueue(open_run_);
}

SessionEviction::RunId SessionEviction::plain_run() {
    if (!is_alive(plain_run_) || plain_time_s_ != now_s_ || runs_[plain_run_.run].place != Place::kIdle) {
        const RunId run = new_run();
        plain_run_ = {run, runs_[run].generation};
        plain_time_s_ = now_s_;
        enqueue(run);
    }
    return plain_run_.run;
}

SessionEviction::RunId SessionEviction::run_for(BlockId block) {
    const RunRef before = run_of_[block];
    if (is_alive(before)) {
        Run& run = runs_[before.run];
        const bool pins = is_open_ && runs_[open_run_].place == Place::kPinned;
        if (run.place == Place::kPinned && !(pins && runs_[open_run_].key_s > run.key_s)) {
            run.idle_key_s = now_s_;
            return before.run;
        }
        if (run.place != Place::kSpent && !pins) return plain_run();
    }
    return is_open_ ? open_run_ : plain_run();
}

void SessionEviction::add(BlockId block) noexcept {
    const RunId run = run_for(block);
    runs_[run].blocks.push_back(links_, block);
    ++count(runs_[run]);
    run_of_[block] = {run, runs_[run].generation};
}

void SessionEviction::take_out(BlockId block, RunId run) noexcept {
    runs_[run].blocks.erase(links_, block);
    --count(runs_[run]);
    recycle_if_empty(run);
}

void SessionEviction::remove(BlockId block) noexcept {
    take_out(block, run_of_[block].run);
    run_of_[block] = {};
}

void SessionEviction::adopt(BlockId block) noexcept {
    const RunRef from = run_of_[block];
    if (runs_[from.run].superseded) guesses_.add(false);
    if (adopted_from_.empty() || adopted_from_.back().run != from.run) adopted_from_.push_back(from);
    take_out(block, from.run);
}

void SessionEviction::supersede(RunId run, std::uint64_t session) noexcept {
    Run& entry = runs_[run];
    const bool named = entry.session != 0 && session != 0;
    if (entry.place == Place::kPinned || (named && entry.session != session)) return;
    count(entry) -= entry.blocks.size();
    entry.superseded = true;
    count(entry) += entry.blocks.size();
    if (guesses_.are_good()) move(run, Place::kSpent, entry.idle_key_s);
}

void SessionEviction::settle(std::uint64_t session) noexcept {
    if (spec_.superseded_first) {
        for (const RunRef from : adopted_from_) {
            if (is_alive(from)) supersede(from.run, session);
        }
    }
    adopted_from_.clear();
}

double SessionEviction::wait_s(const Run& run) const noexcept {
    return run.place == Place::kExpected ? run.key_s - now_s_ : now_s_ - run.key_s;
}

void SessionEviction::release_due() noexcept {
    for (const Place place : {Place::kExpected, Place::kPinned}) {
        while (!queue(place).empty() && queue(place).begin()->key_s <= now_s_) {
            const RunId run = queue(place).begin()->run;
            // A session that is overdue is like one that was released when it was due.
            move(run, Place::kIdle, place == Place::kExpected ? runs_[run].key_s : runs_[run].idle_key_s);
            recycle_if_empty(run);
        }
    }
}

EvictionKind SessionEviction::kind_of(const Run& run) const noexcept {
    switch (run.place) {
        case Place::kSpent:
            return run.superseded ? EvictionKind::kSuperseded : EvictionKind::kEnded;
        case Place::kExpected:
            return EvictionKind::kExpected;
        case Place::kPinned:
            return EvictionKind::kPinned;
        default:
            return EvictionKind::kIdle;
    }
}

Victim SessionEviction::pop() noexcept {
    release_due();
    RunId run = 0;
    const Queue& idle = queue(Place::kIdle);
    const Queue& expected = queue(Place::kExpected);
    if (!queue(Place::kSpent).empty()) {
        run = queue(Place::kSpent).begin()->run;
    } else if (!idle.empty() || !expected.empty()) {
        const bool idle_waits_longer = expected.empty() || (!idle.empty() && wait_s(runs_[idle.begin()->run]) >=
                                                                                 wait_s(runs_[expected.rbegin()->run]));
        run = idle_waits_longer ? idle.begin()->run : expected.rbegin()->run;
    } else {
        const auto has_blocks = [this](const QueueKey& pinned) { return !runs_[pinned.run].blocks.empty(); };
        run = std::ranges::find_if(queue(Place::kPinned), has_blocks)->run;
    }
    const Victim victim{runs_[run].blocks.front(), kind_of(runs_[run])};
    if (runs_[run].superseded) guesses_.add(true);
    take_out(victim.block, run);
    run_of_[victim.block] = {};
    return victim;
}

std::vector<IdleBlock> SessionEviction::idle_blocks() const {
    std::vector<IdleBlock> places;
    std::vector<BlockId> blocks;
    for (const Queue& queue : queues_) {
        for (const QueueKey& key : queue) {
            const Run& run = runs_[key.run];
            blocks.clear();
            run.blocks.append_to(blocks, links_, links_.size());
            auto depth = static_cast<std::uint32_t>(blocks.size());
            for (const BlockId block : blocks) places.push_back({block, kind_of(run), key.run, --depth, run.session});
        }
    }
    return places;
}

double SessionEviction::bytes_per_block() const noexcept {
    // A node of a queue holds its key and a tree's links.
    const std::size_t bytes_per_run = sizeof(Run) + sizeof(QueueKey) + 4 * sizeof(void*);
    return static_cast<double>(sizeof(RunRef)) +
           static_cast<double>(runs_.size() * bytes_per_run) / static_cast<double>(links_.size());
}

std::vector<BlockId> SessionEviction::order() const {
    std::vector<BlockId> order;
    const auto append = [&](RunId run) { runs_[run].blocks.append_to(order, links_, links_.size()); };
    for (const QueueKey& key : queue(Place::kSpent)) append(key.run);
    auto expected = queue(Place::kExpected).rbegin();
    for (const QueueKey& key : queue(Place::kIdle)) {
        for (; expected != queue(Place::kExpected).rend() && wait_s(runs_[expected->run]) > wait_s(runs_[key.run]);
             ++expected)
            append(expected->run);
        append(key.run);
    }
    for (; expected != queue(Place::kExpected).rend(); ++expected) append(expected->run);
    for (const QueueKey& key : queue(Place::kPinned)) append(key.run);
    return order;
}

}  // namespace tokenspeed::kv_flat
