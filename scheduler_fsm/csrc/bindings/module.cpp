// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "kv_flat/csrc/version.h"
#include "scheduler_fsm/csrc/bindings/core.h"
#include "scheduler_fsm/csrc/bindings/eviction_io.h"
#include "scheduler_fsm/csrc/bindings/hosted_kv.h"
#include "scheduler_fsm/csrc/bindings/kv_replay.h"
#include "scheduler_fsm/csrc/bindings/kv_report.h"
#include "scheduler_fsm/csrc/bindings/pace_io.h"
#include "scheduler_fsm/csrc/bindings/policy_io.h"
#include "scheduler_fsm/csrc/bindings/prompt.h"
#include "scheduler_fsm/csrc/bindings/transfers.h"

namespace py = pybind11;
using namespace tokenspeed;  // NOLINT(google-build-using-namespace): this file only names things for Python

namespace {

void bind_enums(py::module_& module) {
    py::enum_<kv_flat::Retention>(module, "Retention")
        .value("FULL", kv_flat::Retention::kFull)
        .value("SLIDING_WINDOW", kv_flat::Retention::kSlidingWindow)
        .value("CHUNK", kv_flat::Retention::kChunk)
        .value("STATE", kv_flat::Retention::kState);
    py::enum_<kv_flat::KvEvent::Kind>(module, "KvEventKind")
        .value("STORED", kv_flat::KvEvent::Kind::kStored)
        .value("REMOVED", kv_flat::KvEvent::Kind::kRemoved)
        .value("CLEARED", kv_flat::KvEvent::Kind::kCleared);
    py::enum_<scheduler_fsm::QueuePolicy>(module, "QueuePolicy")
        .value("FCFS", scheduler_fsm::QueuePolicy::kFcfs)
        .value("PRIORITY", scheduler_fsm::QueuePolicy::kPriority);
    py::enum_<scheduler_fsm::Overload>(module, "Overload")
        .value("QUEUE", scheduler_fsm::Overload::kQueue)
        .value("REFUSE", scheduler_fsm::Overload::kRefuse)
        .value("DEGRADE", scheduler_fsm::Overload::kDegrade);
    py::enum_<scheduler_fsm::PauseLevel>(module, "PauseLevel")
        .value("NONE", scheduler_fsm::PauseLevel::kNone)
        .value("NEW", scheduler_fsm::PauseLevel::kNew)
        .value("ALL", scheduler_fsm::PauseLevel::kAll);
    py::enum_<scheduler_fsm::FinishReason>(module, "FinishReason")
        .value("STOP", scheduler_fsm::FinishReason::kStop)
        .value("LENGTH", scheduler_fsm::FinishReason::kLength)
        .value("ABORT", scheduler_fsm::FinishReason::kAbort)
        .value("TIMEOUT", scheduler_fsm::FinishReason::kTimeout)
        .value("ERROR", scheduler_fsm::FinishReason::kError)
        .value("REPETITION", scheduler_fsm::FinishReason::kRepetition);
}

void bind_config(py::module_& module) {
    using kv_flat::GroupSpec;
    using kv_flat::KvConfig;
    using scheduler_fsm::SchedulerConfig;
    py::class_<GroupSpec>(module, "GroupSpec")
        .def(py::init([](std::string name, std::uint32_t block_tokens, kv_flat::Retention retention,
                         std::uint32_t window_tokens) {
                 return GroupSpec{std::move(name), block_tokens, retention, window_tokens};
             }),
             py::kw_only(), py::arg("name"), py::arg("block_tokens"), py::arg("retention"),
             py::arg("window_tokens") = 0)
        .def_readonly("name", &GroupSpec::name)
        .def("max_held_blocks", &GroupSpec::max_held_blocks, py::arg("num_tokens"), py::arg("in_flight_tokens"))
        .def_readonly("block_tokens", &GroupSpec::block_tokens)
        .def_readonly("retention", &GroupSpec::retention)
        .def_readonly("window_tokens", &GroupSpec::window_tokens);
    py::class_<KvConfig>(module, "KvConfig")
        .def(py::init<>())
        .def_readwrite("num_blocks", &KvConfig::num_blocks)
        .def_readwrite("key_tokens", &KvConfig::key_tokens)
        .def_readwrite("in_flight_tokens", &KvConfig::in_flight_tokens)
        .def_readwrite("prefix_caching", &KvConfig::prefix_caching)
        .def_readwrite("record_events", &KvConfig::record_events)
        .def_readwrite("residency_sample_rate", &KvConfig::residency_sample_rate)
        .def_readwrite("eviction", &KvConfig::eviction)
        .def_readwrite("groups", &KvConfig::groups);
    py::class_<scheduler_fsm::EncoderLimits>(module, "EncoderLimits")
        .def(py::init([](std::uint32_t step_embeds, std::uint32_t cache_embeds, bool split_inputs) {
                 return scheduler_fsm::EncoderLimits{step_embeds, cache_embeds, split_inputs};
             }),
             py::kw_only(), py::arg("step_embeds"), py::arg("cache_embeds"), py::arg("split_inputs"))
        .def_readonly("step_embeds", &scheduler_fsm::EncoderLimits::step_embeds)
        .def_readonly("cache_embeds", &scheduler_fsm::EncoderLimits::cache_embeds)
        .def_readonly("split_inputs", &scheduler_fsm::EncoderLimits::split_inputs);
    py::class_<SchedulerConfig>(module, "SchedulerConfig")
        .def(py::init<>())
        .def_readwrite("kv", &SchedulerConfig::kv)
        .def_readwrite("policy", &SchedulerConfig::policy)
        .def_readwrite("max_num_seqs", &SchedulerConfig::max_num_seqs)
        .def_readwrite("max_num_active_seqs", &SchedulerConfig::max_num_active_seqs)
        .def_readwrite("max_scheduled_tokens", &SchedulerConfig::max_scheduled_tokens)
        .def_readwrite("max_model_tokens", &SchedulerConfig::max_model_tokens)
        .def_readwrite("long_prefill_tokens", &SchedulerConfig::long_prefill_tokens)
        .def_readwrite("long_prefill_adaptive", &SchedulerConfig::long_prefill_adaptive)
        .def_readwrite("prefill_interval_steps", &SchedulerConfig::prefill_interval_steps)
        .def_readwrite("chunked_prefill", &SchedulerConfig::chunked_prefill)
        .def_readwrite("reserve_full_sequence", &SchedulerConfig::reserve_full_sequence)
        .def_readwrite("watermark", &SchedulerConfig::watermark)
        .def_readwrite("async_scheduling", &SchedulerConfig::async_scheduling)
        .def_readwrite("decode_stagger_steps", &SchedulerConfig::decode_stagger_steps)
        .def_readwrite("num_sampled_tokens", &SchedulerConfig::num_sampled_tokens)
        .def_readwrite("num_draft_tokens", &SchedulerConfig::num_draft_tokens)
        .def_readwrite("draft_tokens_by_batch", &SchedulerConfig::draft_tokens_by_batch)
        .def_readwrite("lookahead_tokens", &SchedulerConfig::lookahead_tokens)
        .def_readwrite("drafter_slots", &SchedulerConfig::drafter_slots)
        .def_readwrite("drop_last_match_block", &SchedulerConfig::drop_last_match_block)
        .def_readwrite("max_adapters", &SchedulerConfig::max_adapters)
        .def_readwrite("encoder", &SchedulerConfig::encoder)
        .def_readwrite("target_tps", &SchedulerConfig::target_tps)
        .def_readwrite("overload", &SchedulerConfig::overload)
        .def_readwrite("graph_sizes", &SchedulerConfig::graph_sizes);
    py::class_<bindings::RunnerProtocol>(module, "RunnerProtocol")
        .def(py::init([](bool resumed_as_new, bool sends_history, bool sends_new_tokens, bool zeroes_blocks) {
                 return bindings::RunnerProtocol{resumed_as_new, sends_history, sends_new_tokens, zeroes_blocks};
             }),
             py::kw_only(), py::arg("resumed_as_new"), py::arg("sends_history"), py::arg("sends_new_tokens"),
             py::arg("zeroes_blocks"));
}

void bind_requests(py::module_& module) {
    using scheduler_fsm::RepetitionRule;
    using scheduler_fsm::StopRules;
    py::class_<scheduler_fsm::PreparedPrompt>(module, "PreparedPrompt")
        .def_property_readonly("num_tokens",
                               [](const scheduler_fsm::PreparedPrompt& prompt) { return prompt.tokens.size(); })
        .def_property_readonly("keys", [](const scheduler_fsm::PreparedPrompt& prompt) {
            py::list keys;
            for (const kv_flat::Digest& key : prompt.chain.keys()) {
                keys.append(py::bytes(reinterpret_cast<const char*>(key.bytes.data()), key.bytes.size()));
            }
            return keys;
        });
    module.def("prepare_prompt", &bindings::prepare_prompt, py::kw_only(), py::arg("tokens"), py::arg("key_tokens"),
               py::arg("salt") = "", py::arg("adapter") = "", py::arg("content_spans") = py::list(),
               py::arg("encoder_inputs") = py::list(), py::arg("lookahead_tokens") = 0,
               py::arg("marks_content") = false);
    py::class_<StopRules>(module, "StopRules")
        .def(py::init([](std::optional<std::int32_t> eos, std::vector<std::int32_t> stops, std::uint32_t min_tokens,
                         std::uint32_t max_tokens, std::tuple<std::uint32_t, std::uint32_t, std::uint32_t> repetition) {
                 const auto [shortest, longest, count] = repetition;
                 return StopRules{eos, std::move(stops), min_tokens, max_tokens,
                                  RepetitionRule{shortest, longest, count}};
             }),
             py::kw_only(), py::arg("eos_token"), py::arg("stop_tokens"), py::arg("min_tokens"), py::arg("max_tokens"),
             py::arg("repetition") = std::make_tuple(0U, 0U, 0U));
}

std::uint64_t submit(bindings::Core& core, py::str req_id, py::object request, scheduler_fsm::PreparedPrompt& prompt,
                     const scheduler_fsm::StopRules& stop, std::uint32_t client_index, std::int64_t priority,
                     double arrival_time_s, std::int32_t adapter, bool may_read_cache, bool ready, bool is_plain,
                     bool has_grammar, bool is_session, const kv_flat::SessionHints& hints, double target_tps,
                     std::optional<double> rank) {
    scheduler_fsm::RequestSpec spec;
    spec.label = req_id;
    spec.prompt = std::move(prompt);
    spec.stop = stop;
    spec.priority = priority;
    spec.arrival_time_s = arrival_time_s;
    spec.adapter = adapter;
    spec.may_read_cache = may_read_cache;
    spec.ready = ready;
    spec.is_session = is_session;
    spec.hints = hints;
    spec.target_tps = target_tps;
    spec.rank = rank;
    return core.submit(std::move(spec), {std::move(req_id), std::move(request), client_index, is_plain, has_grammar});
}

py::object feed(bindings::Core& core, std::uint64_t handle, scheduler_fsm::PreparedPrompt& chunk,
                const scheduler_fsm::StopRules& stop, double arrival_time_s, bool is_plain, bool has_grammar,
                std::optional<double> rank) {
    return core.feed(handle, {std::move(chunk.tokens), stop, arrival_time_s, rank}, is_plain, has_grammar);
}

void bind_plan(py::module_& module) {
    using bindings::PlanColumns;
    py::class_<PlanColumns>(module, "PlanColumns")
        .def_readonly("step", &PlanColumns::step)
        .def_readonly("num_tokens", &PlanColumns::num_tokens)
        .def_readonly("num_scheduled_tokens", &PlanColumns::num_scheduled_tokens)
        .def_readonly("new_rows", &PlanColumns::new_rows)
        .def_readonly("admitted", &PlanColumns::admitted)
        .def_readonly("req_ids", &PlanColumns::req_ids)
        .def_readonly("resumed_req_ids", &PlanColumns::resumed_req_ids)
        .def_readonly("new_token_ids", &PlanColumns::new_token_ids)
        .def_readonly("all_token_ids", &PlanColumns::all_token_ids)
        .def_readonly("new_block_ids", &PlanColumns::new_block_ids)
        .def_readonly("num_computed_tokens", &PlanColumns::num_computed_tokens)
        .def_readonly("num_output_tokens", &PlanColumns::num_output_tokens)
        .def_readonly("spec_tokens", &PlanColumns::spec_tokens)
        .def_readonly("num_next_drafts", &PlanColumns::num_next_drafts)
        .def_readonly("drafts_are_unused", &PlanColumns::drafts_are_unused)
        .def_readonly("retracted", &PlanColumns::retracted)
        .def_readonly("ended", &PlanColumns::ended)
        .def_readonly("refused", &PlanColumns::refused)
        .def_readonly("prefetching", &PlanColumns::prefetching)
        .def_readonly("has_sync_loads", &PlanColumns::has_sync_loads)
        .def_readonly("blocks_to_zero", &PlanColumns::blocks_to_zero)
        .def_readonly("block_copies", &PlanColumns::block_copies)
        .def_readonly("encoder_inputs", &PlanColumns::encoder_inputs)
        .def_readonly("evicted_encoder_outputs", &PlanColumns::evicted_encoder_outputs)
        .def_readonly("consumed_inputs", &PlanColumns::consumed_inputs)
        .def_readonly("num_run_embeds", &PlanColumns::num_run_embeds)
        .def_readonly("grammar_req_ids", &PlanColumns::grammar_req_ids)
        .def_readonly("waits_for_grammar_tokens", &PlanColumns::waits_for_grammar_tokens);
}

void bind_core(py::module_& module) {
    using bindings::Core;
    py::register_exception<bindings::RefusedRequest>(module, "RefusedRequest", PyExc_ValueError);
    py::class_<Core> core(module, "Core");
    core.def(py::init<scheduler_fsm::SchedulerConfig, bindings::RunnerProtocol, py::object>(), py::kw_only(),
             py::arg("config"), py::arg("protocol"), py::arg("output_class"))
        .def("submit", &submit, py::kw_only(), py::arg("req_id"), py::arg("request"), py::arg("prompt"),
             py::arg("stop"), py::arg("client_index"), py::arg("priority"), py::arg("arrival_time_s"),
             py::arg("adapter"), py::arg("may_read_cache"), py::arg("ready"), py::arg("is_plain"),
             py::arg("has_grammar"), py::arg("is_session"), py::arg("hints") = kv_flat::SessionHints{},
             py::arg("target_tps") = -1.0, py::arg("rank") = py::none())
        .def("feed", &feed, py::arg("handle"), py::kw_only(), py::arg("chunk"), py::arg("stop"),
             py::arg("arrival_time_s"), py::arg("is_plain"), py::arg("has_grammar"), py::arg("rank") = py::none())
        .def("open_gate", &Core::open_gate)
        .def("plan", &Core::plan, py::arg("pause"), py::arg("throttle_prefills"), py::arg("now_s") = 0.0)
        .def("advance", &Core::advance, py::arg("step"), py::arg("sampled"), py::arg("req_ids"), py::arg("positions"),
             py::arg("all_special"), py::arg("now_s") = 0.0)
        .def("pace", &Core::pace)
        .def_property_readonly("is_paced", &Core::is_paced)
        .def("step_time_profile",
             [](const Core& core) { return bindings::profile_figures(core.scheduler().state().pace); })
        .def(
            "start_from_profile",
            [](Core& core, const py::dict& figures) { bindings::start_from_figures(core.scheduler().pace(), figures); },
            py::arg("figures"))
        .def("step_classes", [](const Core& core) { return bindings::step_classes(core.scheduler().state().pace); })
        .def("users_below_target",
             [](const Core& core, double now_s) {
                 return bindings::users_below_target(core.scheduler().state(), now_s);
             })
        .def("set_chunk_budget", &Core::set_chunk_budget)
        .def("set_victim_choice", &Core::set_victim_choice)
        .def("finish", &Core::finish)
        .def("release", &Core::release)
        .def("set_drafts", &Core::set_drafts)
        .def("retract_all", &Core::retract_all)
        .def("reset_prefix_cache", &Core::reset_prefix_cache)
        .def("reset_encoder_cache", &Core::reset_encoder_cache)
        .def_property_readonly("encoder_limits",
                               [](const Core& core) { return core.scheduler().state().config.encoder; })
        .def("drain_kv_events", &Core::drain_kv_events)
        .def("drain_block_lives", &Core::drain_block_lives)
        .def("counters", &Core::counters)
        .def("eviction_counts",
             [](const Core& core) { return bindings::eviction_counts(core.scheduler().state().kv.pool()); })
        .def("kv_gauges",
             [](const Core& core) {
                 return bindings::kv_gauges(core.scheduler().state().kv,
                                            bindings::holders_of(core.scheduler().state()));
             })
        .def("kv_map",
             [](const Core& core) {
                 return bindings::kv_map(core.scheduler().state().kv, bindings::holders_of(core.scheduler().state()));
             })
        .def("check_integrity", [](const Core& core) { core.scheduler().check_integrity(); })
        .def_property_readonly("num_running", [](const Core& core) { return core.scheduler().num_running(); })
        .def_property_readonly("num_waiting", [](const Core& core) { return core.scheduler().num_waiting(); })
        .def_property_readonly("num_skipped",
                               [](const Core& core) {
                                   const auto& state = core.scheduler().state();
                                   return state.num_parked + state.num_idle();
                               })
        .def_property_readonly("num_awaiting_input",
                               [](const Core& core) { return core.scheduler().state().num_awaiting_input; })
        .def_property_readonly("kv_usage", [](const Core& core) {
            const kv_flat::BlockPool& pool = core.scheduler().state().kv.pool();
            return static_cast<double>(pool.num_in_use()) / static_cast<double>(pool.num_usable());
        });
    bindings::bind_transfers(core);
}

}  // namespace

PYBIND11_MODULE(_core, module) {
    module.doc() = "C++ control plane of tokenspeed-plugin: request states, scheduling policy and the flat KV manager.";
    module.attr("core_version") = kv_flat::core_version();
    module.attr("key_format") = std::string(kv_flat::kKeyFormat);
    bind_enums(module);
    bindings::bind_eviction(module);
    bind_config(module);
    bind_requests(module);
    bind_plan(module);
    bind_core(module);
    bindings::bind_kv_replay(module);
    bindings::bind_hosted_kv(module);
    bindings::bind_pace(module);
    bindings::bind_policies(module);
}
