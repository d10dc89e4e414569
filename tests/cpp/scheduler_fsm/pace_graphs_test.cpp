// SPDX-License-Identifier: Apache-2.0
// Steps with prompts that cost more than their tokens do, and steps that are too large for every CUDA graph.
#include <algorithm>
#include <array>
#include <catch2/catch.hpp>
#include <cmath>

#include "tests/cpp/scheduler_fsm/paced_engine.h"

using namespace tokenspeed::scheduler_fsm;
using namespace tokenspeed::scheduler_fsm::testing;

namespace {

constexpr std::uint32_t kLargest = 512;

SchedulerConfig with_graphs(bool knows_them) {
    SchedulerConfig config = paced(70);
    if (knows_them) config.graph_sizes = {1, 2, 4, 8, 16, 32, 64, 128, 256, kLargest};
    return config;
}

/// Forty users on a device where a step with prompts takes 3 ms more, and 8 more when no graph holds it.
struct Graphed : Engine {
    explicit Graphed(bool knows_them = true, double mixed = 3, double large = 8) : Engine(with_graphs(knows_them)) {
        mixed_ms = mixed;
        large_mixed_ms = large;
        largest_graph = kLargest;
        add_many(40, 500, 100'000);
        steps(60);
    }
    /// One short prompt each `every` steps; returns the mean milliseconds of a step.
    double newcomers(int count, int every) {
        const double begin_s = now_s;
        for (int i = 0; i < count; ++i) {
            add(60, 2);
            steps(every);
        }
        return (now_s - begin_s) * 1e3 / (count * every);
    }
};

}  // namespace

TEST_CASE("a model that knows the graphs tells steps below and above the largest apart") {
    const auto error_of = [](bool knows_them) {
        Graphed engine(knows_them);
        double error_ms = 0;
        double measured_ms = 0;
        for (int i = 0; i < 300; ++i) {
            // Prompts of all sizes: their ends fall on either side of the edge.
            if (i % 3 == 0) engine.add(40 + 97 * static_cast<std::uint32_t>(i % 13), 2);
            engine.step();
            const auto& report = engine.scheduler.pace().report;
            if (i < 100 || engine.num_prefill == 0) continue;
            error_ms += std::abs(report.predicted_ms - report.measured_ms);
            measured_ms += report.measured_ms;
        }
        return error_ms / measured_ms;
    };
    const double with = error_of(true);
    const double without = error_of(false);
    CAPTURE(with, without);
    CHECK(with < 0.1);
    CHECK(with < 0.7 * without);
}

TEST_CASE("times that rise while rows go, as an H200's do before newcomers start, do not let the fit run away") {
    // They ask for a coefficient below zero, which none may have: cut off alone it would raise the fit with every step.
    LeastSquares<3> fit({4.0, 0.5, 2.0}, {4.0, 0.5, 2.0});
    const std::array<double, 6> times_ms = {5.3, 6.2, 7.2, 7.0, 7.2, 8.4};
    double largest_ms = 0;
    for (std::size_t i = 0; i < 600; ++i) {
        const double rows = 510 - 4.0 * static_cast<double>(i % times_ms.size());
        const LeastSquares<3>::Vector step = {1.0, (rows > 496 ? 512 : 496) / 64.0, 1700 * rows / 65'536};
        if (i > 60) largest_ms = std::max(largest_ms, fit.value(step));
        fit.add(step, times_ms[i % times_ms.size()], fit.value(step));
    }
    CHECK(largest_ms < 8.4);
    CHECK(largest_ms > 5.3);
    for (const double coefficient : fit.coefficients()) CHECK(coefficient >= 0);
}

TEST_CASE("rows are padded to the next graph, and above the largest they are not") {
    const GraphSizes graphs({1, 2, 4, 8});
    CHECK(graphs.padded(3) == 4);
    CHECK(graphs.padded(8) == 8);
    CHECK(graphs.padded(9) == 9);
    CHECK(graphs.exceeded_by(9));
    CHECK_FALSE(graphs.exceeded_by(8));
    CHECK_FALSE(GraphSizes().exceeded_by(1e6));
    CHECK(GraphSizes().padded(3) == 3);
}

TEST_CASE("newcomers whose steps cost more than their tokens are gathered, for a period at most") {
    Graphed costly;
    const double ms = costly.newcomers(100, 1);
    CHECK(costly.num_prompt_steps < 40);
    CHECK(costly.num_finished >= 90);
    CHECK(ms < 6.0);
    Graphed free(true, 0, 0);
    const int before = free.num_prompt_steps;
    free.newcomers(100, 1);
    CHECK(free.num_prompt_steps - before > 90);
}

TEST_CASE("a queue that has no room to start does not keep newcomers from being gathered") {
    SchedulerConfig config = with_graphs(true);
    config.max_num_seqs = 64;
    Engine engine(config);
    engine.mixed_ms = 3;
    engine.largest_graph = kLargest;
    engine.add_many(40, 500, 100'000);
    engine.steps(60);
    // About one of 24 ends in each step, and hundreds wait for its slot: their prompts would fill any step.
    for (std::uint32_t i = 0; i < 600; ++i) engine.add(60, 12 + i % 24);
    engine.steps(100);
    const int prompt_steps = engine.num_prompt_steps;
    const int finished = engine.num_finished;
    engine.steps(200);
    CHECK(engine.num_prompt_steps - prompt_steps < 120);
    CHECK(engine.num_finished - finished > 120);
}

namespace {

/// How many steps hold prompts while all slots answer, and others wait for theirs or nobody does.
struct FullHouse {
    explicit FullHouse(bool others_wait) : engine(config()) {
        engine.mixed_ms = 6;
        engine.largest_graph = kLargest;
        // Users come and go: as one ends, the next one is there.
        for (int i = 0; i < 1500; ++i) {
            while (num_sent - engine.num_finished < kSlots + (others_wait ? 40 : 0)) {
                engine.add(60, 250 + static_cast<std::uint32_t>(num_sent++ * 37 % 300));
            }
            engine.step();
            if (i < 600) continue;
            ++num_steps;
            if (engine.num_prefill == 0) continue;
            ++num_prompt_steps;
            most_tokens = std::max(most_tokens, engine.num_prefill + engine.num_decodes);
        }
    }

    static constexpr int kSlots = 128;
    static SchedulerConfig config() {
        SchedulerConfig made = with_graphs(true);
        made.max_num_seqs = kSlots;
        return made;
    }

    Engine engine;
    int num_sent = 0;
    int num_steps = 0;
    int num_prompt_steps = 0;
    std::uint32_t most_tokens = 0;
};

ChunkQuestion crowded(double started, double waiting, double held) {
    ChunkQuestion question;
    question.decodes = {100, 50'000, 0, 0, 0};
    question.most_tokens = 8192;
    question.period_ms = 8;
    question.slowest_user_ms = 30;
    question.since_prompts_ms = 100;
    question.started_tokens = started;
    question.waiting_tokens = waiting;
    question.newcomers = 2;
    question.held_requests = held;
    return question;
}

/// 4 ms for these decodes, 7 more for prompts.
StepTimeModel costly_prompts() {
    StepTimeModel model(GraphSizes({128, 256, kLargest}));
    model.start_from({.fixed_ms = 3, .row_us = 10, .prefill_us = 3, .mixed_ms = 7, .large_mixed_ms = 25});
    return model;
}

}  // namespace

TEST_CASE("while others wait for room, prompts that fill a graph run at once and smaller ones wait for more") {
    const StepTimeModel model = costly_prompts();
    const std::uint32_t room = kLargest - 100;
    CHECK(chunk_within_target(crowded(0, 2000, 5), model) == room);
    CHECK(chunk_within_target(crowded(0, 300, 5), model) == 0);
    // A prompt that was begun waits, too; without anybody behind it goes on.
    CHECK(chunk_within_target(crowded(300, 0, 5), model) == 0);
    CHECK(chunk_within_target(crowded(300, 0, 0), model) > 0);
    // Together they do not wait for longer than what all users together lose to such a step.
    ChunkQuestion late = crowded(0, 300, 5);
    late.newcomers = 8;
    CHECK(chunk_within_target(late, model) == room);
    // Pieces would each cost as much: nothing until users are ahead by what the whole takes.
    ChunkQuestion behind = crowded(0, 2000, 5);
    behind.slowest_user_ms = 11.5;
    CHECK(chunk_within_target(behind, model) == 0);
}

TEST_CASE("where prompts cost nothing in any case nobody waits for others") {
    StepTimeModel model(GraphSizes({128, 256, kLargest}));
    model.start_from({.fixed_ms = 3, .row_us = 10, .prefill_us = 3});
    CHECK(chunk_within_target(crowded(0, 60, 5), model) > 0);
}

TEST_CASE("while others wait for room a server spends fewer steps on prompts, and nothing starves") {
    const FullHouse crowd(true);
    const FullHouse just_full(false);
    CAPTURE(crowd.num_prompt_steps, just_full.num_prompt_steps, crowd.num_steps);
    CHECK(crowd.num_prompt_steps < 0.7 * just_full.num_prompt_steps);
    // One at least in 33 plans.
    CHECK(crowd.num_prompt_steps >= crowd.num_steps / 33);
    CHECK(crowd.most_tokens <= kLargest);
    CHECK(crowd.engine.num_finished >= 0.9 * just_full.engine.num_finished);
}

TEST_CASE("a single newcomer long after the last prompts starts at once") {
    Graphed engine;
    engine.newcomers(20, 5);
    engine.steps(20);
    const int before = engine.num_prompt_steps;
    engine.add(60, 2);
    engine.step();
    CHECK(engine.num_prompt_steps == before + 1);
}

TEST_CASE("what fits a graph in few steps does not leave it, and a long prompt does") {
    Graphed engine(true, 3, 30);
    // The model sees steps of both kinds first.
    for (int i = 0; i < 20; ++i) {
        engine.add(400 + 200 * static_cast<std::uint32_t>(i % 4), 2);
        engine.steps(8);
    }
    engine.add(700, 2);
    engine.steps(8);
    engine.add(700, 2);
    std::uint32_t largest = 0;
    for (int i = 0; i < 8; ++i) {
        engine.step();
        largest = std::max(largest, engine.num_prefill + engine.num_decodes);
    }
    CHECK(largest <= kLargest);
    Graphed cheap(true, 3, 6);
    cheap.add(20'000, 2);
    for (int i = 0; i < 8; ++i) {
        cheap.step();
        largest = std::max(largest, cheap.num_prefill + cheap.num_decodes);
    }
    CHECK(largest > kLargest);
}
