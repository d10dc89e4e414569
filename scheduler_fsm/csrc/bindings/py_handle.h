// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>

namespace tokenspeed::bindings {

namespace py = pybind11;

// Bulk paths use the C API directly: at 256 rows a step, pybind11's checks and temporaries would cost more than the
// scheduling.

/// Takes ownership of a new reference, or throws the pending Python error.
[[nodiscard]] inline py::object checked(PyObject* object) {
    if (object == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(object);
}

[[nodiscard]] inline PyObject* new_int(std::uint64_t value) {
    PyObject* number = PyLong_FromUnsignedLongLong(value);
    if (number == nullptr) throw py::error_already_set();
    return number;
}

/// A dict with room for `size` items: one that grows reads every key again each time. CPython keeps the call that gives
/// room from extensions since 3.13.
[[nodiscard]] inline py::object new_dict([[maybe_unused]] std::size_t size) {
#if PY_VERSION_HEX < 0x030D0000
    return checked(_PyDict_NewPresized(static_cast<Py_ssize_t>(size)));
#else
    return checked(PyDict_New());
#endif
}

/// A list of known length, filled front to back.
class ListWriter {
  public:
    explicit ListWriter(std::size_t size) : list_(checked(PyList_New(static_cast<Py_ssize_t>(size)))) {}

    /// Steals the reference.
    void put(PyObject* item) noexcept { PyList_SET_ITEM(list_.ptr(), next_++, item); }
    void put_borrowed(PyObject* item) noexcept {
        Py_INCREF(item);
        put(item);
    }
    void put_int(std::uint64_t value) { put(new_int(value)); }

    [[nodiscard]] py::object take() noexcept { return std::move(list_); }

  private:
    py::object list_;
    Py_ssize_t next_ = 0;
};

template <typename Range>
[[nodiscard]] py::object int_list(const Range& values) {
    ListWriter list(values.size());
    for (const auto value : values) list.put(checked(PyLong_FromLongLong(value)).release().ptr());
    return list.take();
}

inline void set_item(const py::object& dict, PyObject* key, PyObject* value) {
    if (PyDict_SetItem(dict.ptr(), key, value) != 0) throw py::error_already_set();
}

inline void set_int(const py::object& dict, PyObject* key, std::uint64_t value) {
    PyObject* number = new_int(value);
    const int failed = PyDict_SetItem(dict.ptr(), key, number);
    Py_DECREF(number);
    if (failed != 0) throw py::error_already_set();
}

}  // namespace tokenspeed::bindings
