// Objects of Python as the bindings of lists use them. What Python raises is thrown.
//
// Code of the user may run wherever an object is asked for an attribute, compared or destroyed, and may change
// lists meanwhile. So each look at a list checks its size, and what is used behind such code is owned.
#pragma once

#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

namespace zero {

namespace py = pybind11;

// A new reference that Python has returned.
inline py::object owned(PyObject* object) {
  if (object == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(object);
}

inline py::object attribute(py::handle of, PyObject* name) {
  return owned(PyObject_GetAttr(of.ptr(), name));
}

inline py::object item(py::handle sequence, size_t at) {
  return owned(PySequence_GetItem(sequence.ptr(), static_cast<Py_ssize_t>(at)));
}

// Of a dictionary: a borrowed reference, null where it has none.
inline PyObject* entry(py::handle dict, py::handle key) {
  PyObject* found = PyDict_GetItemWithError(dict.ptr(), key.ptr());
  if (found == nullptr && PyErr_Occurred() != nullptr) {
    throw py::error_already_set();
  }
  return found;
}

// The name of an attribute that is asked of many objects. It lives as long as the process.
inline PyObject* lasting(const char* name) {
  return owned(PyUnicode_InternFromString(name)).release().ptr();
}

// Valid as long as `object` lives.
inline const at::Tensor& tensor_in(py::handle object) {
  if (!THPVariable_Check(object.ptr())) {
    throw py::type_error(c10::str("a tensor was expected, not ", Py_TYPE(object.ptr())->tp_name));
  }
  return THPVariable_Unpack(object.ptr());
}

}  // namespace zero
