// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include "scheduler_fsm/csrc/bindings/eviction_io.h"
#include "scheduler_fsm/csrc/bindings/hosted_kv.h"
#include "scheduler_fsm/csrc/bindings/pool_reports.h"

namespace tokenspeed::bindings {

using kv_flat::BlockId;
using kv_flat::GroupId;

void bind_hosted_kv(py::module_& module) {
    using kv_flat::Departure;
    py::class_<HostedKv>(module, "HostedKv")
        .def(py::init<kv_flat::KvConfig, bool, bool, bool>(), py::kw_only(), py::arg("config"),
             py::arg("drop_last_match_block"), py::arg("whole_blocks_only"), py::arg("zeroes_blocks"))
        .def("begin_step", &HostedKv::begin_step)
        .def("end_step", &HostedKv::end_step)
        .def("knows", &HostedKv::knows)
        .def("open", &HostedKv::open)
        .def("close", &HostedKv::close)
        .def("probe", &HostedKv::probe)
        .def("grow",
             [](HostedKv& self, const std::string& id, const py::list& tokens, std::uint32_t num_hit,
                std::uint32_t num_external, std::uint32_t num_settled, std::uint32_t num_slots,
                std::uint32_t num_published, std::uint32_t num_whole, std::uint32_t num_kept_free,
                std::uint32_t num_watermark, const std::vector<GroupId>& unzeroed) {
                 return self.grow(id, tokens,
                                  {num_hit, num_external, num_settled, num_slots, num_published, num_whole,
                                   num_kept_free, num_watermark},
                                  unzeroed);
             })
        .def("publish", py::overload_cast<const std::string&, const py::list&, std::uint32_t>(&HostedKv::publish))
        .def("retire", &HostedKv::retire)
        .def("departure", &HostedKv::departure)
        .def("release", &HostedKv::release)
        .def("release_into_pins", &HostedKv::release_into_pins)
        .def("pin", &HostedKv::pin)
        .def("unpin", &HostedKv::unpin, py::arg("blocks"), py::arg("departure") = Departure{})
        .def("unpublish", &HostedKv::unpublish)
        .def("reset", &HostedKv::reset)
        .def("block_ids", &HostedKv::block_ids)
        .def("num_hit_tokens", &HostedKv::num_hit_tokens)
        .def("num_published_tokens", &HostedKv::num_published_tokens)
        .def("blocks_to_complete", &HostedKv::blocks_to_complete)
        .def("take_copies", &HostedKv::take_copies)
        .def("take_blocks_to_zero", &HostedKv::take_blocks_to_zero)
        .def("zero_from", &HostedKv::zero_from)
        .def("record_match", &HostedKv::record_match)
        .def("drain_kv_events", [](HostedKv& self) { return drain_kv_events(self.kv().pool()); })
        .def("drain_block_lives", [](HostedKv& self) { return drain_block_lives(self.kv().pool()); })
        .def("eviction_counts", [](const HostedKv& self) { return eviction_counts(self.kv().pool()); })
        .def("counters",
             [](const HostedKv& self) {
                 const HostedKv::Counters& counters = self.counters();
                 py::dict values;
                 values["evicted_hit_tokens"] = counters.num_evicted_hit_tokens;
                 values["granularity_lost_tokens"] = counters.num_granularity_lost_tokens;
                 values["missing_state_tokens"] = counters.num_missing_state_tokens;
                 values["isolated_tokens"] = counters.num_isolated_tokens;
                 values["block_copies"] = counters.num_block_copies;
                 values["lost_checkpoints"] = 0;  // no group keeps states
                 return values;
             })
        .def("kv_gauges", [](const HostedKv& self) { return kv_gauges(self.kv(), self.holders()); })
        .def("kv_map", [](const HostedKv& self) { return kv_map(self.kv(), self.holders()); })
        .def("check_integrity", &HostedKv::check_integrity)
        .def("free_order", [](const HostedKv& self) { return self.kv().pool().free_order(); })
        .def("num_owners",
             [](const HostedKv& self, BlockId block) {
                 if (block > self.kv().pool().num_usable()) throw py::index_error("block " + std::to_string(block));
                 return self.kv().pool().num_owners(block);
             })
        .def_property_readonly("num_free", [](const HostedKv& self) { return self.kv().pool().num_free(); })
        .def_property_readonly("num_usable", [](const HostedKv& self) { return self.kv().pool().num_usable(); })
        .def_property_readonly("num_cached", [](const HostedKv& self) { return self.kv().pool().num_cached(); });
}

}  // namespace tokenspeed::bindings
