// SPDX-License-Identifier: Apache-2.0
// A rate per user, kept on a virtual clock by a device whose times the scheduler has to learn.
#include <catch2/catch.hpp>
#include <cmath>

#include "tests/cpp/scheduler_fsm/paced_engine.h"

using namespace tokenspeed::scheduler_fsm;
using namespace tokenspeed::scheduler_fsm::testing;

TEST_CASE("a long prompt is cut so that users keep their rate, and it gets what they can spare") {
    RunningEngine engine;
    REQUIRE(engine.num_decodes == 16);
    engine.add(100'000, 10);
    engine.steps(20);
    for (int i = 0; i < 10; ++i) CHECK(engine.mean_ms(10) <= kTargetMs);
    CHECK(engine.mean_ms(10) > 0.8 * kTargetMs);  // no time is left unused
    CHECK(engine.num_prefill > 100);
}

TEST_CASE("without a target the same prompt makes everybody wait") {
    RunningEngine engine(0);
    engine.add(100'000, 10);
    CHECK(engine.mean_ms(10) > 2 * kTargetMs);
    CHECK(engine.scheduler.pace().model().num_steps() == 0);
}

TEST_CASE("a burst of long prompts is worked off one by one at the target after 20 steps, and nobody starves") {
    RunningEngine engine;
    engine.add_many(8, 100'000, 20);
    engine.steps(20);
    CHECK(engine.largest_mean_until_finished(8, 6000) <= kTargetMs);
    CHECK(engine.num_finished == 8);
}

TEST_CASE("a step change of load is within the target after 20 steps") {
    RunningEngine engine;
    engine.add_many(60, 3000, 400);
    engine.steps(20);
    CHECK(engine.largest_mean_until_finished(60, 6000) <= kTargetMs);
    CHECK(engine.num_finished == 60);
    CHECK(engine.now_s < 60);
}

TEST_CASE("a model that is wrong by 2 or by half is right again after 20 steps") {
    for (const double factor : {2.0, 0.5}) {
        RunningEngine engine;
        engine.add_many(4, 100'000, 10);
        engine.steps(30);
        engine.factor = factor;
        engine.steps(20);
        const double mean = engine.mean_ms(20);
        CHECK(mean <= kTargetMs);
        CHECK(mean > 0.7 * kTargetMs);
        // Later a prompt begins whose tokens the model has not seen without a long context: one step that is too long.
        CHECK(engine.largest_mean_until_finished(4, 6000) <= 1.05 * kTargetMs);
        CHECK(engine.num_finished == 4);
    }
}

TEST_CASE("more users than the target bears wait in order, and those that run keep their rate") {
    Engine engine(paced(70));
    std::vector<RequestHandle> handles;
    for (int i = 0; i < 120; ++i) handles.push_back(engine.add(8000, 2000));
    engine.steps(1000);
    const std::uint32_t num_running = engine.scheduler.num_running();
    CHECK(num_running < 110);
    CHECK(num_running > 40);
    for (std::size_t i = 1; i < handles.size(); ++i) {
        const Request* before = engine.scheduler.find(handles[i - 1]);
        const Request* after = engine.scheduler.find(handles[i]);
        if (after != nullptr && after->is_running()) CHECK((before == nullptr || before->is_running()));
    }
    CHECK(engine.mean_ms(50) <= 1.02 * kTargetMs);
    while (engine.num_finished < 120) engine.step();
    CHECK(engine.scheduler.pace().report.num_held_admissions > 0);
}

TEST_CASE("when decodes alone outgrow the target, the last ones wait and the others keep it") {
    RunningEngine engine;
    engine.add_many(24, 2000, 2000);
    engine.steps(100);
    engine.factor = 6;  // forty users take 19 ms now
    engine.steps(250);
    CHECK(engine.scheduler.pace().report.num_shed_requests > 0);
    CHECK(engine.scheduler.num_running() >= 2);
    CHECK(engine.mean_ms(50) <= 1.1 * kTargetMs);
}

TEST_CASE("a target that not even one user can get limits nothing") {
    Engine engine(paced(70));
    engine.factor = 40;
    engine.add_many(10, 500, 200);
    engine.steps(30);
    engine.add(6000, 5);
    engine.step();
    CHECK(engine.num_prefill == 6000);
    CHECK(engine.scheduler.num_running() == 11);
    CHECK(engine.scheduler.pace().report.num_shed_requests == 0);
}

TEST_CASE("a budget that always says no does not starve prompts") {
    RunningEngine engine;
    engine.scheduler.pace().set_chunk_budget([](const ChunkQuestion&, const StepTimeModel&) { return 0U; });
    engine.add(1000, 3);
    int num_steps = 0;
    while (engine.num_finished == 0) {
        REQUIRE(++num_steps < 600);
        engine.step();
    }
}

TEST_CASE("time without work is not a step") {
    Engine engine(paced(70));
    engine.add(100, 5);
    engine.steps(5);
    CHECK(engine.num_finished == 1);
    engine.now_s += 100;
    engine.add(100, 5);
    engine.step();
    CHECK(engine.scheduler.pace().report.measured_ms < 10);
}

TEST_CASE("prompts that may not be split run whole under a target, too") {
    SchedulerConfig config = paced(70);
    config.chunked_prefill = false;
    Engine engine(config);
    engine.add_many(4, 500, 1000);
    engine.steps(30);
    engine.add(8000, 2);
    engine.step();
    CHECK(engine.num_prefill == 8000);
}

TEST_CASE("a negative target is refused") {
    CHECK_THROWS_WITH(Scheduler(paced(-1)), Catch::Contains("target_tps is -1") && Catch::Contains("at least 0"));
}

TEST_CASE("a rate of its own switches the measuring on, and binds while its user decodes") {
    RunningEngine engine(0);
    CHECK_FALSE(engine.scheduler.pace().is_on());
    engine.add(500, 300, 70);
    CHECK(engine.scheduler.pace().is_on());
    engine.steps(60);
    engine.add(100'000, 10);
    engine.steps(20);
    for (int i = 0; i < 10; ++i) CHECK(engine.mean_ms(10) <= kTargetMs);
    while (engine.num_finished < 2) engine.step();
    engine.add(100'000, 10);
    engine.step();
    CHECK(engine.mean_ms(5) > 2 * kTargetMs);
}

TEST_CASE("users without a rate are retracted before those who have one") {
    RunningEngine engine;
    const RequestHandle guest = engine.add(2000, 2000, 0);
    engine.add_many(23, 2000, 2000);
    engine.steps(100);
    engine.factor = 6;
    while (engine.scheduler.pace().report.num_shed_requests == 0) engine.step();
    CHECK(engine.scheduler.find(guest)->was_retracted());
}

TEST_CASE("a rate out of reach binds nobody, and those within reach are kept") {
    RunningEngine engine;
    engine.add(500, 100'000, 5000);
    engine.steps(60);
    engine.add(100'000, 10);
    engine.steps(20);
    for (int i = 0; i < 10; ++i) CHECK(engine.mean_ms(10) <= kTargetMs);
    CHECK(engine.mean_ms(10) > 0.8 * kTargetMs);
}

TEST_CASE("above capacity requests are refused, or run and everybody gets slower, when the setting says so") {
    for (const Overload overload : {Overload::kRefuse, Overload::kDegrade}) {
        SchedulerConfig config = paced(70);
        config.overload = overload;
        Engine engine(config);
        engine.add_many(70, 8000, 100'000);
        engine.steps(600);
        std::uint64_t num_refused = 0;
        for (int i = 0; i < 120; ++i) engine.add(8000, 100'000);
        for (int i = 0; i < 2500; ++i) {
            engine.step();
            num_refused += engine.num_refused;
        }
        const auto& report = engine.scheduler.pace().report;
        CHECK(report.num_refused_requests == num_refused);
        CHECK((num_refused > 20) == (overload == Overload::kRefuse));
        CHECK((report.num_degraded_admissions > 5) == (overload == Overload::kDegrade));
        // Whoever runs has been promised an answer: when contexts outgrow the rate, it waits and is not refused.
        if (overload == Overload::kDegrade) CHECK(report.num_held_admissions + report.num_shed_requests == 0);
        CHECK((engine.mean_ms(50) > 1.02 * kTargetMs) == (overload == Overload::kDegrade));
        engine.scheduler.check_integrity();
    }
}

TEST_CASE("steps are counted by shape, with what the model said of them") {
    RunningEngine engine;
    double measured_ms = 0;
    std::uint64_t num_steps = 0;
    bool has_decodes_alone = false;
    for (int i = 0; i < 50; ++i) engine.step();
    engine.scheduler.pace().tally.for_each([&](std::size_t decodes, std::size_t prompts, const StepClass& seen) {
        num_steps += seen.num_steps;
        measured_ms += seen.measured_ms;
        has_decodes_alone = has_decodes_alone || (decodes == 2 && prompts == 0);  // 16 rows
        CHECK(std::abs(seen.predicted_ms - seen.measured_ms) <= seen.error_ms + 1e-9);
    });
    CHECK(num_steps == engine.scheduler.pace().model().num_steps());
    CHECK(measured_ms == Approx(engine.now_s * 1e3).epsilon(0.01));
    CHECK(has_decodes_alone);
}
