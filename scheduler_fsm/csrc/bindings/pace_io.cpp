// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/bindings/pace_io.h"

#include <string>
#include <utility>

namespace tokenspeed::bindings {

using scheduler_fsm::ChunkBudget;
using scheduler_fsm::ChunkQuestion;
using scheduler_fsm::StepTimeModel;

void bind_pace(py::module_& module) {
    using Question = PyChunkQuestion;
    py::class_<Question>(module, "ChunkQuestion")
        .def_property_readonly("decode_tokens", [](const Question& q) { return q.question.decodes.decode_tokens; })
        .def_property_readonly("context_tokens", [](const Question& q) { return q.question.decodes.context_tokens; })
        .def_property_readonly("begin_tokens", [](const Question& q) { return q.question.begin_tokens; })
        .def_property_readonly("most_tokens", [](const Question& q) { return q.question.most_tokens; })
        .def_property_readonly("period_ms", [](const Question& q) { return q.question.period_ms; })
        .def_property_readonly("slowest_user_ms", [](const Question& q) { return q.question.slowest_user_ms; })
        .def_property_readonly("since_prompts_ms", [](const Question& q) { return q.question.since_prompts_ms; })
        .def_property_readonly("started_tokens", [](const Question& q) { return q.question.started_tokens; })
        .def_property_readonly("waiting_tokens", [](const Question& q) { return q.question.waiting_tokens; })
        .def_property_readonly("newcomers", [](const Question& q) { return q.question.newcomers; })
        .def_property_readonly("held_requests", [](const Question& q) { return q.question.held_requests; })
        .def("predict_ms",
             [](const Question& q, double num_tokens) {
                 return q.model.predict_ms(q.question.decodes.with_prefill(q.question.begin_tokens, num_tokens));
             })
        .def("fitting_tokens", [](const Question& q, double budget_ms) {
            return q.model.fitting_prefill(q.question.decodes, q.question.begin_tokens, budget_ms,
                                           q.question.most_tokens);
        });
}

ChunkBudget python_chunk_budget(py::function budget) {
    return [budget = std::move(budget)](const ChunkQuestion& question, const StepTimeModel& model) {
        const py::object answer = budget(PyChunkQuestion{question, model});
        if (!py::isinstance<py::int_>(answer) || answer < py::int_(0)) {
            throw py::value_error("the chunk budget answered " + py::repr(answer).cast<std::string>() +
                                  "; allowed: a number of tokens, 0 or more");
        }
        const py::int_ most(question.most_tokens);
        return (answer < most ? answer : py::object(most)).cast<std::uint32_t>();
    };
}

py::dict pace_report(const scheduler_fsm::PaceControl& pace) {
    py::dict values;
    values["target_period_ms"] = pace.period_s() * 1e3;
    values["predicted_ms"] = pace.report.predicted_ms;
    values["measured_ms"] = pace.report.measured_ms;
    values["relative_error"] = pace.model().relative_error();
    values["learnt_steps"] = pace.model().num_steps();
    values["chunk_tokens"] = pace.report.chunk_tokens;
    values["limited_steps"] = pace.report.num_limited_steps;
    values["held_admissions"] = pace.report.num_held_admissions;
    values["shed_requests"] = pace.report.num_shed_requests;
    values["refused_requests"] = pace.report.num_refused_requests;
    values["degraded_admissions"] = pace.report.num_degraded_admissions;
    return values;
}

py::dict profile_figures(const scheduler_fsm::PaceControl& pace) {
    const scheduler_fsm::StepTimeProfile profile = pace.model().profile();
    py::dict figures;
    figures["fixed_ms"] = profile.fixed_ms;
    figures["row_us"] = profile.row_us;
    figures["context_us"] = profile.context_us;
    figures["prefill_us"] = profile.prefill_us;
    figures["pair_us"] = profile.pair_us;
    figures["mixed_ms"] = profile.mixed_ms;
    figures["large_mixed_ms"] = profile.large_mixed_ms;
    figures["large_ms"] = profile.large_ms;
    return figures;
}

void start_from_figures(scheduler_fsm::PaceControl& pace, const py::dict& figures) {
    const auto figure = [&](const char* name) { return figures[name].cast<double>(); };
    pace.start_from({.fixed_ms = figure("fixed_ms"),
                     .row_us = figure("row_us"),
                     .context_us = figure("context_us"),
                     .prefill_us = figure("prefill_us"),
                     .pair_us = figure("pair_us"),
                     .mixed_ms = figure("mixed_ms"),
                     .large_mixed_ms = figure("large_mixed_ms"),
                     .large_ms = figure("large_ms")});
}

py::list step_classes(const scheduler_fsm::PaceControl& pace) {
    py::list rows;
    pace.tally.for_each([&](std::size_t decodes, std::size_t prompts, const scheduler_fsm::StepClass& seen) {
        rows.append(
            py::make_tuple(decodes, prompts, seen.num_steps, seen.predicted_ms, seen.measured_ms, seen.error_ms));
    });
    return rows;
}

std::uint32_t users_below_target(const scheduler_fsm::EngineState& engine, double now_s) {
    std::uint32_t count = 0;
    for (const scheduler_fsm::Request* request : engine.decoding.items()) {
        const bool has_rate = request->period_s > 0 && request->first_token_s >= 0;
        count += has_rate && request->first_token_s + request->num_output_tokens() * request->period_s < now_s;
    }
    return count;
}

}  // namespace tokenspeed::bindings
