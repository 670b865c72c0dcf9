// Objects of Python as the bindings of lists use them. Its functions throw what Python has raised.
#pragma once

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

namespace zero {

namespace py = pybind11;

inline py::object owned(PyObject* object) {
  if (object == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(object);
}

inline py::object attribute(PyObject* of, PyObject* name) {
  return owned(PyObject_GetAttr(of, name));
}

// Of a dictionary; a borrowed reference, null where it has none.
inline PyObject* item(PyObject* dict, PyObject* key) {
  PyObject* found = PyDict_GetItemWithError(dict, key);
  if (found == nullptr && PyErr_Occurred() != nullptr) {
    throw py::error_already_set();
  }
  return found;
}

// A name that lives as long as the process.
inline PyObject* lasting(const char* name) {
  return PyUnicode_InternFromString(name);
}

inline const at::Tensor& tensor_in(PyObject* object) {
  TORCH_CHECK_TYPE(THPVariable_Check(object), "a tensor was expected, not ", Py_TYPE(object)->tp_name);
  return THPVariable_Unpack(object);
}

}  // namespace zero
