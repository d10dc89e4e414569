// SPDX-License-Identifier: Apache-2.0
// A rate per user from the first step on: the step-time model begins with what another run learnt.
#include <catch2/catch.hpp>

#include "tests/cpp/scheduler_fsm/paced_engine.h"

using namespace tokenspeed::scheduler_fsm;
using namespace tokenspeed::scheduler_fsm::testing;

namespace {

StepTimeProfile times(double factor, const StepTimeProfile& profile) {
    return {.fixed_ms = profile.fixed_ms * factor,
            .row_us = profile.row_us * factor,
            .context_us = profile.context_us * factor,
            .prefill_us = profile.prefill_us * factor,
            .pair_us = profile.pair_us * factor};
}

/// What a run with decodes and prompts learnt of the device.
StepTimeProfile learnt() {
    RunningEngine teacher;
    teacher.add_many(4, 20'000, 10);
    teacher.steps(200);
    return teacher.scheduler.pace().model().profile();
}

}  // namespace

TEST_CASE("a start with a profile, right or wrong by 2 or by half, keeps the target after 20 steps") {
    const StepTimeProfile profile = learnt();
    for (const double wrong : {1.0, 2.0, 0.5}) {
        CAPTURE(wrong);
        Engine engine(paced(70));
        engine.scheduler.pace().start_from(times(wrong, profile));
        engine.add_many(16, 200, 100'000);
        engine.add_many(4, 100'000, 10);
        engine.steps(21);
        CHECK(engine.largest_mean_until_finished(4, 6000) <= kTargetMs);
        CHECK(engine.num_finished == 4);  // nothing starves
    }
}

TEST_CASE("with a profile the first steps are predicted, without one they are guessed") {
    const StepTimeProfile profile = learnt();
    const auto error_of_first_steps = [&](bool has_profile) {
        Engine engine(paced(70));
        if (has_profile) engine.scheduler.pace().start_from(profile);
        engine.add_many(16, 2000, 100'000);
        engine.steps(3);
        return engine.scheduler.pace().model().relative_error();
    };
    CHECK(error_of_first_steps(true) < 0.15);
    CHECK(error_of_first_steps(false) > 0.5);
}
