// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/bindings/plan_writer.h"

#include <pybind11/stl.h>

#include <algorithm>

#include "scheduler_fsm/csrc/bindings/py_handle.h"

namespace tokenspeed::bindings {

using scheduler_fsm::ExecutionPlan;
using scheduler_fsm::PlanRow;
using scheduler_fsm::Request;
using scheduler_fsm::RowKind;

PlanColumns PlanWriter::write(const ExecutionPlan& plan) const {
    PlanColumns columns;
    columns.step = plan.step;
    columns.num_tokens = plan.num_tokens;
    columns.num_next_drafts = plan.num_next_drafts;
    columns.drafts_are_unused = plan.drafts_are_unused;
    write_rows(plan, columns);
    write_admitted(plan, columns);
    write_new(plan, columns);
    write_drafts(plan, columns);
    write_encoder_runs(plan, columns);
    columns.retracted = requests(plan.retracted);
    columns.ended = requests(plan.ended);
    columns.refused = requests(plan.refused);
    columns.prefetching = requests(plan.prefetching);
    columns.has_sync_loads = plan.has_sync_loads;
    columns.blocks_to_zero = blocks_to_zero(plan);
    columns.block_copies = block_copies(plan);
    return columns;
}

bool PlanWriter::is_cached_row(const PlanRow& row) const noexcept {
    return row.kind == RowKind::kRunning || (row.kind == RowKind::kResumed && !protocol_.resumed_as_new);
}

// One walk for everything that every row has a part in.
void PlanWriter::write_rows(const ExecutionPlan& plan, PlanColumns& columns) const {
    columns.num_scheduled_tokens = new_dict(plan.rows.size());
    columns.grammar_req_ids = checked(PyList_New(0));
    const auto num_rows = static_cast<std::size_t>(
        std::ranges::count_if(plan.rows, [this](const PlanRow& row) { return is_cached_row(row); }));
    ListWriter req_ids(num_rows);
    ListWriter new_block_ids(num_rows);
    ListWriter num_computed(num_rows);
    ListWriter num_output(num_rows);
    ListWriter new_tokens(protocol_.sends_new_tokens ? num_rows : 0);
    columns.resumed_req_ids = checked(PySet_New(nullptr));
    columns.all_token_ids = checked(PyDict_New());
    for (std::size_t i = 0; i < plan.rows.size(); ++i) {
        const PlanRow& row = plan.rows[i];
        views_.fetch_ahead(i, plan.rows.size(), [&](std::size_t turn) { return plan.rows[turn].handle; });
        const RequestView& view = views_.of(row.handle);
        PyObject* req_id = view.req_id.ptr();
        set_int(columns.num_scheduled_tokens, req_id, row.num_tokens);
        if (row.samples && view.has_grammar) {
            if (PyList_Append(columns.grammar_req_ids.ptr(), req_id) != 0) throw py::error_already_set();
            columns.waits_for_grammar_tokens = columns.waits_for_grammar_tokens || row.num_placeholders > 0;
        }
        if (!is_cached_row(row)) continue;
        req_ids.put_borrowed(req_id);
        if (row.has_new_blocks) {
            const std::uint32_t* first = plan.first_new_blocks.data() + i * groups_.size();
            new_block_ids.put(block_ids_from(*row.request, first).release().ptr());
        } else {
            new_block_ids.put_borrowed(Py_None);
        }
        num_computed.put_int(row.num_computed_tokens);
        num_output.put_int(row.num_output_tokens + row.num_placeholders);
        if (row.kind == RowKind::kResumed && PySet_Add(columns.resumed_req_ids.ptr(), req_id) != 0)
            throw py::error_already_set();
        if (protocol_.sends_history && row.needs_history) {
            set_item(columns.all_token_ids, req_id, int_list(row.request->tokens.all()).ptr());
        }
        if (protocol_.sends_new_tokens) {
            const auto tokens = row.request->tokens.all();
            const auto begin = std::min<std::size_t>(row.num_computed_tokens, tokens.size());
            const auto end = std::min<std::size_t>(begin + row.num_tokens - row.num_drafts, tokens.size());
            new_tokens.put(int_list(tokens.subspan(begin, end - begin)).release().ptr());
        }
    }
    columns.req_ids = req_ids.take();
    columns.new_block_ids = new_block_ids.take();
    columns.num_computed_tokens = num_computed.take();
    columns.num_output_tokens = num_output.take();
    columns.new_token_ids = new_tokens.take();
}

void PlanWriter::write_new(const ExecutionPlan& plan, PlanColumns& columns) const {
    columns.new_rows = checked(PyList_New(0));
    if (!plan.has_new_tables) return;
    const std::vector<std::uint32_t> whole_table(groups_.size(), 0);
    for (const PlanRow& row : plan.rows) {
        if (is_cached_row(row)) continue;
        const Request& request = *row.request;
        py::object history = protocol_.resumed_as_new ? int_list(request.tokens.all()) : py::none();
        const py::tuple item = py::make_tuple(views_.of(request).request, block_ids_from(request, whole_table.data()),
                                              row.num_computed_tokens, std::move(history));
        if (PyList_Append(columns.new_rows.ptr(), item.ptr()) != 0) throw py::error_already_set();
    }
}

void PlanWriter::write_admitted(const ExecutionPlan& plan, PlanColumns& columns) const {
    columns.admitted = checked(PyList_New(0));
    if (!plan.has_new_tables) return;
    for (const PlanRow& row : plan.rows) {
        if (row.kind == RowKind::kRunning) continue;
        const py::tuple item =
            py::make_tuple(views_.of(*row.request).request, row.num_cached_tokens, row.num_loaded_tokens);
        if (PyList_Append(columns.admitted.ptr(), item.ptr()) != 0) throw py::error_already_set();
    }
}

void PlanWriter::write_drafts(const ExecutionPlan& plan, PlanColumns& columns) const {
    columns.spec_tokens = checked(PyDict_New());
    if (plan.drafts.empty()) return;
    std::size_t begin = 0;
    for (const PlanRow& row : plan.rows) {
        if (row.num_drafts == 0) continue;
        const auto drafts = std::span(plan.drafts).subspan(begin, row.num_drafts);
        set_item(columns.spec_tokens, views_.of(*row.request).req_id.ptr(), int_list(drafts).ptr());
        begin += row.num_drafts;
    }
}

void PlanWriter::write_encoder_runs(const ExecutionPlan& plan, PlanColumns& columns) const {
    columns.encoder_inputs = py::none();
    columns.evicted_encoder_outputs = py::none();
    columns.consumed_inputs = py::none();
    columns.num_run_embeds = plan.num_run_embeds;
    // A worker that is not sent a resumed request again may need its data again.
    if (!plan.consumed_inputs.empty() && protocol_.resumed_as_new) {
        py::list consumed;
        for (const auto& [request, number] : plan.consumed_inputs)
            consumed.append(py::make_tuple(views_.of(*request).request, number));
        columns.consumed_inputs = std::move(consumed);
    }
    if (!plan.evicted_encoder_outputs.empty()) columns.evicted_encoder_outputs = py::cast(plan.evicted_encoder_outputs);
    if (plan.encoder_runs.empty()) return;
    py::dict by_request;
    const Request* last = nullptr;
    py::list inputs;
    for (const auto& [request, number] : plan.encoder_runs) {
        if (request != last) by_request[views_.of(*request).req_id] = inputs = py::list();
        last = request;
        inputs.append(number);
    }
    columns.encoder_inputs = std::move(by_request);
}

py::object PlanWriter::requests(const std::vector<Request*>& list) const {
    ListWriter writer(list.size());
    for (const Request* request : list) writer.put_borrowed(views_.of(*request).request.ptr());
    return writer.take();
}

py::object PlanWriter::block_ids_from(const Request& request, const std::uint32_t* first) const {
    py::object tuple = checked(PyTuple_New(static_cast<Py_ssize_t>(groups_.size())));
    for (kv_flat::GroupId group = 0; group < groups_.size(); ++group) {
        const auto ids = request.kv()->table(group).ids().subspan(first[group]);
        PyTuple_SET_ITEM(tuple.ptr(), static_cast<Py_ssize_t>(group), int_list(ids).release().ptr());
    }
    return tuple;
}

py::object PlanWriter::blocks_to_zero(const ExecutionPlan& plan) const {
    if (!protocol_.zeroes_blocks) return py::none();
    std::vector<kv_flat::BlockId> fresh;
    for (std::size_t i = 0; i < plan.rows.size(); ++i) {
        const PlanRow& row = plan.rows[i];
        if (!row.has_new_blocks) continue;
        for (kv_flat::GroupId group = 0; group < groups_.size(); ++group) {
            // A state is read only where a step has written it.
            if (groups_[group].retention == kv_flat::Retention::kState) continue;
            // A whole new table begins with what the cache gave or a load brought: valid content, never to be zeroed.
            const kv_flat::KvSequence& sequence = *row.request->kv();
            const std::uint32_t num_warm = std::max(
                sequence.num_warm_blocks(group), kv_flat::ceil_div(row.num_warm_tokens, groups_[group].block_tokens));
            const std::uint32_t first = std::max(plan.first_new_blocks[i * groups_.size() + group], num_warm);
            for (const kv_flat::BlockId block : sequence.table(group).ids().subspan(first)) fresh.push_back(block);
        }
    }
    if (fresh.empty()) return py::none();
    return int_list(fresh);
}

py::object PlanWriter::block_copies(const ExecutionPlan& plan) {
    if (plan.copies.empty()) return py::none();
    py::list pairs;
    for (const scheduler_fsm::PlannedCopy& copy : plan.copies) pairs.append(py::make_tuple(copy.source, copy.target));
    return pairs;
}

}  // namespace tokenspeed::bindings
