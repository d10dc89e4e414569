// SPDX-License-Identifier: Apache-2.0
#include "scheduler_fsm/csrc/bindings/pool_reports.h"

#include <pybind11/stl.h>

#include "scheduler_fsm/csrc/bindings/py_handle.h"

namespace tokenspeed::bindings {

py::list drain_kv_events(kv_flat::BlockPool& pool) {
    const auto as_bytes = [](const kv_flat::Digest& key) {
        return py::bytes(reinterpret_cast<const char*>(key.bytes.data()), key.bytes.size());
    };
    py::list events;
    for (const kv_flat::KvEvent& event : pool.events().drain()) {
        const py::object parent = event.has_parent ? py::object(as_bytes(event.parent)) : py::none();
        events.append(py::make_tuple(event.kind, event.group, event.block_tokens, as_bytes(event.key), parent,
                                     int_list(event.tokens)));
    }
    return events;
}

py::list drain_block_lives(kv_flat::BlockPool& pool) {
    py::list lives;
    for (const kv_flat::BlockLife& life : pool.drain_lives()) {
        lives.append(py::make_tuple(life.lifetime_s, life.idle_s, py::tuple(py::cast(life.reuse_gaps_s))));
    }
    return lives;
}

}  // namespace tokenspeed::bindings
