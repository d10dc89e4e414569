// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>

#include "scheduler_fsm/csrc/pace/step_time_model.h"

using namespace tokenspeed::scheduler_fsm;

namespace {

/// A device whose times the model does not know.
double device_ms(const StepWork& work, double factor = 1.0) {
    return factor * (1.3 + 0.0026 * work.decode_tokens + 1.7e-5 * work.context_tokens + 0.0035 * work.prefill_tokens +
                     3.3e-7 * work.prefill_pairs);
}

/// Shapes that a busy engine sees, the i-th of them.
StepWork shape(int i) {
    const StepWork decodes{8.0 + i * 7 % 96, 1000.0 * (8 + i * 13 % 300), 0, 0};
    return i % 3 == 0 ? decodes.with_prefill(1000.0 * (i % 11), 64.0 * (i % 17)) : decodes;
}

void learn(StepTimeModel& model, int num_steps, double factor = 1.0) {
    for (int i = 0; i < num_steps; ++i) model.learn(shape(i), device_ms(shape(i), factor));
}

double worst_error(const StepTimeModel& model, double factor = 1.0) {
    double worst = 0;
    for (int i = 100; i < 150; ++i) {
        worst = std::max(worst, std::abs(model.predict_ms(shape(i)) / device_ms(shape(i), factor) - 1));
    }
    return worst;
}

}  // namespace

TEST_CASE("the model learns a device from the steps that it sees") {
    StepTimeModel model;
    CHECK(worst_error(model) > 0.3);
    learn(model, 200);
    CHECK(worst_error(model) < 0.1);
    CHECK(model.relative_error() < 0.15);
    CHECK(model.num_steps() == 200);
}

TEST_CASE("a device that becomes slower or faster is followed within 20 steps") {
    for (const double factor : {2.0, 0.5}) {
        StepTimeModel model;
        learn(model, 200);
        learn(model, 20, factor);
        CHECK(worst_error(model, factor) < 0.25);
    }
}

TEST_CASE("outliers hardly move what is predicted") {
    StepTimeModel model;
    learn(model, 200);
    const double before = model.predict_ms(shape(7));
    for (int i = 0; i < 3; ++i) {
        model.learn(shape(i), 40 * device_ms(shape(i)));
        CHECK(std::abs(model.predict_ms(shape(7)) / before - 1) < 0.6);
        for (int j = 0; j < 12; ++j) model.learn(shape(j), device_ms(shape(j)));
    }
    CHECK(worst_error(model) < 0.2);
}

TEST_CASE("times that cannot be are ignored") {
    StepTimeModel model;
    const double before = model.predict_ms(shape(1));
    for (const double ms :
         {0.0, -3.0, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
        model.learn(shape(1), ms);
    }
    CHECK(model.predict_ms(shape(1)) == before);
    CHECK(model.num_steps() == 0);
}

TEST_CASE("what prompts cost in any case is learnt for either side of the largest graph, and where it is felt") {
    StepTimeModel model(GraphSizes({8, 64, 512}));
    // The host launches a step while the one before it runs: most of what prompts cost is felt there.
    const auto took_ms = [](const StepWork& work) {
        double ms = device_ms(work);
        if (work.launched_tokens > 0) ms += work.launched_tokens > 512 ? 11 : 4;
        if (work.decode_tokens + work.prefill_tokens > 512) ms += 17;
        return ms;
    };
    StepWork before{96, 100'000};
    for (int i = 0; i < 400; ++i) {
        StepWork work = before;
        StepWork next{96, 100'000};
        if (i % 5 == 0) next = next.with_prefill(200, i % 3 == 0 ? 900 : 60.0 + i % 200);
        work.launched_tokens = next.launched_tokens;
        model.learn(work, took_ms(work));
        before = next;
    }
    const StepWork decodes{96, 100'000};
    CHECK(model.relative_error() < 0.08);
    CHECK(model.least_prompt_ms(decodes) == Approx(4).epsilon(0.2));
    CHECK(model.large_step_ms() > 9);
    const StepWork large = decodes.with_prefill(200, 900);
    CHECK(model.predict_ms(large) == Approx(device_ms(large) + 28).epsilon(0.1));
    CHECK(model.captured_prefill(decodes) == 416);
    CHECK(model.predict_ms(decodes.with_prefill(200, 60)) ==
          Approx(device_ms(decodes.with_prefill(200, 60)) + 4).epsilon(0.1));
    CHECK(model.fitting_prefill(decodes, 200, device_ms(decodes) + 10, 8192) <= 416);
}

TEST_CASE("the largest chunk that fits is found") {
    StepTimeModel model;
    learn(model, 200);
    const StepWork decodes{32, 64'000, 0, 0};
    const double budget_ms = 12;
    const std::uint32_t tokens = model.fitting_prefill(decodes, 4000, budget_ms, 8192);
    CHECK(tokens > 0);
    CHECK(tokens < 8192);
    CHECK(model.predict_ms(decodes.with_prefill(4000, tokens)) <= budget_ms);
    CHECK(model.predict_ms(decodes.with_prefill(4000, tokens + 1)) > budget_ms);
    CHECK(model.fitting_prefill(decodes, 4000, 0.001, 8192) == 0);
    CHECK(model.fitting_prefill(decodes, 4000, 1e9, 8192) == 8192);
}

TEST_CASE("a median waits for a majority") {
    RecentSteps steps;
    const auto ratio = [&](double fitted_ms) {
        return steps.median_ratio([=](const StepWork&) { return fitted_ms; }, 3.0);
    };
    CHECK(ratio(1.0) == 3.0);
    for (int i = 0; i < 7; ++i) steps.add({}, 1.0);
    for (int i = 0; i < 3; ++i) steps.add({}, 9.0);
    CHECK(ratio(1.0) == 1.0);
    CHECK(ratio(2.0) == 0.5);
    steps.add({}, 9.0);
    CHECK(ratio(1.0) == 9.0);
}

TEST_CASE("a profile keeps what was learnt, and a model that starts from it goes on learning") {
    StepTimeModel teacher;
    learn(teacher, 200);
    const StepTimeProfile profile = teacher.profile();
    StepTimeModel model;
    model.start_from(profile);
    CHECK(worst_error(model) < 0.1);
    CHECK(model.num_steps() == 0);
    const StepTimeProfile again = model.profile();
    CHECK(again.fixed_ms == Approx(profile.fixed_ms));
    CHECK(again.row_us == Approx(profile.row_us));
    CHECK(again.context_us == Approx(profile.context_us));
    CHECK(again.prefill_us == Approx(profile.prefill_us));
    CHECK(again.pair_us == Approx(profile.pair_us));
    learn(model, 20, 2.0);
    CHECK(worst_error(model, 2.0) < 0.25);
    CHECK(model.profile().context_us == Approx(2 * profile.context_us).epsilon(0.3));
}

TEST_CASE("a coefficient that a profile has at 0 is learnt all the same") {
    StepTimeModel model;
    model.start_from({.fixed_ms = 1.3, .row_us = 2.6, .context_us = 0, .prefill_us = 3.5, .pair_us = 0});
    learn(model, 400);
    CHECK(worst_error(model) < 0.15);
}
