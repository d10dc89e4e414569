// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/bindings/kv_replay.h"

#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "scheduler_fsm/csrc/bindings/eviction_io.h"

namespace tokenspeed::bindings {

using kv_flat::Departure;
using kv_flat::KvSequence;
using scheduler_fsm::PreparedPrompt;

KvSequence KvReplay::compute(const PreparedPrompt& prompt, std::uint64_t session, std::uint32_t& num_hit_tokens) {
    const auto num_tokens = static_cast<std::uint32_t>(prompt.tokens.size());
    const kv_flat::Match match = kv_.probe(prompt.chain.keys(), num_tokens);
    num_hit_tokens = match.num_tokens;
    KvSequence sequence = kv_.open(match, session);
    if (!kv_.extend(sequence, num_tokens)) {
        throw std::runtime_error("a prompt of " + std::to_string(num_tokens) + " tokens does not fit into " +
                                 std::to_string(kv_.pool().num_free()) + " free blocks");
    }
    kv_.publish(sequence, prompt.chain, prompt.tokens, num_tokens);
    return sequence;
}

std::uint32_t KvReplay::serve(const PreparedPrompt& prompt, const Departure& departure) {
    std::uint32_t num_hit_tokens = 0;
    Held held{compute(prompt, departure.hints.session, num_hit_tokens), departure};
    const auto leaving = kv_.depart(departure);
    static_cast<void>(KvSequence(std::move(held.sequence)));
    return num_hit_tokens;
}

std::uint32_t KvReplay::probe(const PreparedPrompt& prompt) const {
    return kv_.probe(prompt.chain.keys(), static_cast<std::uint32_t>(prompt.tokens.size())).num_tokens;
}

std::size_t KvReplay::hold(const PreparedPrompt& prompt, const Departure& departure) {
    std::uint32_t num_hit_tokens = 0;
    held_.push_back(std::make_unique<Held>(Held{compute(prompt, departure.hints.session, num_hit_tokens), departure}));
    return held_.size() - 1;
}

void KvReplay::let_go(std::size_t held) {
    if (held >= held_.size() || held_[held] == nullptr)
        throw std::invalid_argument("held is " + std::to_string(held) + "; nothing is held under that number");
    const auto leaving = kv_.depart(held_[held]->departure);
    held_[held].reset();
}

void KvReplay::cycle(std::uint32_t num_tokens) {
    KvSequence sequence = kv_.open(kv_.no_match());
    if (!kv_.extend(sequence, num_tokens)) throw std::runtime_error("the pool is too small");
}

void KvReplay::check_integrity() const {
    std::vector<std::uint32_t> owners(kv_.config().num_blocks);
    for (const auto& held : held_) {
        if (held != nullptr) kv_flat::FlatKv::count_owners(held->sequence, owners);
    }
    kv_.pool().check_integrity(owners);
}

void bind_kv_replay(py::module_& module) {
    py::class_<Departure>(module, "Departure")
        .def(py::init([](std::uint32_t num_prompt_tokens, std::uint32_t num_output_tokens,
                         const kv_flat::SessionHints& hints) {
                 return Departure{num_prompt_tokens, num_output_tokens, hints};
             }),
             py::kw_only(), py::arg("num_prompt_tokens") = 0, py::arg("num_output_tokens") = 0,
             py::arg("hints") = kv_flat::SessionHints{});
    py::class_<KvReplay>(module, "KvReplay")
        .def(py::init<kv_flat::KvConfig>(), py::kw_only(), py::arg("config"))
        .def("set_time", &KvReplay::set_time)
        .def("serve", &KvReplay::serve)
        .def("probe", &KvReplay::probe)
        .def("hold", &KvReplay::hold)
        .def("let_go", &KvReplay::let_go)
        .def("cycle", &KvReplay::cycle)
        .def("check_integrity", &KvReplay::check_integrity)
        .def("free_order", [](const KvReplay& replay) { return replay.kv().pool().free_order(); })
        .def("eviction_counts", [](const KvReplay& replay) { return eviction_counts(replay.kv().pool()); })
        .def_property_readonly("bytes_per_block",
                               [](const KvReplay& replay) { return replay.kv().pool().bytes_per_block(); });
}

}  // namespace tokenspeed::bindings
