// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/bindings/result_io.h"

#include <map>

#include "scheduler_fsm/csrc/bindings/py_handle.h"

namespace tokenspeed::bindings {

using scheduler_fsm::Delivery;
using scheduler_fsm::Request;
using scheduler_fsm::StepRecord;

namespace {

void append_ids(PyObject* list, std::vector<kv_flat::TokenId>& tokens) {
    const Py_ssize_t size = PyList_GET_SIZE(list);
    for (Py_ssize_t i = 0; i < size; ++i) {
        const long id = PyLong_AsLong(PyList_GET_ITEM(list, i));
        if (id == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
        tokens.push_back(static_cast<kv_flat::TokenId>(id));
    }
}

}  // namespace

void DraftTally::add(std::uint32_t drafts, std::uint32_t accepted) {
    ++num_rows;
    num_drafts += drafts;
    num_accepted += accepted;
    if (drafts_by_position.size() < drafts) {
        drafts_by_position.resize(drafts);
        accepted_by_position.resize(drafts);
    }
    for (std::uint32_t position = 0; position < drafts; ++position) ++drafts_by_position[position];
    for (std::uint32_t position = 0; position < accepted; ++position) ++accepted_by_position[position];
}

void SampledTokens::clear() {
    tokens.clear();
    offsets.clear();
    lists.clear();
    positions.clear();
}

Py_ssize_t ResultIo::position_of(const StepRecord& record, const Request& request, const py::list& req_ids,
                                 const py::dict& positions) {
    const std::uint32_t index = request.handle.index;
    if (last_positions_.size() <= index) last_positions_.resize(index + 1);
    PyObject* req_id = views_.of(request).req_id.ptr();
    Py_ssize_t& position = last_positions_[index];
    if (position < PyList_GET_SIZE(req_ids.ptr())) {
        PyObject* guess = PyList_GET_ITEM(req_ids.ptr(), position);
        // From a worker in another process the id comes as a copy.
        if (guess == req_id || (PyUnicode_CheckExact(guess) && PyUnicode_Compare(guess, req_id) == 0)) return position;
    }
    PyObject* place = PyDict_GetItemWithError(positions.ptr(), req_id);
    if (place == nullptr) {
        if (PyErr_Occurred() != nullptr) throw py::error_already_set();
        throw py::key_error("the model runner's output has no row for request " + request.label +
                            ", which was scheduled in step " + std::to_string(record.step));
    }
    return position = PyLong_AsSsize_t(place);
}

void ResultIo::read(const scheduler_fsm::Scheduler& scheduler, const StepRecord& record, const py::list& sampled,
                    const py::list& req_ids, const py::dict& positions, SampledTokens& out) {
    out.clear();
    out.offsets.push_back(0);
    const auto num_lists = static_cast<std::size_t>(PyList_GET_SIZE(sampled.ptr()));
    for (std::size_t i = 0; i < record.rows.size(); ++i) {
        const StepRecord::Row& row = record.rows[i];
        views_.fetch_ahead(i, record.rows.size(), [&](std::size_t turn) { return record.rows[turn].handle; });
        if (i + scheduler_fsm::kFetchTurns < record.rows.size())
            scheduler.state().requests.fetch(record.rows[i + scheduler_fsm::kFetchTurns].handle);
        // Most often the runner's batch has the order of the plan.
        if (i + scheduler_fsm::kFetchTurns < num_lists) {
            const auto ahead = static_cast<Py_ssize_t>(i + scheduler_fsm::kFetchTurns);
            __builtin_prefetch(PyList_GET_ITEM(sampled.ptr(), ahead));
        }
        PyObject* list = nullptr;
        Py_ssize_t position = -1;
        const Request* request = scheduler.find(row.handle);
        if (request != nullptr && !request->is_finished()) {
            position = position_of(record, *request, req_ids, positions);
            if (position < PyList_GET_SIZE(sampled.ptr())) list = PyList_GET_ITEM(sampled.ptr(), position);
            if (list != nullptr && !PyList_CheckExact(list))
                throw py::type_error("sampled_token_ids must hold lists of integers");
            if (list != nullptr) append_ids(list, out.tokens);
        }
        out.lists.push_back(list);
        out.positions.push_back(position);
        out.offsets.push_back(static_cast<std::uint32_t>(out.tokens.size()));
    }
}

PyObject* ResultIo::whole_token_list(const Delivery& delivery, const SampledTokens& sampled) const noexcept {
    PyObject* list = sampled.lists[delivery.row];
    const bool is_whole = list != nullptr && PyList_GET_SIZE(list) == static_cast<Py_ssize_t>(delivery.num_new_tokens);
    return is_whole ? list : nullptr;
}

py::object ResultIo::new_token_list(const Delivery& delivery, const SampledTokens& sampled) const {
    PyObject* list = sampled.lists[delivery.row];
    if (list == nullptr) return checked(PyList_New(0));
    // Nothing was cut off: the runner's list is the answer. A cut one is copied, as the runner may still look at its
    // own.
    if (PyObject* whole = whole_token_list(delivery, sampled)) return py::reinterpret_borrow<py::object>(whole);
    return checked(PyList_GetSlice(list, 0, static_cast<Py_ssize_t>(delivery.num_new_tokens)));
}

py::tuple ResultIo::special_row(const Delivery& delivery, const StepRecord& record,
                                const SampledTokens& sampled) const {
    const RequestView& view = views_.of(*delivery.request);
    const py::object stop_token = delivery.stop.token ? py::cast(*delivery.stop.token) : py::none();
    const int reason = delivery.finished ? static_cast<int>(delivery.stop.reason) : -1;
    return py::make_tuple(view.request, pack(delivery.request->handle), sampled.positions[delivery.row],
                          new_token_list(delivery, sampled), reason, stop_token, record.rows[delivery.row].num_drafts,
                          delivery.num_accepted_drafts);
}

void ResultIo::append_output(PyObject* list, const RequestView& view, const Delivery& delivery,
                             const SampledTokens& sampled) const {
    py::object cut;
    PyObject* tokens = whole_token_list(delivery, sampled);
    if (tokens == nullptr) tokens = (cut = new_token_list(delivery, sampled)).ptr();
    PyObject* arguments[] = {view.req_id.ptr(), tokens};
    PyObject* output = PyObject_Vectorcall(output_class_.ptr(), arguments, 2, nullptr);
    const bool is_appended = output != nullptr && PyList_Append(list, output) == 0;
    Py_XDECREF(output);
    if (!is_appended) throw py::error_already_set();
}

py::tuple ResultIo::write(std::span<const Delivery> deliveries, const StepRecord& record, const SampledTokens& sampled,
                          bool all_special) const {
    py::dict by_client;
    py::list special;
    std::map<std::uint32_t, PyObject*> lists;  // borrowed from by_client
    std::uint32_t client_index = 0;
    PyObject* list = nullptr;  // that of client_index
    DraftTally tally;
    for (std::size_t i = 0; i < deliveries.size(); ++i) {
        const Delivery& delivery = deliveries[i];
        const auto handle_of = [&](std::size_t turn) { return record.rows[deliveries[turn].row].handle; };
        views_.fetch_ahead(i, deliveries.size(), handle_of);
        if (i + scheduler_fsm::kFetchTurns < deliveries.size())
            __builtin_prefetch(sampled.lists[deliveries[i + scheduler_fsm::kFetchTurns].row]);
        const std::uint32_t num_drafts = record.rows[delivery.row].num_drafts;
        if (num_drafts > 0 && delivery.num_new_tokens > 0) tally.add(num_drafts, delivery.num_accepted_drafts);
        const RequestView& view = views_.of(handle_of(i));
        const bool has_output = delivery.num_new_tokens > 0 || record.rows[delivery.row].samples;
        if (!has_output) continue;  // a chunk of a prompt
        const bool is_steady = view.is_plain && !delivery.has_news && !delivery.finished && !all_special;
        if (!is_steady) {
            special.append(special_row(delivery, record, sampled));
            continue;
        }
        if (delivery.num_new_tokens == 0) continue;
        if (list == nullptr || view.client_index != client_index) {
            client_index = view.client_index;
            list = lists[client_index];
        }
        if (list == nullptr) {
            py::list created;
            by_client[py::int_(client_index)] = created;
            list = lists[client_index] = created.ptr();
        }
        append_output(list, view, delivery, sampled);
    }
    py::object drafts = py::none();
    if (tally.num_rows > 0) {
        drafts = py::make_tuple(tally.num_rows, tally.num_drafts, tally.num_accepted,
                                int_list(tally.drafts_by_position), int_list(tally.accepted_by_position));
    }
    return py::make_tuple(std::move(by_client), std::move(special), std::move(drafts));
}

}  // namespace tokenspeed::bindings
