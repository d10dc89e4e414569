// SPDX-License-Identifier: Apache-2.0
// Builds the Python objects of a decode step and does nothing else. Called through ctypes.PyDLL.
#include <Python.h>

// [output_class(id, tokens) for id, tokens in zip(ids, token_lists)]
PyObject *build_outputs(PyObject *output_class, PyObject *ids, PyObject *token_lists) {
    const Py_ssize_t size = PyList_GET_SIZE(ids);
    PyObject *outputs = PyList_New(size);
    for (Py_ssize_t i = 0; outputs != NULL && i < size; ++i) {
        PyObject *arguments[] = {PyList_GET_ITEM(ids, i), PyList_GET_ITEM(token_lists, i)};
        PyObject *output = PyObject_Vectorcall(output_class, arguments, 2, NULL);
        if (output == NULL) {
            Py_CLEAR(outputs);
        } else {
            PyList_SET_ITEM(outputs, i, output);
        }
    }
    return outputs;
}

// The columns of a step: ids, None per row, two lists of integers from `first` on, and {id: 1}.
PyObject *build_columns(PyObject *ids, long first) {
    const Py_ssize_t size = PyList_GET_SIZE(ids);
    PyObject *column[4] = {PyList_New(size), PyList_New(size), PyList_New(size), PyList_New(size)};
    PyObject *counts = PyDict_New();
    PyObject *one = PyLong_FromLong(1);
    for (Py_ssize_t i = 0; i < size; ++i) {
        PyObject *id = PyList_GET_ITEM(ids, i);
        Py_INCREF(id);
        PyList_SET_ITEM(column[0], i, id);
        Py_INCREF(Py_None);
        PyList_SET_ITEM(column[1], i, Py_None);
        PyList_SET_ITEM(column[2], i, PyLong_FromLong(first + i));
        PyList_SET_ITEM(column[3], i, PyLong_FromLong(first + i));
        if (PyDict_SetItem(counts, id, one) != 0) return NULL;
    }
    Py_DECREF(one);
    return Py_BuildValue("(NNNNN)", column[0], column[1], column[2], column[3], counts);
}
