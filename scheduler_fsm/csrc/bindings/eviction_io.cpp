// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/bindings/eviction_io.h"

#include <functional>
#include <string>

namespace tokenspeed::bindings {
namespace {

// In the order of EvictionKind.
constexpr const char* kKindNames[] = {"superseded", "ended", "idle", "expected", "pinned"};
static_assert(std::size(kKindNames) == static_cast<std::size_t>(kv_flat::EvictionKind::kNumKinds));

}  // namespace

void bind_eviction(py::module_& module) {
    using kv_flat::EvictionSpec;
    using kv_flat::SessionHints;
    const EvictionSpec standard;
    py::class_<EvictionSpec>(module, "EvictionSpec")
        .def(py::init([](std::string name, double idle_scale_s, double output_exponent, double prompt_exponent,
                         bool superseded_first, bool use_hints) {
                 return EvictionSpec{std::move(name), idle_scale_s,     output_exponent,
                                     prompt_exponent, superseded_first, use_hints};
             }),
             py::kw_only(), py::arg("name") = standard.name, py::arg("idle_scale_s") = standard.idle_scale_s,
             py::arg("output_exponent") = standard.output_exponent,
             py::arg("prompt_exponent") = standard.prompt_exponent,
             py::arg("superseded_first") = standard.superseded_first, py::arg("use_hints") = standard.use_hints)
        .def_readonly("name", &EvictionSpec::name);
    py::class_<SessionHints>(module, "SessionHints")
        .def(py::init([](const std::string& session, bool ends, double return_in_s, double pin_s) {
                 const std::uint64_t number = session.empty() ? 0 : std::hash<std::string>{}(session) | 1U;
                 return SessionHints{number, ends, return_in_s, pin_s};
             }),
             py::kw_only(), py::arg("session") = "", py::arg("ends") = false, py::arg("return_in_s") = -1.0,
             py::arg("pin_s") = 0.0)
        .def_readonly("session", &SessionHints::session);
}

py::dict eviction_counts(const kv_flat::BlockPool& pool) {
    py::dict values;
    const kv_flat::CountsByKind idle = pool.num_idle_blocks();
    for (std::size_t kind = 0; kind < std::size(kKindNames); ++kind) {
        values[py::str(std::string("evictions_") + kKindNames[kind])] = pool.num_evictions_by_kind()[kind];
        values[py::str(std::string("cached_blocks_") + kKindNames[kind])] = idle[kind];
    }
    values["blank_blocks"] = pool.num_blank();
    return values;
}

}  // namespace tokenspeed::bindings
