// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/bindings/policy_io.h"

#include <string>
#include <utility>

namespace tokenspeed::bindings {
namespace {

using scheduler_fsm::VictimCandidate;

/// A copy: a policy may keep it longer than the request lives.
struct PyCandidate {
    std::string req_id;
    std::int64_t priority;
    std::uint32_t num_prompt_tokens;
    std::uint32_t num_output_tokens;
    std::uint32_t num_computed_tokens;
    std::uint32_t num_freed_blocks;
    std::uint32_t num_restored_tokens;
    std::uint32_t num_retractions;
    bool has_rate;
};

PyCandidate described(const VictimCandidate& candidate) {
    const scheduler_fsm::Request& request = *candidate.request;
    return {request.label,
            request.order.priority,
            request.num_prompt_tokens,
            request.num_output_tokens(),
            request.num_computed_tokens,
            candidate.num_freed_blocks,
            candidate.num_restored_tokens,
            request.num_retractions,
            request.period_s > 0};
}

}  // namespace

void bind_policies(py::module_& module) {
    py::class_<PyCandidate>(module, "VictimCandidate")
        .def_readonly("req_id", &PyCandidate::req_id)
        .def_readonly("priority", &PyCandidate::priority)
        .def_readonly("num_prompt_tokens", &PyCandidate::num_prompt_tokens)
        .def_readonly("num_output_tokens", &PyCandidate::num_output_tokens)
        .def_readonly("num_computed_tokens", &PyCandidate::num_computed_tokens)
        .def_readonly("num_freed_blocks", &PyCandidate::num_freed_blocks)
        .def_readonly("num_restored_tokens", &PyCandidate::num_restored_tokens)
        .def_readonly("num_retractions", &PyCandidate::num_retractions)
        .def_readonly("has_rate", &PyCandidate::has_rate);
}

scheduler_fsm::VictimChoice python_victim_choice(py::function choice) {
    return [choice = std::move(choice)](std::span<const VictimCandidate> candidates, std::uint32_t num_missing) {
        py::list described_ones;
        for (const VictimCandidate& candidate : candidates) described_ones.append(described(candidate));
        const py::object answer = choice(described_ones, num_missing);
        if (!py::isinstance<py::int_>(answer) || answer < py::int_(0) || answer >= py::int_(candidates.size())) {
            throw py::value_error("the victim choice answered " + py::repr(answer).cast<std::string>() +
                                  "; allowed: an index of one of the " + std::to_string(candidates.size()) +
                                  " candidates");
        }
        return answer.cast<std::size_t>();
    };
}

}  // namespace tokenspeed::bindings
