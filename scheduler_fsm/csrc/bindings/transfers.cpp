// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/bindings/transfers.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "scheduler_fsm/csrc/bindings/core.h"
#include "scheduler_fsm/csrc/bindings/py_handle.h"

namespace tokenspeed::bindings {

using scheduler_fsm::Request;

namespace {

/// A request's table by group, up to `num_tokens`.
py::tuple table_of(const Request& request, const std::vector<kv_flat::GroupSpec>& groups, std::uint32_t num_tokens) {
    py::tuple table(groups.size());
    for (kv_flat::GroupId group = 0; group < groups.size(); ++group) {
        std::span<const kv_flat::BlockId> ids;
        if (request.kv() != nullptr) ids = request.kv()->table(group).ids();
        const std::size_t num_blocks = kv_flat::ceil_div(num_tokens, groups[group].block_tokens);
        table[group] = int_list(ids.first(std::min(ids.size(), num_blocks)));
    }
    return table;
}

}  // namespace

ConnectorCallbacks::Offer ConnectorCallbacks::ask(const Request& request, std::uint32_t num_cached_tokens) {
    const auto answer =
        py::cast<std::pair<std::optional<std::uint32_t>, bool>>(offer_(views_.of(request).request, num_cached_tokens));
    if (!answer.first) return {.is_undecided = true};
    return {.num_tokens = *answer.first, .is_async = answer.second};
}

void ConnectorCallbacks::accept(const Request& request, std::uint32_t num_tokens) {
    py::tuple table(request.kv()->num_groups());
    for (kv_flat::GroupId group = 0; group < request.kv()->num_groups(); ++group)
        table[group] = int_list(request.kv()->table(group).ids());
    accept_(views_.of(request).request, std::move(table), request.num_cached_tokens, num_tokens);
}

void Core::attach_connector(py::object offer, py::object accept, bool needs_delivery) {
    connector_ = std::make_unique<ConnectorCallbacks>(views_, std::move(offer), std::move(accept));
    scheduler_.attach(*connector_, needs_delivery);
}

void Core::let_go(std::uint64_t handle, bool awaits_send) {
    scheduler_.let_go(unpack(handle), awaits_send);
    views_.drop(unpack(handle));
}

py::tuple Core::block_ids(std::uint64_t handle) const {
    const Request* request = scheduler_.find(unpack(handle));
    if (request == nullptr) throw py::key_error("the core does not know request handle " + std::to_string(handle));
    return table_of(*request, scheduler_.state().kv.config().groups, std::numeric_limits<std::uint32_t>::max());
}

py::tuple Core::computed(std::uint64_t handle) {
    const Request* request = scheduler_.retire(unpack(handle));
    if (request == nullptr) throw py::key_error("the core does not know request handle " + std::to_string(handle));
    const std::uint32_t num_tokens = request->num_computed_tokens;
    return py::make_tuple(num_tokens, table_of(*request, scheduler_.state().kv.config().groups, num_tokens));
}

py::list Core::invalidate(const std::vector<kv_flat::BlockId>& blocks) {
    py::list requests;
    for (const Request* request : scheduler_.invalidate(blocks)) requests.append(views_.of(*request).request);
    return requests;
}

void bind_transfers(py::class_<Core>& core) {
    core.def("attach_connector", &Core::attach_connector, py::kw_only(), py::arg("offer"), py::arg("accept"),
             py::arg("needs_delivery"))
        .def("let_go", &Core::let_go)
        .def("load_done", [](Core& self, std::uint64_t handle) { return self.scheduler().load_done(unpack(handle)); })
        .def("send_done", [](Core& self, std::uint64_t handle) { return self.scheduler().send_done(unpack(handle)); })
        .def("fail_load", [](Core& self, std::uint64_t handle) { self.scheduler().fail_load(unpack(handle)); })
        .def("is_draining",
             [](const Core& self, std::uint64_t handle) {
                 const Request* request = self.scheduler().find(unpack(handle));
                 return request != nullptr && request->is_draining();
             })
        .def("has_failed_load",
             [](const Core& self, std::uint64_t handle) {
                 const Request* request = self.scheduler().find(unpack(handle));
                 return request != nullptr && request->is_loading() &&
                        request->load.valid_tokens < request->load.end_tokens;
             })
        .def("invalidate", &Core::invalidate)
        .def("recompute", [](Core& self, std::uint64_t handle) { self.scheduler().recompute(unpack(handle)); })
        .def("block_ids", &Core::block_ids)
        .def("computed", &Core::computed)
        .def("pin", [](Core& self, const std::vector<kv_flat::BlockId>& blocks) { self.scheduler().pin(blocks); })
        .def("unpin", [](Core& self, const std::vector<kv_flat::BlockId>& blocks) { self.scheduler().unpin(blocks); })
        .def("num_owners",
             [](const Core& self, kv_flat::BlockId block) {
                 const kv_flat::BlockPool& pool = self.scheduler().state().kv.pool();
                 if (block > pool.num_usable()) throw py::index_error("block " + std::to_string(block));
                 return pool.num_owners(block);
             })
        .def_property_readonly("num_draining",
                               [](const Core& self) { return self.scheduler().state().transfers.num_draining; })
        .def_property_readonly("num_holding_waiting",
                               [](const Core& self) { return self.scheduler().num_holding_waiting(); })
        .def_property_readonly("num_unknown_reports",
                               [](const Core& self) { return self.scheduler().state().transfers.num_unknown_reports; });
}

}  // namespace tokenspeed::bindings
